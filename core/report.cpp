#include "core/report.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <span>
#include <string_view>
#include <tuple>

#include "core/device_bytes.h"
#include "core/out.h"
#include "core/runtime.h"
#include "core/stack_text.h"
#include "core/totals.h"
#include "core/whole_file.h"

namespace cushion {
namespace {

// Live blocks of one device, call, stream, thread, call stack and size, of those that were tracked or of those that
// were not.
struct LiveGroup {
  std::uint64_t size = 0;
  std::uint64_t count = 0;
  std::uint64_t oldest = 0;  // as Note::time; 0: allocated while tracking was off, as all of the group
  std::uint32_t stream = 0;  // 0: host-ordered
  std::uint32_t thread = 0;  // 0: unknown
  std::uint32_t stack = 0;   // its id (stacks.h)
  int device = 0;
  Api api = Api::malloc;
  bool foreign = false;
  const char* suppressed = nullptr;  // by this pattern

  auto key() const noexcept { return std::make_tuple(device, foreign, api, stream, thread, stack, size, oldest == 0); }
};

// The live blocks of the process, grouped, in scratch memory of their own.
class LiveList {
 public:
  LiveList(Runtime& runtime, Patience patience) noexcept {
    std::size_t count = 0;
    bool all = visit(runtime, patience, [&](const LiveGroup&) { ++count; });
    capacity_ = count + count / 8 + 64;  // other threads may still allocate
    groups_ = static_cast<LiveGroup*>(map_pages(capacity_ * sizeof(LiveGroup)));
    if (groups_ == nullptr) return;
    all = visit(runtime, patience,
                [&](const LiveGroup& one) {
                  if (size_ < capacity_) groups_[size_++] = one;
                }) &&
          all;
    complete_ = all && size_ < capacity_;
    merge();
    suppress(runtime, patience);
    std::sort(groups_, groups_ + size_,
              [](const LiveGroup& a, const LiveGroup& b) { return a.size * a.count > b.size * b.count; });
  }
  ~LiveList() {
    if (groups_ != nullptr) munmap(groups_, capacity_ * sizeof(LiveGroup));
  }
  LiveList(const LiveList&) = delete;
  LiveList& operator=(const LiveList&) = delete;

  const LiveGroup* begin() const noexcept { return groups_; }
  const LiveGroup* end() const noexcept { return groups_ + size_; }
  std::size_t size() const noexcept { return size_; }
  bool complete() const noexcept { return complete_; }

 private:
  template <class Each>
  static bool visit(Runtime& runtime, Patience patience, Each each) noexcept {
    bool all = true;
    runtime.shared().for_each_context([&](Context& context) {
      all = context.inspect(patience, [&](const Pool& pool) {
        pool.for_each_live([&](const Pool::LiveBlock& b) {
          each(LiveGroup{b.requested, 1, b.note.time, b.stream, b.note.thread, b.note.stack, context.device(), b.api,
                         false});
        });
      }) && all;
    });
    return runtime.for_each_foreign(patience, [&](CUdeviceptr, const ForeignBlock& b) {
      each(LiveGroup{b.size, 1, b.note.time, b.stream, b.note.thread, b.note.stack, b.device, b.api,
                     b.server == nullptr});
    }) && all;
  }
  void merge() noexcept {
    std::sort(groups_, groups_ + size_, [](const LiveGroup& a, const LiveGroup& b) { return a.key() < b.key(); });
    std::size_t kept = 0;
    for (std::size_t i = 0; i < size_; ++i) {
      if (kept != 0 && groups_[kept - 1].key() == groups_[i].key()) {
        LiveGroup& into = groups_[kept - 1];
        into.count += groups_[i].count;
        into.oldest = std::min(into.oldest, groups_[i].oldest);
      } else {
        groups_[kept++] = groups_[i];
      }
    }
    size_ = kept;
  }
  // While they lie by key: groups of one stack follow each other, and it is asked once.
  void suppress(Runtime& runtime, Patience patience) noexcept {
    const Suppressions& suppressions = runtime.program().suppressions;
    for (std::size_t i = 0; i < size_; ++i) {
      groups_[i].suppressed =
          i != 0 && groups_[i - 1].stack == groups_[i].stack
              ? groups_[i - 1].suppressed
              : suppressions.covers(runtime.shared().stacks, groups_[i].stack, patience != Patience::none);
    }
  }

