// ControlPage: what a process shares with `cushion ctl` and `cushion top`: who it is, the level of tracking, one
// request at a time, and its live figures. It is a file that the process maps (control_file.h), or, where none can be
// had, the same in its own memory, so that all code has one way.
//
// Invariant: the header is written before the file has its name, and never again. Everything after it is atomic, or
// belongs to whom `request` says. A reader trusts nothing in it (control_file.h checks the header; counts and indices
// are bounded where they are used); the process itself takes from it only what its user may ask for anyway.
//
// Cost: an allocation reads `word`, alone on its line: one relaxed load. The gauges are the contexts' own, written as
// seldom as without anybody looking (Tally: when 4 MiB have come together in a lane, and at each answer): what is read
// here may lack up to 4 MiB a lane. Counts of calls are written at each answer.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "core/counters.h"
#include "core/process_key.h"
#include "core/track.h"

namespace cushion {

inline constexpr int kDevices = 128;

enum class RequestKind : std::uint32_t { track, mark, report, trim };
// idle → posted (asker) → taken (process) → done (process) → idle (asker). An asker that gives up makes posted idle.
enum class RequestState : std::uint64_t { idle, posted, taken, done };

struct ControlPage {
  static constexpr char kMagic[8] = {'C', 'U', 'S', 'H', 'P', 'A', 'G', 'E'};
  static constexpr std::uint32_t kVersion = 2;  // of this layout
  static constexpr std::size_t kContexts = 64;  // later ones are served, and are not in the figures

  struct Header {
    char magic[8];
    std::uint32_t version;
    std::uint32_t size;  // of the page
    ProcessKey key;
    std::uint32_t helper;  // 1: a thread answers at once
    char program[60];      // ends with 0
  };
  Header header{};

  // The level in force, and above it why an allocation call must turn aside.
  static constexpr std::uint32_t kLevel = 0xff;
  static constexpr std::uint32_t kAttention = 0x100;  // somebody asks for something
  static constexpr std::uint32_t kCounting = 0x200;   // until TRACK_AFTER is reached
  alignas(64) std::atomic<std::uint32_t> word{0};
  std::atomic<std::uint64_t> interval{0};  // of the level `sampled`, set before it; orders nothing

  // The request: text and answer belong to the asker, while it is taken to the process. Askers come one after another:
  // each holds the file's lock. Release and acquire on `request` hand the rest over.
  alignas(64) std::atomic<std::uint64_t> request{0};  // RequestState
  std::atomic<std::uint32_t> doorbell{0};             // a futex: rung after each request, for the helper thread
  RequestKind kind{};
  std::int32_t failed = 0;  // the answer: 0 if it was done
  char text[4096]{};        // both end with 0
  char answer[512]{};

  struct alignas(64) Slot {  // a context
    std::atomic<int> device{0};
    Gauges gauges;
  };
  struct DeviceGauges {
    Gauge forwarded;         // served by the driver itself
    Gauge from_driver_pool;  // by the async allocator
  };
  alignas(64) std::atomic<std::uint32_t> contexts{0};  // slots in use
  std::array<Slot, kContexts> slots{};
  std::array<DeviceGauges, kDevices> devices{};
  struct {
    Counter calls;  // allocations, served and forwarded
    Counter frees;
    Counter hits;  // allocations that a magazine served
    Counter waits;
    Counter at_ns;  // when they were counted, on the monotonic clock; 0: never
  } counted;

  TrackLevel level() const noexcept { return static_cast<TrackLevel>(word.load(std::memory_order_relaxed) & kLevel); }

  Tracking tracking() const noexcept {
    const TrackLevel now = level();
    return {now, now == TrackLevel::sampled ? interval.load(std::memory_order_relaxed) : 0};
  }

  // The gauges of one more context on the device. Callers come one after another.
  Gauges* add_context(int device) noexcept {
    const std::uint32_t n = contexts.load(std::memory_order_relaxed);
    if (n >= kContexts) return nullptr;
    slots[n].device.store(device, std::memory_order_relaxed);
    contexts.store(n + 1, std::memory_order_release);
    return &slots[n].gauges;
  }
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free);

}  // namespace cushion
