#include "settings.h"

#include <cctype>
#include <cstdlib>
#include <sstream>

namespace emu {
namespace {

std::string Variable(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : otherwise;
}

std::size_t Bytes(const std::string& text) {
  std::size_t end = 0;
  std::size_t bytes = std::stoull(text, &end);
  const char suffix = end < text.size() ? static_cast<char>(std::toupper(text[end])) : ' ';
  if (suffix == 'K') bytes <<= 10;
  if (suffix == 'M') bytes <<= 20;
  if (suffix == 'G') bytes <<= 30;
  return bytes;
}

std::vector<PlannedFailure> Failures(const std::string& text) {
  std::vector<PlannedFailure> failures;
  std::istringstream list(text);
  for (std::string item; std::getline(list, item, ',');) {
    std::istringstream fields(item);
    std::string function, call = "1", code = "2";
    std::getline(fields, function, ':');
    std::getline(fields, call, ':');
    std::getline(fields, code, ':');
    failures.push_back({function, std::stoul(call), call.ends_with('+'), static_cast<CUresult>(std::stoi(code))});
  }
  return failures;
}

}  // namespace

const Settings& settings() {
  static const Settings* const read = new Settings{
      Bytes(Variable("EMU_MEMORY", "4G")),
      std::stoi(Variable("EMU_DEVICES", "1")),
      std::stoi(Variable("EMU_DRIVER_VERSION", "13000")),
      Failures(Variable("EMU_FAIL", "")),
      Variable("EMU_COUNT", ""),
      Variable("EMU_LEFT", ""),
  };
  return *read;
}

}  // namespace emu
