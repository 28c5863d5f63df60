// Samples: a report's live blocks as profilers take them, bytes and blocks for each call stack, outermost frame first.
//
// A report without call stacks still tells which call allocated how much: its stacks are program, call and size, and
// that is said. Of one whose stacks were sampled the stacks' own estimates stand for all tracked blocks. Several
// reports become one set, each under a frame of its own.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/report/report_file.h"

namespace cushion {

struct Sample {
  std::vector<FramePointer> frames;  // outermost first
  std::uint64_t bytes = 0;
  std::uint64_t count = 0;
};

struct Samples {
  std::vector<Sample> all;
  bool any_stack = false;
  std::vector<std::string> lacks;  // for a person
};

Samples live_samples(const std::vector<Report>& reports);
// At the peak; empty where no report has them.
Samples peak_samples(const std::vector<Report>& reports);

}  // namespace cushion
