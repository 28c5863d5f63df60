// Streams: asynchronous queues, each with a worker thread of its own while it has work.
//
// Every context has a legacy stream, per-thread streams and the streams the program creates. Work on the legacy stream
// waits for all earlier work on the context's blocking streams and holds back what is put on them later; non-blocking
// streams take no part in that. A destroyed stream's handle is gone at once, and its queue still runs to its end
// (contract §3).
#pragma once

#include <deque>

#include "task.h"

namespace emu {

struct Capture;

struct Stream : std::enable_shared_from_this<Stream> {
  enum class Kind { kLegacy, kPerThread, kCreated };

  std::uint64_t id = 0;
  Kind kind = Kind::kCreated;
  unsigned flags = 0;
  int priority = 0;
  std::shared_ptr<Context> context;

  std::deque<TaskPtr> queue;
  std::condition_variable ready;
  bool has_worker = false;
  TaskPtr tail;  // the task last put on the stream

  std::uint64_t count = 0;  // tasks put on the stream so far
  Clock seen;               // what the next task comes after

  std::shared_ptr<Capture> capture;
  std::uint64_t captured = 0;  // the same two while a capture is open
  Clock capture_seen;

  bool blocking() const { return kind != Kind::kLegacy && (flags & CU_STREAM_NON_BLOCKING) == 0; }
};

using StreamPtr = std::shared_ptr<Stream>;

StreamPtr NewStream(const std::shared_ptr<Context>& context, Stream::Kind kind, unsigned flags, int priority);

// The stream that a handle names for the calling thread: 0 is the function's default stream, 1 the legacy stream,
// 2 the calling thread's own. Refuses unknown handles, broken contexts, and the legacy stream while a blocking stream
// of its context captures (contract §4).
StreamPtr StreamOf(CUstream handle);

// What handle 0 means in the function being called: CU_STREAM_LEGACY, or CU_STREAM_PER_THREAD in _ptsz and _ptds ones.
void SetDefaultStream(CUstream handle);

// Puts work on a stream. No work makes a marker, which is done at once where nothing is before it. `ready` is for
// kernels that spin on a flag (task.h).
TaskPtr Submit(Stream& stream, Work run, const Tasks& after = {}, Work on_done = {}, std::function<bool()> ready = {});

// The same for work that a capture turns into a node of its graph.
void Issue(Stream& stream, Work run, std::function<bool()> ready = {});

// Runs the first task of the stream's queue, which nothing holds back, without the lock.
void RunFront(Lock& lock, const StreamPtr& stream);

// What work put on the stream now comes after.
Clock Covered(const Stream& stream);

// Unfinished tasks that end a stream's queue; for the legacy stream those of all blocking streams as well.
Tasks Pending(const Stream& stream);

// What is complete once they are.
Clock Waited(const Stream& stream);

// Makes work put on the stream from now on wait for the tasks.
void MakeWait(Stream& stream, const Tasks& tasks, const Clock& clock);

void RunHostFunction(const Work& function);
bool InHostFunction();

}  // namespace emu
