// Lane: where frees and allocations of one order meet: a stream of a context, or a share of its threads (host lanes,
// for cudaMalloc and cudaFree). It has a magazine of its own, so that threads and streams that are independent of each
// other share no lock.
//
// Who may have a block of a magazine:
//   stream lane  everything in it was freed on the stream, or was clean: the stream itself may have all of it at once
//   host lane    what is clean: freed by a `sync` cudaFree, whose wait is over (stamp 0), or covered by a complete
//   fence
//
// Lane records are never destroyed, only recycled: `serial` tells incarnations apart and is 0 while there is none. A
// caller that remembered a lane enters it with the serial that it remembered.
//
// Lock order: Context's lock, an arena's, a lane's. The lane's is a leaf.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

#include "core/counters.h"
#include "core/heap.h"
#include "core/magazine.h"
#include "core/spin_lock.h"

namespace cushion {

class Lane;

struct LaneRef {
  Lane* lane = nullptr;
  std::uint64_t serial = 0;
};

// Who a stream is. Handles are reused after destroy, ids are not.
struct StreamIdentity {
  CUstream handle = nullptr;
  std::uint64_t id = 0;
  long owner_thread = 0;   // for a per-thread stream: the only thread that may use the handle
  mutable LaneRef lane{};  // where its context found it last: a hint
  bool blocking = false;   // its work waits for the legacy stream's earlier work, and that one's for it
};

class alignas(64) Lane {
 public:
  static constexpr int kArenas = 65;  // the global one, and those of streams and threads or of bins

  // What the program has ordered before this stream's next work: of the lane `serial`, frees up to `stamp`. At most
  // kMostBefore of them: an order that is forgotten only costs a chance to reuse.
  struct Before {
    std::uint64_t serial;
    std::uint64_t stamp;
    Lane* lane;
  };
  static constexpr std::size_t kMostBefore = 32;

  // `number` spreads lanes over arenas.
  Lane(unsigned number, Gauges& gauges) noexcept : tally(gauges), number_(number) {}

  bool is_stream() const noexcept { return stream_; }
  bool is(std::uint64_t serial) const noexcept {
    return serial != 0 && serial_.load(std::memory_order_relaxed) == serial;
  }
  std::uint64_t serial() const noexcept { return serial_.load(std::memory_order_relaxed); }
  unsigned number() const noexcept { return number_; }
  const StreamIdentity& identity() const noexcept { return identity_; }

  // Takes the lock, if the lane is still the one that the caller means.
  bool enter(std::uint64_t serial) noexcept {
    lock_.lock();
    if (is(serial)) return true;
    lock_.unlock();
    return false;
  }
  void leave() noexcept { lock_.unlock(); }
  // Takes the lock, whichever incarnation it is: for the tally, which belongs to the record.
  void enter() noexcept { lock_.lock(); }

  // A new incarnation.
  void open(std::uint64_t serial, const StreamIdentity* stream) noexcept {
    stream_ = stream != nullptr;
    identity_ = stream != nullptr ? *stream : StreamIdentity{};
    lock_.lock();
    before.clear();
    serial_.store(serial, std::memory_order_relaxed);
    lock_.unlock();
  }
  // Ends this incarnation; with the lock held.
  void end() noexcept { serial_.store(0, std::memory_order_relaxed); }

  void order_after(Before earlier) {
    if (earlier.serial == serial()) return;
    for (Before& b : before) {
      if (b.serial == earlier.serial) {
        if (b.stamp < earlier.stamp) b.stamp = earlier.stamp;
        return;
      }
    }
    if (before.size() < kMostBefore) {
      before.push_back(earlier);
      return;
    }
    const auto oldest = std::min_element(before.begin(), before.end(),
                                         [](const Before& a, const Before& b) { return a.stamp < b.stamp; });
    if (oldest->stamp < earlier.stamp) *oldest = earlier;
  }

  // Under the lock:
  Magazine magazine;
  Tally tally;
  std::vector<Before> before;

  // Under the lock of the arena in question: this lane's heap there, if it has one.
  std::array<Heap*, kArenas> heaps{};
  // Under the Context's lock: threads asking the stream just now; destroying it waits for them.
  int queries = 0;

 private:
  const unsigned number_;
  SpinLock lock_;
  // Written under the lock; read without it where a stale answer is found out later.
  std::atomic<std::uint64_t> serial_{0};
  // Constant while the incarnation lasts; who remembers an ended one may read the next one's.
  Relaxed<bool> stream_{};
  StreamIdentity identity_;  // under the Context's lock
};

}  // namespace cushion
