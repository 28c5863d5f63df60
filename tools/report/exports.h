// Reports in the formats of other tools. One row a format; what a report lacks for it is said, not made up.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "tools/report/report_file.h"

namespace cushion {

struct Exported {
  std::string content;             // empty: there is nothing to export
  std::vector<std::string> lacks;  // what the reports do not tell, each a line for a person
};

struct ExportFormat {
  const char* name;
  bool binary;  // nothing for a terminal
  Exported (*make)(const std::vector<Report>& reports);
};

std::span<const ExportFormat> export_formats();

// Live blocks by call stack (one value a stack and report).
Exported to_folded(const std::vector<Report>& reports);      // flamegraph.pl, inferno: "outer;inner BYTES"
Exported to_speedscope(const std::vector<Report>& reports);  // speedscope.app
Exported to_pprof(const std::vector<Report>& reports);       // go tool pprof: profile.proto, compressed
Exported to_memory_viz(const std::vector<Report>& reports);  // pytorch.org/memory_viz: a pickle
// Live and held memory over time.
Exported to_perfetto(const std::vector<Report>& reports);  // ui.perfetto.dev: trace events as JSON

}  // namespace cushion
