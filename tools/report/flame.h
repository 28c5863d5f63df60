// The tree of call stacks that a flame graph shows: each frame under its caller, with the bytes of all below it.
//
// Invariant: a frame's children together have no more bytes than it has. Frames deeper than kDeepest are counted to the
// last one above.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/report/samples.h"

namespace cushion {

struct FlameFrame {
  static constexpr std::size_t kDeepest = 150;

  std::string name;
  std::string place;
  std::uint64_t bytes = 0;
  std::uint64_t count = 0;
  std::vector<FlameFrame> callees;  // most bytes first
};

FlameFrame flame_of(const std::vector<Sample>& samples);  // the root: everything

}  // namespace cushion
