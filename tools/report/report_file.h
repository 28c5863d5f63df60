// A report file, read: what the preload wrote at exit, as values. tools/report.schema.json says what each means.
//
// Invariant: a Report holds only what its file says, and is whole: every stack, frame and module that is named exists.
// Sections that a file lacks are empty; fields that this reader does not know are passed over. What is wrong with a
// file is said once, with its name and the place: line and column where it is no JSON, else the path of the value
// (/live/3/size). Cost: memory for the values, not for the file's text as JSON; live groups are taken while the text is
// read.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace cushion {

inline constexpr std::uint64_t kReportVersion = 1;

struct Module {  // a program or library
  std::string path;
  std::string build_id;  // in hex; may be empty
};

struct Frame {  // what is unknown is empty or 0
  std::string function;
  std::string file;
  std::uint64_t line = 0;
  std::shared_ptr<const Module> module;  // none: a Python frame, or code in no module
  std::uint64_t offset = 0;              // within the module's file; of code in none, its address
  bool inlined = false;                  // into the next frame of the stack
};
// Each frame is kept once, however many stacks it is in.
using FramePointer = std::shared_ptr<const Frame>;

// What was allocated, or waited for, from somewhere: all ever, what is live, what was at the peak.
struct StackUse {
  std::uint64_t interval = 0;  // of sampling, in bytes: the figures are estimates; 0: they are exact
  std::uint64_t allocations = 0;
  std::uint64_t bytes = 0;
  std::uint64_t live = 0;
  std::uint64_t live_bytes = 0;
  std::uint64_t peak = 0;
  std::uint64_t peak_bytes = 0;
  std::uint64_t temporary = 0;
  std::uint64_t waits = 0;
  double wait_seconds = 0;
};

struct Stack {
  std::vector<FramePointer> frames;  // innermost first
  StackUse use;
};

struct Fragmentation {  // of the free blocks in a pool
  std::uint64_t largest_free = 0;
  std::uint64_t free = 0;
  double free_squares = 0;  // the sum of their squares by the square of their sum: 1 is one block
};

struct Figure {
  std::uint64_t current = 0;
  std::uint64_t peak = 0;
};

struct DeviceUse {
  std::uint64_t device = 0;
  Figure requested;
  Figure handed_out;
  Figure held;
  Figure forwarded;
  std::string uuid;     // empty: not told
  std::string backing;  // where memory comes from, and why; empty: from the driver as it is
  std::optional<Fragmentation> fragmentation;
};

struct FunctionCalls {
  std::string function;
  std::uint64_t served = 0;
  std::uint64_t forwarded = 0;
};

struct LiveBlocks {  // blocks never freed that have all this in common
  std::uint64_t size = 0;
  std::uint64_t count = 0;
  std::string api;
  std::string served_by;
  std::uint64_t device = 0;
  std::optional<std::string> stream;   // none: host-ordered
  std::optional<double> oldest_age_s;  // none: allocated while tracking was off
  std::optional<std::size_t> stack;    // in Report::stacks

  std::uint64_t bytes() const noexcept;
};

struct TimePoint {
  double time_s = 0;
  std::uint64_t live = 0;
  std::uint64_t held = 0;
};

struct MapSegment {  // of memory held from the driver
  std::uint64_t device = 0;
  std::uint64_t address = 0;
  std::uint64_t size = 0;
  std::uint64_t used = 0;  // bytes in the program's hands
  std::uint64_t largest_free_run = 0;
  std::string cells;  // '0', nothing of it is used, to '9', all is
};

struct MapAtPeak {  // of the address space
  double time_s = 0;
  std::uint64_t live = 0;
  std::uint64_t cell = 0;      // bytes
  std::uint64_t left_out = 0;  // segments
  std::vector<MapSegment> segments;
};

struct Bucket {  // from <= x < below; bytes or seconds
  double from = 0;
  std::optional<double> below;
  std::uint64_t count = 0;
};

struct Report {
  std::string file;  // where it was read from
  std::string name;
  std::string command;
  std::string host;
  std::uint64_t pid = 0;
  std::optional<std::uint64_t> rank;
  double started_unix_s = 0;
  double duration_s = 0;
  std::string end;
  std::vector<std::pair<std::string, std::string>> options;
  std::vector<DeviceUse> devices;
  std::uint64_t served = 0;
  std::uint64_t forwarded = 0;
  std::vector<FunctionCalls> functions;
  std::vector<std::pair<std::string, std::uint64_t>> counters;
  std::uint64_t driver_version = 0;
  std::uint64_t driver_calls = 0;
  double driver_seconds = 0;
  std::uint64_t waits = 0;
  double wait_seconds = 0;
  std::optional<double> free_wait_seconds;  // of them in cudaFree
  std::optional<std::string> single_order_ended_by;
  bool live_complete = true;
  std::vector<LiveBlocks> live;
  std::vector<std::shared_ptr<const Module>> modules;
  std::vector<Stack> stacks;
  std::vector<TimePoint> timeline;
  std::optional<MapAtPeak> peak_map;
  std::vector<Bucket> size_histogram;
  std::vector<Bucket> lifetime_histogram;

  Figure total(Figure DeviceUse::*figure) const noexcept;  // over the devices
};

// Why a file is no report that can be read: "FILE:LINE:COLUMN: ..." or "FILE: /path: ...".
struct ReportError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

std::string read_text(const std::string& file);
Report parse_report(std::string_view text, const std::string& file);

// Figures of a file may be anything: what does not fit stays at the highest.
std::uint64_t add(std::uint64_t a, std::uint64_t b) noexcept;
std::uint64_t multiply(std::uint64_t a, std::uint64_t b) noexcept;

}  // namespace cushion
