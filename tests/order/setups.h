// Setups: the mixes of options, and of driver and device, that programs run under.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace order {

struct Setup {
  std::string name;
  std::map<std::string, std::string> environment;
  // Under CUSHION_FREE=deferred what cudaFree's wait orders is given up.
  bool free_returns() const {
    const auto found = environment.find("CUSHION_FREE");
    return found != environment.end() && found->second == "deferred";
  }
  // CUSHION_INIT and CUSHION_GUARD put a fill on the stream of an allocation, CUSHION_QUARANTINE on that of a free: on
  // the legacy stream that holds others back, which is seen where a kernel spins.
  bool fills() const {
    return environment.contains("CUSHION_INIT") || environment.contains("CUSHION_GUARD") ||
           environment.contains("CUSHION_QUARANTINE");
  }
};

// Its environment, each variable after a blank.
std::string Print(const Setup& setup);

const std::vector<Setup>& AllSetups();

// "all", names of setups separated by commas, or one of the caller's own: "NAME=VALUE NAME=VALUE ...".
std::vector<Setup> SetupsOf(const std::string& text);

}  // namespace order
