// Interpreter: runs a program over the emulated driver in stepped mode and writes down what happened.
//
// The same program runs twice. The native run goes first: it skips a step that the program would have to answer for
// itself (memory used outside its life, or without the order that its life has; calls that a capture forbids; waits
// that cannot end) and says what every driver guarantees. The run under Cushion takes the steps that the native one
// took.
#pragma once

#include "tests/order/trace.h"

namespace order {

struct RunOptions {
  std::uint64_t seed = 0;
  const Trace* native = nullptr;  // of the native run; null: this is it
  bool free_returns = false;      // cudaFree gives no order (CUSHION_FREE=deferred)
};

// Once a process: CUDA starts here and is not ended.
void Run(const Program& program, const RunOptions& options, Trace& trace);

}  // namespace order
