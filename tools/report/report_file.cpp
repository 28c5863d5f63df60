#include "tools/report/report_file.h"

#include <fmt/core.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>

#include "core/utf8.h"

namespace cushion {
namespace {

using nlohmann::json;

[[noreturn]] void fail(const std::string& path, std::string_view problem) {
  throw ReportError(fmt::format("{}: {}", path, problem));
}

// An object or array of the file and where it is. Members are asked for by name and kind; `maybe` ones may be absent or
// null.
class Node {
 public:
  Node(const json& value, std::string path) : value_(value), path_(std::move(path)) {}

  Node object(const char* key) const { return {member(key, &json::is_object, "an object"), path_of(key)}; }
  std::string text(const char* key) const {
    return member(key, &json::is_string, "a string").get_ref<const std::string&>();
  }
  bool flag(const char* key) const { return member(key, &json::is_boolean, "true or false").get<bool>(); }
  std::uint64_t whole(const char* key) const {
    return member(key, &json::is_number_unsigned, "a whole number, 0 or more").get<std::uint64_t>();
  }
  double number(const char* key) const { return member(key, &json::is_number, "a number").get<double>(); }
  Figure figure(const char* key) const {
    const Node figure = object(key);
    return {figure.whole("current"), figure.whole("peak")};
  }

  bool has(const char* key) const {
    const auto found = value_.find(key);
    return found != value_.end() && !found->is_null();
  }
  std::string maybe_text(const char* key) const { return has(key) ? text(key) : std::string(); }
  std::uint64_t maybe_whole(const char* key) const { return has(key) ? whole(key) : 0; }
  // A place in a list of `size`.
  std::size_t index(const char* key, const char* what, std::size_t size) const {
    return within(whole(key), path_of(key), what, size);
  }
  static std::size_t within(std::uint64_t at, const std::string& path, const char* what, std::size_t size) {
    if (at >= size) fail(path, fmt::format("there is no {} {}: the file has {}", what, at, size));
    return at;
  }

  // each(Node) for the objects of an array; of one that is absent nothing, unless it is `needed`.
  template <class Each>
  void objects(const char* key, bool needed, Each each) const {
    if (!needed && !has(key)) return;
    const json& array = member(key, &json::is_array, "an array");
    for (std::size_t i = 0; i < array.size(); ++i) each(element(array[i], path_of(key), i));
  }
  static Node element(const json& value, const std::string& array, std::size_t i) {
    Node node{value, fmt::format("{}/{}", array, i)};
    node.expect(value.is_object(), "an object", value, node.path_);
    return node;
  }
  const json& value() const { return value_; }
  std::string path_of(std::string_view key) const { return fmt::format("{}/{}", path_, Printable<80>(key).view()); }
  const json& member(const char* key, bool (json::*is)() const noexcept, const char* kind) const {
    const auto found = value_.find(key);
    if (found == value_.end()) fail(path_of(key), fmt::format("is missing; expected {}", kind));
    expect(((*found).*is)(), kind, *found, path_of(key));
    return *found;
  }

  static void expect(bool kept, const char* kind, const json& found, const std::string& path) {
    if (kept) return;
    const std::string shown =
        found.is_structured() ? found.type_name() : found.dump(-1, ' ', true, json::error_handler_t::replace);
    fail(path, fmt::format("expected {}, found {}", kind, Printable<60>(shown).view()));
  }

 private:
  const json& value_;
  std::string path_;
};

LiveBlocks live_blocks(const Node& node) {
  LiveBlocks blocks;
  blocks.size = node.whole("size");
  blocks.count = node.whole("count");
  blocks.api = node.text("api");
  blocks.served_by = node.text("served_by");
  blocks.device = node.whole("device");
  if (node.has("stream")) blocks.stream = node.text("stream");
  if (node.has("oldest_age_s")) blocks.oldest_age_s = node.number("oldest_age_s");
  if (node.has("stack")) blocks.stack = node.whole("stack");  // checked when the stacks are known
  return blocks;
}

// The text as JSON, with the live groups, by far the most of it, taken out on the way.
class Reader {
 public:
  Reader(std::string_view text, Report& report) : text_(text), report_(report) {}

