// The driver as a test program sees it: a typed table, filled at first use.
//
// The route is that of CUDA's own static runtime: dlopen("libcuda.so.1"), dlsym("cuGetProcAddress_v2"), and everything
// else through that, so that a preloaded shim sees it. The program links to no CUDA library; LD_LIBRARY_PATH says
// whether it meets the emulated driver or the real one. A function that the driver does not have is null.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>

#include <iosfwd>
#include <string>

// googletest prints a result by its name.
void PrintTo(CUresult result, std::ostream* out);

namespace harness {

struct Driver {
#define X(name, version) PFN_cu##name##_v##version name = nullptr;
#define T(name, version) PFN_cu##name##_v##version name = nullptr, name##_ptsz = nullptr;
#include "tests/harness/driver_functions.def"
#undef X
#undef T

  PFN_cuGetProcAddress_v12000 GetProcAddress = nullptr;
  void* library = nullptr;  // for dlsym

  // Why there is no usable driver or device here; empty where there is.
  static const std::string& Missing();

  // Whether the driver is the emulated one.
  static bool Emulated();
};

const Driver& driver();

// The same as found by a program that has no per-thread default streams: it asks for no _ptsz variant.
const Driver& driver_without_per_thread();

}  // namespace harness
