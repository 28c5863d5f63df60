// Counters: what Cushion did, summed for the report. One table; a new figure is one line.
//
// Relaxed atomics: they order nothing and are read only by the report. What is written under a lock that all its
// writers hold (a lane's) is bumped with a load and a store, which cost less than an atomic addition.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>

#include "core/block.h"

namespace cushion {

inline constexpr int kApis = sizeof(kApiNames) / sizeof(kApiNames[0]);

// CUSHION_COUNTER(field, "report key", "what a person reads")
#define CUSHION_COUNTERS(CUSHION_COUNTER)                                                                              \
  CUSHION_COUNTER(frees_served, "frees_served", "frees of the pool's blocks")                                          \
  CUSHION_COUNTER(frees_forwarded, "frees_forwarded", "frees passed to the driver")                                    \
  CUSHION_COUNTER(misses, "misses", "allocations that no magazine could serve")                                        \
  CUSHION_COUNTER(free_waits, "free_waits", "frees that waited for the device, as natively")                           \
  CUSHION_COUNTER(free_waits_owed, "free_waits_owed", "frees that returned before their wait (FREE=auto)")             \
  CUSHION_COUNTER(stream_waits, "stream_waits", "stream waits inserted, memory being short")                           \
  CUSHION_COUNTER(memory_waits, "memory_waits", "allocations that waited for freed blocks, memory being short")        \
  CUSHION_COUNTER(grows, "grows", "segments taken from the driver")                                                    \
  CUSHION_COUNTER(releases, "releases", "segments and handles given back to the driver")                               \
  CUSHION_COUNTER(remaps, "remaps", "growths that moved idle memory to other addresses (BACKING=vmm)")                 \
  CUSHION_COUNTER(out_of_memory, "out_of_memory", "allocations the pool could not serve, memory being short")          \
  CUSHION_COUNTER(reset_blocks, "reset_blocks", "blocks still live when their context was reset or destroyed")         \
  CUSHION_COUNTER(reset_bytes, "reset_bytes", "bytes requested of those blocks")                                       \
  CUSHION_COUNTER(wrong_frees, "wrong_frees", "frees of what is no block of the pool's")                               \
  CUSHION_COUNTER(guards_overwritten, "guards_overwritten", "blocks whose guard was overwritten (GUARD)")              \
  CUSHION_COUNTER(guards_skipped, "guards_skipped", "frees whose guard could not be looked at (GUARD)")                \
  CUSHION_COUNTER(quarantine_overwritten, "quarantine_overwritten", "blocks written to after their free (QUARANTINE)") \
  CUSHION_COUNTER(quarantine_skipped, "quarantine_skipped", "held blocks that could not be looked at (QUARANTINE)")    \
  CUSHION_COUNTER(ipc_exported, "ipc_exported", "IPC handles given for the pool's blocks")                             \
  CUSHION_COUNTER(ipc_refused, "ipc_refused", "IPC handles refused for the pool's blocks")

// Requests by size: class i holds those of i significant bits, so from 2^(i-1) bytes to below 2^i.
inline constexpr int kSizes = 64;
constexpr int size_class(std::uint64_t bytes) noexcept { return std::min(static_cast<int>(std::bit_width(bytes)), 63); }

using Counter = std::atomic<std::uint64_t>;

struct Counters {
  Counter served[kApis]{};
  Counter forwarded[kApis]{};
  Counter sizes[kSizes]{};     // of tracked allocations
  Counter wait_ticks{0};       // host time spent waiting, of all kinds
  Counter free_wait_ticks{0};  // of it in cudaFree
#define CUSHION_COUNTER(field, key, text) Counter field{0};
  CUSHION_COUNTERS(CUSHION_COUNTER)
#undef CUSHION_COUNTER
};

inline void count(Counter& counter, std::uint64_t by = 1) noexcept { counter.fetch_add(by, std::memory_order_relaxed); }
// The same where all writers hold one lock.
inline void bump(Counter& counter, std::uint64_t by = 1) noexcept {
  counter.store(counter.load(std::memory_order_relaxed) + by, std::memory_order_relaxed);
}

// A figure with its highest value. Anybody may add and read.
class Gauge {
 public:
  // `high` is the most that it was above its start while `by` (two's complement) came together.
  void add(std::uint64_t by, std::uint64_t high) noexcept {
    const std::uint64_t most = current_.fetch_add(by, std::memory_order_relaxed) + high;
    std::uint64_t peak = peak_.load(std::memory_order_relaxed);
    while (most > peak && !peak_.compare_exchange_weak(peak, most, std::memory_order_relaxed)) {
    }
  }
  void add(std::uint64_t bytes) noexcept { add(bytes, bytes); }
  void subtract(std::uint64_t bytes) noexcept { add(0 - bytes, 0); }
  std::uint64_t current() const noexcept { return current_.load(std::memory_order_relaxed); }
  std::uint64_t peak() const noexcept { return peak_.load(std::memory_order_relaxed); }

