#include "tools/report/stacks.h"

#include <fmt/core.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "tools/report/words.h"

namespace cushion {
namespace {

using Cell = TopList::Cell;

Cell bytes_cell(std::uint64_t bytes) { return {bytes_text(bytes), static_cast<double>(bytes)}; }
Cell count_cell(std::uint64_t count) { return {count_text(count), static_cast<double>(count)}; }

constexpr TopList kLists[kTopLists] = {
    {"Most bytes never freed, by call stack",
     {"bytes", "blocks"},
     [](const StackUse& use) {
       return std::array{bytes_cell(use.live_bytes), count_cell(use.live)};
     }},
    {"Most bytes at the peak, by call stack",
     {"bytes", "blocks"},
     [](const StackUse& use) {
       return std::array{bytes_cell(use.peak_bytes), count_cell(use.peak)};
     }},
    {"Most allocations, by call stack",
     {"allocations", "bytes"},
     [](const StackUse& use) {
       return std::array{count_cell(use.allocations), bytes_cell(use.bytes)};
     }},
    {"Most temporary allocations, by call stack",
     {"temporary", "of all"},
     [](const StackUse& use) {
       return std::array{
           count_cell(use.temporary),
           Cell{share_text(use.temporary, use.allocations),
                static_cast<double>(use.temporary) / static_cast<double>(std::max<std::uint64_t>(use.allocations, 1))}};
     }},
    {"Where cudaFree waited, by call stack", {"time", "waits"}, [](const StackUse& use) {
       return std::array{Cell{seconds_text(use.wait_seconds), use.wait_seconds}, count_cell(use.waits)};
     }}};

}  // namespace

std::size_t StackNumbers::of(const Stack& stack) {
  std::string text;
  for (const FramePointer& frame : stack.frames) text += frame_name(*frame) + '\t' + frame_place(*frame) + '\n';
  return numbers_.try_emplace(std::move(text), numbers_.size() + 1).first->second;
}

std::vector<SeenStack> seen_stacks(const std::vector<Report>& reports) {
  StackNumbers numbers;
  std::vector<SeenStack> seen;
  for (const Report& report : reports) {
    for (const Stack& stack : report.stacks) {
      const std::size_t number = numbers.of(stack);
      if (number > seen.size()) seen.push_back({&stack, {}});
      StackUse& sum = seen[number - 1].use;
      const StackUse& use = stack.use;
      sum.interval = std::max(sum.interval, use.interval);
      for (auto figure : {&StackUse::allocations, &StackUse::bytes, &StackUse::live, &StackUse::live_bytes,
                          &StackUse::peak, &StackUse::peak_bytes, &StackUse::temporary, &StackUse::waits}) {
        sum.*figure = add(sum.*figure, use.*figure);
      }
      sum.wait_seconds += use.wait_seconds;
    }
  }
  return seen;
}

bool are_estimates(std::span<const Report> reports) {
  return std::ranges::any_of(reports, [](const Report& report) {
    return std::ranges::any_of(report.stacks, [](const Stack& stack) { return stack.use.interval != 0; });
  });
}

std::string estimates_text(const std::vector<SeenStack>& stacks) {
  std::uint64_t most = 0;
  std::uint64_t least = std::numeric_limits<std::uint64_t>::max();
  for (const SeenStack& stack : stacks) {
    most = std::max(most, stack.use.interval);
    least = std::min(least, stack.use.interval);
  }
  if (most == 0) return {};
  if (least == most) return fmt::format(" (estimates: sampled every {})", bytes_text(most));
  return fmt::format(" (estimates: sampled at several rates, every {} at most)", bytes_text(most));
}

bool leaks_tell_stacks(const std::vector<Report>& reports) {
  return !are_estimates(reports) && std::ranges::any_of(reports, [](const Report& report) {
    return std::ranges::any_of(report.live, [](const LiveBlocks& blocks) { return blocks.stack.has_value(); });
  });
}

const TopList& top_list(std::size_t which) { return kLists[which]; }

std::vector<SeenStack> most_of(const std::vector<SeenStack>& stacks, const TopList& list) {
  std::vector<std::pair<double, const SeenStack*>> order;
  for (const SeenStack& stack : stacks) {
    if (const double value = list.cells(stack.use)[0].value; value > 0) order.emplace_back(value, &stack);
  }
  std::ranges::stable_sort(order, std::greater{}, &std::pair<double, const SeenStack*>::first);
  std::vector<SeenStack> most;
  most.reserve(order.size());
  for (const auto& [value, stack] : order) most.push_back(*stack);
  return most;
}

}  // namespace cushion
