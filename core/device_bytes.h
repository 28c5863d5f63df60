// DeviceBytes: what one device's memory is used for, all contexts together.
//
// Cost: a few relaxed loads for each lane that there is. Takes no lock, allocates nothing.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "core/context.h"
#include "core/shared.h"

namespace cushion {

// Of several contexts on one device the peaks are added: an upper bound.
struct DeviceBytes {
  static constexpr int kFigures = 4;
  static constexpr const char* kKeys[kFigures] = {"requested", "handed_out", "held", "forwarded"};
  static constexpr const char* kTexts[kFigures] = {"requested by the program, served by the pool", "handed out for it",
                                                   "held from the driver", "served by the driver itself"};
  std::uint64_t current[kFigures]{};
  std::uint64_t peak[kFigures]{};

  DeviceBytes(Shared& shared, int device) noexcept {
    shared.for_each_context([&](const Context& context) {
      if (context.device() != device) return;
      add(0, context.usage().requested);
      add(1, context.usage().handed_out);
      add(2, context.usage().held);
    });
    add(0, shared.from_driver_pool(device));
    add(3, shared.forwarded(device));
  }
  bool any() const noexcept {
    return std::any_of(std::begin(peak), std::end(peak), [](std::uint64_t bytes) { return bytes != 0; });
  }

 private:
  template <class Figure>  // Gauge or Level
  void add(int figure, const Figure& from) noexcept {
    current[figure] += from.current();
    peak[figure] += from.peak();
  }
};

}  // namespace cushion
