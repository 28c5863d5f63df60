// Output: how Cushion writes to the files that its options name, and to stderr.
//
// Invariant: that never stops, ends or changes the program, nor a file that is not meant. A write raises no signal
// (SIGPIPE, SIGXFSZ); opening waits for nobody (a pipe without a reader); and in folders where others may create files
// nothing is opened through a symbolic link or in a file that another user put there. What lies under /dev (but for
// /dev/shm) and /proc is opened as it is named; /dev/stdout and its like are the program's own descriptors.
// Safe in signal handlers; allocates nothing.
#pragma once

#include <sys/types.h>

#include <string_view>

namespace cushion {

// 0, or the errno of what could not be written.
int write_all(int fd, std::string_view text) noexcept;

// Gives the open file `size` bytes of room, zeros: 0, or the errno of why there is none (a full disk, a file limit).
int reserve(int fd, off_t size) noexcept;

// Whether output to `path` goes straight to it: a device, a pipe, or anything under /dev and /proc. Nothing is ever
// created, truncated or renamed there.
bool is_special_file(const char* path) noexcept;

// Each answers a descriptor, or -1 and errno.
int open_special(const char* path) noexcept;
int open_to_append(const char* path) noexcept;  // special or regular; created if it is not there

// Creates a regular file. Where one is in the way, that is an error (EEXIST), whatever it is.
int create_file(const char* path) noexcept;

// Why, for a person; the text of the C library or a literal.
const char* reason_of(int error) noexcept;

}  // namespace cushion
