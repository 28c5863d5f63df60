// Report: what the program allocated, what is still live and what it cost, as JSON (schema "cushion-report" 1, whose
// keys README explains) or as text.
//
// Written from host memory only: not one CUDA call. The same code serves exit and a deadly signal, so it allocates
// nothing (its scratch comes from mmap; a report on demand, which no handler writes, allocates the names of files),
// uses little stack, and waits for a lock only as long as `Patience` says.
#pragma once

#include "core/block.h"
#include "core/patience.h"

namespace cushion {

class Runtime;

// Writes a report now, of a process that goes on: as JSON, or as text if the path ends in .txt; text to stderr if the
// path is null. It is written beside the path and renamed. 0, or why not.
int write_report_now(Runtime& runtime, const char* path) noexcept;

// Whether blocks of the program's own are live: all but those that the suppressions cover.
bool leaks(Runtime& runtime) noexcept;

// One block of text on stderr: what was asked for, what there is, who has most, and which option would have helped; and
// the report of this moment beside the one at the end, as NAME.oom.json.
void say_out_of_memory(Runtime& runtime, std::uint64_t bytes, Api api) noexcept;

// Writes the report where the options want it; nothing if they want none.
void write_report(Runtime& runtime, const char* how, Patience patience) noexcept;

}  // namespace cushion
