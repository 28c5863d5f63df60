// Fences: when is a freed block clean? One set for each context.
//
// A fence is an event that completes after everything submitted to the whole context before it: cuCtxRecordEvent,
// which covers legacy, blocking, non-blocking and per-thread streams, also destroyed ones whose work still runs, and
// makes no false dependency (contract §3, measured). Each free takes a stamp; a fence carries the stamp current just
// before its record and cleans every free up to it.
//
// Invariants, each of which a test breaks:
//  - a fence's stamp is read before its event is recorded: work submitted before a free that it covers was submitted
//    before the record;
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

// The fences under way, oldest first, and the highest stamp known complete. The context's lock protects all of it.
class FenceSet {
 public:
  static constexpr std::size_t kMost = 32;  // more would only be queried in vain

  std::uint64_t stamp() const noexcept { return stamp_.load(std::memory_order_acquire); }
  std::uint64_t next_stamp() noexcept { return stamp_.fetch_add(1, std::memory_order_release) + 1; }
  std::uint64_t clean_through() const noexcept { return clean_through_; }
  void completed(std::uint64_t stamp) noexcept {
    if (stamp > clean_through_) clean_through_ = stamp;
  }

  // Whether frees up to stamp() lack a fence that will clean them, and there is room for one.
  bool wants_fence(std::uint64_t newest_free) const noexcept {
    const std::uint64_t covered = fences_.empty() ? clean_through_ : std::max(fences_.back().stamp, clean_through_);
    return newest_free > covered && fences_.size() < kMost;
  }
  void add(Fence fence) {
    fence.id = ++last_id_;
    fences_.push_back(std::move(fence));
  }
  // The oldest fence that nobody is querying, marked as being queried by the caller; null if there is none.
  Fence* claim() noexcept {
    for (Fence& f : fences_) {
      if (!f.being_queried) {
        f.being_queried = true;
        return &f;
      }
    }
    return nullptr;
  }
  // Ends the query of fence `id`: complete, its stamp is clean and its events are returned for release.
  std::vector<FenceEvent> finish(std::uint64_t id, bool complete) noexcept {
    for (auto f = fences_.begin(); f != fences_.end(); ++f) {
      if (f->id != id) continue;
      f->being_queried = false;
      if (!complete) return {};
      completed(f->stamp);
      auto events = std::move(f->events);
      fences_.erase(f);
      return events;
    }
    return {};
  }
  // The context is gone: what it held is forgotten. Stamps go on, so that old ones stay old.
  void abandon() noexcept {
    fences_.clear();
    clean_through_ = stamp();
  }

 private:
  // Read without the lock before the program's own cuCtxSynchronize: acquire, so that a free that the caller knows of
  // has its stamp in what is read.
  std::atomic<std::uint64_t> stamp_{0};
  std::uint64_t clean_through_ = 0;
  std::uint64_t last_id_ = 0;
  std::deque<Fence> fences_;
};

}  // namespace cushion
