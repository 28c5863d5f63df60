#include "tools/report/table.h"

#include <algorithm>

#include "tools/report/words.h"

namespace cushion {

std::string Table::text(std::size_t width, const std::string& indent) const {
  std::vector<std::size_t> widths(columns_.size());
  for (const Row& row : rows_) {
    for (std::size_t i = 0; i < row.cells.size(); ++i) widths[i] = std::max(widths[i], width_of(row.cells[i]));
  }
  std::size_t total = indent.size();
  for (const std::size_t w : widths) total += w + 2;
  total -= 2;
  if (width != 0 && total > width) {
    for (std::size_t i = 0; i < columns_.size(); ++i) {
      if (columns_[i] != Column::flexible) continue;
      const std::size_t excess = total - width;
      widths[i] = widths[i] > excess + 8 ? widths[i] - excess : 8;
      break;
    }
  }
  std::string out;
  for (const Row& row : rows_) {
    std::string line = indent;
    for (std::size_t i = 0; i < row.cells.size(); ++i) {
      const std::string cell = columns_[i] == Column::flexible ? shortened(row.cells[i], widths[i]) : row.cells[i];
      const std::string gap(widths[i] - std::min(widths[i], width_of(cell)), ' ');
      line.append(i == 0 ? "" : "  ").append(columns_[i] == Column::right ? gap + cell : cell + gap);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + '\n';
    for (const std::string& note : row.notes) {
      const std::string inset = indent + "    ";
      out += inset + (width == 0 ? note : shortened(note, width - std::min(width - 1, inset.size()))) + '\n';
    }
  }
  return out;
}

}  // namespace cushion
