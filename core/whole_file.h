// WholeFile: output files that have their name once they are whole. They are written as PATH.partial, locked, and then
// renamed; what was there before is replaced. What core/output.h says of all output holds.
//
// Cost and errors: system calls; each function answers 0 or an errno. Thread safety: any thread.
#pragma once

#include <sys/types.h>

#include <cerrno>
#include <ctime>
#include <string>

#include "core/out.h"

namespace cushion {

// A path that this process has reserved while it lives. An empty path: nowhere. An empty partial: a device or a pipe,
// written as it is.
struct ClaimedFile {
  std::string path;
  std::string partial;
  dev_t device = 0;  // which file `partial` is
  ino_t inode = 0;
};

// One line on stderr: the option's file cannot be written.
void complain_of(const char* option, const char* path, int error) noexcept;

// Creates the path's directories and PATH.partial. If another process has it, or has written it since this one was
// `loaded`, the pid is appended. If it cannot be written, complains and returns an empty path.
ClaimedFile claim_file(const char* option, std::string path, long pid, timespec loaded);

// Steps of the two below: a descriptor, or -1 and errno; and the end of writing.
int open_claimed(const ClaimedFile& file) noexcept;
int open_whole(const char* path, std::string& partial);
int finish_file(int fd, const char* partial, const char* path, int error) noexcept;

// write(Out&) fills the file. Safe in signal handlers, if `write` is: all that allocates was done by claim_file().
template <class Write>
int write_claimed(const ClaimedFile& file, Write write) noexcept {
  const int fd = open_claimed(file);
  if (fd < 0) return errno;
  Out out(fd);
  write(out);
  return finish_file(fd, file.partial.c_str(), file.path.c_str(), out.finish());
}

// The same for a path that was not claimed. EBUSY: a running process has claimed it, or writes it just now.
template <class Write>
int write_whole(const char* path, Write write) noexcept try {
  std::string partial;
  const int fd = open_whole(path, partial);
  if (fd < 0) return errno;
  Out out(fd);
  write(out);
  return finish_file(fd, partial.c_str(), path, out.finish());
} catch (...) {
  return ENOMEM;
}

}  // namespace cushion
