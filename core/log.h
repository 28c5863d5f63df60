// Log: what Cushion says of its own work (CUSHION_LOG_LEVEL, CUSHION_LOG_FILE; off by default), and the one line on
// stderr by which a mistake of the user's is told.
//
// Safe in any thread, and after main: the logger is made once and never destroyed. A statement below the level costs
// one relaxed load; a line in a file three system calls. Never throws.
#pragma once

#include <fmt/format.h>

#include <atomic>
#include <string_view>

#include "core/options.h"

namespace cushion::log {

extern constinit std::atomic<int> level;

// Opens the log. An unwritable file is complained about, and the log goes to stderr.
void open(LogLevel wanted, const std::string& file) noexcept;
void write(LogLevel at, std::string_view message) noexcept;

// One line on stderr, "cushion: …", written with a single write(2).
void complain(std::string_view message) noexcept;

template <class... Args>
void say(LogLevel at, fmt::string_view format, const Args&... args) noexcept {
  if (static_cast<int>(at) > level.load(std::memory_order_relaxed)) return;
  try {
    const std::string line = fmt::vformat(format, fmt::make_format_args(args...));
    write(at, line);
  } catch (...) {  // no host memory for the line
  }
}
template <class... Args>
void warn(fmt::string_view format, const Args&... args) noexcept {
  say(LogLevel::warn, format, args...);
}
template <class... Args>
void info(fmt::string_view format, const Args&... args) noexcept {
  say(LogLevel::info, format, args...);
}
template <class... Args>
void debug(fmt::string_view format, const Args&... args) noexcept {
  say(LogLevel::debug, format, args...);
}

}  // namespace cushion::log
