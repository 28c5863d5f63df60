// Time line: live and held bytes over the life of the process, in bounded memory: when it is full, every second point
// goes and the distance doubles, so a long run has as many points as a short one, evenly spread.
//
// Thread safety: any thread adds (the second one at a time goes without); reading takes no lock and may run in a signal
// handler: points that another thread moves meanwhile may come twice, and are to be passed over by their time. Cost: a
// load and a compare for an allocation at which no point is due.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/block.h"
#include "core/spin_lock.h"

namespace cushion {

class TimeLine {
 public:
  static constexpr std::size_t kMost = 2048;

  struct Point {
    Relaxed<std::uint64_t> ns;  // on the monotonic clock
    Relaxed<std::uint64_t> live;
    Relaxed<std::uint64_t> held;
  };

  // Nanoseconds between two points, to begin with.
  void configure(std::uint64_t distance) noexcept { distance_ = distance != 0 ? distance : 1; }
  bool due(std::uint64_t ns) const noexcept { return ns >= next_.load(std::memory_order_relaxed); }
  // usage(live, held) is asked for if the point is taken.
  template <class Usage>
  void add(std::uint64_t ns, Usage usage) noexcept {
    if (!lock_.try_lock()) return;
    if (due(ns)) {
      std::uint64_t live = 0;
      std::uint64_t held = 0;
      usage(live, held);
      if (size() == kMost) thin();
      Point& point = points_[size()];
      point.ns = ns;
      point.live = live;
      point.held = held;
      size_.store(size() + 1, std::memory_order_release);  // who sees the count sees the points below it
      next_.store(ns + distance_, std::memory_order_relaxed);
    }
    lock_.unlock();
  }

  std::size_t size() const noexcept { return size_.load(std::memory_order_acquire); }
  const Point& operator[](std::size_t i) const noexcept { return points_[i]; }

 private:
  void thin() noexcept {
    for (std::size_t i = 1; i < kMost / 2; ++i) {
      points_[i].ns = points_[2 * i].ns;
      points_[i].live = points_[2 * i].live;
      points_[i].held = points_[2 * i].held;
    }
    size_.store(kMost / 2, std::memory_order_release);
    distance_ *= 2;
  }

  SpinLock lock_;  // protects adding; usage() takes no lock
  std::uint64_t distance_ = 1;
  std::atomic<std::uint64_t> next_{0};
  std::atomic<std::size_t> size_{0};
  std::array<Point, kMost> points_{};
};

}  // namespace cushion
