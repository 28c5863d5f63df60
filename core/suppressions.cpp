#include "core/suppressions.h"

#include <cerrno>
#include <fstream>
#include <system_error>

#include "core/options.h"
#include "core/output.h"

namespace cushion {
namespace {

constexpr const char* kBuiltIn[] = {"libcublas.so*",   "libcublasLt.so*", "libcudnn*.so*", "libcufft.so*",
                                    "libcusolver.so*", "libcusparse.so*", "libnccl.so*",   "libcurand.so*"};

std::string_view base_name(std::string_view path) noexcept { return path.substr(path.rfind('/') + 1); }

}  // namespace

std::string Suppressions::read(const std::string& file) {
  if (file == "none") return {};
  patterns_.assign(std::begin(kBuiltIn), std::end(kBuiltIn));
  if (file.empty()) return {};
  errno = 0;
  std::ifstream in(file);
  std::string line;
  while (std::getline(in, line)) {
    line.erase(std::min(line.find('#'), line.size()));
    const std::size_t first = line.find_first_not_of(" \t\r");
    if (first == std::string::npos) continue;
    patterns_.push_back(line.substr(first, line.find_last_not_of(" \t\r") + 1 - first));
  }
  if (in.is_open() && in.eof()) return {};
  return reason_of(errno != 0 ? errno : EIO);
}

const char* Suppressions::covers(const Stacks& stacks, std::uint32_t id, bool may_ask_linker) const noexcept {
  if (id == 0 || patterns_.empty()) return nullptr;
  const Stacks::Stack& stack = stacks[id];
  for (std::uint32_t i = 0; i < stack.depth; ++i) {
    const Stacks::Named call = stacks.named(stack.frames[i], may_ask_linker);
    for (const std::string& pattern : patterns_) {
      if (matches_pattern(pattern, call.function) || matches_pattern(pattern, base_name(call.file)))
        return pattern.c_str();
    }
  }
  return nullptr;
}

}  // namespace cushion
