// Work of a device and the order it runs in.
//
// A task runs once all its blockers are done. A task of a stream also waits for those queued there before it; a joint
// belongs to no stream and is done with the last of its blockers. Invariant: everything here is read and written under
// the one lock of the emulator; only `run` is called without it. Cost: a lock, an allocation and, for a task that has
// to run, a hand-over to the stream's worker.
//
// A clock says what is ordered: for each stream id, how many of its tasks come before. The pools use it to know whether
// a free happened before an allocation (contract §3), whatever has completed by now; stepped mode says by it which
// accesses to memory are ordered.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "api.h"

namespace emu {

struct Context;
struct Stream;
struct Task;

using Lock = std::unique_lock<std::mutex>;
using TaskPtr = std::shared_ptr<Task>;
using Tasks = std::vector<TaskPtr>;
using Work = std::function<void()>;
using Clock = std::map<std::uint64_t, std::uint64_t>;
using TimePoint = std::chrono::steady_clock::time_point;

struct Task {
  std::shared_ptr<Stream> stream;
  Work run;
  Work on_done;                 // under the lock
  std::function<bool()> ready;  // of a kernel that spins on a flag, in stepped mode: whether it can end now
  std::size_t blockers = 0;
  Tasks dependents;
  Tasks after;  // what it waits for besides its stream's queue
  Clock clock;  // what is complete once it is, itself included
  bool done = false;
  TimePoint finished{};
};

std::mutex& global_mutex();

bool AllDone(const Tasks& tasks);
void BlockOn(const TaskPtr& task, const TaskPtr& blocker);
void Complete(const TaskPtr& task);
TaskPtr Join(const Tasks& tasks, Work on_done);

// Returns once all tasks are done; the lock is released meanwhile.
void WaitFor(Lock& lock, const Tasks& tasks);

void Merge(Clock& into, const Clock& from);

}  // namespace emu
