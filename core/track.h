// Track: how much is noted of each allocation, as a level that may change at any moment. A block remembers for itself
// what was noted of it (Block::note), so blocks of different levels live and are freed side by side.
//
// The one place where levels have names. A level with a parameter has it beside the level.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string_view>

namespace cushion {

enum class TrackLevel : std::uint8_t {
  off,
  on,       // when, which thread, which stream, which call
  stacks,   // and the call stack
  sampled,  // as on, and the call stack of a sample: so many bytes apart on average
};

// In the order of the enumerators.
inline constexpr std::string_view kTrackLevels[] = {"off", "on", "stacks", "sampled"};

struct Tracking {
  static constexpr std::uint64_t kInterval = std::uint64_t{64} << 20;  // unless one is given; by measurement: README

  TrackLevel level = TrackLevel::off;
  std::uint64_t interval = 0;  // of sampled: bytes

  bool operator==(const Tracking&) const = default;
};

constexpr std::string_view name_of(TrackLevel level) noexcept {
  return kTrackLevels[static_cast<std::size_t>(level) % std::size(kTrackLevels)];
}

// When tracking begins by itself: so long after the process began, or after so many allocation calls; both 0: at once.
struct TrackStart {
  std::uint64_t ns = 0;
  std::uint64_t calls = 0;
};

// The signal that switches tracking; 0: none.
struct ToggleSignal {
  int number = 0;
};

}  // namespace cushion
