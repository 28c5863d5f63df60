// Options: text from the environment becomes a checked Options value, and back.
//
// Invariant: one parser per type serves the defaults, the bounds named in a range phrase ("2MiB to 100%") and
// the user's text, so the documented table cannot say anything else than what is accepted. Cost: a few
// microseconds and a handful of host allocations, once in a program's life; inert() allocates nothing.
#include "core/options.h"

#include <signal.h>
#include <sys/auxv.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <optional>
#include <type_traits>
#include <utility>

#include "core/utf8.h"

namespace cushion {
namespace {

constexpr std::string_view kPrefix = "CUSHION_";

constexpr OptionInfo kTable[] = {
#define CUSHION_OPTION(type, field, name, fallback, range, help) {name, fallback, range, help},
#include "core/options.def"
#undef CUSHION_OPTION
};

// --- words and quantities ------------------------------------------------------------------------------------

constexpr char lower(char c) noexcept { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

bool same_word(std::string_view a, std::string_view b) noexcept { return std::ranges::equal(a, b, {}, lower, lower); }

// Takes the text up to `separator` (or all of it) off the front of `rest`.
std::string_view take_until(std::string_view& rest, char separator) noexcept {
  const std::size_t end = std::min(rest.find(separator), rest.size());
  const std::string_view head = rest.substr(0, end);
  rest.remove_prefix(std::min(end + 1, rest.size()));
  return head;
}

std::string_view trim(std::string_view text) noexcept {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

struct Unit {
  std::string_view name;
  std::uint64_t scale;
};

// Written out: the first unit that divides a value. Read: any of them, case ignored.
constexpr std::uint64_t kKi = 1024;
constexpr std::uint64_t kK = 1000;
constexpr Unit kSizeUnits[] = {
    {"TiB", kKi* kKi* kKi* kKi},
    {"GiB", kKi* kKi* kKi},
    {"MiB", kKi* kKi},
    {"KiB", kKi},
    {"", 1},
    {"B", 1},
    {"T", kKi* kKi* kKi* kKi},
    {"G", kKi* kKi* kKi},
    {"M", kKi* kKi},
    {"k", kKi},
    {"TB", kK* kK* kK* kK},
    {"GB", kK* kK* kK},
    {"MB", kK* kK},
    {"KB", kK},
};
constexpr Unit kDurationUnits[] = {
    {"h", 3600 * kK* kK* kK}, {"min", 60 * kK* kK* kK}, {"s", kK* kK* kK}, {"ms", kK* kK}, {"us", kK}, {"ns", 1},
};

// A decimal number without sign or exponent, then its unit: `1.5GiB` is {1, 0.5, "GiB"}.
struct Quantity {
  std::uint64_t whole = 0;
  double fraction = 0;
  std::string_view unit;
};

std::optional<Quantity> split_quantity(std::string_view text) noexcept {
  Quantity quantity;
  const char* const end = text.data() + text.size();
  auto [rest, error] = std::from_chars(text.data(), end, quantity.whole);
  if (error != std::errc{}) return std::nullopt;
  if (rest != end && *rest == '.') {
    double scale = 1;
    const char* digit = rest + 1;
    for (; digit != end && *digit >= '0' && *digit <= '9'; ++digit) quantity.fraction += (*digit - '0') * (scale /= 10);
    if (digit == rest + 1) return std::nullopt;
    rest = digit;
  }
  quantity.unit = std::string_view(rest, static_cast<std::size_t>(end - rest));
  return quantity;
}

std::optional<std::uint64_t> scaled(const Quantity& quantity, std::span<const Unit> units) noexcept {
  const auto unit = std::ranges::find_if(units, [&](const Unit& u) { return same_word(u.name, quantity.unit); });
  if (unit == units.end()) return std::nullopt;
  std::uint64_t value = 0;
  const auto part = static_cast<std::uint64_t>(quantity.fraction * static_cast<double>(unit->scale));
  if (__builtin_mul_overflow(quantity.whole, unit->scale, &value) || __builtin_add_overflow(value, part, &value)) {
    return std::nullopt;
  }
  return value;
}

std::string with_unit(std::uint64_t value, std::span<const Unit> units) {
  if (value == 0) return "0";
  const auto unit = std::ranges::find_if(units, [&](const Unit& u) { return value % u.scale == 0; });
  return std::to_string(value / unit->scale).append(unit->name);
}

// --- one parser and one writer per type -----------------------------------------------------------------------

std::optional<Size> parse_size(std::string_view text) noexcept {
  const std::optional<Quantity> quantity = split_quantity(text);
  if (!quantity) return std::nullopt;
  if (quantity->unit == "%") {
    const double percent = static_cast<double>(quantity->whole) + quantity->fraction;
    return percent <= 100 ? std::optional(Size{.bytes = 0, .percent = percent}) : std::nullopt;
  }
  const std::optional<std::uint64_t> bytes = scaled(*quantity, kSizeUnits);
  return bytes ? std::optional(Size{.bytes = *bytes}) : std::nullopt;
}

std::optional<Duration> parse_duration(std::string_view text) noexcept {
  if (text == "0") return Duration{};
  const std::optional<Quantity> quantity = split_quantity(text);
  const std::optional<std::uint64_t> ns = quantity ? scaled(*quantity, kDurationUnits) : std::nullopt;
  return ns ? std::optional(Duration{*ns}) : std::nullopt;
}

// The two ends of a range phrase: "LOW to HIGH", anything after a comma being for people only.
std::pair<std::string_view, std::string_view> ends_of(std::string_view range) noexcept {
  constexpr std::string_view kTo = " to ";
  const std::string_view bounds = take_until(range, ',');
  const std::size_t at = bounds.find(kTo);
  return {bounds.substr(0, at), bounds.substr(at + kTo.size())};
}

template <typename Enumeration>
requires std::is_enum_v<Enumeration>
bool parse(std::string_view text, std::string_view range, Enumeration& out) noexcept {
  for (std::underlying_type_t<Enumeration> i = 0; !range.empty(); ++i) {
    if (same_word(take_until(range, '|'), text)) {
      out = static_cast<Enumeration>(i);
      return true;
    }
  }
  return false;
}

// A share and a number of bytes cannot be compared before the device is known: a share is held to shares.
bool parse(std::string_view text, std::string_view range, Size& out) noexcept {
  const std::optional<Size> size = parse_size(text);
  const std::optional<Size> low = parse_size(ends_of(range).first);
  const std::optional<Size> high = parse_size(ends_of(range).second);
  if (!size || !low || (size->percent < 0 && size->bytes < low->bytes)) return false;
  // A range that ends with bytes is no matter of the device's size.
  if (high && high->percent < 0 && (size->percent >= 0 || size->bytes > high->bytes)) return false;
  out = *size;
  return true;
}

bool parse(std::string_view text, std::string_view range, Duration& out) noexcept {
  const std::optional<Duration> duration = parse_duration(text);
  const std::optional<Duration> high = parse_duration(ends_of(range).second);
  if (!duration || !high || duration->ns > high->ns) return false;
  out = *duration;
  return true;
}

bool parse(std::string_view text, std::string_view, Tracking& out) noexcept {
  const std::optional<Tracking> tracking = parse_tracking(text);
  if (tracking) out = *tracking;
  return tracking.has_value();
}

bool parse(std::string_view text, std::string_view range, Count& out) noexcept {
  const auto number = [](std::string_view digits, std::uint32_t& to) {
    const auto [rest, error] = std::from_chars(digits.data(), digits.data() + digits.size(), to);
    return error == std::errc{} && rest == digits.data() + digits.size();
  };
  std::uint32_t value = 0;
  std::uint32_t low = 0;
  std::uint32_t high = 0;
  if (!number(text, value) || !number(ends_of(range).first, low) || !number(ends_of(range).second, high) ||
      value < low || value > high)
    return false;
  out = {value};
  return true;
}

bool parse(std::string_view text, std::string_view, TrackStart& out) noexcept {
  constexpr Unit kCalls[] = {{"calls", 1}, {"call", 1}};
  if (const std::optional<Duration> time = parse_duration(text)) {
    out = {.ns = time->ns, .calls = 0};
    return true;
  }
  const std::optional<Quantity> quantity = split_quantity(text);
  const std::optional<std::uint64_t> calls = quantity ? scaled(*quantity, kCalls) : std::nullopt;
  if (!calls || quantity->fraction != 0) return false;
  out = {.ns = 0, .calls = *calls};
  return true;
}

constexpr std::pair<std::string_view, int> kToggleSignals[] = {{"USR1", SIGUSR1}, {"USR2", SIGUSR2}};

bool parse(std::string_view text, std::string_view, ToggleSignal& out) noexcept {
  if (same_word(text, "off")) {
    out = {};
    return true;
  }
  int number = 0;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const bool is_number = error == std::errc{} && rest == text.data() + text.size();
  if (text.size() > 3 && same_word(text.substr(0, 3), "SIG")) text.remove_prefix(3);
  for (const auto& [name, signal] : kToggleSignals) {
    if (is_number ? number != signal : !same_word(text, name)) continue;
    out = {signal};
    return true;
  }
  return false;
}

bool parse(std::string_view text, std::string_view, Text& out) {
  out = text;
  return true;
}

template <typename Enumeration>
requires std::is_enum_v<Enumeration> std::string write(Enumeration value, std::string_view range) {
  for (auto i = static_cast<unsigned>(value); i > 0; --i) take_until(range, '|');
  return std::string(take_until(range, '|'));
}

std::string write(const Size& size, std::string_view) {
  if (size.percent < 0) return with_unit(size.bytes, kSizeUnits);
  std::array<char, 64> digits{};  // the shortest text without exponent that reads back as the same number
  const auto [end, error] =
      std::to_chars(digits.data(), digits.data() + digits.size(), size.percent, std::chars_format::fixed);
  return error == std::errc{} ? std::string(digits.data(), end) + '%' : std::string("0%");
}

std::string write(const Duration& duration, std::string_view) { return with_unit(duration.ns, kDurationUnits); }

std::string write(const Tracking& tracking, std::string_view) {
  std::string text(name_of(tracking.level));
  return tracking.level == TrackLevel::sampled ? text + ':' + with_unit(tracking.interval, kSizeUnits) : text;
}

std::string write(const Count& count, std::string_view) { return std::to_string(count.value); }

std::string write(const TrackStart& start, std::string_view) {
  return start.calls != 0 ? std::to_string(start.calls) + "calls" : with_unit(start.ns, kDurationUnits);
}

std::string write(const ToggleSignal& toggle, std::string_view) {
  for (const auto& [name, signal] : kToggleSignals) {
    if (toggle.number == signal) return std::string(name);
  }
  return "off";
}

std::string write(const Text& text, std::string_view) { return text; }

// --- what a person is told ------------------------------------------------------------------------------------

std::string shown(std::string_view text) { return std::string(Printable<64>(text).view()); }

// "pool|cuda" as "pool or cuda"; a phrase stays as it is.
std::string choices(std::string_view range) {
  std::string out;
  while (!range.empty()) {
    const std::string_view word = take_until(range, '|');
    if (!out.empty()) out += range.empty() ? " or " : ", ";
    out += word;
  }
  return out;
}

std::string invalid(const OptionInfo& option, std::string_view value) {
  return std::string(kPrefix) + option.name + '=' + shown(value) + " is not valid: use " + choices(option.range);
}

// Levenshtein distance. One row, on the stack: `known` is a name of the table.
std::size_t edit_distance(std::string_view text, std::string_view known) noexcept {
  std::array<std::size_t, 64> row{};
  const std::size_t columns = std::min(known.size(), row.size() - 1);
  for (std::size_t j = 0; j <= columns; ++j) row[j] = j;
  for (std::size_t i = 0; i < text.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i + 1);
    for (std::size_t j = 0; j < columns; ++j) {
      const std::size_t replaced = diagonal + (lower(text[i]) == lower(known[j]) ? 0 : 1);
      diagonal = std::exchange(row[j + 1], std::min({replaced, row[j] + 1, row[j + 1] + 1}));
    }
  }
  return row[columns];
}

std::string unknown(std::string_view name) {
  constexpr std::size_t kLongest = 64;
  const auto distance = [&](const OptionInfo& option) { return edit_distance(name.substr(0, kLongest), option.name); };
  const auto nearest = std::ranges::min_element(kTable, {}, distance);
  return std::string(kPrefix) + shown(name) + " is not an option: did you mean " + std::string(kPrefix) +
         nearest->name + '?';
}

// --- assignment -----------------------------------------------------------------------------------------------

const OptionInfo* find(std::string_view name) noexcept {
  const auto option = std::ranges::find_if(kTable, [&](const OptionInfo& info) { return name == info.name; });
  return option == std::ranges::end(kTable) ? nullptr : option;
}

bool assign(Options& options, const OptionInfo& info, std::string_view value) {
  const std::string_view wanted = info.name;
#define CUSHION_OPTION(type, field, name, fallback, range, help) \
  if (wanted == name) return parse(value, range, options.field);
#include "core/options.def"
#undef CUSHION_OPTION
  return false;
}

void read_into(OptionsResult& result, const char* const* environment) {
  for (const OptionInfo& option : kTable) assign(result.options, option, option.fallback);
  std::array<bool, std::size(kTable)> seen{};  // of a name given twice, the first counts, as for getenv
  for (; environment != nullptr && *environment != nullptr; ++environment) {
    std::string_view value = *environment;
    if (!value.starts_with(kPrefix) || value.find('=') == std::string_view::npos) continue;
    const std::string_view name = take_until(value, '=').substr(kPrefix.size());
    const OptionInfo* const option = find(name);
    if (option == nullptr) {
      result.warnings.push_back(unknown(name));
    } else if (!std::exchange(seen[static_cast<std::size_t>(option - kTable)], true) &&
               !assign(result.options, *option, value)) {
      result.errors.push_back(invalid(*option, value));
    }
  }
}

// Empty if it is not set.
std::string_view variable(const char* name) noexcept {
  const char* const value = std::getenv(name);
  return value != nullptr ? value : std::string_view();
}

// Whether the filter leaves `program` out: a !pattern matches it, or none of the plain patterns does.
bool left_out(std::string_view filter, std::string_view program) noexcept {
  bool wanted = false;
  bool any_wanted = false;
  while (!filter.empty()) {
    std::string_view item = trim(take_until(filter, ','));
    if (item.empty()) continue;
    if (item.front() == '!') {
      if (matches_pattern(trim(item.substr(1)), program)) return true;
    } else {
      any_wanted = true;
      wanted = wanted || matches_pattern(item, program);
    }
  }
  return any_wanted && !wanted;
}

}  // namespace

// Linear but for the last star, which is retried.
bool matches_pattern(std::string_view pattern, std::string_view text) noexcept {
  std::size_t p = 0;
  std::size_t star = std::string_view::npos;
  std::size_t retry = 0;
  for (std::size_t t = 0; t < text.size();) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      retry = t;
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == text[t])) {
      ++p;
      ++t;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      t = ++retry;
    } else {
      return false;
    }
  }
  return pattern.substr(std::min(p, pattern.size())).find_first_not_of('*') == std::string_view::npos;
}

