// The driver's interface under its ELF names.
//
// cuda.h renames functions with macros (cuMemAlloc is cuMemAlloc_v2, and so on), which is the opposite of what the
// driver's own side needs. Compiled the way NVIDIA compiles the driver, the same header declares every exported
// function under its exact ELF name, old ABIs and the _ptds/_ptsz variants included, and no macro is left.
// Every source of the emulator includes this file instead of cuda.h.
#pragma once

#define __CUDA_API_VERSION_INTERNAL
#pragma GCC visibility push(default)
#include <cuda.h>
#pragma GCC visibility pop

namespace emu {

// How a body refuses a call: thrown inside the emulator, turned into a return code at the exported function.
struct Failure {
  CUresult code;
};

[[noreturn]] inline void Fail(CUresult code) { throw Failure{code}; }

inline void Require(bool condition, CUresult code = CUDA_ERROR_INVALID_VALUE) {
  if (!condition) Fail(code);
}

// Codes after which a context answers nothing else (contract §2, sticky errors).
constexpr bool IsSticky(CUresult code) {
  return code == CUDA_ERROR_ILLEGAL_ADDRESS || code == CUDA_ERROR_LAUNCH_TIMEOUT ||
         (code >= CUDA_ERROR_ASSERT && code <= CUDA_ERROR_LAUNCH_FAILED && code != CUDA_ERROR_TOO_MANY_PEERS &&
          code != CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED && code != CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
}

}  // namespace emu
