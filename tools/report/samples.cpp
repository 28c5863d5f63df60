#include "tools/report/samples.h"

#include <fmt/core.h>

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
    bool without = false;
    for (const LiveBlocks& blocks : report.live) {
      if (blocks.bytes() == 0) continue;
      Sample sample{roots(reports, report), blocks.bytes(), blocks.count};
      if (blocks.stack) {
        samples.any_stack = true;
        append(sample.frames, report.stacks[*blocks.stack]);
      } else {
        without = true;
        sample.frames.push_back(named(report.name));
      }
      sample.frames.push_back(named(blocks.api));
      if (!blocks.stack) sample.frames.push_back(named(bytes_text(blocks.size)));
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
