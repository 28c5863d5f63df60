#include "event.h"

#include <algorithm>
#include <utility>

#include "capture.h"
#include "driver.h"
#include "stepped.h"

namespace emu {

void Event::Record(Tasks covered, Clock covered_clock) {
  tasks = std::move(covered);
  clock = std::move(covered_clock);
  recorded = true;
  recorded_at = std::chrono::steady_clock::now();
  capture = nullptr;
}

TimePoint Event::Time() const {
  TimePoint time = recorded_at;
  for (const TaskPtr& task : tasks) time = std::max(time, task->finished);
  return time;
}

EventPtr EventOf(CUevent handle) {
  EventPtr event = driver().events.Find(handle);
  Require(event != nullptr, CUDA_ERROR_INVALID_HANDLE);
  Require(event->context->broken == CUDA_SUCCESS, event->context->broken);
  return event;
}

CUresult EventCreate(CUevent* out, unsigned flags) {
  Lock lock(global_mutex());
  constexpr unsigned kKnown = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
  Require(out != nullptr && (flags & ~kKnown) == 0);
  Require((flags & CU_EVENT_INTERPROCESS) == 0 || (flags & CU_EVENT_DISABLE_TIMING) != 0);
  auto event = std::make_shared<Event>();
  event->context = CurrentContext();
  event->flags = flags;
  *out = driver().events.Add(std::move(event));
  return CUDA_SUCCESS;
}

CUresult EventDestroy(CUevent handle) {
  Lock lock(global_mutex());
  Require(driver().events.Take(handle) != nullptr, CUDA_ERROR_INVALID_HANDLE);
  return CUDA_SUCCESS;
}

CUresult EventRecordWithFlags(CUevent handle, CUstream stream_handle, unsigned flags) {
  Lock lock(global_mutex());
  Require((flags & ~static_cast<unsigned>(CU_EVENT_RECORD_EXTERNAL)) == 0);
  const EventPtr event = EventOf(handle);
  const StreamPtr stream = StreamOf(stream_handle);
  Require(event->context == stream->context, CUDA_ERROR_INVALID_HANDLE);
  if (stream->capture != nullptr) {
    Require(flags == 0, CUDA_ERROR_NOT_SUPPORTED);  // external records are not emulated
    RecordInCapture(*stream, *event);
  } else {
    const TaskPtr marker = Submit(*stream, nullptr);
    event->Record({marker}, stream->seen);
  }
  return CUDA_SUCCESS;
}

CUresult EventRecord(CUevent handle, CUstream stream) { return EventRecordWithFlags(handle, stream, 0); }

CUresult StreamWaitEvent(CUstream stream_handle, CUevent handle, unsigned flags) {
  Lock lock(global_mutex());
  Require((flags & ~static_cast<unsigned>(CU_EVENT_WAIT_EXTERNAL)) == 0);
  const StreamPtr stream = StreamOf(stream_handle);
  const EventPtr event = EventOf(handle);
  if (stream->capture != nullptr || event->capture != nullptr) {
    Require(flags == 0, CUDA_ERROR_NOT_SUPPORTED);
    WaitInCapture(*stream, *event);
  } else if (event->recorded) {
    MakeWait(*stream, event->tasks, event->clock);
  }
  return CUDA_SUCCESS;
}

CUresult EventQuery(CUevent handle) {
  Lock lock(global_mutex());
  const EventPtr event = EventOf(handle);
  RefuseDuringCapture();
  Require(event->capture == nullptr, CUDA_ERROR_CAPTURED_EVENT);
  if (Stepped()) Progress(lock);
  if (!event->Done() || !MayTell(event->clock)) return CUDA_ERROR_NOT_READY;
  Observe(event->clock);
  return CUDA_SUCCESS;
}

CUresult EventSynchronize(CUevent handle) {
  Lock lock(global_mutex());
  const EventPtr event = EventOf(handle);
  RefuseDuringCapture();
  Require(event->capture == nullptr, CUDA_ERROR_CAPTURED_EVENT);
  const Tasks tasks = event->tasks;
  const Clock clock = event->clock;
  WaitFor(lock, tasks);
  Observe(clock);
  AfterSynchronize(event->context->device);
  return event->context->broken;
}

CUresult EventElapsedTime(float* milliseconds, CUevent start_handle, CUevent end_handle) {
  Lock lock(global_mutex());
  Require(milliseconds != nullptr);
  const EventPtr start = EventOf(start_handle);
  const EventPtr end = EventOf(end_handle);
  for (const Event* event : {start.get(), end.get()}) {
    Require(event->recorded && (event->flags & CU_EVENT_DISABLE_TIMING) == 0, CUDA_ERROR_INVALID_HANDLE);
    Require(event->capture == nullptr, CUDA_ERROR_CAPTURED_EVENT);
  }
  Require(start->Done() && end->Done(), CUDA_ERROR_NOT_READY);
  Observe(start->clock);
  Observe(end->clock);
  *milliseconds = std::chrono::duration<float, std::milli>(end->Time() - start->Time()).count();
  return CUDA_SUCCESS;
}

}  // namespace emu
