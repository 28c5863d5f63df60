// The reader of reports: of any bytes it makes a report or says in one line what is wrong, and what it made can be
// shown in every form, and written again to be read the same. Input: a report's text.
#include <string>
#include <string_view>

#include "tests/fuzz/require.h"
#include "tools/report/exports.h"
#include "tools/report/leaks.h"
#include "tools/report/page.h"
#include "tools/report/report_file.h"
#include "tools/report/stacks.h"
#include "tools/report/symbolize.h"
#include "tools/report/text.h"

namespace {

bool is_one_line(std::string_view text) {
  return !text.empty() && text.find_first_of("\n\r\033") == std::string_view::npos;
}

void show(const std::vector<cushion::Report>& reports) {
  const std::string text = cushion::text_view(reports, {.colour = false, .width = 80, .top = 5});
  require(text.find('\033') == std::string::npos);
  require(!cushion::html_page(reports, 5).empty());
  for (const cushion::ExportFormat& format : cushion::export_formats()) {
    const cushion::Exported exported = format.make(reports);
    require(!exported.content.empty() || !exported.lacks.empty());
    for (const std::string& lack : exported.lacks) require(is_one_line(lack));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  try {
    const std::string_view text(reinterpret_cast<const char*>(data), size);
    const cushion::Report report = cushion::parse_report(text, "a file\n\033[31m.json");
    show({report});
    show({report, report});
    require(cushion::changes_between(report, report).empty());
    require(!cushion::text_difference(report, report, {}).empty());
    const std::string again = cushion::with_frames_of(report, text);
    require(cushion::text_view({cushion::parse_report(again, report.file)}, {}) == cushion::text_view({report}, {}));
    for (const std::size_t list : {cushion::kMostLive, cushion::kLongestWaits}) {
      const auto seen = cushion::seen_stacks({report, report});
      const auto most = cushion::most_of(seen, cushion::top_list(list));
      require(seen.size() <= report.stacks.size() && most.size() <= seen.size());
    }
  } catch (const cushion::ReportError& error) {
    require(is_one_line(error.what()));
  }
  return 0;
}
