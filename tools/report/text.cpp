#include "tools/report/text.h"

#include <fmt/core.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "core/options.h"
#include "tools/report/leaks.h"
#include "tools/report/stacks.h"
#include "tools/report/table.h"
#include "tools/report/words.h"

namespace cushion {
namespace {

using Column = Table::Column;

constexpr std::size_t kFrames = 12;  // of a stack

class View {
 public:
  explicit View(const TextStyle& style) : style_(style) {}

  std::string take() { return std::move(out_); }

  void one(const Report& report) {
    heading(fmt::format("{} (pid {} on {}) {}", plain(report.name), report.pid, plain(report.host), end_text(report)));
    fact("command", plain(report.command));
    fact("options", changed_options(report));
    heading("Memory");
    Table memory({Column::left, Column::left, Column::right, Column::right});
    memory.row({"", "", "at exit", "peak"});
    for (const DeviceUse& device : report.devices) {
      std::string name = fmt::format("device {}", device.device);
      for (const FigureRow& row : kFigures) {
        const Figure& figure = device.*row.figure;
        memory.row({std::exchange(name, ""), row.text, bytes_text(figure.current), bytes_text(figure.peak)});
      }
    }
    print(memory);
    for (const DeviceUse& device : report.devices) {
      if (!device.backing.empty()) line(fmt::format("device {}  backing {}", device.device, plain(device.backing)));
      if (device.fragmentation)
        line(fmt::format("device {}  {}", device.device, fragmentation_text(*device.fragmentation)));
    }
    if (report.peak_map) line("map at peak  " + map_text(*report.peak_map));
    heading("Calls");
    fact("served",
         fmt::format("{} by Cushion, {} passed to the driver ({} served)", count_text(report.served),
                     count_text(report.forwarded), share_text(report.served, add(report.served, report.forwarded))));
    fact("waits", waits_text(report));
    fact("driver", fmt::format("{} calls of Cushion's own, {} in them", count_text(report.driver_calls),
                               seconds_text(report.driver_seconds)));
    if (report.single_order_ended_by) fact("order", "a single one, ended by: " + plain(*report.single_order_ended_by));
    Table calls({Column::right, Column::left});
    for (const FunctionCalls& function : report.functions) {
      if (const std::uint64_t all = add(function.served, function.forwarded); all != 0)
        calls.row({count_text(all), plain(function.function)});
    }
    for (const auto& [name, count] : report.counters) {
      if (count != 0) calls.row({count_text(count), counter_text(name)});
    }
    print(calls);
    histogram("Sizes asked for", report.size_histogram,
              [](double x) { return bytes_text(static_cast<std::uint64_t>(std::clamp(x, 0.0, 1e19))); });
    histogram("Lifetimes", report.lifetime_histogram, &seconds_text);
  }

  void tops(const std::vector<Report>& reports) {
    const std::vector<SeenStack> stacks = seen_stacks(reports);
    for (std::size_t list = 0; list < kTopLists; ++list) {
      if (list != kMostLive || !leaks_tell_stacks(reports)) top(top_list(list), stacks);
    }
  }

  void many(const std::vector<Report>& reports) {
    heading(fmt::format("{} reports", reports.size()));
    Table table({Column::right, Column::flexible, Column::left, Column::right, Column::right, Column::right,
                 Column::right, Column::right, Column::right, Column::right});
    table.row({"#", "report", "end", "time", "served", "to driver", "waits", "peak requested", "peak held", "live"});
    std::uint64_t served = 0, forwarded = 0, requested = 0, held = 0, live = 0;
    double time = 0, waited = 0;
    for (std::size_t i = 0; i < reports.size(); ++i) {
      const Report& r = reports[i];
      std::uint64_t bytes = 0;
      for (const LiveBlocks& blocks : r.live) bytes = add(bytes, blocks.bytes());
      table.row({std::to_string(i), label_of(r), plain(r.end), seconds_text(r.duration_s), count_text(r.served),
                 count_text(r.forwarded), seconds_text(r.wait_seconds), bytes_text(r.total(&DeviceUse::requested).peak),
                 bytes_text(r.total(&DeviceUse::held).peak), bytes_text(bytes)});
      served = add(served, r.served);
      forwarded = add(forwarded, r.forwarded);
      requested = add(requested, r.total(&DeviceUse::requested).peak);
      held = add(held, r.total(&DeviceUse::held).peak);
      live = add(live, bytes);
      time = std::max(time, r.duration_s);
      waited += r.wait_seconds;
    }
    table.row({"", "all (peaks added, longest time)", "", seconds_text(time), count_text(served), count_text(forwarded),
               seconds_text(waited), bytes_text(requested), bytes_text(held), bytes_text(live)});
    print(table);
  }