  json read() {
    json all = json::parse(
        text_, [this](int depth, json::parse_event_t event, json& parsed) { return keep(depth, event, parsed); });
    return all;
  }
  // What was wrong with a live group: said only if the file is a report of this version at all.
  const std::string& problem() const { return problem_; }

 private:
  bool keep(int depth, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::key && depth == 1) live_ = parsed == "live";
    if (event != json::parse_event_t::object_end || depth != 2 || !live_) return true;
    try {
      if (problem_.empty()) report_.live.push_back(live_blocks(Node::element(parsed, "/live", report_.live.size())));
    } catch (const ReportError& error) {
      problem_ = error.what();
    }
    return false;
  }

  std::string_view text_;
  Report& report_;
  std::string problem_;
  bool live_ = false;
};

// Where a text stops being JSON.
class Locator : public nlohmann::json_sax<json> {
 public:
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(std::size_t) override { return true; }
  bool key(string_t&) override { return true; }
  bool end_object() override { return true; }
  bool start_array(std::size_t) override { return true; }
  bool end_array() override { return true; }
  bool parse_error(std::size_t position, const std::string&, const json::exception&) override {
    position_ = position;
    return false;
  }
  static std::size_t position_in(std::string_view text) {
    Locator locator;
    json::sax_parse(text, &locator);
    return std::min(locator.position_, text.size());
  }

