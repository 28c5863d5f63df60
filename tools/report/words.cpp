#include "tools/report/words.h"

#include <fmt/core.h>

#include <algorithm>
#include <filesystem>

#include "core/counters.h"
#include "core/utf8.h"

namespace cushion {

std::string bytes_text(std::uint64_t bytes) {
  static constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes < 1024) return fmt::format("{} B", bytes);
  double shown = static_cast<double>(bytes) / 1024;
  std::size_t unit = 0;
  for (; shown >= 1023.995 && unit + 1 < std::size(kUnits); ++unit) shown /= 1024;
  return fmt::format("{:.2f} {}", shown, kUnits[unit]);
}

std::string count_text(std::uint64_t count) {
  std::string text = std::to_string(count);
  for (std::size_t at = text.size(); at > 3;) text.insert(at -= 3, 1, ' ');
  return text;
}

std::string change_text(std::uint64_t before, std::uint64_t after, std::string (*text)(std::uint64_t)) {
  if (before == after) return "=";
  return after > before ? fmt::format("+{}", text(after - before)) : fmt::format("-{}", text(before - after));
}

std::string seconds_text(double seconds) {
  if (seconds < 0) return fmt::format("-{}", seconds_text(-seconds));
  if (seconds == 0) return "0 s";
  if (seconds < 1e-6) return fmt::format("{:.0f} ns", seconds * 1e9);
  if (seconds < 1e-3) return fmt::format("{:.1f} µs", seconds * 1e6);
  if (seconds < 1) return fmt::format("{:.1f} ms", seconds * 1e3);
  if (seconds < 120) return fmt::format("{:.2f} s", seconds);
  if (seconds < 7200) return fmt::format("{:.1f} min", seconds / 60);
  return fmt::format("{:.1f} h", seconds / 3600);
}

std::string share_text(std::uint64_t part, std::uint64_t whole) {
  if (whole == 0) return "-";
  return fmt::format("{:.1f} %", 100.0 * static_cast<double>(part) / static_cast<double>(whole));
}

std::string bucket_text(const Bucket& bucket, std::string (*text)(double)) {
  if (!bucket.below) return fmt::format("{} and more", text(bucket.from));
  if (bucket.from == 0) return fmt::format("below {}", text(*bucket.below));
  return fmt::format("{} to {}", text(bucket.from), text(*bucket.below));
}

std::string plain(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t length = utf8_length(text.substr(i));
    const auto byte = static_cast<unsigned char>(text[i]);
    const bool c1 = length == 2 && byte == 0xC2 && static_cast<unsigned char>(text[i + 1]) < 0xA0;
    if (length == 0 || byte < 0x20 || byte == 0x7F || c1) {
      out += fmt::format("\\x{:02x}", c1 ? static_cast<unsigned char>(text[i + 1]) : byte);
    } else {
      out += text.substr(i, length);
    }
    i += std::max<std::size_t>(length, 1);
  }
  return out;
}

std::size_t width_of(std::string_view text) {
  return static_cast<std::size_t>(
      std::ranges::count_if(text, [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

std::string shortened(std::string_view text, std::size_t width) {
  if (width_of(text) <= width) return std::string(text);
  if (width < 8) width = 8;
  const auto points = [&](std::size_t skip) {  // the byte at which code point `skip` begins
    std::size_t at = 0;
    for (std::size_t seen = 0; at < text.size(); ++at) {
      if ((static_cast<unsigned char>(text[at]) & 0xC0) != 0x80 && seen++ == skip) break;
    }
    return at;
  };
  const std::size_t head = (width - 1) / 3;  // the end of a path says most
  const std::size_t tail = width - 1 - head;
  return fmt::format("{}…{}", text.substr(0, points(head)), text.substr(points(width_of(text) - tail)));
}

std::string frame_name(const Frame& frame) {
  if (!frame.function.empty()) return plain(frame.function);
  if (frame.module)
    return fmt::format("{}+{:#x}", plain(std::filesystem::path(frame.module->path).filename().string()), frame.offset);
  return frame.offset != 0 ? fmt::format("{:#x}", frame.offset) : "unknown";
}

std::string frame_place(const Frame& frame) {
  if (!frame.file.empty())
    return frame.line == 0 ? plain(frame.file) : fmt::format("{}:{}", plain(frame.file), frame.line);
  return frame.function.empty() || !frame.module ? std::string() : plain(frame.module->path);
}

namespace {

// "ns::Class<T>::method(int) const" as "method". What is all template arguments, as "<module>", stays.
std::string short_name(const Frame& frame) {
  const std::string name = frame_name(frame);
  if (frame.function.empty()) return name;
  std::string bare;
  int depth = 0;
  for (const char c : name) {
    if (c == '(' && depth == 0) break;
    depth += c == '<' ? 1 : 0;
    if (depth == 0) bare += c;
    depth -= c == '>' && depth > 0 ? 1 : 0;
  }
  if (const std::size_t scope = bare.rfind("::"); scope != std::string::npos) bare.erase(0, scope + 2);
  bare.erase(bare.find_last_not_of(' ') + 1);
  return bare.empty() ? name : bare;
}

}  // namespace

std::string chain_text(const Stack& stack) {
  std::string text;
  for (const FramePointer& frame : stack.frames) text.append(text.empty() ? "" : " ← ").append(short_name(*frame));
  return text;
}

std::string fragmentation_text(const Fragmentation& fragmentation) {
  return fmt::format("{} free in the pool, at most {} in one piece; fragmentation {:.2f} (0: one piece)",
                     bytes_text(fragmentation.free), bytes_text(fragmentation.largest_free),
                     1 - fragmentation.free_squares);
}

std::string map_text(const MapAtPeak& map) {
  std::uint64_t size = 0;
  std::uint64_t used = 0;
  std::uint64_t run = 0;
  for (const MapSegment& segment : map.segments) {
    size = add(size, segment.size);
    used = add(used, segment.used);
    run = std::max(run, segment.largest_free_run);
  }
  return fmt::format("{} {}, {}, {} used, largest free run {}; {} live, after {}", count_text(map.segments.size()),
                     map.segments.size() == 1 ? "segment" : "segments", bytes_text(size), share_text(used, size),
                     bytes_text(run), bytes_text(map.live), seconds_text(map.time_s));
}

std::string waits_text(const Report& report) {
  std::string text = fmt::format("{}, {} in all", count_text(report.waits), seconds_text(report.wait_seconds));
  if (report.free_wait_seconds && *report.free_wait_seconds > 0) {
    text +=
        fmt::format(", {} of it in cudaFree: what FREE=deferred could save", seconds_text(*report.free_wait_seconds));
  }
  return text;
}

std::string counter_text(const std::string& key) {
#define CUSHION_COUNTER(field, known, text) \
  if (key == known) return text;
  CUSHION_COUNTERS(CUSHION_COUNTER)
#undef CUSHION_COUNTER
  return plain(key);
}

std::string end_text(const Report& report) {
  const std::string how = report.end == "running" ? "still running" : "ended by " + plain(report.end);
  return how + " after " + seconds_text(report.duration_s);
}

std::string label_of(const Report& report) {
  if (report.rank) return fmt::format("rank {}", *report.rank);
  return plain(std::filesystem::path(report.file).filename().string());
}

}  // namespace cushion
