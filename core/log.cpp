#include "core/log.h"

#include <spdlog/logger.h>
#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <unistd.h>

#include <memory>

#include "core/format.h"

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

}  // namespace

void complain(std::string_view message) noexcept {
  char line[1024];
  const std::string_view text = format_into(line, "cushion: {}", message.substr(0, sizeof line - 16));
  line[text.size()] = '\n';
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line, text.size() + 1);
}

void open(LogLevel wanted, const std::string& file) noexcept {
  if (wanted == LogLevel::off) return;
  try {
    std::shared_ptr<spdlog::sinks::sink> sink;
    if (!file.empty()) {
      try {
        sink = std::make_shared<spdlog::sinks::basic_file_sink_mt>(file);
      } catch (const spdlog::spdlog_ex& e) {
        char text[512];
        complain(format_into(text, "CUSHION_LOG_FILE: {}; logging to stderr", e.what()));
      }
    }
    if (!sink) sink = std::make_shared<spdlog::sinks::stderr_sink_mt>();
    auto* logger = new spdlog::logger("cushion", std::move(sink));
    logger->set_level(spd(wanted));
    logger->flush_on(spdlog::level::trace);
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
