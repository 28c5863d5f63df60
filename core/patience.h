// Patience: how long to wait for a lock that this very thread may hold, because a signal interrupted it.
#pragma once

#include <sched.h>

#include <mutex>

#include "core/ticks.h"

namespace cushion {

enum class Patience {
  none,  // in a signal handler
  some,  // in exit, _exit and the like, which a signal handler may call: 100 ms, far longer than any of ours is held
};

template <class Mutex>
bool lock_within(std::unique_lock<Mutex>& lock, Patience patience) noexcept {
  const std::uint64_t deadline = patience == Patience::none ? 0 : monotonic_ns() + 100'000'000;
  while (!lock.try_lock()) {
    if (deadline == 0 || monotonic_ns() >= deadline) return false;
    sched_yield();
  }
  return true;
}

}  // namespace cushion
