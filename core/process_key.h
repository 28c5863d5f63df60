// ProcessKey: which process, for good. A pid comes again; with the moment the process began and the namespace that
// counts the pids it does not.
//
// Read from /proc: a few microseconds. Never throws, allocates nothing.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>

namespace cushion {

struct ProcessKey {
  std::int64_t pid = 0;
  std::uint64_t start = 0;          // clock ticks after the machine's start
  std::uint64_t pid_namespace = 0;  // inode of /proc/PID/ns/pid

  bool operator==(const ProcessKey&) const = default;
};

// Of this process; nothing where /proc cannot be read.
std::optional<ProcessKey> own_key() noexcept;

// Of a process by its pid in our own namespace; nothing if there is none. Where the kernel does not tell its namespace
// (another user's process) it is taken to be ours.
std::optional<ProcessKey> key_of(std::int64_t pid) noexcept;

}  // namespace cushion