 private:
  std::size_t position_ = 0;
};

// The library's message without what is said already and what nobody reads.
std::string reason_in(std::string_view what) {
  if (const auto from = what.find(" - "); from != std::string_view::npos) what.remove_prefix(from + 3);
  if (const auto from = what.find("] "); what.starts_with('[') && from != std::string_view::npos)
    what.remove_prefix(from + 2);
  return std::string(Printable<160>(what.substr(0, what.find("; last read"))).view());
}

// "LINE:COLUMN: what is wrong there" of a text that is no JSON.
std::string fault_in(std::string_view text, std::string_view what) {
  const bool cut = what.find("unexpected end of input") != std::string_view::npos ||
                   what.find("missing closing quote") != std::string_view::npos;
  // The library's position is past the byte that it read last.
  const std::size_t at = Locator::position_in(text);
  const std::string_view before = text.substr(0, cut ? text.size() : std::max<std::size_t>(at, 1) - 1);
  const std::size_t start = before.rfind('\n') + 1;  // of the line; 0 of the first
  return fmt::format("{}:{}: {}", 1 + std::ranges::count(before, '\n'), before.size() - start + 1,
                     text.empty() ? "the file is empty"
                     : cut        ? "the file is cut off"
                                  : reason_in(what));
}

std::vector<Bucket> buckets(const Node& root, const char* key) {
  std::vector<Bucket> all;
  root.objects(key, false, [&](const Node& node) {
    Bucket bucket{node.number("from"), std::nullopt, node.whole("count")};
    if (node.has("below")) bucket.below = node.number("below");
    all.push_back(bucket);
  });
  return all;
}

MapAtPeak map_at_peak(const Node& node) {
  MapAtPeak map{node.number("time_s"), node.whole("live"), node.whole("cell"), node.whole("left_out"), {}};
  Node::expect(map.cell != 0, "more than 0", node.value()["cell"], node.path_of("cell"));
  node.objects("segments", true, [&](const Node& one) {
    map.segments.push_back({one.whole("device"), one.whole("address"), one.whole("size"), one.whole("used"),
                            one.whole("largest_free_run"), one.text("cells")});
    const std::string& cells = map.segments.back().cells;
    Node::expect(cells.find_first_not_of("0123456789") == std::string::npos, "digits", one.value()["cells"],
                 one.path_of("cells"));
  });
  return map;
}

// The places in `size` things that an array of whole numbers names.
std::vector<std::size_t> indices(const Node& node, const char* key, const char* what, std::size_t size) {
  const json& array = node.member(key, &json::is_array, "an array");
  std::vector<std::size_t> all;
  all.reserve(array.size());
  for (std::size_t i = 0; i < array.size(); ++i) {
    const std::string path = fmt::format("{}/{}", node.path_of(key), i);
    Node::expect(array[i].is_number_unsigned(), "a whole number, 0 or more", array[i], path);
    all.push_back(Node::within(array[i].get<std::uint64_t>(), path, what, size));
  }
  return all;
}

void read_stacks(const Node& root, Report& report) {
  root.objects("modules", false, [&](const Node& node) {
    report.modules.push_back(std::make_shared<Module>(Module{node.text("path"), node.text("build_id")}));
  });
  std::vector<FramePointer> frames;
  root.objects("frames", false, [&](const Node& node) {
    Frame frame{node.maybe_text("function"), node.maybe_text("file"),
                node.maybe_whole("line"),    nullptr,
                node.maybe_whole("address"), node.has("inlined") && node.flag("inlined")};
    if (node.has("module")) {
      frame.module = report.modules[node.index("module", "module", report.modules.size())];
      frame.offset = node.maybe_whole("offset");
    }
    frames.push_back(std::make_shared<Frame>(std::move(frame)));
  });
  root.objects("stacks", false, [&](const Node& node) {
    Stack& stack = report.stacks.emplace_back();
    for (const std::size_t i : indices(node, "frames", "frame", frames.size())) stack.frames.push_back(frames[i]);
    stack.use = {node.whole("interval"),   node.whole("allocations"), node.whole("bytes"),      node.whole("live"),
                 node.whole("live_bytes"), node.whole("peak"),        node.whole("peak_bytes"), node.whole("temporary"),
                 node.whole("waits"),      node.number("wait_s")};
  });
}

void read_calls(const Node& calls, Report& report) {
  report.served = calls.whole("served");
  report.forwarded = calls.whole("forwarded");
  const Node functions = calls.object("by_function");
  for (const auto& [name, value] : functions.value().items()) {
    const Node function = functions.object(name.c_str());
    report.functions.push_back({name, function.whole("served"), function.whole("forwarded")});
  }
  for (const auto& [name, value] : calls.value().items()) {
    if (value.is_number_unsigned() && name != "served" && name != "forwarded")
      report.counters.emplace_back(name, value.get<std::uint64_t>());
  }
}

void read_sections(const Node& root, Report& report) {
  const Node program = root.object("program");
  report.name = program.text("name");
  report.command = program.text("command");
  report.host = program.text("host");
  report.pid = program.whole("pid");
  if (program.has("rank")) report.rank = program.whole("rank");
  report.started_unix_s = program.number("started_unix_s");
  report.duration_s = program.number("duration_s");
  report.end = program.text("end");
  const Node options = root.object("options");
  for (const auto& [name, value] : options.value().items()) {
    report.options.emplace_back(name, options.text(name.c_str()));
  }
  root.objects("devices", true, [&](const Node& device) {
    report.devices.push_back({device.whole("device"),
                              device.figure("requested"),
                              device.figure("handed_out"),
                              device.figure("held"),
                              device.figure("forwarded"),
                              device.has("uuid") ? device.text("uuid") : std::string(),
                              {},
                              std::nullopt});
    if (device.has("backing")) {
      const Node backing = device.object("backing");
      report.devices.back().backing = fmt::format("{} ({})", backing.text("kind"), backing.text("reason"));
    }
    if (!device.has("fragmentation")) return;
    const Node free = device.object("fragmentation");
    report.devices.back().fragmentation = {free.whole("largest_free"), free.whole("free"), free.number("free_squares")};
  });
  read_calls(root.object("calls"), report);
  const Node driver = root.object("driver");
  report.driver_version = driver.whole("version");
  report.driver_calls = driver.whole("calls");
  report.driver_seconds = driver.number("seconds");
  const Node waits = root.object("waits");
  report.waits = waits.whole("count");
  report.wait_seconds = waits.number("seconds");
  if (waits.has("free_seconds")) report.free_wait_seconds = waits.number("free_seconds");
  if (root.has("single_order_ended_by")) report.single_order_ended_by = root.text("single_order_ended_by");
  report.live_complete = root.flag("live_complete");
  if (!root.member("live", &json::is_array, "an array").empty()) fail("/live/0", "expected objects in this array");
  read_stacks(root, report);
  for (std::size_t i = 0; i < report.live.size(); ++i) {
    if (report.live[i].stack)
      Node::within(*report.live[i].stack, fmt::format("/live/{}/stack", i), "stack", report.stacks.size());
  }
  root.objects("timeline", false, [&](const Node& point) {
    report.timeline.push_back({point.number("time_s"), point.whole("live"), point.whole("held")});
  });
  std::ranges::stable_sort(report.timeline, {}, &TimePoint::time_s);
  if (root.has("peak_map")) report.peak_map = map_at_peak(root.object("peak_map"));
  report.size_histogram = buckets(root, "size_histogram");
  report.lifetime_histogram = buckets(root, "lifetime_histogram");
}

}  // namespace

