// CUSHION_PROGRAMS: any pattern is held against any name, and answers as the C library's fnmatch does, of whose special
// characters only * and ? are patterns here. Input: the pattern's text, a line end, the program's name.
#include <fnmatch.h>
#include <stdlib.h>

#include <algorithm>
#include <string>
#include <string_view>

#include "core/options.h"
#include "tests/fuzz/require.h"

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  const std::size_t end = std::min(text.find('\n'), text.size());
  const std::string pattern(text, 0, std::min(end, text.find('\0')));
  const std::string program = text.substr(std::min(end + 1, text.size())).c_str();
  setenv("CUSHION_PROGRAMS", pattern.c_str(), 1);
  const bool left_out = cushion::inert(program.c_str());
  const bool single = !pattern.empty() && pattern.find_first_of(", !") == std::string::npos;
  if (!single) return 0;
  std::string escaped;
  for (const char c : pattern) {
    if (c == '[' || c == ']' || c == '\\') escaped += '\\';
    escaped += c;
  }
  // fnmatch works on characters of the locale: the C locale's are bytes. (Its stars take time that is exponential.)
  if (std::ranges::count(pattern, '*') > 6) return 0;
  require(left_out == (fnmatch(escaped.c_str(), program.c_str(), 0) != 0));
  return 0;
}
