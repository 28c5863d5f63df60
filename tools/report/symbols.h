// The symbols of one module (a program or library): what its file, and the separate debug file that belongs to it, say
// of an address.
//
// Invariant: they are of the very module that was asked for, by its build id, or there are none; a file that is gone,
// damaged or of another kind is no error. Nothing is asked of the network.
// Cost: the module's units are listed when it is opened; a unit's functions when the first address in it is asked for.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tools/report/report_file.h"

namespace cushion {

struct Place {  // what is unknown is empty or 0
  std::string function;
  std::string file;
  std::uint64_t line = 0;
};

class ModuleSymbols {
 public:
  // Separate debug files are looked for in `debug_dirs` and where they usually are (beside the module, in .debug and
  // in /usr/lib/debug), by build id and by .gnu_debuglink.
  ModuleSymbols(const Module& module, const std::vector<std::string>& debug_dirs);
  ~ModuleSymbols();

  // Innermost first; all but the last were inlined into the next. Empty: nothing is known. The address is the file's.
  std::vector<Place> at(std::uint64_t address);

  // Why there are no symbols although there is a file, for a person.
  const std::string& problem() const { return problem_; }

 private:
  class File;
  std::unique_ptr<File> file_;  // none: no symbols
  std::string problem_;
};

}  // namespace cushion
