// Counters: what Cushion did, summed for the report. One table; a new figure is one line.
//
// Relaxed atomics: they order nothing and are read only by the report. What is written under a lock that all its
// writers hold is bumped with a load and a store, which cost less than an atomic addition.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/block.h"

namespace cushion {

inline constexpr int kApis = sizeof(kApiNames) / sizeof(kApiNames[0]);

// CUSHION_COUNTER(field, "report key", "what a person reads")
#define CUSHION_COUNTERS(CUSHION_COUNTER)                                                                       \
  CUSHION_COUNTER(frees_served, "frees_served", "frees of the pool's blocks")                                   \
  CUSHION_COUNTER(frees_forwarded, "frees_forwarded", "frees passed to the driver")                             \
  CUSHION_COUNTER(free_waits, "free_waits", "frees that waited for the device, as natively")                    \
  CUSHION_COUNTER(stream_waits, "stream_waits", "stream waits inserted, memory being short")                    \
  CUSHION_COUNTER(memory_waits, "memory_waits", "allocations that waited for freed blocks, memory being short") \
  CUSHION_COUNTER(grows, "grows", "segments taken from the driver")                                             \
  CUSHION_COUNTER(releases, "releases", "segments given back to the driver")                                    \
  CUSHION_COUNTER(out_of_memory, "out_of_memory", "allocations the pool could not serve, memory being short")   \
  CUSHION_COUNTER(reset_blocks, "reset_blocks", "blocks still live when their context was reset or destroyed")  \
  CUSHION_COUNTER(reset_bytes, "reset_bytes", "bytes requested of those blocks")                                \
  CUSHION_COUNTER(ipc_refused, "ipc_refused", "IPC handles refused for the pool's blocks")

using Counter = std::atomic<std::uint64_t>;

struct Counters {
  Counter served[kApis]{};
  Counter forwarded[kApis]{};
  Counter wait_ticks{0};  // host time spent waiting, of all kinds
#define CUSHION_COUNTER(field, key, text) Counter field{0};
  CUSHION_COUNTERS(CUSHION_COUNTER)
#undef CUSHION_COUNTER
};

inline void count(Counter& counter, std::uint64_t by = 1) noexcept { counter.fetch_add(by, std::memory_order_relaxed); }
// The same where all writers hold one lock.
inline void bump(Counter& counter, std::uint64_t by = 1) noexcept {
  counter.store(counter.load(std::memory_order_relaxed) + by, std::memory_order_relaxed);
}

// A figure with its highest value. Its writers hold one lock; anybody may read.
class Gauge {
 public:
  void add(std::uint64_t bytes) noexcept {
    bump(current_, bytes);
    if (current() > peak()) peak_.store(current(), std::memory_order_relaxed);
  }
  void subtract(std::uint64_t bytes) noexcept { bump(current_, 0 - bytes); }
  std::uint64_t current() const noexcept { return current_.load(std::memory_order_relaxed); }
  std::uint64_t peak() const noexcept { return peak_.load(std::memory_order_relaxed); }

 private:
  Counter current_{0};
  Counter peak_{0};
};

// Bytes that the pool of one context deals with.
struct Usage {
  Gauge requested;   // by the program
  Gauge handed_out;  // blocks given for them: requests rounded up
  Gauge held;        // segments taken from the driver
};

}  // namespace cushion
