// Control: `cushion ctl`, one request to one process, and the figures that a process shows.
//
// A request is answered by the process's next allocation call, or at once by its helper thread (CUSHION_CTL=on). One
// that is given up is taken back: it does not take effect later.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "core/asking.h"

namespace cushion {

struct DeviceFigures {
  int device = 0;
  std::uint64_t live = 0;  // bytes that the program asked for and did not free, wherever they were served
  std::uint64_t held = 0;  // bytes of Cushion's own pools
  std::uint64_t peak = 0;  // of live; of several contexts on a device, the sum of their peaks
};

// What a process's page shows at a moment.
struct Figures {
  ProcessKey key;
  std::string program;  // fit for a terminal
  std::string track;
  bool helper = false;
  std::vector<DeviceFigures> devices;
  std::uint64_t calls = 0;  // allocations
  std::uint64_t frees = 0;
  std::uint64_t hits = 0;  // of the allocations, those that a magazine served
  std::uint64_t waits = 0;
  double age_s = -1;  // of the counts; negative: never counted
};
Figures read_figures(const OpenPage& page);

// Asks the process to bring its figures up to date; whether it has by the deadline.
void ask_figures(const OpenPage& page);
bool has_figures_since(const OpenPage& page, std::uint64_t monotonic);

// The commands; each answers the exit status.
int ctl_track(std::int64_t pid, const std::string& level);
int ctl_trim(std::int64_t pid);
int ctl_mark(std::int64_t pid, const std::string& name);
int ctl_report(std::int64_t pid, const std::string& path);  // empty: cushion-report-PID.json here
int ctl_show(std::int64_t pid, bool json);

}  // namespace cushion
