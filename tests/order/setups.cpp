#include "tests/order/setups.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>

namespace order {
namespace {

using Environment = std::map<std::string, std::string>;

Setup Make(std::string name, Environment environment, const Environment& more = {}) {
  environment.insert(more.begin(), more.end());
  return {std::move(name), std::move(environment)};
}

std::vector<Setup> MakeAll() {
  std::vector<Setup> setups;
  const Environment deferred{{"CUSHION_FREE", "deferred"}};
  const auto both = [&](const std::string& name, const Environment& environment) {
    setups.push_back(Make(name, environment));
    setups.push_back(Make(name + "_deferred", environment, deferred));
  };
  const Environment tight{
      {"CUSHION_MAX_SIZE", "4MiB"}, {"CUSHION_SEGMENT_SIZE", "2MiB"}, {"CUSHION_SUPERBLOCK_SIZE", "2MiB"}};
  const Environment full{{"EMU_MEMORY", "12M"},
                         {"CUSHION_SEGMENT_SIZE", "2MiB"},
                         {"CUSHION_SUPERBLOCK_SIZE", "2MiB"},
                         {"CUSHION_OOM_WAIT", "1ms"}};
  for (const char* allocator : {"pool", "arena", "binning"}) {
    const Environment chosen{{"CUSHION_ALLOCATOR", allocator}};
    const auto with = [&](const Environment& more) { return Make("", chosen, more).environment; };
    both(allocator, chosen);
    setups.push_back(Make(std::string(allocator) + "_auto", with({{"CUSHION_FREE", "auto"}})));
    both(std::string(allocator) + "_tight", with(tight));
    both(std::string(allocator) + "_full", with(full));
    both(std::string(allocator) + "_no_magazine", with({{"CUSHION_MAGAZINE_SIZE", "0"}}));
    both(std::string(allocator) + "_old", with({{"EMU_DRIVER_VERSION", "12040"}}));
  }
  both("pool_old_tight", Make("", tight, {{"EMU_DRIVER_VERSION", "12000"}}).environment);
  both("pool_old_full", Make("", full, {{"EMU_DRIVER_VERSION", "12000"}}).environment);
  both("pool_release", {{"CUSHION_RELEASE_THRESHOLD", "0"}, {"CUSHION_SEGMENT_SIZE", "2MiB"}});
  const Environment vmm{{"CUSHION_BACKING", "vmm"}};
  for (const char* allocator : {"pool", "arena"}) {
    const Environment chosen = Make("", vmm, {{"CUSHION_ALLOCATOR", allocator}}).environment;
    both(std::string(allocator) + "_vmm", chosen);
    both(std::string(allocator) + "_vmm_tight", Make("", chosen, tight).environment);
    both(std::string(allocator) + "_vmm_full", Make("", chosen, full).environment);
    setups.push_back(Make(std::string(allocator) + "_vmm_auto", chosen, {{"CUSHION_FREE", "auto"}}));
  }
  both("pool_vmm_release", Make("", vmm, {{"CUSHION_RELEASE_THRESHOLD", "0"}}).environment);
  both("pool_zero", {{"CUSHION_INIT", "zero"}});
  both("pool_guard", {{"CUSHION_GUARD", "100"}});
  setups.push_back(Make("arena_guard_tight",
                        Make("", tight, {{"CUSHION_GUARD", "4KiB"}, {"CUSHION_ALLOCATOR", "arena"}}).environment));
  both("pool_quarantine", {{"CUSHION_QUARANTINE", "1MiB"}});
  both("pool_quarantine_full", Make("", full, {{"CUSHION_QUARANTINE", "8MiB"}, {"CUSHION_GUARD", "64"}}).environment);
  setups.push_back(
      Make("binning_quarantine_tight",
           Make("", tight, {{"CUSHION_QUARANTINE", "3MiB"}, {"CUSHION_ALLOCATOR", "binning"}}).environment));
  both("async", {{"CUSHION_ALLOCATOR", "async"}});
  both("async_full", Make("", full, {{"CUSHION_ALLOCATOR", "async"}}).environment);
  setups.push_back(Make("cuda", {{"CUSHION_ALLOCATOR", "cuda"}}));
  setups.push_back(Make("track", {{"CUSHION_TRACK", "stacks"}, {"CUSHION_REPORT", "/dev/null"}}));
  return setups;
}

}  // namespace

std::string Print(const Setup& setup) {
  std::string text;
  for (const auto& [name, value] : setup.environment) text += " " + name + "=" + value;
  return text;
}

const std::vector<Setup>& AllSetups() {
  static const std::vector<Setup> all = MakeAll();
  return all;
}

std::vector<Setup> SetupsOf(const std::string& text) {
  if (text == "all") return AllSetups();
  if (text.find('=') != std::string::npos) {
    Setup own{"own", {}};
    std::istringstream words(text);
    for (std::string word; words >> word;) {
      const std::size_t equals = word.find('=');
      if (equals == std::string::npos) throw std::invalid_argument("not NAME=VALUE: " + word);
      own.environment[word.substr(0, equals)] = word.substr(equals + 1);
    }
    return {own};
  }
  std::vector<Setup> chosen;
  std::istringstream names(text);
  for (std::string name; std::getline(names, name, ',');) {
    const auto& all = AllSetups();
    const auto found = std::find_if(all.begin(), all.end(), [&](const Setup& setup) { return setup.name == name; });
    if (found == all.end()) throw std::invalid_argument("no setup is called " + name);
    chosen.push_back(*found);
  }
  return chosen;
}

}  // namespace order