std::uint64_t add(std::uint64_t a, std::uint64_t b) noexcept {
  std::uint64_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? std::numeric_limits<std::uint64_t>::max() : sum;
}

std::uint64_t multiply(std::uint64_t a, std::uint64_t b) noexcept {
  std::uint64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<std::uint64_t>::max() : product;
}

std::uint64_t LiveBlocks::bytes() const noexcept { return multiply(size, count); }

Figure Report::total(Figure DeviceUse::*figure) const noexcept {
  Figure sum;
  for (const DeviceUse& device : devices) {
    sum.current = add(sum.current, (device.*figure).current);
    sum.peak = add(sum.peak, (device.*figure).peak);
  }
  return sum;
}

Report parse_report(std::string_view text, const std::string& file) {
  const std::string shown(Printable<300>(file).view());
  Report report;
  report.file = file;
  try {
    Reader reader(text, report);
    const json all = reader.read();
    const Node root(all, "");
    if (!all.is_object()) fail("/", "no Cushion report: expected an object");
    if (!all.contains("schema") || all["schema"] != "cushion-report")
      fail("/schema", "no Cushion report: expected \"cushion-report\"");
    const std::uint64_t version = root.whole("version");
    if (version > kReportVersion) {
      fail("/version", fmt::format("a report of version {}; this cushion reads up to {}: use the cushion that wrote it",
                                   version, kReportVersion));
    }
    if (version == 0) fail("/version", "there is no version 0");
    if (!reader.problem().empty()) throw ReportError(reader.problem());
    read_sections(root, report);
  } catch (const json::exception& error) {
    throw ReportError(fmt::format("{}:{}", shown, fault_in(text, error.what())));
  } catch (const ReportError& error) {
    throw ReportError(fmt::format("{}: {}", shown, error.what()));
  }
  return report;
}

std::string read_text(const std::string& file) {
  constexpr std::size_t kMostBytes = std::size_t{1} << 30;
  const std::string shown(Printable<300>(file).view());
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> stream(std::fopen(file.c_str(), "rbe"), &std::fclose);
  if (!stream) throw ReportError(fmt::format("{}: {}", shown, std::strerror(errno)));
  struct stat s {};
  if (fstat(fileno(stream.get()), &s) == 0 && (S_ISCHR(s.st_mode) || S_ISBLK(s.st_mode)) &&
      isatty(fileno(stream.get())) == 0)
    throw ReportError(fmt::format("{}: a device, not a report", shown));
  std::string text;
  char part[1 << 16];
  for (std::size_t got = 0; (got = std::fread(part, 1, sizeof part, stream.get())) > 0;) {
    if (text.size() > kMostBytes) throw ReportError(fmt::format("{}: no report is larger than 1 GiB", shown));
    text.append(part, got);
  }
  if (std::ferror(stream.get()) != 0) throw ReportError(fmt::format("{}: {}", shown, std::strerror(errno)));
  return text;
}

}  // namespace cushion