  LiveGroup* groups_ = nullptr;
  std::size_t size_ = 0;
  std::size_t capacity_ = 0;
  bool complete_ = false;
};

struct CounterField {
  const char* key;
  const char* text;
  const std::uint64_t Totals::*counter;
};
#define CUSHION_COUNTER(field, key, text) {key, text, &Totals::field},
constexpr CounterField kCounters[] = {CUSHION_COUNTERS(CUSHION_COUNTER)};
#undef CUSHION_COUNTER

constexpr char kRunning[] = "running";  // how it ended: not yet

class Writer {
 public:
  Writer(Runtime& runtime, const char* how, Patience patience, Out& out) noexcept
      : runtime_(runtime),
        shared_(runtime.shared()),
        stacks_(shared_.stacks),
        patience_(patience),
        counters_(shared_),
        program_(runtime.program()),
        how_(how),
        now_(ClockPair::now()),
        tick_(program_.loaded.clock, now_),
        out_(out) {}

  void json() noexcept {
    const LiveList live(runtime_, patience_);
    out_.raw("{\n  \"schema\": \"cushion-report\",\n  \"version\": 1,\n  \"program\": {\"name\": ");
    out_.quoted(program_.name);
    out_.raw(", \"command\": ");
    out_.quoted(program_.command);
    out_.raw(", \"host\": ");
    out_.quoted(program_.host);
    if (!program_.rank.empty() && program_.rank.find_first_not_of("0123456789") == std::string::npos &&
        program_.rank.size() < 10)
      out_.print(", \"rank\": {}", std::strtoul(program_.rank.c_str(), nullptr, 10));
    out_.print(", \"pid\": {}, \"started_unix_s\": {}.{:09}, \"duration_s\": {:.9f}, \"end\": ", program_.pid,
               std::int64_t{program_.loaded.wall.tv_sec}, std::int64_t{program_.loaded.wall.tv_nsec}, duration());
    out_.quoted(how_);
    out_.raw("},\n  \"options\": {");
    const char* comma = "";
    for (const auto& [name, setting] : program_.options) {
      out_.raw(comma);
      out_.quoted(name);
      out_.raw(": ");
      out_.quoted(setting);
      comma = ", ";
    }
    out_.raw("},\n  \"tracking\": {\"level\": \"");
    print_level();
    out_.print("\", \"switches\": {}, \"stacks_lost\": {}}},\n  \"marks\": [", runtime_.track_switches(),
               stacks_.lost());
    comma = "";
    for (const NamedMoment& mark : runtime_.marks()) {
      out_.raw(comma);
      out_.raw("{\"name\": ");
      out_.quoted(mark.name);
      out_.print(", \"age_s\": {:.6f}, \"live\": {}}}", tick_.seconds(now_.tick - mark.tick), mark.live);
      comma = ", ";
    }
    out_.raw("],\n  \"devices\": [");
    comma = "\n";
    for (int d = 0; d < Shared::kDevices; ++d) {
      const DeviceBytes bytes(shared_, d);
      if (!bytes.any()) continue;
      out_.print("{}    {{\"device\": {}", comma, d);
      for (int i = 0; i < DeviceBytes::kFigures; ++i) {
        out_.print(", \"{}\": {{\"current\": {}, \"peak\": {}}}", DeviceBytes::kKeys[i], bytes.current[i],
                   bytes.peak[i]);
      }
      if (const char* uuid = shared_.uuids[static_cast<std::size_t>(d)].data(); *uuid != 0)
        out_.print(", \"uuid\": \"{}\"", uuid);
      if (const Vmm* vmm = backing_of(d))
        out_.print(", \"backing\": {{\"kind\": \"{}\", \"reason\": \"{}\"}}", vmm->on() ? "vmm" : "driver", vmm->why());
      const Pool::Fragments fragments = fragments_of(d);
      if (fragments.bytes != 0) {
        out_.print(", \"fragmentation\": {{\"largest_free\": {}, \"free\": {}, \"free_squares\": {:.6f}}}",
                   fragments.largest, fragments.bytes, share_of_squares(fragments));
      }
      out_.raw("}");
      comma = ",\n";
    }
    out_.print("\n  ],\n  \"calls\": {{\"served\": {}, \"forwarded\": {}, \"by_function\": {{", sum(counters_.served),
               sum(counters_.forwarded));
    comma = "";
    for (int i = 0; i < kApis; ++i) {
      out_.print("{}\"{}\": {{\"served\": {}, \"forwarded\": {}}}", comma, kApiNames[i], counters_.served[i],
                 counters_.forwarded[i]);
      comma = ", ";
    }
    out_.raw("}");
    for (const CounterField& f : kCounters) out_.print(", \"{}\": {}", f.key, counters_.*f.counter);
    out_.print("}},\n  \"driver\": {{\"version\": {}, \"calls\": {}, \"seconds\": {:.9f}}},\n", shared_.driver.version,
               shared_.driver.calls.load(std::memory_order_relaxed),
               tick_.seconds(shared_.driver.time.load(std::memory_order_relaxed)));
    out_.print("  \"waits\": {{\"count\": {}, \"seconds\": {:.9f}, \"free_seconds\": {:.9f}}},\n", waits(),
               tick_.seconds(counters_.wait_ticks), tick_.seconds(counters_.free_wait_ticks));
    timeline();
    peak_map();
    histograms();
    modules();
    frames();
    stacks();
    if (const char* order = single_order()) out_.print("  \"single_order_ended_by\": \"{}\",\n", order);
    out_.print("  \"live_complete\": {},\n  \"live\": [", live.complete());
    comma = "\n";
    for (const LiveGroup& g : live) {
      out_.print(
          "{}    {{\"size\": {}, \"count\": {}, \"api\": \"{}\", \"served_by\": \"{}\", \"device\": {}, \"stream\": ",
          comma, g.size, g.count, kApiNames[static_cast<int>(g.api)], g.foreign ? "driver" : "pool", g.device);
      print_stream(g, "null", "\"");
      if (g.thread != 0) out_.print(", \"thread\": {}", g.thread);
      if (g.stack != 0) out_.print(", \"stack\": {}", g.stack - 1);
      if (g.suppressed != nullptr) {
        out_.raw(", \"suppressed\": ");
        out_.quoted(g.suppressed);
      }
      if (g.oldest != 0) {
        out_.print(", \"oldest_age_s\": {:.9f}}}", age(g.oldest));
      } else {
        out_.raw(", \"oldest_age_s\": null}");
      }
      comma = ",\n";
    }
    out_.raw("\n  ]\n}\n");
  }

