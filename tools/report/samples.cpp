#include "tools/report/samples.h"

#include <fmt/core.h>

#include <map>
#include <optional>
#include <tuple>

#include "tools/report/stacks.h"
#include "tools/report/words.h"

namespace cushion {
namespace {

FramePointer named(std::string name) {
  Frame frame;
  frame.function = std::move(name);
  return std::make_shared<Frame>(std::move(frame));
}

// The frames that every stack of a report begins with.
std::vector<FramePointer> roots(const std::vector<Report>& reports, const Report& report) {
  std::vector<FramePointer> frames;
  if (reports.size() > 1) frames.push_back(named(label_of(report)));
  return frames;
}

void append(std::vector<FramePointer>& frames, const Stack& stack) {
  frames.insert(frames.end(), stack.frames.rbegin(), stack.frames.rend());
}

struct Sum {
  std::uint64_t bytes = 0;
  std::uint64_t count = 0;
};

// By stack, call and, without a stack, size.
using Sums = std::map<std::tuple<std::optional<std::size_t>, std::string, std::uint64_t>, Sum>;

Sums live_sums(const Report& report, bool sampled) {
  Sums sums;
  std::map<std::size_t, std::string> calls;
  for (const LiveBlocks& blocks : report.live) {
    if (blocks.bytes() == 0) continue;
    if (blocks.stack) calls.try_emplace(*blocks.stack, blocks.api);
    if (sampled && (blocks.stack || blocks.oldest_age_s)) continue;  // a stack's estimate stands for them
    Sum& sum = sums[{blocks.stack, blocks.api, blocks.stack ? 0 : blocks.size}];
    sum.bytes = add(sum.bytes, blocks.bytes());
    sum.count = add(sum.count, blocks.count);
  }
  for (std::size_t i = 0; sampled && i < report.stacks.size(); ++i) {
    const StackUse& use = report.stacks[i].use;
    if (use.live_bytes != 0) sums[{i, calls[i], 0}] = {use.live_bytes, use.live};
  }
  return sums;
}

}  // namespace

Samples live_samples(const std::vector<Report>& reports) {
  Samples samples;
  for (const Report& report : reports) {
    const bool sampled = are_estimates({&report, 1});
    bool without = false;
    for (const auto& [key, sum] : live_sums(report, sampled)) {
      const auto& [stack, api, size] = key;
      Sample sample{roots(reports, report), sum.bytes, sum.count};
      if (stack) {
        samples.any_stack = true;
        append(sample.frames, report.stacks[*stack]);
      } else {
        without = true;
        sample.frames.push_back(named(report.name));
      }
      if (!api.empty()) sample.frames.push_back(named(api));
      if (!stack) sample.frames.push_back(named(bytes_text(size)));
      samples.all.push_back(std::move(sample));
    }
    if (sampled) {
      samples.lacks.push_back(fmt::format("{} was sampled: bytes by call stack are estimates", plain(report.file)));
    }
    if (without) {
      samples.lacks.push_back(
          fmt::format("{} holds no call stacks for {} live blocks: they are grouped by call and size",
                      plain(report.file), report.stacks.empty() ? "its" : "some"));
    }
  }
  if (samples.all.empty()) samples.lacks.push_back("nothing was live at exit: there is nothing to export");
  return samples;
}

Samples peak_samples(const std::vector<Report>& reports) {
  Samples samples;
  for (const Report& report : reports) {
    for (const Stack& stack : report.stacks) {
      if (stack.use.peak_bytes == 0) continue;
      Sample sample{roots(reports, report), stack.use.peak_bytes, stack.use.peak};
      append(sample.frames, stack);
      if (sample.frames.empty()) sample.frames.push_back(named("unknown"));
      samples.any_stack = true;
      samples.all.push_back(std::move(sample));
    }
  }
  return samples;
}

}  // namespace cushion
