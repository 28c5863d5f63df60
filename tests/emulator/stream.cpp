#include "stream.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "capture.h"
#include "context.h"
#include "driver.h"
#include "pool.h"
#include "stepped.h"

namespace emu {
namespace {

thread_local CUstream default_stream = CU_STREAM_LEGACY;
thread_local bool in_host_function = false;

// A worker stays a moment after its queue ran empty, so that no stream keeps a thread for ever.
constexpr auto kLinger = std::chrono::seconds(1);

void Serve(const StreamPtr& stream) {
  Lock lock(global_mutex());
  for (;;) {
    const bool woken = stream->ready.wait_for(
        lock, kLinger, [&] { return !stream->queue.empty() && stream->queue.front()->blockers == 0; });
    if (!woken) {
      if (!stream->queue.empty()) continue;
      stream->has_worker = false;
      return;
    }
    RunFront(lock, stream);
  }
}

void Enqueue(Stream& stream, const TaskPtr& task) {
  stream.queue.push_back(task);
  if (Stepped()) {
    Busy(stream);
  } else if (stream.has_worker) {
    stream.ready.notify_one();
  } else {
    stream.has_worker = true;
    std::thread(Serve, stream.shared_from_this()).detach();
  }
}

}  // namespace

StreamPtr NewStream(const std::shared_ptr<Context>& context, Stream::Kind kind, unsigned flags, int priority) {
  static std::uint64_t last_id = 0;
  auto stream = std::make_shared<Stream>();
  stream->id = ++last_id;
  stream->kind = kind;
  stream->flags = flags;
  stream->priority = priority;
  stream->context = context;
  // Streams that are gone and drained need no remembering.
  if (!Stepped())
    std::erase_if(context->streams, [](const StreamPtr& old) { return old.use_count() == 1 && old->queue.empty(); });
  context->streams.push_back(stream);
  if (!context->held_back_by.empty()) MakeWait(*stream, context->held_back_by, context->held_back_clock);
  return stream;
}

void SetDefaultStream(CUstream handle) { default_stream = handle; }

StreamPtr StreamOf(CUstream handle) {
  if (handle == nullptr) handle = default_stream;
  StreamPtr stream;
  if (handle == CU_STREAM_LEGACY) {
    const auto context = CurrentContext();
    RefuseLegacyDuringCapture(*context);
    stream = context->legacy;
  } else if (handle == CU_STREAM_PER_THREAD) {
    stream = PerThreadStream(CurrentContext());
  } else {
    stream = driver().streams.Find(handle);
    Require(stream != nullptr, CUDA_ERROR_INVALID_HANDLE);
  }
  Require(stream->context->broken == CUDA_SUCCESS, stream->context->broken);
  return stream;
}

void RunFront(Lock& lock, const StreamPtr& stream) {
  const TaskPtr task = stream->queue.front();
  if (task->run && stream->context->broken == CUDA_SUCCESS) {
    CUresult result = CUDA_SUCCESS;
    lock.unlock();
    try {
      task->run();
    } catch (const Failure& failure) {
      result = failure.code;
    }
    lock.lock();
    if (result != CUDA_SUCCESS) stream->context->broken = result;
  }
  stream->queue.pop_front();
  Complete(task);
}

Clock Covered(const Stream& stream) {
  const Context& context = *stream.context;
  Clock clock = stream.seen;
  if (stream.kind == Stream::Kind::kLegacy) {
    for (const StreamPtr& other : context.streams) {
      if (other->blocking()) Merge(clock, other->seen);
    }
  } else if (stream.blocking()) {
    Merge(clock, context.legacy->seen);
  }
  return clock;
}

TaskPtr Submit(Stream& stream, Work run, const Tasks& after, Work on_done, std::function<bool()> ready) {
  auto task = std::make_shared<Task>();
  task->stream = stream.shared_from_this();
  task->run = std::move(run);
  task->on_done = std::move(on_done);
  task->ready = std::move(ready);
  for (const TaskPtr& blocker : after) BlockOn(task, blocker);
  const Context& context = *stream.context;
  if (stream.kind == Stream::Kind::kLegacy) {
    for (const StreamPtr& other : context.streams) {
      if (!other->blocking()) continue;
      BlockOn(task, other->tail);
    }
  } else if (stream.blocking()) {
    BlockOn(task, context.legacy->tail);
  }
  Clock before = Covered(stream);
  for (const TaskPtr& blocker : after) Merge(before, blocker->clock);
  stream.seen = before;
  stream.seen[stream.id] = ++stream.count;
  if (Stepped()) {
    Merge(before, KnownToHost());
    task->clock = before;
    task->clock[stream.id] = stream.count;
    Remember(stream, std::move(before));
  }
  stream.tail = task;
  if (!task->run && task->blockers == 0 && stream.queue.empty()) {
    Complete(task);
  } else {
    Enqueue(stream, task);
  }
  return task;
}

void Issue(Stream& stream, Work run, std::function<bool()> ready) {
  if (stream.capture != nullptr) {
    AddNode(stream, std::move(run));
  } else {
    Submit(stream, std::move(run), {}, {}, std::move(ready));
  }
}

Tasks Pending(const Stream& stream) {
  Tasks tasks;
  const auto add = [&](const Stream& from) {
    if (from.tail != nullptr && !from.tail->done) tasks.push_back(from.tail);
  };
  add(stream);
  if (stream.kind == Stream::Kind::kLegacy) {
    for (const StreamPtr& other : stream.context->streams) {
      if (other->blocking()) add(*other);
    }
  }
  return tasks;
}

Clock Waited(const Stream& stream) { return stream.kind == Stream::Kind::kLegacy ? Covered(stream) : stream.seen; }

void MakeWait(Stream& stream, const Tasks& tasks, const Clock& clock) {
  // In stepped mode what a wait orders must not depend on what is done by now.
  if (Stepped() || !AllDone(tasks)) Submit(stream, nullptr, tasks);
  Merge(stream.seen, clock);
}

void RunHostFunction(const Work& function) {
  in_host_function = true;
  function();
  in_host_function = false;
}

bool InHostFunction() { return in_host_function; }

CUresult StreamCreateWithPriority(CUstream* out, unsigned flags, int priority) {
  Lock lock(global_mutex());
  Require(out != nullptr && (flags & ~static_cast<unsigned>(CU_STREAM_NON_BLOCKING)) == 0);
  *out = driver().streams.Add(NewStream(CurrentContext(), Stream::Kind::kCreated, flags, priority));
  return CUDA_SUCCESS;
}

CUresult StreamCreate(CUstream* out, unsigned flags) { return StreamCreateWithPriority(out, flags, 0); }

CUresult StreamDestroy(CUstream handle) {
  Lock lock(global_mutex());
  const StreamPtr stream = driver().streams.Take(handle);
  Require(stream != nullptr, CUDA_ERROR_INVALID_HANDLE);
  LeaveCapture(*stream);
  return CUDA_SUCCESS;
}

CUresult StreamSynchronize(CUstream handle) {
  Lock lock(global_mutex());
  const StreamPtr stream = StreamOf(handle);
  RefuseOn(*stream);
  RefuseDuringCapture();
  WaitFor(lock, Pending(*stream));
  Observe(Waited(*stream));
  AfterSynchronize(*stream);
  return stream->context->broken;
}

CUresult StreamQuery(CUstream handle) {
  Lock lock(global_mutex());
  const StreamPtr stream = StreamOf(handle);
  RefuseOn(*stream);
  RefuseDuringCapture();
  if (Stepped()) Progress(lock);
  if (!Pending(*stream).empty() || !MayTell(Waited(*stream))) return CUDA_ERROR_NOT_READY;
  Observe(Waited(*stream));
  return CUDA_SUCCESS;
}

CUresult StreamGetId(CUstream handle, unsigned long long* id) {
  Lock lock(global_mutex());
  Require(id != nullptr);
  *id = StreamOf(handle)->id;
  return CUDA_SUCCESS;
}

CUresult StreamGetCtx(CUstream handle, CUcontext* context) {
  Lock lock(global_mutex());
  Require(context != nullptr);
  *context = StreamOf(handle)->context->handle;
  return CUDA_SUCCESS;
}

CUresult StreamGetCtxOrGreen(CUstream handle, CUcontext* context, CUgreenCtx* green) {
  if (green != nullptr) *green = nullptr;
  return StreamGetCtx(handle, context);
}

CUresult StreamGetFlags(CUstream handle, unsigned* flags) {
  Lock lock(global_mutex());
  Require(flags != nullptr);
  *flags = StreamOf(handle)->flags;
  return CUDA_SUCCESS;
}

CUresult StreamGetPriority(CUstream handle, int* priority) {
  Lock lock(global_mutex());
  Require(priority != nullptr);
  *priority = StreamOf(handle)->priority;
  return CUDA_SUCCESS;
}

CUresult LaunchHostFunc(CUstream handle, CUhostFn function, void* data) {
  Lock lock(global_mutex());
  Require(function != nullptr);
  Issue(*StreamOf(handle), [=] { RunHostFunction([=] { function(data); }); });
  return CUDA_SUCCESS;
}

CUresult StreamAddCallback(CUstream handle, CUstreamCallback callback, void* data, unsigned flags) {
  Lock lock(global_mutex());
  Require(callback != nullptr && flags == 0);
  const StreamPtr stream = StreamOf(handle);
  RefuseOn(*stream);
  Submit(*stream, [=] { RunHostFunction([=] { callback(handle, CUDA_SUCCESS, data); }); });
  return CUDA_SUCCESS;
}

}  // namespace emu