 private:
  Counter current_{0};
  Counter peak_{0};
};

struct Gauges {  // of one context
  Gauge requested;
  Gauge handed_out;
  Gauge held;
};

// What one lane counts for itself, so that independent threads and streams write to no shared line. Written under the
// lane's lock, read by anybody. Bytes go to the context's gauges when kMost of them have come together, and when the
// thread turns to another lane: peaks are exact while one thread allocates; with more, each adds at most kMost bytes
// of error.
struct Tally {
  static constexpr std::int64_t kMost = std::int64_t{4} << 20;

  struct Bytes {
    Counter delta{0};  // two's complement: since it last went to the gauge
    Counter high{0};   // the most that it was since then
    void add(std::uint64_t bytes) noexcept {
      const std::uint64_t now = delta.load(std::memory_order_relaxed) + bytes;
      delta.store(now, std::memory_order_relaxed);
      if (static_cast<std::int64_t>(now) > static_cast<std::int64_t>(high.load(std::memory_order_relaxed)))
        high.store(now, std::memory_order_relaxed);
    }
    void subtract(std::uint64_t bytes) noexcept { bump(delta, 0 - bytes); }
    bool is_much() const noexcept {
      const auto now = static_cast<std::int64_t>(delta.load(std::memory_order_relaxed));
      return now >= kMost || now <= -kMost;
    }
    void settle(Gauge& gauge) noexcept {
      gauge.add(delta.load(std::memory_order_relaxed), high.load(std::memory_order_relaxed));
      delta.store(0, std::memory_order_relaxed);
      high.store(0, std::memory_order_relaxed);
    }
  };
  Counter served[kApis]{};
  Counter frees{0};
  Counter misses{0};        // allocations that no magazine had a block for
  Counter sizes[kSizes]{};  // of tracked allocations
  Bytes requested;          // by the program
  Bytes handed_out;         // blocks given for them: requests rounded up

  explicit Tally(Gauges& to) noexcept : gauges_(to) {}
  [[gnu::always_inline]] void allocated(int api, std::uint64_t asked, std::uint64_t size) noexcept {
    bump(served[api]);
    requested.add(asked);
    handed_out.add(size);
    if (handed_out.is_much()) [[unlikely]]
      settle();
  }
  void tracked(std::uint64_t asked) noexcept { bump(sizes[size_class(asked)]); }
  [[gnu::always_inline]] void freed(std::uint64_t asked, std::uint64_t size) noexcept {
    bump(frees);
    requested.subtract(asked);
    handed_out.subtract(size);
    if (handed_out.is_much()) [[unlikely]]
      settle();
  }
  [[gnu::noinline]] void settle() noexcept {
    requested.settle(gauges_.requested);
    handed_out.settle(gauges_.handed_out);
  }

 private:
  Gauges& gauges_;  // where the bytes go: its context's
};

// A figure now and at its highest.
class Level {
 public:
  constexpr Level(std::uint64_t current, std::uint64_t peak) noexcept : current_(current), peak_(peak) {}
  std::uint64_t current() const noexcept { return current_; }
  std::uint64_t peak() const noexcept { return peak_; }

 private:
  std::uint64_t current_;
  std::uint64_t peak_;
};

// Bytes that one context deals with.
struct Usage {
  Level requested;   // by the program
  Level handed_out;  // blocks given for them: requests rounded up
  Level held;        // segments taken from the driver
};

}  // namespace cushion
