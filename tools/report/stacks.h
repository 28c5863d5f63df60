// Call stacks as a person sees them, and the top lists of them: who has most that is live, who had most at the peak,
// who allocated most often, who in vain, and where cudaFree waited.
//
// Invariant: stacks that look the same are one, at whatever addresses and in whatever reports they are; their figures
// are added.
// Cost: a text for each stack, made once, and a sort for each list.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "tools/report/report_file.h"

namespace cushion {

// Stacks that look the same have the same number; 0 is none.
class StackNumbers {
 public:
  std::size_t of(const Stack& stack);

 private:
  std::map<std::string, std::size_t> numbers_;
};

struct SeenStack {
  const Stack* stack = nullptr;  // one of those that look so
  StackUse use;                  // of all of them
};

std::vector<SeenStack> seen_stacks(const std::vector<Report>& reports);

// " (estimates ...)" of stacks that were sampled.
std::string estimates_text(const std::vector<SeenStack>& stacks);

// True if figures of some stacks are estimates.
bool are_estimates(std::span<const Report> reports);

// True if the live blocks themselves say what is live by call stack, so that the list of it says nothing more.
bool leaks_tell_stacks(const std::vector<Report>& reports);

struct TopList {
  struct Cell {
    std::string text;
    double value;
  };
  const char* title;
  std::array<const char*, 2> headings;
  std::array<Cell, 2> (*cells)(const StackUse& use);  // the list is in the order of the first
};

enum : std::size_t { kMostLive, kMostAtPeak, kMostAllocations, kMostTemporary, kLongestWaits, kTopLists };
const TopList& top_list(std::size_t which);

// The stacks that a list has, most first.
std::vector<SeenStack> most_of(const std::vector<SeenStack>& stacks, const TopList& list);

}  // namespace cushion