  void text() noexcept {
    const LiveList live(runtime_, patience_);
    out_.print("cushion: {} (pid {}) {}{} after {:.3f} s\n", std::string_view(program_.name).substr(0, 200),
               program_.pid, how_ == kRunning ? "" : "ended by ", how_, duration());
    for (const NamedMoment& mark : runtime_.marks()) {
      out_.print("  mark    {:>10.3f} s ago  ", tick_.seconds(now_.tick - mark.tick));
      print_bytes(mark.live, 10);
      out_.print(" live  {}\n", Printable<64>(mark.name).view());
    }
    for (int d = 0; d < Shared::kDevices; ++d) {
      const DeviceBytes bytes(shared_, d);
      if (!bytes.any()) continue;
      out_.print("  device {}\n", d);
      for (int i = 0; i < DeviceBytes::kFigures; ++i) {
        out_.print("    {:<44}  now ", DeviceBytes::kTexts[i]);
        print_bytes(bytes.current[i], 10);
        out_.raw("  peak ");
        print_bytes(bytes.peak[i], 10);
        out_.raw("\n");
      }
    }
    out_.print("  calls   {} served by the pool, {} passed to the driver\n", sum(counters_.served),
               sum(counters_.forwarded));
    for (const CounterField& f : kCounters) {
      if (counters_.*f.counter != 0) out_.print("          {} {}\n", counters_.*f.counter, f.text);
    }
    out_.print("  driver  {} calls of Cushion's own, {:.6f} s in them\n",
               shared_.driver.calls.load(std::memory_order_relaxed),
               tick_.seconds(shared_.driver.time.load(std::memory_order_relaxed)));
    out_.print("  waits   {}, {:.6f} s in all\n", waits(), tick_.seconds(counters_.wait_ticks));
    if (const char* order = single_order()) out_.print("  order   a single one, ended by: {}\n", order);
    std::uint64_t blocks = 0;
    std::uint64_t bytes = 0;
    std::uint64_t suppressed = 0;
    std::size_t groups = 0;
    for (const LiveGroup& g : live) {
      if (g.suppressed != nullptr) {
        suppressed += g.count;
        continue;
      }
      ++groups;
      blocks += g.count;
      bytes += g.count * g.size;
    }
    if (suppressed != 0) out_.print("  live    {} blocks suppressed\n", suppressed);
    if (!live.complete()) {
      out_.raw("  live    unknown in part: the process ended inside Cushion\n");
    } else if (blocks == 0) {
      out_.raw(suppressed == 0 ? "  live    nothing: every block was freed\n" : "  live    nothing else\n");
    }
    if (blocks == 0) return;
    out_.print("  live    {} blocks, ", blocks);
    print_bytes(bytes, 0);
    out_.print(" requested and {}\n", how_ == kRunning ? "not freed yet" : "never freed");
    constexpr std::size_t kMost = 20;
    std::size_t shown = 0;
    for (const LiveGroup& g : live) {
      if (g.suppressed != nullptr) continue;
      if (++shown > kMost) break;
      out_.print("          {:>8} x ", g.count);
      print_bytes(g.size, 10);
      out_.print("  {:<16} device {}  stream ", kApiNames[static_cast<int>(g.api)], g.device);
      print_stream(g, "-", "");
      if (g.oldest != 0) {
        out_.print("  oldest {:.3f} s", age(g.oldest));
      } else {
        out_.raw("  allocated while tracking was off");
      }
      out_.raw(g.foreign ? "  (from the driver)\n" : "\n");
      if (g.stack != 0) print_stack(g.stack, "            ");
    }
    if (groups > kMost) out_.print("          and {} more groups (CUSHION_REPORT=FILE lists all)\n", groups - kMost);
  }