  // What the ranks use of one GPU together.
  void gpus(const std::vector<Report>& reports) {
    struct Use {
      std::vector<std::size_t> reports;
      DeviceUse sum;
    };
    std::map<std::string, Use> gpus;
    for (std::size_t i = 0; i < reports.size(); ++i) {
      for (const DeviceUse& device : reports[i].devices) {
        if (device.uuid.empty()) continue;
        Use& use = gpus[device.uuid];
        if (use.reports.empty() || use.reports.back() != i) use.reports.push_back(i);
        for (auto figure : {&DeviceUse::requested, &DeviceUse::held, &DeviceUse::forwarded}) {
          (use.sum.*figure).current = add((use.sum.*figure).current, (device.*figure).current);
          (use.sum.*figure).peak = add((use.sum.*figure).peak, (device.*figure).peak);
        }
      }
    }
    if (gpus.empty()) return;
    heading("By GPU (peaks added)");
    Table table({Column::left, Column::left, Column::right, Column::right, Column::right, Column::right});
    table.row({"GPU", "reports (#)", "peak requested", "peak held", "peak by the driver", "held now"});
    for (const auto& [uuid, use] : gpus) {
      table.row({plain(uuid), ranges_text(use.reports), bytes_text(use.sum.requested.peak),
                 bytes_text(use.sum.held.peak), bytes_text(use.sum.forwarded.peak), bytes_text(use.sum.held.current)});
    }
    print(table);
  }

  void leaks(const std::vector<Report>& reports) {
    const bool many = reports.size() > 1;
    const std::vector<Leak> leaks = leaks_of(reports);
    std::uint64_t count = 0;
    std::uint64_t bytes = 0;
    for (const Leak& leak : leaks) {
      count = add(count, leak.count);
      bytes = add(bytes, leak.bytes);
    }
    const bool complete = std::ranges::all_of(reports, &Report::live_complete);
    if (!complete) {
      warning("Never freed: known in part only, a process ended inside Cushion");
    } else if (leaks.empty()) {
      heading("Never freed: nothing");
    }
    if (leaks.empty()) return;
    warning(
        fmt::format("Never freed: {} {}, {}", count_text(count), count == 1 ? "block" : "blocks", bytes_text(bytes)));
    Table table(
        {Column::right, Column::right, Column::right, Column::flexible, Column::left, Column::left, Column::right});
    if (many) {
      table.row({"bytes", "blocks", "size", "call", "reports (#)", "", ""});
    } else {
      table.row({"bytes", "blocks", "size", "call", "device", "stream", "age"});
    }
    for (std::size_t i = 0; i < leaks.size() && i < style_.top; ++i) {
      const Leak& leak = leaks[i];
      const LiveBlocks& b = *leak.blocks;
      const std::string call = plain(b.api) + (b.served_by == "driver" ? " (driver)" : "");
      if (many) {
        table.row({bytes_text(leak.bytes), count_text(leak.count), sizes_text(leak), call, ranges_text(leak.reports),
                   "", ""});
      } else {
        table.row({bytes_text(leak.bytes), count_text(leak.count), sizes_text(leak), call,
                   leak.one_device ? std::to_string(b.device) : "several",
                   leak.one_stream ? plain(b.stream.value_or("-")) : "several",
                   leak.oldest_age_s ? seconds_text(*leak.oldest_age_s) : "-"});
      }
      stack(table, leak.stack);
    }
    print(table);
    more(leaks.size());
  }

  void difference(const Report& a, const Report& b) {
    heading(fmt::format("{} → {}", plain(a.file), plain(b.file)));
    Table table({Column::left, Column::right, Column::right, Column::right});
    table.row({"", "before", "after", "change"});
    const auto bytes = [&](const char* what, std::uint64_t x, std::uint64_t y) {
      table.row({what, bytes_text(x), bytes_text(y), change_text(x, y, &bytes_text)});
    };
    const auto counts = [&](const char* what, std::uint64_t x, std::uint64_t y) {
      table.row({what, count_text(x), count_text(y), change_text(x, y, &count_text)});
    };
    const auto seconds = [&](const char* what, double x, double y) {
      const std::string change = x == y ? "=" : fmt::format("{}{}", y > x ? "+" : "", seconds_text(y - x));
      table.row({what, seconds_text(x), seconds_text(y), change});
    };
    bytes("peak requested", a.total(&DeviceUse::requested).peak, b.total(&DeviceUse::requested).peak);
    bytes("peak held", a.total(&DeviceUse::held).peak, b.total(&DeviceUse::held).peak);
    bytes("peak served by the driver", a.total(&DeviceUse::forwarded).peak, b.total(&DeviceUse::forwarded).peak);
    counts("calls served", a.served, b.served);
    counts("calls passed to the driver", a.forwarded, b.forwarded);
    counts("waits", a.waits, b.waits);
    seconds("time in waits", a.wait_seconds, b.wait_seconds);
    seconds("time", a.duration_s, b.duration_s);
    print(table);

    const std::vector<LeakChange> changes = changes_between(a, b);
    if (changes.empty()) return heading("Never freed: the same in both");
    warning("Never freed: what changed");
    Table leaks({Column::left, Column::right, Column::right, Column::right, Column::right, Column::left});
    leaks.row({"", "change", "before", "after", "size", "call"});
    for (std::size_t i = 0; i < changes.size() && i < style_.top; ++i) {
      const LeakChange& c = changes[i];
      const bool grew = c.after.bytes >= c.before.bytes;
      const char* const word = c.before.count == 0 ? "new" : c.after.count == 0 ? "gone" : grew ? "grew" : "shrank";
      leaks.row({word, change_text(c.before.bytes, c.after.bytes, &bytes_text), count_text(c.before.count),
                 count_text(c.after.count), sizes_text(c.either()), plain(c.either().blocks->api)});
      stack(leaks, c.either().stack);
    }
    print(leaks);
    more(changes.size());
  }

