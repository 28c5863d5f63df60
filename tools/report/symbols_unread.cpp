// Stands in for symbols.cpp in a build without libdw.
#include "tools/report/symbols.h"

namespace cushion {

class ModuleSymbols::File {};

ModuleSymbols::ModuleSymbols(const Module&, const std::vector<std::string>&) {}
ModuleSymbols::~ModuleSymbols() = default;
std::vector<Place> ModuleSymbols::at(std::uint64_t) { return {}; }

}  // namespace cushion
