#include "tools/top.h"

#include <fmt/core.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <map>
#include <thread>
#include <vector>

#include "core/ticks.h"
#include "tools/control.h"
#include "tools/figures.h"

namespace cushion {
namespace {

using namespace std::chrono_literals;

struct Row {  // a process's device
  Figures process;
  DeviceFigures device;
  double rate = -1;  // allocation calls a second; negative: not known yet
};

using Less = bool (*)(const Row&, const Row&);
struct SortKey {
  const char* name;
  Less before;
};
constexpr SortKey kSortKeys[] = {
    {"live", [](const Row& a, const Row& b) { return a.device.live > b.device.live; }},
    {"held", [](const Row& a, const Row& b) { return a.device.held > b.device.held; }},
    {"peak", [](const Row& a, const Row& b) { return a.device.peak > b.device.peak; }},
    {"calls", [](const Row& a, const Row& b) { return a.rate > b.rate; }},
    {"waits", [](const Row& a, const Row& b) { return a.process.waits > b.process.waits; }},
    {"name", [](const Row& a, const Row& b) { return a.process.program < b.process.program; }},
    {"id", [](const Row& a, const Row& b) { return a.process.key.pid < b.process.key.pid; }},
};
const SortKey* find_key(std::string_view name) {
  const auto found = std::ranges::find_if(kSortKeys, [&](const SortKey& key) { return key.name == name; });
  return found != std::end(kSortKeys) ? found : nullptr;
}

struct Counted {
  std::uint64_t calls = 0;
  std::uint64_t at_ns = 0;
};

// One look at all processes, and what the last one said, for rates.
class View {
 public:
  void look() {
    PageSearch search = list_pages();
    problems_ = std::move(search.problems);
    const std::uint64_t asked = monotonic_ns();
    for (const OpenPage& page : search.pages) ask_figures(page);
    const auto missing = [&](const OpenPage& page) { return !has_figures_since(page, asked); };
    const std::uint64_t deadline = asked + 100'000'000;
    while (std::ranges::any_of(search.pages, missing) && monotonic_ns() < deadline) std::this_thread::sleep_for(1ms);
    rows_.clear();
    processes_.clear();
    std::map<std::pair<std::int64_t, std::uint64_t>, Counted> counted;
    for (const OpenPage& page : search.pages) {
      const Figures figures = read_figures(page);
      const std::pair key(figures.key.pid, figures.key.start);
      counted[key] = {figures.calls, asked};
      const auto last = last_.find(key);
      // A program that made no call in between was not counted anew, and its rate is 0.
      const double rate = last == last_.end() || figures.calls < last->second.calls
                              ? -1
                              : static_cast<double>(figures.calls - last->second.calls) /
                                    (static_cast<double>(asked - last->second.at_ns) * 1e-9);
      processes_.emplace_back(figures, rate);
      for (const DeviceFigures& device : figures.devices) rows_.push_back({figures, device, rate});
    }
    last_ = std::move(counted);
  }
  std::vector<Row> sorted(const SortKey& key) const {
    std::vector<Row> rows = rows_;
    std::ranges::stable_sort(rows, key.before);
    return rows;
  }
  const std::vector<std::pair<Figures, double>>& processes() const { return processes_; }
  const std::vector<std::string>& problems() const { return problems_; }

