#include "tools/report/exports.h"

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <tuple>

#include "tools/report/samples.h"
#include "tools/report/words.h"

namespace cushion {
namespace {

using json = nlohmann::ordered_json;

constexpr ExportFormat kFormats[] = {{"folded", false, &to_folded},
                                     {"speedscope", false, &to_speedscope},
                                     {"pprof", true, &to_pprof},
                                     {"perfetto", false, &to_perfetto},
                                     {"memory-viz", true, &to_memory_viz}};

// Frames are divided by semicolons, the value by the last blank.
std::string folded_name(const Frame& frame) {
  std::string name = frame_name(frame);
  std::ranges::replace(name, ';', ':');
  return name;
}

// The frames of a speedscope file, each kept once.
class SpeedscopeFrames {
 public:
  std::size_t index_of(const Frame& frame) {
    const auto [at, is_new] = indices_.try_emplace({frame_name(frame), frame.file, frame.line}, indices_.size());
    if (is_new) {
      json one{{"name", frame_name(frame)}};
      if (!frame.file.empty()) one["file"] = frame.file;
      if (frame.line != 0) one["line"] = frame.line;
      frames_.push_back(std::move(one));
    }
    return at->second;
  }
  json take() { return std::move(frames_); }

 private:
  std::map<std::tuple<std::string, std::string, std::uint64_t>, std::size_t> indices_;
  json frames_ = json::array();
};

json speedscope_profile(const char* name, const Samples& samples, SpeedscopeFrames& frames) {
  json stacks = json::array();
  json weights = json::array();
  std::uint64_t total = 0;
  for (const Sample& sample : samples.all) {
    json stack = json::array();
    for (const FramePointer& frame : sample.frames) stack.push_back(frames.index_of(*frame));
    stacks.push_back(std::move(stack));
    weights.push_back(sample.bytes);
    total = add(total, sample.bytes);
  }
  return {{"type", "sampled"}, {"name", name},      {"unit", "bytes"},   {"startValue", 0},
          {"endValue", total}, {"samples", stacks}, {"weights", weights}};
}

}  // namespace

std::span<const ExportFormat> export_formats() { return kFormats; }

Exported to_folded(const std::vector<Report>& reports) {
  Samples samples = live_samples(reports);
  std::map<std::string, std::uint64_t> lines;
  for (const Sample& sample : samples.all) {
    std::string line;
    for (const FramePointer& frame : sample.frames) line.append(line.empty() ? "" : ";").append(folded_name(*frame));
    std::uint64_t& bytes = lines[line];
    bytes = add(bytes, sample.bytes);
  }
  Exported exported{{}, std::move(samples.lacks)};
  for (const auto& [line, bytes] : lines) exported.content += fmt::format("{} {}\n", line, bytes);
  return exported;
}

Exported to_speedscope(const std::vector<Report>& reports) {
  Samples live = live_samples(reports);
  const Samples peak = peak_samples(reports);
  if (live.all.empty() && peak.all.empty()) return {{}, std::move(live.lacks)};
  SpeedscopeFrames frames;
  json profiles = json::array();
  if (!live.all.empty()) profiles.push_back(speedscope_profile("never freed", live, frames));
  if (!peak.all.empty()) profiles.push_back(speedscope_profile("at the peak", peak, frames));
  const json file{{"$schema", "https://www.speedscope.app/file-format-schema.json"},
                  {"name", reports.front().name},
                  {"exporter", "cushion"},
                  {"activeProfileIndex", 0},
                  {"shared", {{"frames", frames.take()}}},
                  {"profiles", std::move(profiles)}};
  if (live.all.empty()) live.lacks = {"nothing was live at exit: only the peak is exported"};
  return {file.dump() + "\n", std::move(live.lacks)};
}

Exported to_perfetto(const std::vector<Report>& reports) {
  json events = json::array();
  Exported exported;
  for (std::size_t i = 0; i < reports.size(); ++i) {
    const Report& report = reports[i];
    if (report.timeline.empty()) {
      exported.lacks.push_back(plain(report.file) + " holds no time line of its memory");
      continue;
    }
    // Process ids of several hosts may be the same: the place in the list tells them apart.
    const std::uint64_t process = reports.size() == 1 ? report.pid : i + 1;
    const std::string name = reports.size() == 1 ? report.name : fmt::format("{} ({})", label_of(report), report.name);
    events.push_back({{"name", "process_name"}, {"ph", "M"}, {"pid", process}, {"args", {{"name", name}}}});
    for (const TimePoint& point : report.timeline) {
      for (const auto& [track, bytes] : {std::pair("live", point.live), std::pair("held", point.held)}) {
        events.push_back({{"name", track},
                          {"cat", "memory"},
                          {"ph", "C"},
                          {"pid", process},
                          {"ts", point.time_s * 1e6},
                          {"args", {{"bytes", bytes}}}});
      }
    }
  }
  if (!events.empty())
    exported.content = json{{"displayTimeUnit", "ms"}, {"traceEvents", std::move(events)}}.dump() + "\n";
  return exported;
}

}  // namespace cushion
