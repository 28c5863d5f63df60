#include "task.h"

#include <algorithm>
#include <utility>

#include "stepped.h"
#include "stream.h"

namespace emu {
namespace {

struct Progress {
  std::condition_variable changed;
  int waiters = 0;
};

Progress& progress() {
  static auto* const state = new Progress;
  return *state;
}

}  // namespace

std::mutex& global_mutex() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}

bool AllDone(const Tasks& tasks) {
  return std::all_of(tasks.begin(), tasks.end(), [](const TaskPtr& task) { return task->done; });
}

void BlockOn(const TaskPtr& task, const TaskPtr& blocker) {
  if (blocker == nullptr || blocker->done) return;
  blocker->dependents.push_back(task);
  task->after.push_back(blocker);
  ++task->blockers;
}

void Complete(const TaskPtr& task) {
  task->done = true;
  task->finished = std::chrono::steady_clock::now();
  task->run = nullptr;
  task->after.clear();
  if (task->on_done) std::exchange(task->on_done, nullptr)();
  for (const TaskPtr& dependent : std::exchange(task->dependents, {})) {
    if (--dependent->blockers > 0) continue;
    if (dependent->stream == nullptr) {
      Complete(dependent);
    } else {
      dependent->stream->ready.notify_one();
    }
  }
  task->stream = nullptr;
  if (progress().waiters > 0) progress().changed.notify_all();
}

TaskPtr Join(const Tasks& tasks, Work on_done) {
  auto joint = std::make_shared<Task>();
  joint->on_done = std::move(on_done);
  for (const TaskPtr& task : tasks) {
    BlockOn(joint, task);
    Merge(joint->clock, task->clock);
  }
  if (joint->blockers == 0) Complete(joint);
  return joint;
}

void WaitFor(Lock& lock, const Tasks& tasks) {
  if (Stepped()) {
    Force(lock, tasks);
    for (const TaskPtr& task : tasks) Observe(task->clock);
    return;
  }
  ++progress().waiters;
  progress().changed.wait(lock, [&] { return AllDone(tasks); });
  --progress().waiters;
}

void Merge(Clock& into, const Clock& from) {
  for (const auto& [stream, count] : from) {
    auto& known = into[stream];
    known = std::max(known, count);
  }
}

}  // namespace emu
