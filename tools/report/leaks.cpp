#include "tools/report/leaks.h"

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <span>
#include <tuple>

#include "tools/report/words.h"

namespace cushion {
namespace {

// Stacks that look the same have the same number, in whatever report they are; 0 is none.
class StackNumbers {
 public:
  std::size_t of(const Stack& stack) {
    std::string text;
    for (const Frame& frame : stack) text += frame_name(frame) + '\t' + frame_place(frame) + '\n';
    return numbers_.try_emplace(std::move(text), numbers_.size() + 1).first->second;
  }

 private:
  std::map<std::string, std::size_t> numbers_;
};

using Kind = std::tuple<std::uint64_t, std::string, std::string, std::size_t>;

std::map<Kind, Leak> kinds_of(std::span<const Report> reports, StackNumbers& stacks) {
  std::map<Kind, Leak> kinds;
  for (std::size_t r = 0; r < reports.size(); ++r) {
    std::vector<std::size_t> numbers;
    for (const Stack& stack : reports[r].stacks) numbers.push_back(stacks.of(stack));
    for (const LiveBlocks& blocks : reports[r].live) {
      Leak& leak = kinds[{blocks.size, blocks.api, blocks.served_by, blocks.stack ? numbers[*blocks.stack] : 0}];
      if (leak.blocks == nullptr) {
        leak.blocks = &blocks;
        leak.stack = blocks.stack ? &reports[r].stacks[*blocks.stack] : nullptr;
      }
      leak.count = add(leak.count, blocks.count);
      leak.bytes = add(leak.bytes, blocks.bytes());
      if (leak.reports.empty() || leak.reports.back() != r) leak.reports.push_back(r);
    }
  }
  return kinds;
}

}  // namespace

std::vector<Leak> leaks_of(const std::vector<Report>& reports) {
  std::vector<Leak> leaks;
  if (reports.size() == 1) {
    const Report& report = reports.front();
    for (const LiveBlocks& blocks : report.live) {
      leaks.push_back(
          {&blocks, blocks.stack ? &report.stacks[*blocks.stack] : nullptr, blocks.count, blocks.bytes(), {0}});
    }
  } else {
    StackNumbers stacks;
    for (auto& [kind, leak] : kinds_of(reports, stacks)) leaks.push_back(std::move(leak));
  }
  std::ranges::stable_sort(leaks, std::greater{}, &Leak::bytes);
  return leaks;
}

std::vector<LeakChange> changes_between(const Report& before, const Report& after) {
  StackNumbers stacks;
  std::map<Kind, LeakChange> kinds;
  for (auto& [kind, leak] : kinds_of({&before, 1}, stacks)) kinds[kind].before = std::move(leak);
  for (auto& [kind, leak] : kinds_of({&after, 1}, stacks)) kinds[kind].after = std::move(leak);
  std::vector<LeakChange> changes;
  for (auto& [kind, change] : kinds) {
    if (change.before.bytes != change.after.bytes || change.before.count != change.after.count)
      changes.push_back(std::move(change));
  }
  const auto order = [](const LeakChange& c) {  // what grew, then what shrank, each by most first
    const bool grew = c.after.bytes >= c.before.bytes;
    return std::pair(!grew, ~(grew ? c.after.bytes - c.before.bytes : c.before.bytes - c.after.bytes));
  };
  std::ranges::stable_sort(changes, {}, order);
  return changes;
}

std::string ranges_text(const std::vector<std::size_t>& numbers) {
  std::string text;
  for (std::size_t i = 0; i < numbers.size();) {
    std::size_t last = i;
    while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1) ++last;
    text += fmt::format("{}{}", text.empty() ? "" : ",", numbers[i]);
    if (last != i) text += fmt::format("-{}", numbers[last]);
    i = last + 1;
  }
  return text;
}

}  // namespace cushion
