#include "tools/report/command.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string_view>

#include "core/whole_file.h"
#include "tools/report/exports.h"
#include "tools/report/page.h"
#include "tools/report/report_file.h"
#include "tools/report/symbolize.h"
#include "tools/report/text.h"
#include "tools/report/words.h"

namespace cushion {
namespace {

constexpr int kNothing = 1;
constexpr int kBadFile = 2;
constexpr std::size_t kPageRows = 1000;

// To `path`, or stdout if that is empty.
int write(const std::string& path, std::string_view content) {
  int error = 0;
  if (!path.empty()) {
    error = write_whole(path.c_str(), [&](Out& out) { out.raw(content); });
  } else if (std::fwrite(content.data(), 1, content.size(), stdout) != content.size() || std::fflush(stdout) != 0) {
    error = errno;
  }
  if (error == 0 || (path.empty() && error == EPIPE)) return 0;
  fmt::print(stderr, "cushion: {}: {}\n", path.empty() ? "stdout" : plain(path), std::strerror(error));
  return kNothing;
}

int export_as(const ReportRequest& request, const std::vector<Report>& reports) {
  const ExportFormat& format = *std::ranges::find(export_formats(), request.format, &ExportFormat::name);
  if (format.binary && request.output.empty() && isatty(STDOUT_FILENO) != 0) {
    fmt::print(stderr, "cushion: {}: this is nothing for a terminal; name a file with -o\n", request.format);
    return kNothing;
  }
  const Exported exported = format.make(reports);
  for (const std::string& lack : exported.lacks) fmt::print(stderr, "cushion: {}: {}\n", request.format, lack);
  return exported.content.empty() ? kNothing : write(request.output, exported.content);
}

}  // namespace

std::vector<std::string> report_formats() {
  std::vector<std::string> names;
  for (const ExportFormat& format : export_formats()) names.emplace_back(format.name);
  return names;
}

int show_reports(const ReportRequest& request) {
  std::vector<Report> reports;
  std::string text;
  bool bad = false;
  for (const std::string& file : request.files) {
    try {
      text = read_text(file);
      reports.push_back(parse_report(text, file));
    } catch (const ReportError& error) {
      fmt::print(stderr, "cushion: {}\n", error.what());
      bad = true;
    }
  }
  if (bad) return kBadFile;
  for (const std::string& output : {request.html, request.output}) {
    std::error_code none;
    for (const std::string& file : request.files) {
      if (output.empty() || !std::filesystem::equivalent(output, file, none)) continue;
      fmt::print(stderr, "cushion: {}: it is one of the reports, and would be replaced\n", plain(output));
      return kBadFile;
    }
  }
  if (!request.raw) {
    Symbolizer symbolizer(request.debug_dirs);
    for (Report& report : reports) symbolizer.symbolize(report);
    for (const std::string& problem : symbolizer.problems()) fmt::print(stderr, "cushion: {}\n", problem);
  }
  if (!request.symbolized.empty()) return write(request.symbolized, with_frames_of(reports.front(), text));
  if (!request.difference) {  // ranks in their order; files without one as they were named
    std::ranges::stable_sort(reports, {}, [](const Report& r) { return r.rank.value_or(0); });
  }
  if (!request.format.empty()) return export_as(request, reports);
  if (!request.html.empty()) {
    return write(request.html, html_page(reports, request.top == 0 ? kPageRows : request.top));
  }
  TextStyle style = style_of_stdout();
  if (request.top != 0) style.top = request.top;
  return write({}, request.difference ? text_difference(reports[0], reports[1], style) : text_view(reports, style));
}

}  // namespace cushion
