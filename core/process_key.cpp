#include "core/process_key.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <string_view>

#include "core/format.h"

namespace cushion {
namespace {

std::uint64_t namespace_of(const char* path) noexcept {
  struct stat s {};
  return stat(path, &s) == 0 ? s.st_ino : 0;
}

// Field 22 of a process's `stat`. The second, its name in brackets, may hold anything.
std::optional<std::uint64_t> start_of(const char* path) noexcept {
  const int fd = ::open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return std::nullopt;
  char text[1024];
  const ssize_t n = ::read(fd, text, sizeof text);
  ::close(fd);
  if (n <= 0) return std::nullopt;
  std::string_view rest(text, static_cast<std::size_t>(n));
  rest.remove_prefix(std::min(rest.rfind(')'), rest.size()));
  for (int field = 2; field < 22; ++field) {
    const std::size_t space = rest.find(' ');
    if (space == std::string_view::npos) return std::nullopt;
    rest.remove_prefix(space + 1);
  }
  std::uint64_t start = 0;
  if (std::from_chars(rest.data(), rest.data() + rest.size(), start).ec != std::errc{}) return std::nullopt;
  return start;
}

}  // namespace

std::optional<ProcessKey> own_key() noexcept {
  const std::optional<std::uint64_t> start = start_of("/proc/self/stat");
  const std::uint64_t space = namespace_of("/proc/self/ns/pid");
  if (!start || space == 0) return std::nullopt;
  return ProcessKey{getpid(), *start, space};
}

std::optional<ProcessKey> key_of(std::int64_t pid) noexcept {
  char path[64] = "";
  format_into(path, "/proc/{}/stat", pid);
  const std::optional<std::uint64_t> start = pid > 0 ? start_of(path) : std::nullopt;
  if (!start) return std::nullopt;
  char space_path[64] = "";
  format_into(space_path, "/proc/{}/ns/pid", pid);
  const std::uint64_t space = namespace_of(space_path);
  return ProcessKey{pid, *start, space != 0 ? space : namespace_of("/proc/self/ns/pid")};
}

}  // namespace cushion
