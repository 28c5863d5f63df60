// Route: the program takes the C library's own dlsym with dlvsym, as tools that wrap dlsym do, and asks that one.
// Nothing interposes dlvsym, so these answers are the driver's own. Such a block must live beside the pool's:
// what the driver itself allocated is freed by the hooked cuMemFree, and counted as forwarded.
#include "driver_api.h"

int main() {
  void* driver = open_driver();
  DriverApi api = by_elf_name([&](const char* name) { return dlsym(driver, name); });

  void* plain_dlsym = nullptr;
  for (const char* version : {"GLIBC_2.34", "GLIBC_2.17", "GLIBC_2.2.5"})
    if (plain_dlsym == nullptr) plain_dlsym = dlvsym(RTLD_DEFAULT, "dlsym", version);
  require(plain_dlsym, "dlsym by dlvsym");
  auto find = reinterpret_cast<decltype(&dlsym)>(plain_dlsym);
  auto plain_alloc = reinterpret_cast<decltype(api.alloc)>(find(driver, "cuMemAlloc_v2"));
  require(plain_alloc, "cuMemAlloc_v2");
  exercise(api);

  CUdeviceptr block = 0;
  std::printf("alloc by the other dlsym: %d\n", plain_alloc(&block, 1000));
  std::printf("  %s\n", bytes_survive(api, block, 1000, 3));
  std::printf("free: %d\n", api.free(block));
  std::printf("free again: %d\n", api.free(block));
  return 0;
}
