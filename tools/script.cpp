#include "tools/script.h"

#include <algorithm>
#include <filesystem>
#include <sstream>

namespace cushion {

std::string interpreter_of(std::string_view head) {
  if (!head.starts_with("#!")) return {};
  std::istringstream words(std::string(head.substr(2, std::min(head.find('\n'), head.size()) - 2)));
  std::string word;
  words >> word;
  if (std::filesystem::path(word).filename() != "env") return word;
  while (words >> word) {
    if (!word.starts_with('-') && word.find('=') == std::string::npos) return word;
  }
  return {};
}

}  // namespace cushion
