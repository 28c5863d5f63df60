#include "core/whole_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <limits>

#include "core/log.h"
#include "core/utf8.h"

namespace cushion {

void complain_of(const char* option, const char* path, int error) noexcept {
  char line[1024];
  log::complain(
      format_into(line, "CUSHION_{}: cannot write {}: {}", option, Printable<200>(path).view(), reason_of(error)));
}

namespace {

bool make_parents(const std::string& path) {
  for (std::size_t slash = path.find('/', 1); slash != std::string::npos; slash = path.find('/', slash + 1)) {
    const std::string parent = path.substr(0, slash);
    if (mkdir(parent.c_str(), 0777) != 0 && errno != EEXIST && errno != EISDIR) {
      struct stat s {};
      if (stat(parent.c_str(), &s) != 0) return false;
    }
  }
  return true;
}

// A folder that is there, or a path that could only be one.
bool names_folder(const char* path) {
  struct stat s {};
  const std::size_t length = std::strlen(path);
  return (stat(path, &s) == 0 && S_ISDIR(s.st_mode)) || (length != 0 && path[length - 1] == '/');
}

// Whether another process has written the file while this one was running.
bool written_since(const std::string& path, timespec loaded) {
  struct stat s {};
  if (stat(path.c_str(), &s) != 0) return false;
  return s.st_mtim.tv_sec != loaded.tv_sec ? s.st_mtim.tv_sec > loaded.tv_sec : s.st_mtim.tv_nsec >= loaded.tv_nsec;
}

bool is_named(int fd, const std::string& name) {
  struct stat opened {};
  struct stat named {};
  return fstat(fd, &opened) == 0 && lstat(name.c_str(), &named) == 0 && opened.st_ino == named.st_ino &&
         opened.st_dev == named.st_dev;
}

// Creates and locks `partial`: its descriptor; -1 if another live process has it, or has written the file while this
// one was running; -2 (and errno) if it cannot be created. One that nobody holds is left over from a process that is
// gone, or put there by somebody: it is never written to, but removed.
int claim(const std::string& path, const std::string& partial, timespec loaded) {
  for (int tries = 0; tries < 100; ++tries) {
    int fd = create_file(partial.c_str());
    const bool created = fd >= 0;
    if (!created && errno != EEXIST) return -2;
    if (!created) {
      fd = ::open(partial.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY);
      if (fd < 0 && errno == ENOENT) continue;
      if (fd < 0 && errno == EACCES) return -1;
      if (fd < 0 && errno != ELOOP) return -2;
    }
    if (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) != 0) {
      ::close(fd);
      return -1;
    }
    // Its last owner may have renamed it between our open and our lock: then the name is another file's, or nobody's.
    const bool ours = fd < 0 || is_named(fd, partial);
    if (created && ours && !written_since(path, loaded)) return fd;
    const int failed = ours && ::unlink(partial.c_str()) != 0 && errno != ENOENT ? errno : 0;
    if (fd >= 0) ::close(fd);
    if ((created && ours) || failed == EPERM || failed == EACCES) return -1;
    errno = failed;
    if (failed != 0) return -2;
  }
  errno = EEXIST;
  return -2;
}

std::string partial_of(const std::string& path) { return path + ".partial"; }

}  // namespace

ClaimedFile claim_file(const char* option, std::string path, long pid, timespec loaded) {
  ClaimedFile file;
  if (is_special_file(path.c_str())) {
    file.path = std::move(path);
    return file;
  }
  struct stat s {};
  const bool folder = names_folder(path.c_str());
  errno = folder ? EISDIR : 0;
  int fd = !folder && make_parents(path) ? claim(path, partial_of(path), loaded) : -2;
  if (fd == -1) {
    path += fmt::format(".{}", pid);
    fd = claim(path, partial_of(path), loaded);
    if (fd == -1) errno = EEXIST;
  }
  if (fd < 0 || fstat(fd, &s) != 0) {
    complain_of(option, path.c_str(), errno);
    return {};
  }
  // The descriptor only holds the lock, until the process ends: the program may close it and reuse its number, so
  // nothing is ever written to it.
  file.partial = partial_of(path);
  file.path = std::move(path);
  file.device = s.st_dev;
  file.inode = s.st_ino;
  return file;
}

int open_claimed(const ClaimedFile& file) noexcept {
  if (file.partial.empty()) return open_special(file.path.c_str());
  const int fd = ::open(file.partial.c_str(), O_WRONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (fd < 0) return errno == ENOENT ? create_file(file.partial.c_str()) : fd;
  struct stat s {};
  if (fstat(fd, &s) == 0 && s.st_dev == file.device && s.st_ino == file.inode) return fd;
  ::close(fd);
  errno = EEXIST;  // what else has its name is left alone
  return -1;
}

int open_whole(const char* path, std::string& partial) {
  if (is_special_file(path)) return open_special(path);
  errno = 0;
  if (names_folder(path)) {
    errno = EISDIR;
    return -1;
  }
  if (!make_parents(path)) {
    if (errno == 0) errno = ENOTDIR;
    return -1;
  }
  // What was there before is replaced, however new it is.
  constexpr timespec kNever{std::numeric_limits<time_t>::max(), 0};
  partial = partial_of(path);
  const int fd = claim(path, partial, kNever);
  if (fd == -1) errno = EBUSY;
  return fd < 0 ? -1 : fd;
}

int finish_file(int fd, const char* partial, const char* path, int error) noexcept {
  if (*partial != '\0') {
    if (error == 0 && ::rename(partial, path) != 0) error = errno;
    if (error != 0) ::unlink(partial);
  }
  if (::close(fd) != 0 && error == 0) error = errno;
  return error;
}

}  // namespace cushion
