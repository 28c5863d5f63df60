#include "core/output.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <ctime>

namespace cushion {
namespace {

constexpr int kAlways = O_WRONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK;

// Opened without waiting, so that a pipe that nobody reads is an error; written to with waiting, as anything else is.
int made_blocking(int fd) noexcept {
  if (fd >= 0) fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
  return fd;
}

// The descriptor that a name like /dev/stdout stands for, -1 if none. Opened by its name, a file would be written from
// another offset than the program's own, which then overwrites what was written.
int descriptor_named(std::string_view path) noexcept {
  if (path == "/dev/stdin") return STDIN_FILENO;
  if (path == "/dev/stdout") return STDOUT_FILENO;
  if (path == "/dev/stderr") return STDERR_FILENO;
  for (const std::string_view folder : {"/dev/fd/", "/proc/self/fd/"}) {
    if (!path.starts_with(folder)) continue;
    const char* const end = path.data() + path.size();
    int fd = -1;
    const auto [rest, error] = std::from_chars(path.data() + folder.size(), end, fd);
    if (error == std::errc{} && rest == end) return fd;
  }
  return -1;
}

// While it lives, what this thread writes raises no signal.
class Unsignalled {
 public:
  Unsignalled() noexcept {
    sigset_t raised;
    sigemptyset(&raised);
    sigaddset(&raised, SIGPIPE);
    sigaddset(&raised, SIGXFSZ);
    pthread_sigmask(SIG_BLOCK, &raised, &before_);
  }
  ~Unsignalled() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  Unsignalled(const Unsignalled&) = delete;
  Unsignalled& operator=(const Unsignalled&) = delete;

  // What our own call ended with: the signal that it raised goes, and no other.
  void failed(int error) noexcept {
    if (error != EPIPE && error != EFBIG) return;
    constexpr timespec kNow{};
    sigset_t ours;
    sigemptyset(&ours);
    sigaddset(&ours, error == EPIPE ? SIGPIPE : SIGXFSZ);
    sigtimedwait(&ours, nullptr, &kNow);
  }

 private:
  sigset_t before_;
};

int closed_with(int fd, int error) noexcept {
  ::close(fd);
  errno = error;
  return -1;
}

}  // namespace

int write_all(int fd, std::string_view text) noexcept {
  Unsignalled quiet;
  int error = 0;
  while (!text.empty() && error == 0) {
    const ssize_t n = ::write(fd, text.data(), text.size());
    if (n > 0) {
      text.remove_prefix(static_cast<std::size_t>(n));
    } else if (n == 0 || errno != EINTR) {
      error = n == 0 ? ENOSPC : errno;
    }
  }
  quiet.failed(error);
  return error;
}

int reserve(int fd, off_t size) noexcept {
  Unsignalled quiet;
  const int error = posix_fallocate(fd, 0, size);
  quiet.failed(error);
  return error;
}

bool is_special_file(const char* path) noexcept {
  const std::string_view name(path);
  if ((name.starts_with("/dev/") && !name.starts_with("/dev/shm/")) || name.starts_with("/proc/")) return true;
  struct stat s {};
  return lstat(path, &s) == 0 && !S_ISREG(s.st_mode) && !S_ISDIR(s.st_mode) && !S_ISLNK(s.st_mode);
}

int open_special(const char* path) noexcept {
  const int fd = descriptor_named(path);
  return fd >= 0 ? fcntl(fd, F_DUPFD_CLOEXEC, 0) : made_blocking(::open(path, kAlways | O_APPEND));
}

int open_to_append(const char* path) noexcept {
  if (is_special_file(path)) return open_special(path);
  int fd = ::open(path, kAlways | O_APPEND | O_NOFOLLOW | O_CREAT | O_EXCL, 0666);
  if (fd >= 0 || errno != EEXIST) return made_blocking(fd);
  fd = ::open(path, kAlways | O_APPEND | O_NOFOLLOW);
  if (fd < 0) return fd;
  struct stat s {};
  if (fstat(fd, &s) != 0) return closed_with(fd, errno);
  if (!S_ISREG(s.st_mode) || s.st_nlink != 1 || s.st_uid != geteuid()) return closed_with(fd, EPERM);
  return made_blocking(fd);
}

int create_file(const char* path) noexcept {
  return made_blocking(::open(path, kAlways | O_NOFOLLOW | O_CREAT | O_EXCL, 0666));
}

const char* reason_of(int error) noexcept {
  if (error == ELOOP) return "it is a symbolic link";
  if (error == ENXIO) return "nobody reads from it";
  const char* text = strerrordesc_np(error);
  return text != nullptr ? text : "error";
}

}  // namespace cushion
