#include "core/log.h"

#include <spdlog/logger.h>
#include <spdlog/sinks/base_sink.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "core/format.h"
#include "core/output.h"
#include "core/utf8.h"

namespace cushion::log {

constinit std::atomic<int> level{0};

namespace {

// Set once by open(), before `level` rises above off; never destroyed, so that logging after main stays safe.
constinit std::atomic<spdlog::logger*> g_logger{nullptr};

spdlog::level::level_enum spd(LogLevel at) noexcept {
  switch (at) {
    case LogLevel::error:
      return spdlog::level::err;
    case LogLevel::warn:
      return spdlog::level::warn;
    case LogLevel::info:
      return spdlog::level::info;
    case LogLevel::debug:
      return spdlog::level::debug;
    case LogLevel::trace:
      return spdlog::level::trace;
    case LogLevel::off:
      break;
  }
  return spdlog::level::off;
}

void complain_of(const std::string& file, int error, std::string_view what_now) noexcept {
  char line[1024];
  complain(format_into(line, "CUSHION_LOG_FILE: cannot write {}: {}; {}", Printable<200>(file).view(), reason_of(error),
                       what_now));
}

// A line is one write at the file's end, and the file is open for that alone: a program may close every descriptor that
// it does not know and use the number for something else. An empty name is stderr.
class Sink final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  explicit Sink(std::string file) : file_(std::move(file)) {}

 private:
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t line;
    formatter_->format(message, line);
    const int fd = file_.empty() ? STDERR_FILENO : open_to_append(file_.c_str());
    const int error = fd < 0 ? errno : write_all(fd, {line.data(), line.size()});
    if (fd >= 0 && !file_.empty()) ::close(fd);
    if (error != 0 && !std::exchange(complained_, true)) complain_of(file_, error, "what cannot be written is lost");
  }
  void flush_() override {}

  const std::string file_;
  bool complained_ = false;
};

}  // namespace

void complain(std::string_view message) noexcept {
  char line[1024];
  const std::string_view text = format_into(line, "cushion: {}", message.substr(0, sizeof line - 16));
  line[text.size()] = '\n';
  write_all(STDERR_FILENO, {line, text.size() + 1});
}

void open(LogLevel wanted, const std::string& file) noexcept {
  if (wanted == LogLevel::off) return;
  try {
    bool writable = true;
    if (!file.empty()) {
      const int fd = open_to_append(file.c_str());
      writable = fd >= 0;
      if (writable) ::close(fd);
      if (!writable) complain_of(file, errno, "logging to stderr");
    }
    auto* logger = new spdlog::logger("cushion", std::make_shared<Sink>(writable ? file : std::string()));
    logger->set_level(spd(wanted));
    logger->set_pattern("[%Y-%m-%d %H:%M:%S.%f] [%n] [%l] [%t] %v");
    g_logger.store(logger, std::memory_order_release);
    level.store(static_cast<int>(wanted), std::memory_order_relaxed);
  } catch (...) {
    complain("the log could not be opened");
  }
}

void write(LogLevel at, std::string_view message) noexcept {
  spdlog::logger* logger = g_logger.load(std::memory_order_acquire);
  if (logger == nullptr) return;
  try {
    logger->log(spd(at), spdlog::string_view_t(message.data(), message.size()));
  } catch (...) {
  }
}

}  // namespace cushion::log
