// Reports symbolized: frames that are only a place in a module get their function, file and line, and the frames that
// were inlined there; and a report's file written again with them, to be read where the modules are not.
//
// Invariant: a frame that has its function, or of which nothing can be found, stays as it is.
// Cost: each module is opened once and each place in it looked up once, in however many stacks and reports it is.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tools/report/report_file.h"
#include "tools/report/symbols.h"

namespace cushion {

class Symbolizer {
 public:
  explicit Symbolizer(std::vector<std::string> debug_dirs) : debug_dirs_(std::move(debug_dirs)) {}

  void symbolize(Report& report);

  // Modules whose files are not those of the report: a line for a person each.
  std::vector<std::string> problems() const;

 private:
  struct Known {
    Known(const Module& module, const std::vector<std::string>& debug_dirs) : symbols(module, debug_dirs) {}
    ModuleSymbols symbols;
    std::map<std::uint64_t, std::vector<FramePointer>> frames;
  };
  const std::vector<FramePointer>& resolved(const FramePointer& frame);

  const std::vector<std::string> debug_dirs_;
  std::map<std::pair<std::string, std::string>, Known> modules_;  // by path and build id
};

// The text of a report, with the frames that `report`, which was read from it, has by now.
std::string with_frames_of(const Report& report, std::string_view text);

}  // namespace cushion
