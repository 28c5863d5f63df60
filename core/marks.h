// Marks: moments that the program or its user named ("epoch 3"), kept for the report.
//
// Invariant: the first kMost are kept, in the order in which they came; a kept one never changes, so the report reads
// them without the lock, in a signal handler too. Cost: a lock and a copy of the name; memory for all of them is
// static.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string_view>

#include "core/ticks.h"

namespace cushion {

struct NamedMoment {
  char name[64];  // ends with 0
  std::uint64_t tick;
  std::uint64_t live;  // bytes requested and not freed, all devices
};

class Marks {
 public:
  static constexpr std::size_t kMost = 256;

  // False: there is no more room.
  bool add(std::string_view name, std::uint64_t live) noexcept {
    std::lock_guard lock(mutex_);
    const std::size_t n = size_.load(std::memory_order_relaxed);
    if (n == kMost) return false;
    NamedMoment& mark = kept_[n];
    mark.name[name.copy(mark.name, sizeof mark.name - 1)] = '\0';
    mark.tick = ticks();
    mark.live = live;
    size_.store(n + 1, std::memory_order_release);  // who sees the count sees the marks below it
    return true;
  }
  const NamedMoment* begin() const noexcept { return kept_.data(); }
  const NamedMoment* end() const noexcept { return kept_.data() + size_.load(std::memory_order_acquire); }

 private:
  std::mutex mutex_;  // protects adding; a leaf
  std::array<NamedMoment, kMost> kept_{};
  std::atomic<std::size_t> size_{0};
};

}  // namespace cushion
