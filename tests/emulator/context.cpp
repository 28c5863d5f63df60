#include "context.h"

#include <algorithm>

#include "capture.h"
#include "driver.h"
#include "stepped.h"

namespace emu {
namespace {

// Trivially destructible: static destructors of programs still call the driver.
struct Stack {
  static constexpr std::size_t kDepth = 256;
  CUcontext contexts[kDepth];
  std::size_t size;

  CUcontext Top() const { return size == 0 ? nullptr : contexts[size - 1]; }
  void Push(CUcontext context) {
    Require(size < kDepth, CUDA_ERROR_OUT_OF_MEMORY);
    contexts[size++] = context;
  }
  CUcontext Pop() { return size == 0 ? nullptr : contexts[--size]; }
};

thread_local constinit Stack current{};

ContextPtr NewContext(CUcontext handle, CUdevice device, unsigned flags) {
  static std::uint64_t last_id = 0;
  auto context = std::make_shared<Context>();
  context->handle = handle;
  context->id = ++last_id;
  context->device = device;
  context->flags = flags;
  context->legacy = NewStream(context, Stream::Kind::kLegacy, 0, 0);
  context->streams.clear();
  driver().contexts.Put(handle, context);
  return context;
}

// Ends a context: its handles at once, then, when its work is done, its memory (contract §2). Memory of pools is the
// device's (measured): the default pool's goes with the primary context, and that of other pools with none. What is
// mapped stays (measured).
void EndContext(Lock& lock, const ContextPtr& context) {
  const auto belongs = [&](const auto& object) { return object.context == context; };
  for (const StreamPtr& stream : context->streams) LeaveCapture(*stream);
  driver().contexts.Take(context->handle);
  driver().streams.TakeIf(belongs);
  driver().events.TakeIf(belongs);
  driver().modules.TakeIf(belongs);
  WaitFor(lock, Pending(*context));
  Observe(Covered(*context));
  Device& device = DeviceAt(context->device);
  const bool primary = context->handle == device.primary;
  const auto goes = [&](const Block& block) {
    return belongs(block) && block.kind != Block::Kind::kMapped &&
           (block.kind != Block::Kind::kPool || (primary && block.pool->handle == device.default_pool));
  };
  for (const BlockPtr& block : driver().blocks.Select(goes)) Release(block);
  AfterSynchronize(*context);
  if (primary) ResetDefaultPool(device);
  context->streams.clear();
  context->per_thread.clear();
  context->legacy = nullptr;
}

CUresult Create(CUcontext* out, unsigned flags, CUdevice device) {
  Lock lock(global_mutex());
  Require(out != nullptr);
  DeviceAt(device);
  *out = NewContext(driver().contexts.Reserve(), device, flags)->handle;
  current.Push(*out);
  return CUDA_SUCCESS;
}

// The context, also when a sticky error broke it.
ContextPtr Living(CUcontext handle) {
  Require(handle != nullptr, CUDA_ERROR_INVALID_CONTEXT);
  ContextPtr context = driver().contexts.Find(handle);
  Require(context != nullptr, CUDA_ERROR_CONTEXT_IS_DESTROYED);
  return context;
}

// §4: cuCtxSynchronize, cuCtxRecordEvent and cuCtxWaitEvent break every capture of their context, whoever began it and
// whatever the calling thread's mode is.
void RefuseWhileContextCaptures(const Context& context) {
  bool capturing = false;
  for (const StreamPtr& stream : context.streams) {
    if (stream->capture == nullptr) continue;
    Invalidate(*stream->capture);
    capturing = true;
  }
  Require(!capturing, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
}

void Synchronize(Lock& lock, const ContextPtr& context) {
  RefuseWhileContextCaptures(*context);
  RefuseDuringCapture();
  WaitFor(lock, Pending(*context));
  Observe(Covered(*context));
  AfterSynchronize(*context);
  Require(context->broken == CUDA_SUCCESS, context->broken);
}

}  // namespace

ContextPtr ContextOf(CUcontext handle) {
  ContextPtr context = Living(handle != nullptr ? handle : current.Top());
  Require(context->broken == CUDA_SUCCESS, context->broken);
  return context;
}

ContextPtr CurrentContext() { return ContextOf(nullptr); }

std::uint64_t ThreadToken() {
  static std::uint64_t last = 0;  // under the lock
  thread_local std::uint64_t token = ++last;
  return token;
}

StreamPtr PerThreadStream(const ContextPtr& context) {
  StreamPtr& stream = context->per_thread[ThreadToken()];
  if (stream == nullptr) stream = NewStream(context, Stream::Kind::kPerThread, 0, 0);
  return stream;
}

Tasks Pending(const Context& context) {
  Tasks tasks;
  const auto add = [&](const StreamPtr& stream) {
    if (stream != nullptr && stream->tail != nullptr && !stream->tail->done) tasks.push_back(stream->tail);
  };
  add(context.legacy);
  for (const StreamPtr& stream : context.streams) add(stream);
  return tasks;
}

Clock Covered(const Context& context) {
  Clock clock = context.legacy->seen;
  for (const StreamPtr& stream : context.streams) Merge(clock, stream->seen);
  return clock;
}

CUresult DevicePrimaryCtxRetain(CUcontext* out, CUdevice ordinal) {
  Lock lock(global_mutex());
  Require(out != nullptr);
  Device& device = DeviceAt(ordinal);
  if (driver().contexts.Find(device.primary) == nullptr) NewContext(device.primary, ordinal, device.primary_flags);
  ++device.primary_users;
  *out = device.primary;
  return CUDA_SUCCESS;
}

CUresult DevicePrimaryCtxRelease(CUdevice ordinal) {
  Lock lock(global_mutex());
  Device& device = DeviceAt(ordinal);
  Require(device.primary_users > 0, CUDA_ERROR_INVALID_CONTEXT);
  if (--device.primary_users > 0) return CUDA_SUCCESS;
  if (const ContextPtr context = driver().contexts.Find(device.primary)) EndContext(lock, context);
  return CUDA_SUCCESS;
}

// A reset ends the context and leaves its users counted: each still owes a release.
CUresult DevicePrimaryCtxReset(CUdevice ordinal) {
  Lock lock(global_mutex());
  const Device& device = DeviceAt(ordinal);
  if (const ContextPtr context = driver().contexts.Find(device.primary)) EndContext(lock, context);
  return CUDA_SUCCESS;
}

CUresult DevicePrimaryCtxGetState(CUdevice ordinal, unsigned* flags, int* active) {
  Lock lock(global_mutex());
  const Device& device = DeviceAt(ordinal);
  if (flags != nullptr) *flags = device.primary_flags;
  if (active != nullptr) *active = driver().contexts.Find(device.primary) != nullptr ? 1 : 0;
  return CUDA_SUCCESS;
}

CUresult DevicePrimaryCtxSetFlags(CUdevice ordinal, unsigned flags) {
  Lock lock(global_mutex());
  DeviceAt(ordinal).primary_flags = flags;
  return CUDA_SUCCESS;
}

CUresult CtxCreate(CUcontext* out, unsigned flags, CUdevice device) { return Create(out, flags, device); }

CUresult CtxCreateWithAffinity(CUcontext* out, CUexecAffinityParam*, int count, unsigned flags, CUdevice device) {
  Require(count == 0, CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY);
  return Create(out, flags, device);
}

CUresult CtxCreateWithParams(CUcontext* out, CUctxCreateParams*, unsigned flags, CUdevice device) {
  return Create(out, flags, device);
}

CUresult CtxDestroy(CUcontext handle) {
  Lock lock(global_mutex());
  const ContextPtr context = Living(handle);
  Require(handle != DeviceAt(context->device).primary, CUDA_ERROR_INVALID_CONTEXT);
  if (current.Top() == handle) current.Pop();
  EndContext(lock, context);
  return CUDA_SUCCESS;
}

CUresult CtxPushCurrent(CUcontext handle) {
  Lock lock(global_mutex());
  current.Push(Living(handle)->handle);
  return CUDA_SUCCESS;
}

CUresult CtxPopCurrent(CUcontext* out) {
  Require(current.size > 0, CUDA_ERROR_INVALID_CONTEXT);
  const CUcontext popped = current.Pop();
  if (out != nullptr) *out = popped;
  return CUDA_SUCCESS;
}

CUresult CtxSetCurrent(CUcontext handle) {
  Lock lock(global_mutex());
  if (handle != nullptr) Living(handle);
  current.Pop();
  if (handle != nullptr) current.Push(handle);
  return CUDA_SUCCESS;
}

CUresult CtxGetCurrent(CUcontext* out) {
  Require(out != nullptr);
  *out = current.Top();
  return CUDA_SUCCESS;
}

CUresult CtxGetDeviceOf(CUdevice* device, CUcontext handle) {
  Lock lock(global_mutex());
  Require(device != nullptr);
  *device = Living(handle != nullptr ? handle : current.Top())->device;
  return CUDA_SUCCESS;
}

CUresult CtxGetDevice(CUdevice* device) { return CtxGetDeviceOf(device, nullptr); }

CUresult CtxGetLimit(std::size_t* value, CUlimit limit) {
  Lock lock(global_mutex());
  Require(value != nullptr);
  const auto& limits = CurrentContext()->limits;
  const auto found = limits.find(limit);
  *value = found != limits.end() ? found->second : std::size_t{1} << 20;
  return CUDA_SUCCESS;
}

CUresult CtxSetLimit(CUlimit limit, std::size_t value) {
  Lock lock(global_mutex());
  const ContextPtr context = CurrentContext();
  Require(limit != CU_LIMIT_PRINTF_FIFO_SIZE || !context->prints);
  context->limits[limit] = value;
  return CUDA_SUCCESS;
}

CUresult CtxGetId(CUcontext handle, unsigned long long* id) {
  Lock lock(global_mutex());
  Require(id != nullptr);
  *id = Living(handle != nullptr ? handle : current.Top())->id;
  return CUDA_SUCCESS;
}

CUresult CtxGetFlags(unsigned* flags) {
  Lock lock(global_mutex());
  Require(flags != nullptr);
  *flags = CurrentContext()->flags;
  return CUDA_SUCCESS;
}

CUresult CtxGetApiVersion(CUcontext handle, unsigned* version) {
  Lock lock(global_mutex());
  Require(version != nullptr);
  ContextOf(handle);
  *version = 3020;
  return CUDA_SUCCESS;
}

CUresult CtxSynchronize() {
  Lock lock(global_mutex());
  Synchronize(lock, CurrentContext());
  return CUDA_SUCCESS;
}

CUresult CtxSynchronizeOf(CUcontext handle) {
  Lock lock(global_mutex());
  Synchronize(lock, ContextOf(handle));
  return CUDA_SUCCESS;
}

// §3: covers every stream, destroyed ones too, and puts nothing on any of them: no false dependency.
CUresult CtxRecordEvent(CUcontext handle, CUevent event_handle) {
  Lock lock(global_mutex());
  const ContextPtr context = ContextOf(handle);
  const EventPtr event = EventOf(event_handle);
  Require(event->context == context, CUDA_ERROR_INVALID_HANDLE);
  RefuseWhileContextCaptures(*context);
  event->Record(Pending(*context), Covered(*context));
  return CUDA_SUCCESS;
}

CUresult CtxWaitEvent(CUcontext handle, CUevent event_handle) {
  Lock lock(global_mutex());
  const ContextPtr context = ContextOf(handle);
  const EventPtr event = EventOf(event_handle);
  RefuseWhileContextCaptures(*context);
  const auto streams = context->streams;
  for (const StreamPtr& stream : streams) MakeWait(*stream, event->tasks, event->clock);
  MakeWait(*context->legacy, event->tasks, event->clock);
  std::erase_if(context->held_back_by, [](const TaskPtr& task) { return task->done; });
  context->held_back_by.insert(context->held_back_by.end(), event->tasks.begin(), event->tasks.end());
  Merge(context->held_back_clock, event->clock);
  return CUDA_SUCCESS;
}

CUresult CtxEnablePeerAccess(CUcontext peer, unsigned flags) {
  Lock lock(global_mutex());
  Require(flags == 0);
  const ContextPtr context = CurrentContext();
  const ContextPtr other = ContextOf(peer);
  Require(context->device != other->device, CUDA_ERROR_INVALID_DEVICE);
  Require(context->peers.insert(other->id).second, CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
  return CUDA_SUCCESS;
}

CUresult CtxDisablePeerAccess(CUcontext peer) {
  Lock lock(global_mutex());
  const ContextPtr context = CurrentContext();
  Require(context->peers.erase(ContextOf(peer)->id) == 1, CUDA_ERROR_PEER_ACCESS_NOT_ENABLED);
  return CUDA_SUCCESS;
}

}  // namespace emu
