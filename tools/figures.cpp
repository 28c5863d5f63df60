#include "tools/figures.h"

#include <fmt/core.h>

#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>

namespace cushion {

std::string shown_bytes(std::uint64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto shown = static_cast<double>(bytes);
  std::size_t unit = 0;
  for (; shown >= 1024 && unit + 1 < std::size(kUnits); ++unit) shown /= 1024;
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.2f} {}", shown, kUnits[unit]);
}

std::string shown_hits(const Figures& figures) {
  if (figures.calls == 0) return "-";
  // The counts run behind one another.
  const double share = static_cast<double>(std::min(figures.hits, figures.calls)) / static_cast<double>(figures.calls);
  return fmt::format("{:.1f} %", 100 * share);
}

std::string to_json(const Figures& figures, double rate) {
  nlohmann::ordered_json json;
  json["pid"] = figures.key.pid;
  json["program"] = figures.program;
  json["track"] = figures.track;
  json["answers_at_once"] = figures.helper;
  json["devices"] = nlohmann::ordered_json::array();
  for (const DeviceFigures& d : figures.devices)
    json["devices"].push_back({{"device", d.device}, {"live", d.live}, {"held", d.held}, {"peak", d.peak}});
  json["calls"] = figures.calls;
  json["frees"] = figures.frees;
  json["hits"] = figures.hits;
  json["waits"] = figures.waits;
  json["counted_s_ago"] = figures.age_s >= 0 ? nlohmann::ordered_json(figures.age_s) : nlohmann::ordered_json();
  json["calls_per_s"] = rate >= 0 ? nlohmann::ordered_json(rate) : nlohmann::ordered_json();
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace cushion
