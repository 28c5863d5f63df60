#include "tools/control.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <filesystem>
#include <map>
#include <thread>

#include "core/options.h"
#include "core/ticks.h"
#include "core/utf8.h"
#include "tools/figures.h"

namespace cushion {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr auto kPatience = 5s;
constexpr auto kMostWork = 60s;
constexpr auto kAtOnce = 200ms;
constexpr auto kPause = 1ms;

template <std::size_t N>
std::string bounded(const char (&text)[N]) {
  return {text, strnlen(text, N)};
}

}  // namespace

Figures read_figures(const OpenPage& page) {
  Figures figures;
  figures.key = page->header.key;
  figures.program = Printable<60>(bounded(page->header.program)).view();
  const Tracking tracking = page->tracking();
  figures.track = tracking.level == TrackLevel::sampled ? fmt::format("sampled:{}", shown_bytes(tracking.interval))
                                                        : std::string(name_of(tracking.level));
  figures.helper = page->header.helper != 0;
  std::map<int, DeviceFigures> devices;
  const auto of = [&](int device) -> DeviceFigures& {
    DeviceFigures& found = devices[device];
    found.device = device;
    return found;
  };
  // The gauges run behind one another: a free may be in before its allocation.
  const auto bytes = [](std::uint64_t value) { return static_cast<std::int64_t>(value) < 0 ? 0 : value; };
  const std::size_t contexts =
      std::min<std::size_t>(page->contexts.load(std::memory_order_acquire), page->slots.size());
  for (std::size_t i = 0; i < contexts; ++i) {
    const ControlPage::Slot& slot = page->slots[i];
    DeviceFigures& device = of(slot.device.load(std::memory_order_relaxed));
    device.live += bytes(slot.gauges.requested.current());
    device.peak += bytes(slot.gauges.requested.peak());
    device.held += bytes(slot.gauges.held.current());
  }
  for (int d = 0; d < kDevices; ++d) {
    const ControlPage::DeviceGauges& gauges = page->devices[static_cast<std::size_t>(d)];
    if (gauges.forwarded.peak() == 0 && gauges.from_driver_pool.peak() == 0) continue;
    DeviceFigures& device = of(d);
    device.live += bytes(gauges.forwarded.current()) + bytes(gauges.from_driver_pool.current());
    device.peak += bytes(gauges.forwarded.peak()) + bytes(gauges.from_driver_pool.peak());
  }
  for (const auto& [number, device] : devices) figures.devices.push_back(device);
  const std::uint64_t counted_at = page->counted.at_ns.load(std::memory_order_acquire);
  const std::uint64_t now = monotonic_ns();
  figures.calls = page->counted.calls.load(std::memory_order_relaxed);
  figures.frees = page->counted.frees.load(std::memory_order_relaxed);
  figures.hits = page->counted.hits.load(std::memory_order_relaxed);
  figures.waits = page->counted.waits.load(std::memory_order_relaxed);
  if (counted_at != 0) figures.age_s = counted_at < now ? static_cast<double>(now - counted_at) * 1e-9 : 0;
  return figures;
}

void ask_figures(const OpenPage& page) { ring(page); }

bool has_figures_since(const OpenPage& page, std::uint64_t monotonic) {
  return page->counted.at_ns.load(std::memory_order_acquire) >= monotonic;
}

// ---- the commands ------------------------------------------------------------------------------------------------

namespace {

void say_waiting(const OpenPage& page) {
  if (page->header.helper != 0) return;
  fmt::print(stderr, "cushion: waiting for the next allocation call of process {}\n", page->header.key.pid);
}

int fail(const std::string& problem) {
  fmt::print(stderr, "cushion: {}\n", problem);
  return 1;
}

// `about` begins the line of what the process could not do; `said` gets what it says of what it did.
int request(std::int64_t pid, RequestKind kind, const std::string& text, const std::string& about = {},
            std::string* said = nullptr) {
  const PageSearch search = find_page(pid);
  if (search.pages.empty()) return fail(search.problems.front());
  const Answer answer = ask(search.pages.front(), kind, text, kPatience, kMostWork, say_waiting);
  if (answer.done && said != nullptr) *said = answer.said;
  return answer.done ? 0 : fail(about + answer.said);
}

}  // namespace

int ctl_track(std::int64_t pid, const std::string& level) {
  if (!parse_tracking(level)) {
    fmt::print(stderr, "cushion: {} is no level of tracking: use {}\n", Printable<64>(level).view(), tracking_values());
    return 2;
  }
  return request(pid, RequestKind::track, level);
}

int ctl_trim(std::int64_t pid) {
  std::string said;
  const int status = request(pid, RequestKind::trim, "", {}, &said);
  if (status == 0) fmt::print("{}\n", said);
  return status;
}

int ctl_mark(std::int64_t pid, const std::string& name) { return request(pid, RequestKind::mark, name); }

int ctl_report(std::int64_t pid, const std::string& path) {
  // The process may be in another folder: it gets an absolute path.
  const std::string absolute =
      std::filesystem::absolute(path.empty() ? fmt::format("cushion-report-{}.json", pid) : path).string();
  const int status = request(pid, RequestKind::report, absolute, fmt::format("{}: ", Printable<200>(absolute).view()));
  if (status == 0) fmt::print("{}\n", absolute);
  return status;
}

int ctl_show(std::int64_t pid, bool json) {
  const PageSearch search = find_page(pid);
  if (search.pages.empty()) return fail(search.problems.front());
  const OpenPage& page = search.pages.front();
  const std::uint64_t asked = monotonic_ns();
  const auto deadline = Clock::now() + kAtOnce;
  ask_figures(page);
  while (!has_figures_since(page, asked) && Clock::now() < deadline) std::this_thread::sleep_for(kPause);
  const Figures figures = read_figures(page);
  if (json) {
    fmt::print("{}\n", to_json(figures, -1));
    return 0;
  }
  fmt::print("{}  pid {}, tracking {}, requests answered {}\n", figures.program, figures.key.pid, figures.track,
             figures.helper ? "at once" : "by the next allocation call");
  for (const DeviceFigures& d : figures.devices)
    fmt::print("  device {}  live {}  held {}  peak {}\n", d.device, shown_bytes(d.live), shown_bytes(d.held),
               shown_bytes(d.peak));
  if (figures.age_s >= 0)
    fmt::print("  {} allocations ({} from magazines), {} frees, {} waits, counted {:.1f} s ago\n", figures.calls,
               shown_hits(figures), figures.frees, figures.waits, figures.age_s);
  return 0;
}

}  // namespace cushion
