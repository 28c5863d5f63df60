// Shared: what all contexts of the process have in common. One object, constant-initialised, never destroyed.
#pragma once

#include <array>
#include <atomic>

#include "core/address_map.h"
#include "core/capture.h"
#include "core/control_page.h"
#include "core/counters.h"
#include "core/driver.h"
#include "core/ipc.h"
#include "core/limit.h"
#include "core/misuse.h"
#include "core/options.h"
#include "core/single_order.h"
#include "core/stacks.h"
#include "core/streams.h"

namespace cushion {

class Context;

struct Shared {
  static constexpr int kDevices = cushion::kDevices;
  static constexpr int kContexts = 512;

  Driver driver;
  CaptureGate gate;
  AddressMap map;
  Counters counters;  // what no context's lock protects
  // The level of tracking and the live figures: in our own memory, and from start() on in a file if one can be had. Set
  // before the first context, never again.
  ControlPage own_page;
  ControlPage* page = &own_page;
  bool tracks() const noexcept { return page->level() != TrackLevel::off; }
  // Whether an allocation call must turn aside (Runtime::attend): a relaxed load of the word that tracks() reads too.
  bool wants_attention() const noexcept { return page->word.load(std::memory_order_relaxed) > ControlPage::kLevel; }
  // Bytes by device, under Runtime's foreign_mutex_: served by the driver itself, and by the async allocator.
  Gauge& forwarded(int device) noexcept { return page->devices[static_cast<std::size_t>(device)].forwarded; }
  Gauge& from_driver_pool(int device) noexcept {
    return page->devices[static_cast<std::size_t>(device)].from_driver_pool;
  }
  Stacks stacks;
  Misuse misuse;
  Limit limit;
  Ipc ipc;
  const Options* options = nullptr;  // set once, before the first context
  // Whether wrong frees are told.
  bool tells_misuse() const noexcept { return tracks() || options->watches(); }

  // Contexts are added and never removed (a handle that comes again finds its old object), so readers need no lock:
  // acquire on the count shows the entries below it.
  std::array<std::atomic<Context*>, kContexts> contexts{};
  std::atomic<int> context_count{0};
  // Of each device that has a context its UUID as text, empty where the driver does not tell. Written before the
  // device's first context is counted.
  std::array<std::array<char, 37>, kDevices> uuids{};

  // Set once and never cleared; each turns an optimisation off (relaxed: set before the program can rely on it).
  std::atomic<bool> green_contexts{false};    // cuCtxRecordEvent would miss a green context's work
  std::atomic<bool> peers{false};             // another device's work may touch our memory
  std::atomic<bool> legacy_launches{false};   // kernels run on the legacy stream
  std::atomic<bool> blocking_streams{false};  // the legacy stream has others to order (Context::free_async)
  std::atomic<bool> foreign_events{false};    // events are recorded where we cannot see (graph nodes, IPC)

  SingleOrder order;  // CUSHION_FREE=auto

  // The process is one of several that belong together (MPI, SLURM, torchrun). Set once, before the first context.
  bool one_of_many = false;

  std::atomic<std::uint64_t> largest_device{0};  // bytes: a larger request is hopeless

  // The program's streams, kept for drivers without context fences only.
  StreamSet streams;

  // Ticks in 10 µs: a fence that takes longer was a wait, and is counted as one. (An idle device answers in under 1
  // µs.)
  std::uint64_t noticeable_wait = 0;

  // Streams that stream-ordered allocations or frees were seen on: while there are none, event hooks have nothing to
  // note.
  std::atomic<int> stream_lanes{0};

  // Bumped when a stream or context goes: thread-local caches of handles are then asked anew.
  std::atomic<std::uint64_t> handle_epoch{1};

  // The host waited for so long: counted if it was noticeable.
  void count_wait(Counter& waits, std::uint64_t taken) noexcept {
    if (taken <= noticeable_wait) return;
    count(waits);
    count(counters.wait_ticks, taken);
  }

  template <class Visit>
  void for_each_context(Visit visit) {
    const int n = context_count.load(std::memory_order_acquire);
    for (int i = 0; i < n; ++i) visit(*contexts[static_cast<std::size_t>(i)].load(std::memory_order_relaxed));
  }
};

}  // namespace cushion
