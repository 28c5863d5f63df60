#include "tools/launch.h"

#include <fmt/core.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

namespace cushion {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kSeparators = " :";  // what ld.so splits LD_PRELOAD at

bool is_executable_file(const std::string& path) {
  struct stat status {};
  return stat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode) && access(path.c_str(), X_OK) == 0;
}

}  // namespace

LibrarySearch find_library(const std::string& given) {
  LibrarySearch search;
  std::error_code error;
  std::vector<fs::path> places;
  if (!given.empty()) {
    places = {given};
  } else {
    const fs::path here = fs::read_symlink("/proc/self/exe", error).parent_path();
    for (const char* folder : {".", "../lib", "../lib64", "../lib/" CUSHION_MULTIARCH}) {
      places.push_back((here / folder / "libcushion.so").lexically_normal());
    }
  }
  for (const fs::path& place : places) {
    search.searched.push_back(place.string());
    if (fs::is_regular_file(place, error)) {
      search.path = fs::absolute(place, error).string();
      break;
    }
  }
  return search;
}

std::string find_program(const std::string& name) {
  if (name.find('/') != std::string::npos) return name;
  const char* const path = getenv("PATH");
  std::string_view rest = path != nullptr ? path : "/usr/bin:/bin";
  while (!name.empty()) {
    const std::string_view folder = rest.substr(0, rest.find(':'));
    const std::string candidate = std::string(folder.empty() ? "." : folder) + '/' + name;
    if (is_executable_file(candidate)) return candidate;
    if (folder.size() == rest.size()) break;
    rest.remove_prefix(folder.size() + 1);
  }
  return {};
}

std::string preload_problem(std::string_view library) {
  if (library.find_first_of(kSeparators) == std::string_view::npos) return {};
  return fmt::format(
      "{} has a space or colon in its path, where the loader splits LD_PRELOAD: move or link it elsewhere", library);
}

std::string preload_value(std::string_view library, std::string_view current) {
  std::string value(library);
  while (!current.empty()) {
    const std::size_t end = std::min(current.find_first_of(kSeparators), current.size());
    const std::string_view entry = current.substr(0, end);
    if (!entry.empty() && entry != library) value.append(":").append(entry);
    current.remove_prefix(std::min(end + 1, current.size()));
  }
  return value;
}

int become(const std::string& library, char* const* command) {
  const char* const current = getenv("LD_PRELOAD");
  setenv("LD_PRELOAD", preload_value(library, current != nullptr ? current : "").c_str(), 1);
  execvp(command[0], command);
  const int error = errno;
  const bool absent = error == ENOENT || error == ENOTDIR;
  fmt::print(stderr, "cushion: {}: {}\n", command[0],
             absent && std::strchr(command[0], '/') == nullptr ? "not found in PATH" : std::strerror(error));
  return absent ? 127 : 126;
}

}  // namespace cushion
