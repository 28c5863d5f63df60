// Asking: a request to another process of the user's, through its control page.
//
// Thread safety: any thread; askers of one process come one after another, by its file's lock. Cost: 1 ms at least,
// as answers are looked for so often; at most what the caller allows. Throws std::bad_alloc.
#pragma once

#include <chrono>
#include <string>

#include "core/control_file.h"

namespace cushion {

struct Answer {
  bool done = false;
  std::string said;  // what the process says of what it did; else: why not
};
// Waits for the answer for `patience`, and if the process has begun by then for `work` more. `waiting`, if any, is
// called once if the answer does not come at once.
Answer ask(const OpenPage& page, RequestKind kind, const std::string& text, std::chrono::milliseconds patience,
           std::chrono::milliseconds work, void (*waiting)(const OpenPage&));

// Has it look for requests, and bring its figures up to date.
void ring(const OpenPage& page);

// Asks every other process of the user's that has a thread for it (CTL=on) to give unused device memory back. Whether
// any did.
bool others_trim(std::chrono::milliseconds patience);

}  // namespace cushion