  // What a person needs who is told that there is no memory.
  void out_of_memory(std::uint64_t bytes, Api api) noexcept {
    out_.print("cushion: {} (pid {}) is out of device memory: ", Printable<200>(program_.name).view(), program_.pid);
    print_bytes(bytes, 0);
    out_.print(" asked for by {}\n", kApiNames[static_cast<int>(api)]);
    std::uint64_t free = 0;
    std::uint64_t hole = 0;
    for (int d = 0; d < Shared::kDevices; ++d) {
      const DeviceBytes device(shared_, d);
      if (!device.any()) continue;
      const Pool::Fragments fragments = fragments_of(d);
      free = std::max(free, fragments.bytes);
      hole = std::max(hole, fragments.largest);
      out_.print("  device {}  live ", d);
      print_bytes(device.current[0] + device.current[3], 0);
      out_.raw(", held by the pool ");
      print_bytes(device.current[2], 0);
      out_.raw(", free in it ");
      print_bytes(fragments.bytes, 0);
      out_.raw(", the largest hole ");
      print_bytes(fragments.largest, 0);
      out_.raw("\n");
    }
    const Options& options = runtime_.options();
    if (options.max_size.percent < 0 || options.max_size.percent < 100)
      out_.raw("  CUSHION_MAX_SIZE bounds the pool; requests beyond it go to the driver\n");
    if (bytes <= free && bytes > hole)
      out_.raw(
          "  free memory is there, in pieces that are too small: CUSHION_SEGMENT_SIZE or CUSHION_INITIAL_SIZE larger, "
          "or CUSHION_ALLOCATOR=binning, keeps it together\n");
    if (options.oom_wait.ns == 0) out_.raw("  CUSHION_OOM_WAIT=1s would wait for freed blocks still in use\n");
    top_stacks();
  }

