// Suppressions: blocks that are live at the end and are no leak of the program's: what libraries keep for themselves.
//
// A block is suppressed if a call of its stack matches a pattern: by function, by the file of its source (Python), or
// by the name of its library or program, without folders. `*` stands for any text, `?` for one character; case counts.
// The patterns are the built-in ones (caches of NVIDIA's libraries) and those of CUSHION_SUPPRESSIONS: one a line, what
// follows # is for people, spaces around it do not count.
//
// Cost: read once, at start; a look at each frame of the stack for each group of live blocks, when a report is written.
// Thread safety: read-only after read(); in a signal handler function names are not asked for (stacks.h), so patterns
// of native functions match nothing there.
#pragma once

#include <string>
#include <vector>

#include "core/stacks.h"

namespace cushion {

class Suppressions {
 public:
  // `file`: empty for the built-in patterns alone; "none" for no pattern. The error, or empty.
  std::string read(const std::string& file);

  // The pattern that covers the stack, or null.
  const char* covers(const Stacks& stacks, std::uint32_t id, bool may_ask_linker) const noexcept;

 private:
  std::vector<std::string> patterns_;
};

}  // namespace cushion
