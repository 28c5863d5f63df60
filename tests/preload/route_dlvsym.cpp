// Route: dlvsym. The driver's symbols have no versions, so any version finds them. Nothing interposes dlvsym:
// its answers are the driver's own, and such a pointer must live beside the hooked functions: what the
// driver itself allocated is freed by the hooked cuMemFree, and counted as forwarded.
#include "driver_api.h"

int main() {
  void* driver = open_driver();
  DriverApi api = by_elf_name([&](const char* name) { return dlsym(driver, name); });
  auto plain_alloc = reinterpret_cast<decltype(api.alloc)>(dlvsym(driver, "cuMemAlloc_v2", "CUDA_ANY"));
  require(plain_alloc, "cuMemAlloc_v2 by dlvsym");
  exercise(api);

  CUdeviceptr block = 0;
  std::printf("alloc by dlvsym: %d\n", plain_alloc(&block, 1000));
  std::printf("  %s\n", bytes_survive(api, block, 1000, 3));
  std::printf("free by dlsym: %d\n", api.free(block));
  std::printf("free again: %d\n", api.free(block));
  return 0;
}
