// A table of a terminal: columns as wide as their widest cell; where that is more than the terminal has, the cells of
// one column, paths or call stacks, lose their middle.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace cushion {

class Table {
 public:
  enum class Column { left, right, flexible };

  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

  void row(std::vector<std::string> cells) { rows_.push_back({std::move(cells), {}}); }
  // Below the last row, each on a line of its own.
  void note(std::string text) { rows_.back().notes.push_back(std::move(text)); }
  // Each row begins with `indent`; `width` 0 is a terminal without end.
  std::string text(std::size_t width, const std::string& indent) const;

 private:
  struct Row {
    std::vector<std::string> cells;
    std::vector<std::string> notes;
  };
  std::vector<Column> columns_;
  std::vector<Row> rows_;
};

}  // namespace cushion
