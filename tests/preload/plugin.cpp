// A plugin that uses device memory and is unloaded while its block lives on.
#include "driver_api.h"

extern "C" __attribute__((visibility("default"))) CUdeviceptr plugin_alloc() {
  void* driver = open_driver();
  DriverApi api = by_elf_name([&](const char* name) { return dlsym(driver, name); });
  use_device(api);
  CUdeviceptr block = 0;
  std::printf("plugin alloc: %d\n", api.alloc(&block, 5000));
  dlclose(driver);
  return block;
}
