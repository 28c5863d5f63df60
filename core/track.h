// Track: how much is noted of each allocation, as a level that may change at any moment. A block remembers for itself
// whether it was noted (Block::Live::time), so blocks of different levels live and are freed side by side.
//
// The one place where levels have names. A level with a parameter gets its parameter beside the level, not in it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string_view>

namespace cushion {

enum class TrackLevel : std::uint8_t { off, on };

// In the order of the enumerators.
inline constexpr std::string_view kTrackLevels[] = {"off", "on"};

constexpr std::string_view name_of(TrackLevel level) noexcept {
  return kTrackLevels[static_cast<std::size_t>(level) % std::size(kTrackLevels)];
}

// Case is ignored, as for all options.
constexpr std::optional<TrackLevel> parse_track(std::string_view text) noexcept {
  for (std::size_t i = 0; i < std::size(kTrackLevels); ++i) {
    const std::string_view name = kTrackLevels[i];
    bool same = name.size() == text.size();
    for (std::size_t c = 0; same && c < name.size(); ++c) {
      const char lower = text[c] >= 'A' && text[c] <= 'Z' ? static_cast<char>(text[c] - 'A' + 'a') : text[c];
      same = lower == name[c];
    }
    if (same) return static_cast<TrackLevel>(i);
  }
  return std::nullopt;
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
