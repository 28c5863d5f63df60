#include "core/control_file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <optional>
#include <utility>

#include "core/format.h"
#include "core/log.h"
#include "core/output.h"

namespace cushion {
namespace {

// A page has this before its name until its header is written. Its process may die then: it is listed like the others.
constexpr std::string_view kUnfinished = ".new-";

class Descriptor {
 public:
  explicit Descriptor(int fd) noexcept : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const noexcept { return fd_; }
  int release() noexcept { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

// The folder, if it is a real one, the user's and closed to others; else -1 and errno.
int open_folder(const std::string& path, bool create) {
  if (create) mkdir(path.c_str(), 0700);
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  struct stat s {};
  if (fd < 0) return fd;
  if (fstat(fd, &s) == 0 && s.st_uid == geteuid() && (s.st_mode & 077) == 0) return fd;
  ::close(fd);
  errno = EPERM;
  return -1;
}

std::optional<ProcessKey> key_in(std::string_view name) noexcept {
  if (name.starts_with(kUnfinished)) name.remove_prefix(kUnfinished.size());
  ProcessKey key;
  const char* const end = name.data() + name.size();
  const auto number = [&](const char* from, auto& to) {
    const auto [rest, error] = std::from_chars(from, end, to);
    return error == std::errc{} ? rest : nullptr;
  };
  const char* at = number(name.data(), key.pid);
  if (at == nullptr || at == end || *at != '-') return std::nullopt;
  at = number(at + 1, key.start);
  if (at == nullptr || at == end || *at != '-') return std::nullopt;
  at = number(at + 1, key.pid_namespace);
  return at == end && key.pid > 0 ? std::optional(key) : std::nullopt;
}

// Whether the process has a file of this name mapped now. True where the kernel does not say (a process that may not
// be looked at): then the pid's start must do.
bool maps_page(std::int64_t pid, const std::string& name) {
  const std::string path = fmt::format("/proc/{}/maps", pid);
  std::FILE* file = std::fopen(path.c_str(), "re");
  if (file == nullptr) return errno == EACCES || errno == EPERM;
  const std::string wanted = "/" + name + "\n";
  char* line = nullptr;
  std::size_t room = 0;
  bool found = false;
  errno = 0;
  while (!found && getline(&line, &room, file) > 0) found = std::string_view(line).ends_with(wanted);
  const bool hidden = !found && (errno == EACCES || errno == EPERM);
  std::free(line);
  std::fclose(file);
  return found || hidden;
}

// Why the file is not the control page of `key`; empty if it is, and then it is open in `out`.
std::string problem_of(int folder, const std::string& name, const ProcessKey& key, std::vector<OpenPage>& out) {
  Descriptor file(openat(folder, name.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (file.get() < 0) return reason_of(errno);
  struct stat s {};
  if (fstat(file.get(), &s) != 0) return reason_of(errno);
  if (!S_ISREG(s.st_mode)) return "it is no regular file";
  if (s.st_uid != geteuid()) return "it is another user's";
  if ((s.st_mode & 07777) != 0600 || s.st_nlink != 1) return "others may have written it";
  ControlPage::Header header{};
  const bool has_header = pread(file.get(), &header, sizeof header, 0) == static_cast<ssize_t>(sizeof header);
  if (has_header && std::memcmp(header.magic, ControlPage::kMagic, sizeof header.magic) != 0)
    return "it is no control page";
  if (has_header && (header.version != ControlPage::kVersion || header.size != sizeof(ControlPage)))
    return fmt::format("it was made by another version of Cushion (layout {}, ours {})", header.version,
                       ControlPage::kVersion);
  if (s.st_size != sizeof(ControlPage))
    return fmt::format("it is truncated: {} bytes of {}", s.st_size, sizeof(ControlPage));
  if (!has_header) return "it cannot be read";
  if (header.key != key) return "it says that it is another process's";
  void* at = mmap(nullptr, sizeof(ControlPage), PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (at == MAP_FAILED) return reason_of(errno);
  out.emplace_back(static_cast<ControlPage*>(at), file.release());
  return {};
}

}  // namespace

// ---- the process's own -------------------------------------------------------------------------------------------

ControlPage* ControlFile::create(std::string_view program, bool helper) noexcept try {
  const std::optional<ProcessKey> key = own_key();
  if (!key) {
    log::info("no control page: /proc cannot be read");
    return nullptr;
  }
  const std::string name = page_name(*key);
  const std::string unfinished = std::string(kUnfinished) + name;
  int error = 0;
  for (const std::string& place : control_folders()) {
    const Descriptor folder(open_folder(place, true));
    if (folder.get() < 0 || place.size() + name.size() + 2 > sizeof path_) {
      error = folder.get() < 0 ? errno : ENAMETOOLONG;
      continue;
    }
    unlinkat(folder.get(), unfinished.c_str(), 0);  // left by this process, when it was another program
    const Descriptor file(
        openat(folder.get(), unfinished.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
    // Allocated now: a full disk must be an error here, not a signal when the page is written.
    struct stat s {};
    error = file.get() < 0 || fchmod(file.get(), 0600) != 0 || fstat(file.get(), &s) != 0
                ? errno
                : reserve(file.get(), sizeof(ControlPage));
    void* at = MAP_FAILED;
    if (error == 0) {
      at = mmap(nullptr, sizeof(ControlPage), PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
      if (at == MAP_FAILED) error = errno;
    }
    if (error == 0) {
      auto* page = new (at) ControlPage;
      std::memcpy(page->header.magic, ControlPage::kMagic, sizeof page->header.magic);
      page->header.version = ControlPage::kVersion;
      page->header.size = sizeof(ControlPage);
      page->header.key = *key;
      page->header.helper = helper ? 1 : 0;
      program.copy(page->header.program, sizeof page->header.program - 1);
      if (renameat(folder.get(), unfinished.c_str(), folder.get(), name.c_str()) == 0) {
        page_ = page;
        device_ = s.st_dev;
        inode_ = s.st_ino;
        path_[fmt::format("{}/{}", place, name).copy(path_, sizeof path_ - 1)] = '\0';
        return page;
      }
      error = errno;
      munmap(at, sizeof(ControlPage));
    }
    unlinkat(folder.get(), unfinished.c_str(), 0);
  }
  log::warn("no control page: {}", reason_of(error));
  if (helper) log::complain(std::string("CUSHION_CTL=on: no control page can be made: ") + reason_of(error));
  return nullptr;
} catch (...) {  // no host memory
  return nullptr;
}

void ControlFile::remove() noexcept {
  struct stat s {};
  if (page_ != nullptr && lstat(path_, &s) == 0 && s.st_dev == device_ && s.st_ino == inode_) ::unlink(path_);
}

void ControlFile::detach() noexcept {
  if (page_ == nullptr) return;
  // In place: whatever still looks at it finds a page of its own.
  static_cast<void>(
      mmap(page_, sizeof(ControlPage), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0));
  page_ = nullptr;
}

// ---- for other processes of the user -----------------------------------------------------------------------------

OpenPage::OpenPage(OpenPage&& other) noexcept
    : page_(std::exchange(other.page_, nullptr)), fd_(std::exchange(other.fd_, -1)) {}

OpenPage::~OpenPage() {
  if (page_ == nullptr) return;
  munmap(page_, sizeof(ControlPage));
  ::close(fd_);
}

std::vector<std::string> control_folders() {
  std::vector<std::string> folders;
  const char* const runtime = std::getenv("XDG_RUNTIME_DIR");
  if (runtime != nullptr && *runtime == '/') folders.push_back(std::string(runtime) + "/cushion");
  folders.push_back(fmt::format("/tmp/cushion-{}", geteuid()));
  return folders;
}

std::string page_name(const ProcessKey& key) { return fmt::format("{}-{}-{}", key.pid, key.start, key.pid_namespace); }

PageSearch find_page(std::int64_t pid, const std::vector<std::string>& folders) {
  PageSearch search;
  const auto say = [&](std::string problem) { search.problems = {std::move(problem)}; };
  const std::optional<ProcessKey> key = key_of(pid);
  const std::optional<ProcessKey> own = own_key();
  struct stat s {};
  if (!key || stat(fmt::format("/proc/{}", pid).c_str(), &s) != 0) {
    say(fmt::format("there is no process {}", pid));
  } else if (s.st_uid != geteuid()) {
    say(fmt::format("process {} is another user's ({})", pid, s.st_uid));
  } else if (!own || key->pid_namespace != own->pid_namespace) {
    say(fmt::format("process {} is in another pid namespace: ask there (nsenter -t {} -p -m)", pid, pid));
  }
  if (!search.problems.empty()) return search;
  const std::string name = page_name(*key);
  bool was_another = false;
  for (const std::string& place : folders) {
    const Descriptor folder(open_folder(place, false));
    if (folder.get() < 0 || faccessat(folder.get(), name.c_str(), F_OK, AT_SYMLINK_NOFOLLOW) != 0) continue;
    const std::string problem = problem_of(folder.get(), name, *key, search.pages);
    if (!problem.empty()) {
      say(fmt::format("{}/{} cannot be trusted: {}", place, name, problem));
      return search;
    }
    if (maps_page(pid, name)) return search;
    search.pages.clear();
    was_another = true;
  }
  say(was_another
          ? fmt::format("process {} was another program when it made its control page, and has made none since", pid)
          : fmt::format("process {} has no control page in {}: it does not run under Cushion, has not allocated "
                        "device memory yet, or could make none there (CUSHION_LOG_LEVEL=warn tells)",
                        pid, fmt::join(folders, " or ")));
  return search;
}

PageSearch list_pages(const std::vector<std::string>& folders) {
  PageSearch search;
  const std::optional<ProcessKey> own = own_key();
  if (!own) return search;
  for (const std::string& place : folders) {
    Descriptor folder(open_folder(place, false));
    if (folder.get() < 0) continue;
    std::vector<std::string> names;
    if (DIR* entries = fdopendir(dup(folder.get()))) {
      while (const dirent* entry = readdir(entries)) names.emplace_back(entry->d_name);
      closedir(entries);
    }
    for (const std::string& name : names) {
      const std::optional<ProcessKey> key = key_in(name);
      if (!key || key->pid_namespace != own->pid_namespace) continue;  // its pids are not ours to judge
      const bool finished = !name.starts_with(kUnfinished);
      if (key_of(key->pid) != key || (finished && !maps_page(key->pid, name))) {
        unlinkat(folder.get(), name.c_str(), 0);
        continue;
      }
      if (!finished) continue;
      const std::string problem = problem_of(folder.get(), name, *key, search.pages);
      if (!problem.empty()) search.problems.push_back(fmt::format("{}/{} cannot be trusted: {}", place, name, problem));
    }
  }
  return search;
}

}  // namespace cushion
