// Starting a program under Cushion: find the library, put it first in LD_PRELOAD, become the program.
//
// Invariant: the program replaces this process, so its pid, signals, terminal and exit status are its own.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace cushion {

struct LibrarySearch {
  std::string path;                   // absolute; empty if there is none
  std::vector<std::string> searched;  // every place looked at, in order
};
// `given` if it is not empty, else beside this executable (a build tree) or in the lib folders next to its own
// (an installation).
LibrarySearch find_library(const std::string& given);

// The file a shell would run for `name`: itself if it has a slash, else the first executable of that name in
// PATH; empty if there is none.
std::string find_program(const std::string& name);

// Why the dynamic loader cannot be given this path in LD_PRELOAD; empty if it can.
std::string preload_problem(std::string_view library);

// LD_PRELOAD with `library` first and everything that is in `current` kept, in order.
std::string preload_value(std::string_view library, std::string_view current);

// Becomes `command` (null at its end). Returns only if that fails, with a shell's exit status for it: 127 if
// the program was not found, 126 if it cannot be executed.
int become(const std::string& library, char* const* command);

}  // namespace cushion
