// Leaks: the live blocks of one report or many, each kind once. Blocks with a call stack are one kind by it, call and
// server, whatever their sizes. Of others a kind is what the report grouped; of many reports (ranks of one job) and
// between two, device and stream are left out, since they differ from run to run: it is then size, call and server.
//
// Cost: one pass and a sort; stacks are compared by what a person sees of them, once a report.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tools/report/report_file.h"

namespace cushion {

struct Leak {
  const LiveBlocks* blocks = nullptr;  // one of the kind, for what all have in common
  const Stack* stack = nullptr;        // none if the report has none
  std::uint64_t count = 0;
  std::uint64_t bytes = 0;
  std::uint64_t smallest = 0;  // size of a block
  std::uint64_t largest = 0;
  std::optional<double> oldest_age_s;
  bool one_device = true;
  bool one_stream = true;
  std::vector<std::size_t> reports;  // which have it, by their place in the list
};

// The size of its blocks, or the smallest and the largest.
std::string sizes_text(const Leak& leak);

std::vector<Leak> leaks_of(const std::vector<Report>& reports);  // most bytes first

struct LeakChange {
  Leak before;  // of a new kind, empty
  Leak after;   // of one that is gone, empty
  const Leak& either() const noexcept { return after.blocks != nullptr ? after : before; }
};

std::vector<LeakChange> changes_between(const Report& before,
                                        const Report& after);  // what grew, then what shrank, each by most first

// "0-3,7"
std::string ranges_text(const std::vector<std::size_t>& numbers);

}  // namespace cushion
