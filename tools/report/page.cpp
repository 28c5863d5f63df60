#include "tools/report/page.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <iterator>

#include "page_parts.h"
#include "tools/report/flame.h"
#include "tools/report/leaks.h"
#include "tools/report/samples.h"
#include "tools/report/stacks.h"
#include "tools/report/words.h"

namespace cushion {
namespace {

constexpr std::size_t kMostPoints = 1000;  // of a time line
constexpr double kThinnest = 0.0005;       // of a flame graph's width: what is less cannot be seen

std::string html(std::string_view text) {
  std::string out;
  for (const char c : plain(text)) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

// A time line has at most kMostPoints places; of the points that share one, each figure's highest is kept.
std::vector<TimePoint> thinned(const std::vector<TimePoint>& points) {
  if (points.size() <= kMostPoints) return points;
  std::vector<TimePoint> kept;
  for (std::size_t i = 0; i < kMostPoints; ++i) {
    TimePoint one = points[i * points.size() / kMostPoints];
    for (std::size_t j = i * points.size() / kMostPoints; j < (i + 1) * points.size() / kMostPoints; ++j) {
      one.live = std::max(one.live, points[j].live);
      one.held = std::max(one.held, points[j].held);
    }
    kept.push_back(one);
  }
  return kept;
}

class Page {
 public:
  Page(const std::vector<Report>& reports, std::size_t rows)
      : reports_(reports), rows_(rows), stacks_(seen_stacks(reports)) {}

  std::string take() && {
    const Report& first = reports_.front();
    const std::string title =
        reports_.size() == 1 ? html(first.name) : fmt::format("{} ({} reports)", html(first.name), reports_.size());
    put("<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
        "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">"
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'\"><title>{}: GPU memory</title>\n<style>{}</style></head>\n<body><main>\n",
        title, kPageStyle);
    put("<h1>{}</h1>\n", title);
    if (reports_.size() == 1) {
      put("<p class=\"quiet\">pid {} on {}, {}</p>\n<p class=\"quiet\"><code>{}</code></p>\n", first.pid,
          html(first.host), html(end_text(first)), html(first.command));
    }
    cards();
    ranks();
    timelines();
    map();
    const Samples live = live_samples(reports_);
    if (live.any_stack) flame("Never freed, by call stack", live);
    flame("At the peak, by call stack", peak_samples(reports_));
    leaks();
    tops();
    devices();
    histograms();
    calls();
    options();
    put("</main>\n<script>{}</script>\n</body></html>\n", kPageScript);
    return std::move(out_);
  }

 private:
  template <class... Args>
  void put(fmt::format_string<const Args&...> format, const Args&... args) {
    fmt::format_to(std::back_inserter(out_), format, args...);
  }

  void cards() {
    std::uint64_t requested = 0, held = 0, served = 0, forwarded = 0, live = 0;
    double waited = 0;
    const char* const peak = reports_.size() == 1 ? "peak" : "peaks added:";
    for (const Report& r : reports_) {
      requested = add(requested, r.total(&DeviceUse::requested).peak);
      held = add(held, r.total(&DeviceUse::held).peak);
      served = add(served, r.served);
      forwarded = add(forwarded, r.forwarded);
      waited += r.wait_seconds;
      for (const LiveBlocks& blocks : r.live) live = add(live, blocks.bytes());
    }
    put("<div class=\"cards\"><div><b>{}</b>{} requested</div><div><b>{}</b>{} held</div>"
        "<div><b{}>{}</b>never freed</div><div><b>{}</b>of {} calls served</div><div><b>{}</b>waited</div></div>\n",
        bytes_text(requested), peak, bytes_text(held), peak, live == 0 ? "" : " class=\"bad\"", bytes_text(live),
        share_text(served, add(served, forwarded)), count_text(add(served, forwarded)), seconds_text(waited));
    if (!std::ranges::all_of(reports_, &Report::live_complete))
      put("<p class=\"bad\">A process ended inside Cushion: what is live is known in part only.</p>\n");
  }

  void open(std::string_view title) { put("<section><h2>{}</h2>\n", html(title)); }
  void close() { put("</section>\n"); }

  void ranks() {
    if (reports_.size() == 1) return;
    open("Reports");
    table({{"#", true},
           {"report"},
           {"host"},
           {"end"},
           {"time", true},
           {"served", true},
           {"to driver", true},
           {"waits", true},
           {"peak requested", true},
           {"peak held", true},
           {"never freed", true}});
    for (std::size_t i = 0; i < reports_.size(); ++i) {
      const Report& r = reports_[i];
      std::uint64_t live = 0;
      for (const LiveBlocks& blocks : r.live) live = add(live, blocks.bytes());
      put("<tbody><tr>");
      number(i, std::to_string(i));
      text(label_of(r));
      text(r.host);
      text(r.end);
      number(r.duration_s, seconds_text(r.duration_s));
      number(r.served, count_text(r.served));
      number(r.forwarded, count_text(r.forwarded));
      number(r.wait_seconds, seconds_text(r.wait_seconds));
      for (const std::uint64_t bytes : {r.total(&DeviceUse::requested).peak, r.total(&DeviceUse::held).peak, live})
        number(bytes, bytes_text(bytes));
      put("</tr></tbody>\n");
    }
    end_table();
    close();
  }

  void timelines() {
    if (std::ranges::all_of(reports_, [](const Report& r) { return r.timeline.empty(); })) return;
    open("Memory over time");
    for (const Report& report : reports_) {
      if (report.timeline.empty()) continue;
      if (reports_.size() > 1) put("<h3>{}</h3>\n", html(label_of(report)));
      timeline(thinned(report.timeline));
    }
    close();
  }

  void timeline(const std::vector<TimePoint>& points) {
    std::uint64_t most = 1;
    for (const TimePoint& p : points) most = std::max({most, p.live, p.held});
    const double from = points.front().time_s;
    const double span = std::max(points.back().time_s - from, 1e-9);
    const auto path = [&](std::uint64_t TimePoint::*figure) {
      std::string d;
      for (const TimePoint& p : points) {
        fmt::format_to(std::back_inserter(d), "{}{:.2f} {:.2f}", d.empty() ? "M" : "L", (p.time_s - from) / span * 1000,
                       300 - 290 * static_cast<double>(p.*figure) / static_cast<double>(most));
      }
      return d;
    };
    std::string data;
    for (const TimePoint& p : points)
      fmt::format_to(std::back_inserter(data), "{}[{:.6f},{},{}]", data.empty() ? "" : ",", p.time_s, p.live, p.held);
    put("<p class=\"quiet\"><span class=\"key\">live</span> &nbsp; <span class=\"key held\">held from the "
        "driver</span> "
        "&nbsp; <span class=\"readout\"></span></p><div class=\"chart\"><div "
        "class=\"y\"><span>{}</span><span>{}</span><span>0</span></div>"
        "<svg viewBox=\"0 0 1000 300\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"Live and held memory "
        "over "
        "time, at most {}\" data-points=\"[{}]\">"
        "<path class=\"live\" d=\"{}L1000 300L0 300Z\"/><path class=\"held\" d=\"{}\"/>"
        "<line class=\"at\" y1=\"0\" y2=\"300\"/></svg>"
        "<div class=\"x\"><span>{}</span><span>{}</span></div></div>\n",
        bytes_text(most), bytes_text(most / 2), bytes_text(most), data, path(&TimePoint::live), path(&TimePoint::held),
        seconds_text(from), seconds_text(points.back().time_s));
  }

  // Of one report only. Rows of kRow cells, the same width for the same bytes in all segments.
  void map() {
    const Report& report = reports_.front();
    if (reports_.size() > 1 || !report.peak_map) return;
    const MapAtPeak& map = *report.peak_map;
    open("Map of the address space at peak");
    put("<p>{}; the peak was {}.{}</p>\n<p class=\"quiet\">A cell is {}. Used by the program: none <span "
        "class=\"scale\">",
        map_text(map), bytes_text(report.total(&DeviceUse::requested).peak),
        map.left_out == 0 ? std::string() : fmt::format(" {} smaller segments are left out.", count_text(map.left_out)),
        bytes_text(map.cell));
    for (std::size_t digit = 0; digit <= 9; ++digit) put("<i {}></i>", shade(digit));
    put("</span> all</p><div class=\"map\">\n");
    for (const MapSegment& segment : map.segments) strip(segment);
    put("</div>\n");
    close();
  }

  static std::string shade(std::size_t digit) {
    if (digit == 0) return "class=\"free\"";
    return fmt::format("style=\"opacity:{:.2f}\"", 0.2 + 0.8 * static_cast<double>(digit) / 9);
  }

  void strip(const MapSegment& segment) {
    constexpr std::size_t kRow = 256;
    const std::string what = fmt::format("device {}, {:#x}: {}, {} used", segment.device, segment.address,
                                         bytes_text(segment.size), share_text(segment.used, segment.size));
    const std::size_t rows = (segment.cells.size() + kRow - 1) / kRow;
    std::array<std::string, 10> runs;  // of cells of one digit, as the paths that draw them
    for (std::size_t from = 0, to = 0; from < segment.cells.size(); from = to) {
      const char digit = segment.cells[from];
      const std::size_t row = from / kRow;
      while (to < segment.cells.size() && to / kRow == row && segment.cells[to] == digit) ++to;
      fmt::format_to(std::back_inserter(runs[static_cast<std::size_t>(digit - '0')]), "M{} {}h{}v.85h-{}z", from % kRow,
                     row, to - from, to - from);
    }
    put("<p class=\"quiet\">{}</p><svg viewBox=\"0 0 {} {}\" preserveAspectRatio=\"none\" style=\"height:{}px\" "
        "role=\"img\" aria-label=\"{}\"><title>{}, largest free run {}</title>",
        what, kRow, rows, rows * 14, what, what, bytes_text(segment.largest_free_run));
    for (std::size_t digit = 0; digit < runs.size(); ++digit) {
      if (!runs[digit].empty()) put("<path {} d=\"{}\"/>", shade(digit), runs[digit]);
    }
    put("</svg>\n");
  }

  void flame(const std::string& title, const Samples& samples) {
    if (!samples.any_stack) return;
    open(title + estimates_text(stacks_));
    const FlameFrame root = flame_of(samples.all);
    put("<p class=\"quiet readout\">Widths are bytes. Click a frame to see it alone, the top one to see all.</p>\n"
        "<div class=\"flame\">");
    frame(root, root.bytes, root.bytes);
    put("</div>\n");
    close();
  }

  void frame(const FlameFrame& one, std::uint64_t callers, std::uint64_t all) {
    const double width = static_cast<double>(one.bytes) / static_cast<double>(callers);
    unsigned hue = 0;
    for (const char c : one.name) hue = hue * 31 + static_cast<unsigned char>(c);
    put("<div class=\"n\" style=\"width:{:.3f}%;--h:{}\" title=\"{}{}{}: {} in {} ({})\"><button>{}</button>",
        width * 100, 10 + hue % 45, html(one.name), one.place.empty() ? "" : " at ", html(one.place),
        bytes_text(one.bytes), one.count == 1 ? std::string("1 block") : count_text(one.count) + " blocks",
        share_text(one.bytes, all), html(one.name));
    if (!one.callees.empty()) put("<div class=\"c\">");
    for (const FlameFrame& callee : one.callees) {
      if (static_cast<double>(callee.bytes) >= kThinnest * static_cast<double>(all)) frame(callee, one.bytes, all);
    }
    put("{}</div>", one.callees.empty() ? "" : "</div>");
  }

  void leaks() {
    const std::vector<Leak> leaks = leaks_of(reports_);
    const bool many = reports_.size() > 1;
    open(leaks.empty() ? "Never freed: nothing" : "Never freed");
    if (!leaks.empty()) {
      std::vector<Heading> headings{{"bytes", true}, {"blocks", true}, {"size", true}, {"call"}};
      if (many) {
        headings.push_back({"reports (#)"});
      } else {
        headings.insert(headings.end(), {{"device", true}, {"stream"}, {"age", true}});
      }
      table(headings, "bytes");
      for (std::size_t i = 0; i < leaks.size() && i < rows_; ++i) {
        const LiveBlocks& b = *leaks[i].blocks;
        put("<tbody><tr>");
        number(leaks[i].bytes, bytes_text(leaks[i].bytes));
        number(leaks[i].count, count_text(leaks[i].count));
        number(leaks[i].largest, sizes_text(leaks[i]));
        text(b.api + (b.served_by == "driver" ? " (driver)" : ""));
        if (many) {
          text(ranges_text(leaks[i].reports));
        } else {
          number(b.device, leaks[i].one_device ? std::to_string(b.device) : "several");
          text(leaks[i].one_stream ? b.stream.value_or("-") : "several");
          const std::optional<double> age = leaks[i].oldest_age_s;
          number(age.value_or(-1), age ? seconds_text(*age) : "-");
        }
        put("</tr>");
        stack(leaks[i].stack, headings.size());
        put("</tbody>\n");
      }
      end_table();
      if (leaks.size() > rows_) put("<p class=\"quiet\">and {} more</p>\n", count_text(leaks.size() - rows_));
    }
    close();
  }

  // Flame graphs show what is live, and what was at the peak.
  void tops() {
    for (const std::size_t list : {kMostAllocations, kMostTemporary, kLongestWaits}) top(top_list(list));
  }

  void top(const TopList& list) {
    const std::vector<SeenStack> most = most_of(stacks_, list);
    if (most.empty()) return;
    open(list.title + estimates_text(most));
    table({{list.headings[0], true}, {list.headings[1], true}}, list.headings[0]);
    for (std::size_t i = 0; i < most.size() && i < rows_; ++i) {
      put("<tbody><tr>");
      for (const TopList::Cell& cell : list.cells(most[i].use)) number(cell.value, cell.text);
      put("</tr>");
      stack(most[i].stack, 2);
      put("</tbody>\n");
    }
    end_table();
    if (most.size() > rows_) put("<p class=\"quiet\">and {} more</p>\n", count_text(most.size() - rows_));
    close();
  }

  void stack(const Stack* stack, std::size_t columns) {
    if (stack == nullptr || stack->frames.empty()) return;
    put("<tr><td class=\"w\" colspan=\"{}\"><details><summary>{}</summary><ol>", columns, html(chain_text(*stack)));
    for (const FramePointer& frame : stack->frames)
      put("<li>{} <span class=\"quiet\">{}</span></li>", html(frame_name(*frame)), html(frame_place(*frame)));
    put("</ol></details></td></tr>");
  }

  void devices() {
    open("Memory by device");
    std::vector<Heading> headings{{"device"}, {"bytes"}, {"at exit", true}, {"peak", true}};
    if (reports_.size() > 1) headings.insert(headings.begin(), {"report"});
    table(headings);
    for (const Report& report : reports_) {
      for (const DeviceUse& device : report.devices) {
        for (const FigureRow& row : kFigures) {
          put("<tbody><tr>");
          if (reports_.size() > 1) text(label_of(report));
          text(std::to_string(device.device));
          text(row.text);
          number((device.*row.figure).current, bytes_text((device.*row.figure).current));
          number((device.*row.figure).peak, bytes_text((device.*row.figure).peak));
          put("</tr></tbody>\n");
        }
      }
    }
    end_table();
    for (const Report& report : reports_) {
      for (const DeviceUse& device : report.devices) {
        if (!device.fragmentation) continue;
        put("<p class=\"quiet\">{}device {}: {}</p>\n", reports_.size() > 1 ? html(label_of(report)) + ", " : "",
            device.device, fragmentation_text(*device.fragmentation));
      }
    }
    close();
  }

  void histograms() {
    for (const Report& report : reports_) {
      const std::string of = reports_.size() > 1 ? fmt::format(": {}", label_of(report)) : std::string();
      histogram("Sizes asked for" + of, report.size_histogram,
                [](double x) { return bytes_text(static_cast<std::uint64_t>(std::clamp(x, 0.0, 1e19))); });
      histogram("Lifetimes" + of, report.lifetime_histogram, &seconds_text);
    }
  }

  void histogram(const std::string& title, const std::vector<Bucket>& buckets, std::string (*text_of)(double)) {
    if (buckets.empty()) return;
    open(title);
    std::uint64_t most = 1;
    for (const Bucket& bucket : buckets) most = std::max(most, bucket.count);
    put("<div class=\"scroll\"><table class=\"hist\">\n");
    for (const Bucket& bucket : buckets) {
      put("<tr><td>{}</td><td class=\"r\">{}</td><td><div class=\"bar\" style=\"width:{:.2f}%\"></div></td></tr>\n",
          html(bucket_text(bucket, text_of)), count_text(bucket.count),
          100 * static_cast<double>(bucket.count) / static_cast<double>(most));
    }
    end_table();
    close();
  }

  void calls() {
    for (const Report& report : reports_) {
      open(reports_.size() > 1 ? fmt::format("Calls: {}", label_of(report)) : std::string("Calls"));
      table({{"call"}, {"served", true}, {"to driver", true}});
      for (const FunctionCalls& function : report.functions) {
        if (function.served == 0 && function.forwarded == 0) continue;
        put("<tbody><tr>");
        text(function.function);
        number(function.served, count_text(function.served));
        number(function.forwarded, count_text(function.forwarded));
        put("</tr></tbody>\n");
      }
      end_table();
      put("<p class=\"quiet\">");
      for (const auto& [name, count] : report.counters) {
        if (count != 0) put("{} {} · ", count_text(count), html(counter_text(name)));
      }
      put("waits {} · driver calls of Cushion's own {} ({})", waits_text(report), count_text(report.driver_calls),
          seconds_text(report.driver_seconds));
      if (report.single_order_ended_by) put(" · single order ended by: {}", html(*report.single_order_ended_by));
      put("</p>\n");
      close();
    }
  }

  void options() {
    put("<section><details><summary>Options in force</summary>\n");
    for (const Report& report : reports_) {
      if (reports_.size() > 1) put("<h3>{}</h3>\n", html(label_of(report)));
      put("<p class=\"quiet\">");
      for (const auto& [name, value] : report.options) put("{}={} ", html(name), html(value));
      put("</p>\n");
    }
    put("</details></section>\n");
  }

  struct Heading {
    std::string text;
    bool number = false;
  };
  void table(const std::vector<Heading>& headings, std::string_view sorted = {}) {
    put("<div class=\"scroll\"><table class=\"sorts\"><thead><tr>");
    for (const Heading& heading : headings) {
      put("<th{}{}><button>{}</button></th>", heading.number ? " class=\"r\"" : "",
          heading.text == sorted ? " aria-sort=\"descending\"" : "", html(heading.text));
    }
    put("</tr></thead>\n");
  }
  void end_table() { put("</table></div>\n"); }
  void text(std::string_view text) { put("<td>{}</td>", html(text)); }
  template <class Value>
  void number(Value value, const std::string& text) {
    put("<td class=\"r\" data-v=\"{}\">{}</td>", value, html(text));
  }

  const std::vector<Report>& reports_;
  const std::size_t rows_;
  const std::vector<SeenStack> stacks_;
  std::string out_;
};

}  // namespace

std::string html_page(const std::vector<Report>& reports, std::size_t rows) { return Page(reports, rows).take(); }

}  // namespace cushion
