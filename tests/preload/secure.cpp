// A program that loads the driver and Cushion itself, by their paths: also where the loader ignores LD_PRELOAD.
#include <sys/auxv.h>

#include "driver_api.h"

int main(int argc, char** argv) {
  if (argc != 3) return 64;
  std::printf("secure %d\n", getauxval(AT_SECURE) != 0);
  void* driver = dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL);
  void* cushion = dlopen(argv[2], RTLD_NOW);
  if (driver == nullptr || cushion == nullptr) {
    std::printf("%s\n", dlerror());
    return 65;
  }
  // The calls that Cushion hooks are asked of it, all others of the driver.
  const DriverApi api = by_elf_name([=](const char* name) {
    void* hook = dlsym(cushion, name);
    return hook != nullptr ? hook : dlsym(driver, name);
  });
  use_device(api);
  CUdeviceptr block = 0;
  std::printf("alloc %d\n", api.alloc(&block, 1000));
  return 0;
}