 private:
  void heading(const std::string& text) { styled("1", text); }
  void warning(const std::string& text) { styled("1;31", text); }
  void styled(const char* code, const std::string& text) {
    const std::string fitting = style_.width == 0 ? text : shortened(text, style_.width);
    if (!out_.empty()) out_ += '\n';
    out_ += style_.colour ? fmt::format("\033[{}m{}\033[0m\n", code, fitting) : fitting + '\n';
  }
  void fact(const char* name, const std::string& text) { line(fmt::format("{:<8} {}", name, text)); }
  void line(const std::string& text) {
    out_ += "  " + (style_.width == 0 ? text : shortened(text, style_.width - 2)) + '\n';
  }
  void print(const Table& table) { out_ += table.text(style_.width, "  "); }
  void more(std::size_t all) {
    if (all > style_.top) out_ += fmt::format("  and {} more (--top {} shows all)\n", all - style_.top, all);
  }

  static void stack(Table& table, const Stack* stack) {
    if (stack == nullptr) return;
    const std::vector<FramePointer>& frames = stack->frames;
    for (std::size_t i = 0; i < frames.size(); ++i) {
      if (i == kFrames && frames.size() > kFrames + 1) return table.note(fmt::format("… {} more", frames.size() - i));
      const std::string place = frame_place(*frames[i]);
      table.note(frame_name(*frames[i]) + (place.empty() ? "" : "  " + place));
    }
  }

  static std::string changed_options(const Report& report) {
    std::string text;
    for (const auto& [name, value] : report.options) {
      const auto known = std::ranges::find(option_table(), name, &OptionInfo::name);
      if (known != option_table().end() && value == known->fallback) continue;
      text += fmt::format("{}{}={}", text.empty() ? "" : " ", plain(name), plain(value));
    }
    return text.empty() ? "all at their defaults" : text;
  }

  template <class Text>
  void histogram(const char* title, const std::vector<Bucket>& buckets, Text text) {
    if (buckets.empty()) return;
    heading(title);
    std::uint64_t most = 1;
    for (const Bucket& bucket : buckets) most = std::max(most, bucket.count);
    Table table({Column::right, Column::right, Column::left});
    for (const Bucket& bucket : buckets) {
      std::string bar;
      const double share = static_cast<double>(bucket.count) / static_cast<double>(most);
      for (long i = std::lround(share * 30); i > 0; --i) bar += "█";
      table.row({bucket_text(bucket, text), count_text(bucket.count), bar});
    }
    print(table);
  }

  void top(const TopList& list, const std::vector<SeenStack>& stacks) {
    const std::vector<SeenStack> most = most_of(stacks, list);
    if (most.empty()) return;
    heading(list.title + estimates_text(most));
    Table table({Column::right, Column::right, Column::left});
    table.row({list.headings[0], list.headings[1], ""});
    for (std::size_t i = 0; i < most.size() && i < style_.top; ++i) {
      const auto cells = list.cells(most[i].use);
      table.row({cells[0].text, cells[1].text, ""});
      stack(table, most[i].stack);
    }
    print(table);
    more(most.size());
  }

  const TextStyle style_;
  std::string out_;
};

}  // namespace

TextStyle style_of_stdout() {
  TextStyle style;
  if (isatty(STDOUT_FILENO) == 0) return style;
  const char* const no_colour = getenv("NO_COLOR");
  const char* const terminal = getenv("TERM");
  style.colour =
      (no_colour == nullptr || *no_colour == '\0') && terminal != nullptr && std::strcmp(terminal, "dumb") != 0;
  winsize size{};
  style.width = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
  if (const char* const columns = getenv("COLUMNS"); style.width == 0 && columns != nullptr)
    std::from_chars(columns, columns + std::strlen(columns), style.width);
  if (style.width != 0) style.width = std::max<std::size_t>(style.width, 40);
  return style;
}

std::string text_view(const std::vector<Report>& reports, const TextStyle& style) {
  View view(style);
  if (reports.size() == 1) {
    view.one(reports.front());
  } else {
    view.many(reports);
    view.gpus(reports);
  }
  view.tops(reports);
  view.leaks(reports);
  return view.take();
}

std::string text_difference(const Report& before, const Report& after, const TextStyle& style) {
  View view(style);
  view.difference(before, after);
  return view.take();
}

}  // namespace cushion
