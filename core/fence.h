// Fences: when is a freed block clean? One set for each context.
//
// A fence is an event that completes after everything submitted to the whole context before it: cuCtxRecordEvent,
// which covers legacy, blocking, non-blocking and per-thread streams, also destroyed ones whose work still runs, and
// makes no false dependency (contract §3, measured).
//
// Stamps say which frees a fence covers. A free takes the counter as it stands (now(): a load, so that frees of many
// threads share a line that nobody writes). Whoever is about to record something advances the counter first, and covers
// the frees that took no more than what it was (advance()). Why that is enough: the free read the counter before it was
// advanced, and before that read its thread took its lane's lock with a sequentially consistent exchange, a full
// barrier; so all work submitted before the free is visible to the driver before the counter moves, and the record
// comes after. A free that comes too late reads a later stamp and is left to the next fence.
//
// Invariants, each of which a test breaks:
//  - the counter is advanced before the event is recorded or the wait is begun, never after;
//  - an error from the driver never makes anything clean;
//  - an event goes back to the pool of spare events only when no fence, block or waiter depends on it;
//  - a fence recorded later than a free is only queried, never waited on without bound, never made a stream wait:
//    work submitted in between may itself wait for the host. (A `sync` free waits for its own fence, as natively.)
//  - no lock of ours is held across a driver call that can block.
//
// Where an accessing peer may touch the memory, a fence has one event for each context that could.
// Costs: record 0.15 µs idle and 2.1 µs with sixteen busy streams, query 0.1–0.3 µs.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "core/driver.h"

namespace cushion {

// Spare events of one context, without timing. Its lock is a leaf: nothing is called under it. The last event put back
// lies in a slot of its own, so that a thread that frees again and again takes no lock (about 10 ns for both ways). The
// slot is out of use once the context was reset: what a racing put left in it would be an event of the old one.
class EventPool {
 public:
  EventPool() = default;
  // An event of `context`, new if none is spare; null if the driver refuses.
  CUevent take(const Driver& driver, CUcontext context) noexcept;
  // `generation` is the one the event was taken in; events of a context that was reset are dropped.
  void put(CUevent event, std::uint64_t generation) noexcept;
  std::uint64_t generation() const noexcept { return generation_.load(std::memory_order_acquire); }
  // The context was reset or destroyed and its events with it.
  void discard() noexcept;

 private:
  // Acquire and release: who takes the event sees what its last user did to it.
  std::atomic<CUevent> hot_{nullptr};
  std::mutex mutex_;  // protects spare_
  std::vector<CUevent> spare_;
  static constexpr std::uint64_t kFirst = 1;
  std::atomic<std::uint64_t> generation_{kFirst};  // written under mutex_; read without it to notice a reset
};

// One recorded event and where it came from.
struct FenceEvent {
  EventPool* pool = nullptr;
  std::uint64_t generation = 0;
  CUevent event = nullptr;

  // Whether what it covers is complete. A reset context has no work left; an error is "no".
  CUresult query(const Driver& driver) const noexcept {
    if (pool->generation() != generation) return CUDA_SUCCESS;
    return driver.call(driver.cuEventQuery, event);
  }
  void release() noexcept { pool->put(event, generation); }
};

struct Fence {
  std::uint64_t stamp = 0;
  std::vector<FenceEvent> events;
  bool being_queried = false;
  std::uint64_t id = 0;
};

// The fences under way, oldest first, and the highest stamp known complete. Its lock is a leaf and protects the list;
// the stamps are atomics.
class FenceSet {
 public:
  static constexpr std::size_t kMost = 32;  // more would only be queried in vain

  // The stamp that a free takes. Sequentially consistent, see above.
  std::uint64_t now() const noexcept { return stamp_.load(std::memory_order_seq_cst); }
  // Before a record or a wait: the stamp that it covers.
  std::uint64_t advance() noexcept { return stamp_.fetch_add(1, std::memory_order_seq_cst); }

  // Acquire and release: who reads that a free is clean comes after the driver call that said so.
  std::uint64_t clean_through() const noexcept { return clean_through_.load(std::memory_order_acquire); }
  void completed(std::uint64_t stamp) noexcept {
    std::uint64_t known = clean_through();
    while (stamp > known && !clean_through_.compare_exchange_weak(known, stamp, std::memory_order_acq_rel)) {
    }
  }

  // Whether frees up to `newest` lack a fence that will clean them, and there is room for one.
  bool wants_fence(std::uint64_t newest) const noexcept {
    std::lock_guard lock(mutex_);
    const std::uint64_t covered = fences_.empty() ? clean_through() : std::max(fences_.back().stamp, clean_through());
    return newest > covered && fences_.size() < kMost;
  }
  void add(Fence fence) {
    std::lock_guard lock(mutex_);
    fence.id = ++last_id_;
    fences_.push_back(std::move(fence));
  }
  // The oldest fence that nobody is querying, marked as being queried by the caller: its id, and a copy of its events
  // in `events`; 0 if there is none.
  std::uint64_t claim(std::vector<FenceEvent>& events) {
    std::lock_guard lock(mutex_);
    for (Fence& f : fences_) {
      if (f.being_queried) continue;
      events = f.events;
      f.being_queried = true;
      return f.id;
    }
    return 0;
  }
  // Ends the query of fence `id`: complete, its stamp is clean and its events go back.
  void finish(std::uint64_t id, bool complete) noexcept {
    std::lock_guard lock(mutex_);
    for (auto f = fences_.begin(); f != fences_.end(); ++f) {
      if (f->id != id) continue;
      f->being_queried = false;
      if (!complete) return;
      completed(f->stamp);
      for (FenceEvent& event : f->events) event.release();
      fences_.erase(f);
      return;
    }
  }
  // The context is gone: what it held is forgotten. Stamps go on, so that old ones stay old.
  void abandon() noexcept {
    std::lock_guard lock(mutex_);
    fences_.clear();
    completed(advance());
  }

 private:
  alignas(64) std::atomic<std::uint64_t> stamp_{1};  // 0 is "clean"
  std::atomic<std::uint64_t> clean_through_{0};
  alignas(64) mutable std::mutex mutex_;
  std::uint64_t last_id_ = 0;
  std::deque<Fence> fences_;
};

}  // namespace cushion