 private:
  std::vector<Row> rows_;
  std::vector<std::pair<Figures, double>> processes_;
  std::vector<std::string> problems_;
  std::map<std::pair<std::int64_t, std::uint64_t>, Counted> last_;
};

void print(const View& view, const SortKey& key, std::size_t most) {
  fmt::print("{:>8}  {:<20} {:>3}  {:>10}  {:>10}  {:>10}  {:>9}  {:>7}  {:>8}  {}\n", "PID", "PROGRAM", "DEV", "LIVE",
             "HELD", "PEAK", "CALLS/S", "HITS", "WAITS", "TRACK");
  const std::vector<Row> rows = view.sorted(key);
  for (const Row& row : rows) {
    if (most-- == 0) break;
    const std::string rate = row.rate >= 0 ? fmt::format("{:.0f}", row.rate) : std::string("-");
    fmt::print("{:>8}  {:<20.20} {:>3}  {:>10}  {:>10}  {:>10}  {:>9}  {:>7}  {:>8}  {}\n", row.process.key.pid,
               row.process.program, row.device.device, shown_bytes(row.device.live), shown_bytes(row.device.held),
               shown_bytes(row.device.peak), rate, shown_hits(row.process), row.process.waits, row.process.track);
  }
  if (rows.empty()) fmt::print("no process of yours allocates device memory under Cushion\n");
  for (const std::string& problem : view.problems()) fmt::print(stderr, "cushion: {}\n", problem);
}

// The terminal, its keys read one by one while this lives; as it was afterwards, whatever ends the program.
class Keys {
 public:
  Keys() {
    if (isatty(STDIN_FILENO) == 0 || tcgetattr(STDIN_FILENO, &before_) != 0) return;
    for (const int number : {SIGINT, SIGTERM, SIGHUP}) std::signal(number, [](int) { stopped_ = 1; });
    termios raw = before_;
    raw.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);
    reads_ = tcsetattr(STDIN_FILENO, TCSANOW, &raw) == 0;
  }
  ~Keys() {
    if (reads_) tcsetattr(STDIN_FILENO, TCSANOW, &before_);
  }
  Keys(const Keys&) = delete;
  Keys& operator=(const Keys&) = delete;

  // The next key within the time; 0: none, 'q': the end.
  char wait(double seconds) const {
    pollfd in{reads_ ? STDIN_FILENO : -1, POLLIN, 0};
    char key = 0;
    const int ready = poll(&in, 1, static_cast<int>(seconds * 1e3));
    if (stopped_ != 0) return 'q';
    if (ready > 0 && ::read(STDIN_FILENO, &key, 1) <= 0) return 'q';
    return key;
  }

 private:
  static inline volatile std::sig_atomic_t stopped_ = 0;
  termios before_{};
  bool reads_ = false;
};

std::size_t lines_of_screen() {
  winsize size{};
  return ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_row > 5 ? size.ws_row - 4U : 40U;
}

}  // namespace

std::string sort_keys() {
  std::string names;
  for (const SortKey& key : kSortKeys) names.append(names.empty() ? "" : ", ").append(key.name);
  return names;
}

bool is_sort_key(const std::string& key) { return find_key(key) != nullptr; }

int top(const TopSettings& settings) {
  View view;
  const SortKey* key = find_key(settings.sort);
  if (settings.once || settings.json) {
    view.look();
    std::this_thread::sleep_for(std::chrono::duration<double>(std::min(settings.interval_s, 0.5)));
    view.look();  // a rate needs two looks
    if (settings.json) {
      for (const auto& [figures, rate] : view.processes()) fmt::print("{}\n", to_json(figures, rate));
      for (const std::string& problem : view.problems()) fmt::print(stderr, "cushion: {}\n", problem);
    } else {
      print(view, *key, ~std::size_t{0});
    }
    return 0;
  }
  const Keys keys;
  const bool screen = isatty(STDOUT_FILENO) != 0;
  for (;;) {
    view.look();
    if (screen) fmt::print("\x1b[H\x1b[2Jsorted by {}; keys: first letters of {}; q ends\n", key->name, sort_keys());
    print(view, *key, lines_of_screen());
    if (std::fflush(stdout) != 0) return 1;  // nobody reads any more
    const char pressed = keys.wait(settings.interval_s);
    if (pressed == 'q') return 0;
    for (const SortKey& other : kSortKeys) {
      if (pressed == other.name[0]) key = &other;
    }
  }
}

}  // namespace cushion
