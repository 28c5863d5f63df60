#include "core/driver.h"

namespace cushion {

constinit thread_local int t_inside = 0;

bool DriverTable::bind(void* (*find)(const char* name)) noexcept {
  cuDriverGetVersion = reinterpret_cast<decltype(cuDriverGetVersion)>(find("cuDriverGetVersion"));
  if (cuDriverGetVersion == nullptr || cuDriverGetVersion(&version) != CUDA_SUCCESS) return false;
#define CUSHION_DRIVER(elf, base, since) \
  elf = version < (since) ? nullptr : reinterpret_cast<decltype(elf)>(find(#elf));
#include "core/driver.def"
#undef CUSHION_DRIVER
  return cuCtxGetCurrent != nullptr && cuMemAlloc_v2 != nullptr && cuMemFree_v2 != nullptr;
}

}  // namespace cushion
