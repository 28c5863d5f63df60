// `cushion report FILE...`: reads reports and shows them: on the terminal, as a page, or as another tool's format.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace cushion {

struct ReportRequest {
  std::vector<std::string> files;
  bool difference = false;  // of two files
  std::size_t top = 0;      // rows of a list; 0: as many as suit the output
  std::string html;         // a page to write
  std::string format;       // another tool's, instead of text
  std::string output;       // where that goes; empty: stdout
  std::string symbolized;   // the report of one file to write again, with its symbols
  bool raw = false;         // frames as they are in the files
  std::vector<std::string> debug_dirs;
};

// The words of `--format`.
std::vector<std::string> report_formats();

// 0; 1 if there is nothing to show in this format, or it cannot be written; 2 if a file is no report.
int show_reports(const ReportRequest& request);

}  // namespace cushion
