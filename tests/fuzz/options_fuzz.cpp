// Any environment and any value is read: what is refused is told in one printable line that names the option and its
// valid values, and what is accepted is described so that it reads back the same. Input: an environment, one variable a
// line; the first line is also a value, for the option that its first byte chooses.
#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "core/options.h"
#include "core/utf8.h"
#include "tests/fuzz/require.h"
#include "tools/launch.h"

using namespace cushion;

namespace {

void is_one_printable_line(std::string_view line) {
  require(!line.empty() && line.size() < 800);
  for (; !line.empty(); line.remove_prefix(utf8_length(line))) {
    const auto byte = static_cast<unsigned char>(line.front());
    require(utf8_length(line) != 0 && byte >= 0x20 && byte != 0x7F);
  }
}

OptionsResult read(const std::vector<std::string>& variables) {
  std::vector<const char*> environment;
  environment.reserve(variables.size() + 1);
  for (const std::string& variable : variables) environment.push_back(variable.c_str());
  environment.push_back(nullptr);
  return read_options(environment.data());
}

void check_value(const OptionInfo& option, const std::string& value) {
  const std::string variable = std::string("CUSHION_") + option.name + '=';
  const OptionsResult result = read({variable + value});
  const std::string problem = check_option(option.name, value);
  require(result.warnings.empty() && result.errors.size() == (problem.empty() ? 0 : 1));
  if (!problem.empty()) {
    require(result.errors.front() == problem);
    is_one_printable_line(problem);
    require(problem.starts_with(variable));
    return;
  }
  const auto described = describe(result.options);
  for (const auto& [name, text] : described) {
    if (name != option.name) continue;
    const OptionsResult again = read({variable + text});
    require(again.errors.empty() && describe(again.options) == described);
  }
}

void check_as_other_text(const std::string& text) {
  if (const std::string problem = check_option(text, ""); !problem.empty()) is_one_printable_line(problem);
  const std::string path = expand_path(text, {{'p', "42"}, {'h', "host"}, {'e', "program"}});
  require(text.find('%') != std::string::npos || path == text);
  const std::string preload = preload_value("/lib/a.so", text);
  require(preload.starts_with("/lib/a.so") && preload_value("/lib/a.so", preload) == preload);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  std::string_view text(reinterpret_cast<const char*>(data), size);
  std::vector<std::string> variables;
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    variables.emplace_back(line.substr(0, line.find('\0')));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
  }
  const OptionsResult result = read(variables);
  for (const std::string& line : result.errors) is_one_printable_line(line);
  for (const std::string& line : result.warnings) is_one_printable_line(line);
  require(result.errors.size() + result.warnings.size() <= variables.size());
  const std::string first = variables.empty() ? std::string() : variables.front();
  const std::size_t chosen = size == 0 ? 0 : data[0] % option_table().size();
  check_value(option_table()[chosen], first.empty() ? first : first.substr(1));
  check_as_other_text(first);
  return 0;
}
