// Report: what the program allocated, what is still live and what it cost, as JSON (schema "cushion-report" 1, whose
// keys README explains) or as text.
//
// Written from host memory only: not one CUDA call. The same code serves exit and a deadly signal, so it allocates
// nothing (its scratch comes from mmap), uses little stack, and waits for a lock only as long as `Patience` says.
#pragma once

#include <ctime>
#include <string>

#include "core/patience.h"

namespace cushion {

class Runtime;

// Where the report at `path` is written until it is whole.
std::string partial_of(const std::string& path);

// Reserves the report's path for this process while it lives: creates its directories and `PATH.partial`, which the
// report is written to before it is renamed. If another live process has it, or another has written it since this one
// was `loaded`, the pid is appended. If it cannot be written, complains once and returns an empty path. A path that
// exists and is no regular file is taken as it is.
std::string claim_report_path(std::string path, long pid, timespec loaded);

// Writes the report where the options want it; nothing if they want none.
void write_report(Runtime& runtime, const char* how, Patience patience) noexcept;

}  // namespace cushion
