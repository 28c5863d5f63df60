#include "tools/report/samples.h"

#include <fmt/core.h>

#include <map>
#include <optional>
#include <tuple>

#include "tools/report/words.h"

namespace cushion {
namespace {

Frame named(std::string name) {
  Frame frame;
  frame.function = std::move(name);
  return frame;
}

// The frames that every stack of a report begins with.
std::vector<Frame> roots(const std::vector<Report>& reports, const Report& report) {
  std::vector<Frame> frames;
  if (reports.size() > 1) frames.push_back(named(label_of(report)));
  return frames;
}

void append(std::vector<Frame>& frames, const Stack& stack) {
  frames.insert(frames.end(), stack.rbegin(), stack.rend());
}

}  // namespace

Samples live_samples(const std::vector<Report>& reports) {
  Samples samples;
  for (const Report& report : reports) {
    struct Sum {
      std::uint64_t bytes = 0;
      std::uint64_t count = 0;
    };
    std::map<std::tuple<std::optional<std::size_t>, std::string, std::uint64_t>, Sum> sums;  // by stack, call, size
    for (const LiveBlocks& blocks : report.live) {
      if (blocks.bytes() == 0) continue;
      Sum& sum = sums[{blocks.stack, blocks.api, blocks.stack ? 0 : blocks.size}];
      sum.bytes = add(sum.bytes, blocks.bytes());
      sum.count = add(sum.count, blocks.count);
    }
    bool without = false;
    for (const auto& [key, sum] : sums) {
      const auto& [stack, api, size] = key;
      Sample sample{roots(reports, report), sum.bytes, sum.count};
      if (stack) {
        samples.any_stack = true;
        append(sample.frames, report.stacks[*stack]);
      } else {
        without = true;
        sample.frames.push_back(named(report.name));
      }
      sample.frames.push_back(named(api));
      if (!stack) sample.frames.push_back(named(bytes_text(size)));
      samples.all.push_back(std::move(sample));
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
    for (const StackUse& use : report.top_stacks.at_peak) {
      if (use.bytes == 0) continue;
      Sample sample{roots(reports, report), use.bytes, use.count};
      append(sample.frames, report.stacks[use.stack]);
      if (sample.frames.empty()) sample.frames.push_back(named("unknown"));
      samples.any_stack = true;
      samples.all.push_back(std::move(sample));
    }
  }
  return samples;
}

}  // namespace cushion
