#include "tools/report/symbolize.h"

#include <nlohmann/json.hpp>

namespace cushion {

const std::vector<FramePointer>& Symbolizer::resolved(const FramePointer& frame) {
  const Module& module = *frame->module;
  Known& known = modules_.try_emplace({module.path, module.build_id}, module, debug_dirs_).first->second;
  const auto [at, is_new] = known.frames.try_emplace(frame->offset);
  if (is_new) {
    std::vector<Place> places = known.symbols.at(frame->offset);
    for (std::size_t i = 0; i < places.size(); ++i) {
      at->second.push_back(
          std::make_shared<Frame>(Frame{std::move(places[i].function), std::move(places[i].file), places[i].line,
                                        frame->module, frame->offset, i + 1 < places.size()}));
    }
    if (places.empty()) at->second.push_back(frame);
  }
  return at->second;
}

void Symbolizer::symbolize(Report& report) {
  for (Stack& stack : report.stacks) {
    std::vector<FramePointer> frames;
    for (const FramePointer& frame : stack.frames) {
      if (frame->module && frame->function.empty()) {
        const std::vector<FramePointer>& found = resolved(frame);
        frames.insert(frames.end(), found.begin(), found.end());
      } else {
        frames.push_back(frame);
      }
    }
    stack.frames = std::move(frames);
  }
}

std::vector<std::string> Symbolizer::problems() const {
  std::vector<std::string> problems;
  for (const auto& [name, known] : modules_) {
    if (!known.symbols.problem().empty()) problems.push_back(known.symbols.problem());
  }
  return problems;
}

std::string with_frames_of(const Report& report, std::string_view text) {
  using json = nlohmann::ordered_json;
  // What is nested deeper than any report is left out: it is unknown here, and would be written by recursion.
  constexpr int kDeepest = 100;
  json file = json::parse(text, [](int depth, json::parse_event_t, json&) { return depth < kDeepest; });
  std::map<const Module*, std::size_t> modules;
  for (std::size_t i = 0; i < report.modules.size(); ++i) modules[report.modules[i].get()] = i;
  std::map<const Frame*, std::size_t> indices;
  json frames = json::array();
  for (std::size_t i = 0; i < report.stacks.size(); ++i) {
    json stack = json::array();
    for (const FramePointer& frame : report.stacks[i].frames) {
      const auto [at, is_new] = indices.try_emplace(frame.get(), frames.size());
      stack.push_back(at->second);
      if (!is_new) continue;
      json& one = frames.emplace_back(json::object());
      if (frame->module) {
        one["module"] = modules.at(frame->module.get());
        one["offset"] = frame->offset;
      } else if (frame->offset != 0) {
        one["address"] = frame->offset;
      }
      if (!frame->function.empty()) one["function"] = frame->function;
      if (!frame->file.empty()) one["file"] = frame->file;
      if (frame->line != 0) one["line"] = frame->line;
      if (frame->inlined) one["inlined"] = true;
    }
    file["stacks"][i]["frames"] = std::move(stack);
  }
  if (!report.stacks.empty()) file["frames"] = std::move(frames);
  return file.dump(-1, ' ', false, json::error_handler_t::replace) + "\n";
}

}  // namespace cushion
