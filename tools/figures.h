// Figures, written: as a person reads them, and as one line of JSON.
#pragma once

#include <string>

#include "tools/control.h"

namespace cushion {

std::string shown_bytes(std::uint64_t bytes);  // "1.50 GiB"

std::string shown_hits(const Figures& figures);  // of the allocations: "97.5 %", or "-"

// `rate`: allocation calls a second; negative: not known.
std::string to_json(const Figures& figures, double rate);

}  // namespace cushion
