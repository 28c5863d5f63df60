#include "tools/control.h"

#include <fmt/core.h>
#include <linux/futex.h>
#include <sys/file.h>
#include <sys/syscall.h>
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

void ring(const OpenPage& page) {
  page->word.fetch_or(ControlPage::kAttention, std::memory_order_release);
  page->doorbell.fetch_add(1, std::memory_order_release);
  syscall(SYS_futex, &page->doorbell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

std::uint64_t at(RequestState state) { return static_cast<std::uint64_t>(state); }

bool is_gone(const ProcessKey& key) { return key_of(key.pid) != key; }

// The file's lock, so that one asks after another; given back with it.
class Turn {
 public:
  Turn(int fd, Clock::time_point deadline) : fd_(fd) {
    while (!(has_ = flock(fd, LOCK_EX | LOCK_NB) == 0) && Clock::now() < deadline) std::this_thread::sleep_for(kPause);
  }
  ~Turn() {
    if (has_) flock(fd_, LOCK_UN);
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
  explicit operator bool() const { return has_; }

 private:
  int fd_;
  bool has_ = false;
};

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

Answer ask(const OpenPage& page, RequestKind kind, const std::string& text, std::chrono::milliseconds patience,
           void (*waiting)(const OpenPage&)) {
  const ProcessKey key = page->header.key;
  const auto deadline = Clock::now() + patience;
  if (text.size() >= sizeof page->text) return {false, fmt::format("longer than {} bytes", sizeof page->text - 1)};
  const Turn turn(page.fd(), deadline);
  if (!turn) return {false, fmt::format("another cushion ctl is asking process {}", key.pid)};
  std::atomic<std::uint64_t>& request = page->request;
  // An asker that died left its request, or the answer to it. One that is being answered just now is waited for.
  for (std::uint64_t left = request.load(std::memory_order_acquire); left != at(RequestState::idle);) {
    if (left != at(RequestState::taken)) {
      if (request.compare_exchange_strong(left, at(RequestState::idle), std::memory_order_acq_rel)) break;
      continue;
    }
    if (is_gone(key)) return {false, fmt::format("process {} has ended", key.pid)};
    if (Clock::now() >= deadline) return {false, fmt::format("process {} is busy with an earlier request", key.pid)};
    std::this_thread::sleep_for(kPause);
    left = request.load(std::memory_order_acquire);
  }
  page->kind = kind;
  page->text[text.copy(page->text, sizeof page->text - 1)] = '\0';
  request.store(at(RequestState::posted), std::memory_order_release);
  ring(page);

  const auto patient_until = Clock::now() + std::min<Clock::duration>(kAtOnce, patience);
  bool told = waiting == nullptr;
  while (request.load(std::memory_order_acquire) != at(RequestState::done)) {
    if (is_gone(key)) return {false, fmt::format("process {} has ended", key.pid)};
    if (!told && Clock::now() >= patient_until) {
      told = true;
      waiting(page);
    }
    std::uint64_t posted = at(RequestState::posted);
    // What is taken is under way: it is waited for.
    if (Clock::now() >= deadline + kMostWork)
      return {false, fmt::format("process {} has begun what was asked for, and has not ended it", key.pid)};
    if (Clock::now() >= deadline &&
        request.compare_exchange_strong(posted, at(RequestState::idle), std::memory_order_acq_rel)) {
      const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(patience).count();
      if (page->header.helper != 0)
        return {false, fmt::format("process {} did not answer in {} s, though CUSHION_CTL=on: nothing was done. Is it "
                                   "stopped?",
                                   key.pid, seconds)};
      return {false, fmt::format("process {} made no allocation call in {} s: nothing was done. Started with "
                                 "CUSHION_CTL=on it would answer at once",
                                 key.pid, seconds)};
    }
    std::this_thread::sleep_for(kPause);
  }
  Answer answer{page->failed == 0, std::string(Printable<400>(bounded(page->answer)).view())};
  request.store(at(RequestState::idle), std::memory_order_release);
  return answer;
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
  const Answer answer = ask(search.pages.front(), kind, text, kPatience, say_waiting);
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