 private:
  double duration() const noexcept { return static_cast<double>(now_.ns - program_.loaded.clock.ns) * 1e-9; }
  // Where a device's memory comes from, if that was to be chosen; else null.
  const Vmm* backing_of(int device) noexcept {
    const Vmm* found = nullptr;
    if (shared_.options->backing != Backing::driver) {
      shared_.for_each_context([&](Context& context) {
        if (context.device() == device) found = &context.vmm();
      });
    }
    return found;
  }
  // Under FREE=auto, why frees waited, or "nothing"; else null.
  const char* single_order() const noexcept {
    if (shared_.options->free != FreeMode::automatic) return nullptr;
    const char* ended_by = shared_.order.ended_by();
    return ended_by != nullptr ? ended_by : "nothing";
  }
  std::uint64_t waits() const noexcept { return counters_.free_waits + counters_.memory_waits; }

  void print_stream(const LiveGroup& g, std::string_view none, std::string_view quote) noexcept {
    if (g.stream == 0) {
      out_.raw(none);
    } else if (g.stream == 1) {
      out_.print("{}legacy{}", quote, quote);
    } else {
      out_.print("{}{}{}", quote, g.stream, quote);
    }
  }
  void print_bytes(std::uint64_t bytes, int width) noexcept {
    static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double shown = static_cast<double>(bytes);
    int unit = 0;
    while (shown >= 1024 && unit < 4) {
      shown /= 1024;
      ++unit;
    }
    char digits[32];
    const std::string_view text =
        unit == 0 ? format_into(digits, "{} B", bytes) : format_into(digits, "{:.2f} {}", shown, kUnits[unit]);
    out_.print("{:>{}}", text, width);
  }

  void print_level() noexcept {
    const Tracking tracking = shared_.page->tracking();
    out_.raw(name_of(tracking.level));
    if (tracking.level == TrackLevel::sampled) out_.print(":{}", tracking.interval);
  }
  Pool::Fragments fragments_of(int device) noexcept {
    Pool::Fragments all;
    shared_.for_each_context([&](Context& context) {
      if (context.device() != device) return;
      context.inspect(patience_, [&](const Pool& pool) {
        const Pool::Fragments one = pool.fragments();
        all.largest = std::max(all.largest, one.largest);
        all.bytes += one.bytes;
        all.squares += one.squares;
      });
    });
    return all;
  }
  static double share_of_squares(const Pool::Fragments& f) noexcept {
    const double all = static_cast<double>(f.bytes);
    return all != 0 ? f.squares / (all * all) : 0;
  }
  double age(std::uint64_t ns) const noexcept { return ns < now_.ns ? static_cast<double>(now_.ns - ns) * 1e-9 : 0; }

