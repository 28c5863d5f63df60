// Helper: the thread of CUSHION_CTL=on, which answers requests at once where otherwise the next allocation call would.
//
// It blocks all signals, sleeps until a request rings the page's doorbell (a futex: no polling), calls no CUDA, and
// takes no part in the program's end. A forked child has none.
#pragma once

#include "core/runtime.h"

namespace cushion {

// False if there can be no thread.
bool start_helper(Runtime& runtime) noexcept;

}  // namespace cushion
