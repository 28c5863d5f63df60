#include "core/suppressions.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>

#include "core/options.h"
#include "core/output.h"

namespace cushion {
namespace {

constexpr off_t kMostBytes = off_t{16} << 20;
constexpr const char* kBuiltIn[] = {"libcublas.so*",   "libcublasLt.so*", "libcudnn*.so*", "libcufft.so*",
                                    "libcusolver.so*", "libcusparse.so*", "libnccl.so*",   "libcurand.so*"};

std::string_view base_name(std::string_view path) noexcept { return path.substr(path.rfind('/') + 1); }

}  // namespace

std::string Suppressions::read(const std::string& file) {
  if (file == "none") return {};
  patterns_.assign(std::begin(kBuiltIn), std::end(kBuiltIn));
  if (file.empty()) return {};
  const int fd = ::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (fd < 0) return reason_of(errno);
  struct stat s {};
  const bool readable = fstat(fd, &s) == 0 && S_ISREG(s.st_mode) && s.st_size <= kMostBytes;
  std::FILE* const in = readable ? fdopen(fd, "r") : nullptr;
  if (in == nullptr) {
    ::close(fd);
    return "it is no regular file of at most 16 MiB";
  }
  const auto text = [](char* line) {
    std::string_view rest(line);
    rest = rest.substr(0, rest.find('#'));
    const std::size_t first = rest.find_first_not_of(" \t\r\n");
    return first == rest.npos ? rest.substr(rest.size())
                              : rest.substr(first, rest.find_last_not_of(" \t\r\n") + 1 - first);
  };
  char* line = nullptr;
  std::size_t room = 0;
  errno = 0;
  while (::getline(&line, &room, in) >= 0) {
    if (const std::string_view pattern = text(line); !pattern.empty()) patterns_.emplace_back(pattern);
  }
  const int error = std::ferror(in) != 0 ? errno : 0;
  std::free(line);
  std::fclose(in);
  return error != 0 ? reason_of(error) : std::string();
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
