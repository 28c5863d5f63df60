// Reports as text for a terminal: one of them, several ranks in one view, or the difference of two.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "tools/report/report_file.h"

namespace cushion {

struct TextStyle {
  bool colour = false;
  std::size_t width = 0;  // columns of the terminal; 0: nothing is shortened
  std::size_t top = 20;   // rows of a list
};

// As stdout wants it: colour and width only where it is a terminal, no colour where NO_COLOR is set.
TextStyle style_of_stdout();

std::string text_view(const std::vector<Report>& reports, const TextStyle& style);
std::string text_difference(const Report& before, const Report& after, const TextStyle& style);

}  // namespace cushion
