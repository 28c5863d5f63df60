// Ticks: the cheapest clock the processor has (6 to 12 ns), turned into seconds only when a report is written.
#pragma once

#include <cstdint>
#include <ctime>
#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace cushion {

inline std::uint64_t ticks() noexcept {
#if defined(__x86_64__)
  return __rdtsc();
#elif defined(__aarch64__)
  std::uint64_t t;
  asm volatile("mrs %0, cntvct_el0" : "=r"(t));
  return t;
#else
#error "Cushion knows the clocks of x86-64 and arm64 only"
#endif
}

inline std::uint64_t monotonic_ns() noexcept {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<std::uint64_t>(t.tv_sec) * 1'000'000'000u + static_cast<std::uint64_t>(t.tv_nsec);
}

// The same clock at the last timer interrupt, so up to 10 ms ago: half the cost of a tick.
inline std::uint64_t coarse_ns() noexcept {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
  return static_cast<std::uint64_t>(t.tv_sec) * 1'000'000'000u + static_cast<std::uint64_t>(t.tv_nsec);
}

// A reading of both clocks; two of them give the length of a tick.
struct ClockPair {
  std::uint64_t tick = 0;
  std::uint64_t ns = 0;
  static ClockPair now() noexcept { return {ticks(), monotonic_ns()}; }
};

// When the process began, as far as Cushion can tell: in file times' clock, and on both of its own.
struct LoadTime {
  timespec wall{};
  ClockPair clock;
};

class TickLength {
 public:
  TickLength(ClockPair start, ClockPair end) noexcept
      : seconds_(end.tick > start.tick
                     ? static_cast<double>(end.ns - start.ns) * 1e-9 / static_cast<double>(end.tick - start.tick)
                     : 0) {}
  std::uint64_t ticks_in(double seconds) const noexcept {
    return seconds_ > 0 ? static_cast<std::uint64_t>(seconds / seconds_) : 0;
  }
  double seconds(std::uint64_t tick_count) const noexcept { return static_cast<double>(tick_count) * seconds_; }

 private:
  double seconds_;
};

}  // namespace cushion
