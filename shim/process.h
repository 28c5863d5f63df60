// Process: the life of the process as Cushion sees it. From nothing (`fresh`: the program has allocated no device
// memory) to serving or, when told to step aside, native; and the two ends, a forked child's and the program's own.
#pragma once

#include <atomic>

#include "core/runtime.h"

namespace cushion {

enum class Life : int {
  fresh,    // options are not read yet
  serving,  // the runtime is started
  native,   // bad options, or told to step aside: every call goes to the driver
  forked,   // a child forked after start: no CUDA calls, no locks, no report
  ended,    // the report is written; the process is on its way out
};
extern constinit std::atomic<Life> g_life;

// Starts the runtime at the first device allocation. Takes a lock while `fresh`.
void start_serving() noexcept;

// The runtime if it serves this call, else null. Inside a driver call of ours (recursion) it serves nothing.
inline Runtime* serving() noexcept {
  return g_life.load(std::memory_order_acquire) == Life::serving && t_inside == 0 ? &runtime() : nullptr;
}
// The same for calls that allocate device memory: they start it.
inline Runtime* serving_allocation() noexcept {
  if (g_life.load(std::memory_order_acquire) == Life::fresh && t_inside == 0) start_serving();
  Runtime* rt = serving();
  if (rt != nullptr && rt->shared().wants_attention()) [[unlikely]]
    rt->attend();
  return rt;
}

// For the C API. Before the first device allocation, in a program that Cushion will serve (as far as the environment
// says): sets the level to begin with. False otherwise.
bool choose_track_before_start(Tracking wanted) noexcept;
bool may_start() noexcept;

}  // namespace cushion
