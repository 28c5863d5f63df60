// Figures and texts of a report as people read them: bytes, seconds, counts, frames.
//
// Invariant: nothing that a file says reaches the reader's terminal as a control character.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "tools/report/report_file.h"

namespace cushion {

// A device's figures and how they are called.
struct FigureRow {
  const char* text;
  Figure DeviceUse::*figure;
};
inline constexpr std::array<FigureRow, 4> kFigures{{{"requested by the program", &DeviceUse::requested},
                                                    {"handed out for it", &DeviceUse::handed_out},
                                                    {"held from the driver", &DeviceUse::held},
                                                    {"served by the driver", &DeviceUse::forwarded}}};

std::string bytes_text(std::uint64_t bytes);                                                             // "1.50 MiB"
std::string change_text(std::uint64_t before, std::uint64_t after, std::string (*text)(std::uint64_t));  // "+1.50 MiB"
std::string count_text(std::uint64_t count);                                                             // "12 345 678"
std::string seconds_text(double seconds);                                                                // "12.3 ms"
std::string share_text(std::uint64_t part, std::uint64_t whole);                                         // "98.3 %"
std::string bucket_text(const Bucket& bucket, std::string (*text)(double));  // "512 B to 1.00 KiB"

std::string plain(std::string_view text);                         // control characters escaped
std::size_t width_of(std::string_view text);                      // code points
std::string shortened(std::string_view text, std::size_t width);  // "/home/…/train.py": the middle left out

std::string frame_name(const Frame& frame);   // "function", else "module+0x12" or an address
std::string frame_place(const Frame& frame);  // "file:line", else the module; empty if frame_name says it all

// A stack in one line, without namespaces and parameters: "alloc_block ← empty_cuda ← forward".
std::string chain_text(const Stack& stack);

// "209 MiB free in the pool, ..."; "12 segments, 8.00 GiB, 71.0 % used, ..."; "12, 3.40 s in all, ..."
std::string fragmentation_text(const Fragmentation& fragmentation);
std::string map_text(const MapAtPeak& map);
std::string waits_text(const Report& report);

// What a counter of `calls` counts; of one that this version does not know, its key.
std::string counter_text(const std::string& key);

// "ended by exit after 1.30 ms"; of a report on demand "still running after ..."
std::string end_text(const Report& report);

// How a report is called beside others: "rank 3", or its file's name.
std::string label_of(const Report& report);

}  // namespace cushion
