// Events: a set of tasks, complete when all of them are.
//
// Recording on a stream puts a marker there; recording on a context takes the ends of all its queues and puts nothing
// anywhere (contract §3). A wait takes the event as it is at the call, whatever is recorded later. While its stream
// captures, an event stands for a place in the graph instead, and cannot be asked about.
#pragma once

#include "stream.h"

namespace emu {

struct Event {
  std::shared_ptr<Context> context;
  unsigned flags = 0;
  bool recorded = false;
  Tasks tasks;
  Clock clock;
  TimePoint recorded_at{};
  std::shared_ptr<Capture> capture;
  Clock capture_clock;

  void Record(Tasks covered, Clock covered_clock);
  bool Done() const { return AllDone(tasks); }
  TimePoint Time() const;
};

using EventPtr = std::shared_ptr<Event>;

// The event a handle names; refuses unknown ones and those of a broken context.
EventPtr EventOf(CUevent handle);

}  // namespace emu