  void timeline() noexcept {
    const TimeLine& line = runtime_.timeline();
    if (line.size() == 0) return;
    out_.raw("  \"timeline\": [");
    const char* comma = "\n";
    std::uint64_t last = 0;
    for (std::size_t i = 0; i < line.size(); ++i) {
      const std::uint64_t ns = line[i].ns;
      if (ns <= last) continue;
      last = ns;
      out_.print("{}    {{\"time_s\": {:.6f}, \"live\": {}, \"held\": {}}}", comma, std::max(duration() - age(ns), 0.0),
                 std::uint64_t{line[i].live}, std::uint64_t{line[i].held});
      comma = ",\n";
    }
    out_.raw("\n  ],\n");
  }
  void peak_map() noexcept {
    runtime_.peak_map().read(shared_, patience_, [&](const PeakMap::Map& map) {
      out_.print("  \"peak_map\": {{\"time_s\": {:.6f}, \"live\": {}, \"cell\": {}, \"left_out\": {}, \"segments\": [",
                 std::max(duration() - age(map.ns), 0.0), map.live, map.cell, map.left_out);
      const char* comma = "\n";
      for (const PeakMap::Strip& strip : std::span(map.strips).first(map.size)) {
        out_.print("{}    {{\"device\": {}, \"address\": {}, \"size\": {}, \"used\": {}, \"largest_free_run\": {}, ",
                   comma, strip.device, strip.address, strip.size, strip.used, strip.largest_free_run);
        out_.raw("\"cells\": \"");
        for (std::size_t i = 0; i < map.cells(strip); ++i) out_.print("{}", map.digit(strip, i));
        out_.raw("\"}");
        comma = ",\n";
      }
      out_.raw("\n  ]},\n");
    });
  }
  // bucket(i): from, below, count.
  template <class Bucket>
  void histogram(const char* key, int buckets, Bucket bucket) noexcept {
    const char* comma = "\n";
    bool any = false;
    for (int i = 0; i < buckets; ++i) {
      const auto [from, below, count] = bucket(i);
      if (count == 0) continue;
      if (!any) out_.print("  \"{}\": [", key);
      any = true;
      out_.print("{}    {{\"from\": {:.9g}, \"below\": {:.9g}, \"count\": {}}}", comma, from, below, count);
      comma = ",\n";
    }
    if (any) out_.raw("\n  ],\n");
  }
  void histograms() noexcept {
    const auto power = [](int i) { return i == 0 ? 0.0 : std::ldexp(1.0, i - 1); };
    struct Bucket {
      double from;
      double below;
      std::uint64_t count;
    };
    histogram("size_histogram", kSizes, [&](int i) { return Bucket{power(i), power(i + 1), counters_.sizes[i]}; });
    histogram("lifetime_histogram", static_cast<int>(Stacks::kAges), [&](int i) {
      return Bucket{power(i) * 1e-9, power(i + 1) * 1e-9, whole(stacks_.ages()[static_cast<std::size_t>(i)])};
    });
  }
  static std::uint64_t whole(std::uint64_t count) noexcept { return (count + Stacks::kOne / 2) / Stacks::kOne; }

  void modules() noexcept {
    const Modules& modules = stacks_.modules();
    if (modules.size() == 0) return;
    out_.raw("  \"modules\": [");
    const char* comma = "\n";
    for (std::size_t i = 0; i < modules.size(); ++i) {
      out_.print("{}    {{\"path\": ", comma);
      out_.quoted(modules[i].path);
      out_.raw(", \"build_id\": \"");
      for (std::size_t b = 0; b < modules[i].build_id_size; ++b) out_.print("{:02x}", modules[i].build_id[b]);
      out_.raw("\"}");
      comma = ",\n";
    }
    out_.raw("\n  ],\n");
  }
  void frames() noexcept {
    if (stacks_.frame_count() == 0) return;
    out_.raw("  \"frames\": [");
    const char* comma = "\n";
    for (std::size_t i = 0; i < stacks_.frame_count(); ++i) {
      const Stacks::Frame& frame = stacks_.frame(i);
      out_.raw(comma);
      if (frame.python != Stacks::kNativeCode) {
        const Python::Code& code = stacks_.python().code(frame.python);
        out_.raw("    {\"function\": ");
        out_.quoted(code.function);
        out_.raw(", \"file\": ");
        out_.quoted(code.file);
        out_.print(", \"line\": {}}}", frame.line);
      } else if (frame.module >= 0) {
        out_.print("    {{\"module\": {}, \"offset\": {}}}", frame.module, frame.offset);
      } else {
        out_.print("    {{\"address\": {}}}", frame.offset);
      }
      comma = ",\n";
    }
    out_.raw("\n  ],\n");
  }
  void stacks() noexcept {
    if (stacks_.size() == 0) return;
    out_.raw("  \"stacks\": [");
    const char* comma = "\n";
    for (std::uint32_t id = 1; id <= stacks_.size(); ++id) {
      const Stacks::Stack& stack = stacks_[id];
      out_.print("{}    {{\"frames\": [", comma);
      for (std::uint32_t i = 0; i < stack.depth; ++i) out_.print("{}{}", i != 0 ? "," : "", stack.frames[i]);
      const Stacks::Amount peak = stacks_.at_peak(stack);
      out_.print(
          "], \"interval\": {}, \"allocations\": {}, \"bytes\": {}, \"live\": {}, \"live_bytes\": {}, \"peak\": {}, "
          "\"peak_bytes\": {}, \"temporary\": {}, \"waits\": {}, \"wait_s\": {:.9f}}}",
          stack.interval, whole(stack.allocated.count), std::uint64_t{stack.allocated.bytes}, whole(stack.live.count),
          std::uint64_t{stack.live.bytes}, whole(peak.count), peak.bytes, whole(stack.temporary),
          std::uint64_t{stack.waits}, tick_.seconds(stack.wait_ticks));
      comma = ",\n";
    }
    out_.raw("\n  ],\n");
  }

