#include "stepped.h"

#include <algorithm>
#include <random>
#include <set>
#include <utility>

#include "capture.h"
#include "driver.h"

namespace emu {
namespace {

struct State {
  EmuStepped settings{};
  bool on = false;
  std::mt19937_64 random;
  std::vector<StreamPtr> busy;  // with work in their queues
  Clock known;                  // to the host
};

State& state() {
  static auto* const made = new State;
  return *made;
}

struct Last {
  EmuPoint point;
  Clock before;
};
Last& last() {
  thread_local auto* const made = new Last{};
  return *made;
}

bool Includes(const Clock& clock, const EmuPoint& point) {
  const auto found = clock.find(point.stream);
  return found != clock.end() && found->second >= point.count;
}

// What must be done before the task can run: the task before it in its stream, or one that it waits for.
TaskPtr Obstacle(const TaskPtr& task) {
  if (task->stream != nullptr && task->stream->queue.front() != task) return task->stream->queue.front();
  const auto open = std::find_if(task->after.begin(), task->after.end(), [](const TaskPtr& t) { return !t->done; });
  return open != task->after.end() ? *open : nullptr;
}

bool CanRun(const TaskPtr& task) { return Obstacle(task) == nullptr && (!task->ready || task->ready()); }

// Whether the task comes after one that cannot end.
bool Stuck(const TaskPtr& task, std::set<const Task*>& visited) {
  if (task->done || !visited.insert(task.get()).second) return false;
  if (task->ready && !task->ready()) return true;
  if (std::any_of(task->after.begin(), task->after.end(), [&](const TaskPtr& t) { return Stuck(t, visited); }))
    return true;
  if (task->stream == nullptr) return false;
  for (const TaskPtr& earlier : task->stream->queue) {
    if (earlier == task) break;
    if (Stuck(earlier, visited)) return true;
  }
  return false;
}

bool Stuck(const Tasks& tasks) {
  std::set<const Task*> visited;
  return std::any_of(tasks.begin(), tasks.end(), [&](const TaskPtr& task) { return Stuck(task, visited); });
}

void RunNow(Lock& lock, StreamPtr stream) {  // its own reference: a task that is done lets go of its stream
  RunFront(lock, stream);
  if (stream->queue.empty()) std::erase(state().busy, stream);
}

template <class Body>
int Answer(Body body) noexcept try {
  Lock lock(global_mutex());
  return body() ? 1 : 0;
} catch (...) {
  return 0;
}

}  // namespace

bool Stepped() { return state().on; }
unsigned long long SteppedMemory() { return state().settings.memory; }
bool OnlyGuaranteed() { return state().settings.guaranteed != 0; }
bool FreeReturns() { return state().settings.free_returns != 0; }

void Busy(Stream& stream) {
  if (stream.queue.size() == 1) state().busy.push_back(stream.shared_from_this());
}

void Force(Lock& lock, const Tasks& tasks) {
  for (const TaskPtr& task : tasks) {
    while (!task->done) {
      TaskPtr next = task;
      while (const TaskPtr obstacle = Obstacle(next)) next = obstacle;
      if (next->ready && !next->ready()) {
        state().settings.deadlock("a wait for work that comes after a kernel which spins on a flag that is not set");
      }
      RunNow(lock, next->stream);
    }
  }
}

void Progress(Lock& lock) {
  State& s = state();
  if (OnlyGuaranteed() || s.random() % 2 == 0) return;
  for (auto turns = s.random() % 8; turns > 0; --turns) {
    std::vector<StreamPtr> able;
    for (const StreamPtr& stream : s.busy) {
      if (CanRun(stream->queue.front())) able.push_back(stream);
    }
    if (able.empty()) return;
    RunNow(lock, able[s.random() % able.size()]);
  }
}

void Remember(const Stream& stream, Clock before) {
  last().point = {stream.id, stream.count};
  last().before = std::move(before);
}

void Observe(const Clock& known) { Merge(state().known, known); }

bool MayTell(const Clock& asked) {
  return !OnlyGuaranteed() || std::all_of(asked.begin(), asked.end(), [](const auto& entry) {
    return Includes(state().known, {entry.first, entry.second});
  });
}

void ObserveInside(const Clock& known) {
  if (!OnlyGuaranteed()) Observe(known);
}

const Clock& KnownToHost() { return state().known; }

}  // namespace emu

using namespace emu;

void emuStepped(const EmuStepped* settings) {
  state().settings = *settings;
  state().random.seed(settings->seed);
  state().on = true;
}

void emuLast(EmuPoint* point) { *point = last().point; }
int emuLastIsAfter(const EmuPoint* point) { return Includes(last().before, *point) ? 1 : 0; }

void emuHostAccess() {
  Lock lock(global_mutex());
  last().before = KnownToHost();
  last().point = {0, ++state().known[0]};
}

int emuStreamIsAfter(CUstream handle, const EmuPoint* point, int itself) {
  return Answer([&] {
    const StreamPtr stream = StreamOf(handle);
    return Includes(itself != 0 ? stream->seen : Covered(*stream), *point) || Includes(KnownToHost(), *point);
  });
}

int emuHostIsAfter(const EmuPoint* point) {
  return Answer([&] { return Includes(KnownToHost(), *point); });
}

int emuContextIsStuck(CUcontext context) {
  return Answer([&] { return Stuck(Pending(*ContextOf(context))); });
}

int emuStreamIsStuck(CUstream handle) {
  return Answer([&] {
    const StreamPtr stream = StreamOf(handle);
    Tasks tasks = Pending(*stream);
    if (stream->blocking() && stream->context->legacy->tail != nullptr) tasks.push_back(stream->context->legacy->tail);
    return Stuck(tasks);
  });
}

int emuEventIsStuck(CUevent event) {
  return Answer([&] { return Stuck(EventOf(event)->tasks); });
}

int emuCaptureForbids() {
  return Answer([] { return CaptureForbids(); });
}
