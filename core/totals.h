// Totals: the counters of the process, the contexts' and those that belong to none, summed at one moment.
//
// Cost: a few relaxed loads for each lane that there is. Takes no lock, allocates nothing.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/context.h"
#include "core/counters.h"
#include "core/shared.h"

namespace cushion {

struct Totals {
  std::uint64_t served[kApis]{};
  std::uint64_t forwarded[kApis]{};
  std::uint64_t sizes[kSizes]{};
  std::uint64_t wait_ticks = 0;
  std::uint64_t free_wait_ticks = 0;
#define CUSHION_COUNTER(field, key, text) std::uint64_t field = 0;
  CUSHION_COUNTERS(CUSHION_COUNTER)
#undef CUSHION_COUNTER

  explicit Totals(Shared& shared) noexcept {
    add(shared.counters);
    shared.for_each_context([&](const Context& context) { context.for_each_tally([&](const Tally& t) { add(t); }); });
  }
  void add(const Tally& from) noexcept {
    for (int i = 0; i < kApis; ++i) served[i] += from.served[i].load(std::memory_order_relaxed);
    for (int i = 0; i < kSizes; ++i) sizes[i] += from.sizes[i].load(std::memory_order_relaxed);
    frees_served += from.frees.load(std::memory_order_relaxed);
    misses += from.misses.load(std::memory_order_relaxed);
  }
  void add(const Counters& from) noexcept {
    for (int i = 0; i < kApis; ++i) {
      served[i] += from.served[i].load(std::memory_order_relaxed);
      forwarded[i] += from.forwarded[i].load(std::memory_order_relaxed);
    }
    for (int i = 0; i < kSizes; ++i) sizes[i] += from.sizes[i].load(std::memory_order_relaxed);
    wait_ticks += from.wait_ticks.load(std::memory_order_relaxed);
    free_wait_ticks += from.free_wait_ticks.load(std::memory_order_relaxed);
#define CUSHION_COUNTER(field, key, text) field += from.field.load(std::memory_order_relaxed);
    CUSHION_COUNTERS(CUSHION_COUNTER)
#undef CUSHION_COUNTER
  }
};

inline std::uint64_t sum(const std::uint64_t (&counters)[kApis]) noexcept {
  std::uint64_t total = 0;
  for (const std::uint64_t c : counters) total += c;
  return total;
}

}  // namespace cushion