  // The five call stacks that have most bytes live.
  void top_stacks() noexcept {
    std::uint32_t last = 0;
    std::uint64_t below = ~std::uint64_t{0};
    for (int rank = 0; rank < 5; ++rank) {
      std::uint32_t best = 0;
      for (std::uint32_t id = 1; id <= stacks_.size(); ++id) {
        const std::uint64_t bytes = stacks_[id].live.bytes;
        const bool comes_next = bytes < below || (bytes == below && id > last);
        if (bytes != 0 && comes_next && (best == 0 || bytes > stacks_[best].live.bytes)) best = id;
      }
      if (best == 0) break;
      last = best;
      below = stacks_[best].live.bytes;
      out_.raw("  live ");
      print_bytes(below, 0);
      out_.print(" in {} blocks{} from\n", whole(stacks_[best].live.count),
                 stacks_[best].interval != 0 ? " (estimated)" : "");
      print_stack(best, "    ");
    }
    if (last == 0) out_.raw("  CUSHION_TRACK=stacks, or sampled, says from where most is live\n");
  }

  void print_stack(std::uint32_t id, std::string_view indent) noexcept {
    cushion::print_stack(out_, stacks_, id, indent, patience_ != Patience::none);
  }

  Runtime& runtime_;
  Shared& shared_;
  const Stacks& stacks_;
  const Patience patience_;
  const Totals counters_;
  const Runtime::Program& program_;
  const char* how_;
  ClockPair now_;
  TickLength tick_;
  Out& out_;
};

// As the path's end says.
void write_to(Runtime& runtime, Out& out, std::string_view path, const char* how, Patience patience) noexcept {
  Writer writer(runtime, how, patience, out);
  path.ends_with(".txt") ? writer.text() : writer.json();
}

}  // namespace

int write_report_now(Runtime& runtime, const char* path) noexcept {
  if (path != nullptr)
    return write_whole(path, [&](Out& out) { write_to(runtime, out, path, kRunning, Patience::some); });
  Out out(STDERR_FILENO);
  Writer(runtime, kRunning, Patience::some, out).text();
  return out.finish();
}

bool leaks(Runtime& runtime) noexcept {
  const LiveList live(runtime, Patience::some);
  return std::any_of(live.begin(), live.end(), [](const LiveGroup& g) { return g.suppressed == nullptr; });
}

void say_out_of_memory(Runtime& runtime, std::uint64_t bytes, Api api) noexcept try {
  Out out(STDERR_FILENO);
  Writer(runtime, kRunning, Patience::some, out).out_of_memory(bytes, api);
  const std::string& end = runtime.program().report.path;
  std::string path;
  if (!end.empty() && !is_special_file(end.c_str())) {
    const std::size_t name = end.rfind('/') + 1;
    const std::size_t dot = end.rfind('.');
    path = end;
    path.insert(dot != std::string::npos && dot > name ? dot : end.size(), ".oom");
    if (const int error = write_report_now(runtime, path.c_str()); error == 0) {
      out.print("  the report of this moment is {}\n", Printable<200>(path).view());
    } else {
      complain_of("REPORT", path.c_str(), error);
    }
  }
  out.finish();
} catch (...) {  // no host memory either
}

void write_report(Runtime& runtime, const char* how, Patience patience) noexcept {
  const ClaimedFile& file = runtime.program().report;
  if (file.path.empty()) {
    if (runtime.options().track.level == TrackLevel::off || !runtime.options().report.empty()) return;
    Out out(STDERR_FILENO);
    Writer(runtime, how, patience, out).text();
    out.finish();
    return;
  }
  const int error = write_claimed(file, [&](Out& out) { write_to(runtime, out, file.path, how, patience); });
  if (error != 0) complain_of("REPORT", file.path.c_str(), error);
}

}  // namespace cushion
