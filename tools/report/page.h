// Reports as one page for a browser: everything is in it, it loads nothing, and without scripts it shows the same (but
// for sorting, zooming and reading values off the time line). Charts are inline SVG and boxes, since the chart
// libraries of the distributions have no flame graph and would be nearly all of the page.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "tools/report/report_file.h"

namespace cushion {

std::string html_page(const std::vector<Report>& reports, std::size_t rows);

}  // namespace cushion