std::optional<Tracking> parse_tracking(std::string_view text) noexcept {
  std::string_view rest = text;
  const std::string_view word = take_until(rest, ':');
  for (std::size_t i = 0; i < std::size(kTrackLevels); ++i) {
    if (!same_word(kTrackLevels[i], word)) continue;
    const auto level = static_cast<TrackLevel>(i);
    if (level != TrackLevel::sampled) return word.size() == text.size() ? std::optional(Tracking{level}) : std::nullopt;
    if (word.size() == text.size()) return Tracking{level, Tracking::kInterval};
    const std::optional<Size> interval = parse_size(rest);
    if (!interval || interval->percent >= 0 || interval->bytes == 0 || interval->bytes >> 62 != 0) return std::nullopt;
    return Tracking{level, interval->bytes};
  }
  return std::nullopt;
}

std::string_view tracking_values() noexcept { return find("TRACK")->range; }

std::span<const OptionInfo> option_table() noexcept { return kTable; }

std::string check_option(std::string_view name, std::string_view value) {
  const OptionInfo* const option = find(name);
  if (option == nullptr) return unknown(name);
  Options scratch;
  return assign(scratch, *option, value) ? std::string() : invalid(*option, value);
}

OptionsResult read_options(const char* const* environment) noexcept {
  OptionsResult result;
  try {
    read_into(result, environment);
  } catch (...) {
    // No memory for a few strings: step aside even if the line saying so finds no room either.
    result.options.allocator = AllocatorKind::cuda;
    result.options.disable = DisableMode::always;
    try {
      result.errors.emplace_back("out of host memory while reading the CUSHION_ options");
    } catch (...) {  // NOLINT(bugprone-empty-catch)
    }
  }
  return result;
}

