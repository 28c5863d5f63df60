#include "tools/report/leaks.h"

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <span>
#include <tuple>

#include "tools/report/stacks.h"
#include "tools/report/words.h"

namespace cushion {
namespace {

// Size (of blocks without a stack), call, server, stack.
using Kind = std::tuple<std::uint64_t, std::string, std::string, std::size_t>;

void add_to(Leak& leak, const LiveBlocks& blocks, const Report& report, std::size_t number) {
  if (leak.blocks == nullptr) {
    leak.blocks = &blocks;
    leak.stack = blocks.stack ? &report.stacks[*blocks.stack] : nullptr;
    leak.smallest = leak.largest = blocks.size;
  }
  leak.count = add(leak.count, blocks.count);
  leak.bytes = add(leak.bytes, blocks.bytes());
  leak.smallest = std::min(leak.smallest, blocks.size);
  leak.largest = std::max(leak.largest, blocks.size);
  leak.oldest_age_s = std::max(leak.oldest_age_s, blocks.oldest_age_s);  // none is least
  leak.one_device = leak.one_device && leak.blocks->device == blocks.device;
  leak.one_stream = leak.one_stream && leak.blocks->stream == blocks.stream;
  if (leak.reports.empty() || leak.reports.back() != number) leak.reports.push_back(number);
}

std::map<Kind, Leak> kinds_of(std::span<const Report> reports, StackNumbers& stacks) {
  std::map<Kind, Leak> kinds;
  for (std::size_t r = 0; r < reports.size(); ++r) {
    std::vector<std::size_t> numbers;
    for (const Stack& stack : reports[r].stacks) numbers.push_back(stacks.of(stack));
    for (const LiveBlocks& blocks : reports[r].live) {
      const std::size_t number = blocks.stack ? numbers[*blocks.stack] : 0;
      add_to(kinds[{number != 0 ? 0 : blocks.size, blocks.api, blocks.served_by, number}], blocks, reports[r], r);
    }
  }
  return kinds;
}

}  // namespace

std::string sizes_text(const Leak& leak) {
  const std::string smallest = bytes_text(leak.smallest);
  const std::string largest = bytes_text(leak.largest);
  return smallest == largest ? largest : fmt::format("{} to {}", smallest, largest);
}

std::vector<Leak> leaks_of(const std::vector<Report>& reports) {
  StackNumbers stacks;
  std::vector<Leak> leaks;
  const bool one = reports.size() == 1;
  if (one) {
    for (const LiveBlocks& blocks : reports.front().live) {
      if (!blocks.stack) add_to(leaks.emplace_back(), blocks, reports.front(), 0);
    }
  }
  for (auto& [kind, leak] : kinds_of(reports, stacks)) {
    if (!one || leak.stack != nullptr) leaks.push_back(std::move(leak));
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