std::vector<std::pair<std::string, std::string>> describe(const Options& options) {
  return {
#define CUSHION_OPTION(type, field, name, fallback, range, help) {name, write(options.field, range)},
#include "core/options.def"
#undef CUSHION_OPTION
  };
}

bool inert(const char* program) noexcept {
  if (getauxval(AT_SECURE) != 0) return true;
  if (variable("CUSHION_DISABLE") == "1") return true;
  return left_out(variable("CUSHION_PROGRAMS"), program == nullptr ? std::string_view() : program);
}

bool serves_under_checkers() noexcept { return variable("CUSHION_DISABLE") == "0"; }

std::string expand_path(std::string_view pattern, const PathWords& words) {
  std::string path;
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    const char next = pattern[i] == '%' && i + 1 < pattern.size() ? pattern[i + 1] : '\0';
    const auto word = std::ranges::find(words, next, &PathWords::value_type::first);
    if (next == '%') {
      path += '%';
    } else if (next != '\0' && word != words.end()) {
      path += word->second;
    } else {
      path += pattern[i];
      continue;
    }
    ++i;
  }
  return path;
}

std::string_view find_rank(const char* const* environment) noexcept {
  const auto value = [&](std::string_view name) -> std::string_view {
    for (const char* const* entry = environment; entry != nullptr && *entry != nullptr; ++entry) {
      const std::string_view text = *entry;
      if (text.size() > name.size() && text.starts_with(name) && text[name.size()] == '=')
        return text.substr(name.size() + 1);
    }
    return {};
  };
  // torchrun starts its own processes inside a task of another launcher's.
  if (!value("TORCHELASTIC_RUN_ID").empty() && !value("RANK").empty()) return value("RANK");
  for (const char* name :
       {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID", "RANK"}) {
    if (const std::string_view rank = value(name); !rank.empty()) return rank;
  }
  return {};
}

}  // namespace cushion
