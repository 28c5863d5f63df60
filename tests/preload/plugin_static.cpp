// A library with a static object: it allocates while the library is loaded, and frees while it is unloaded.
#include "driver_api.h"

namespace {

struct Static {
  Static() {
    void* driver = open_driver();
    api_ = by_elf_name([=](const char* name) { return dlsym(driver, name); });
    std::printf("constructor alloc: %d\n", api_.alloc(&block_, 7000));
  }
  ~Static() {
    std::printf("destructor: %s", bytes_survive(api_, block_, 7000, 3));
    std::printf(" free %d\n", api_.free(block_));
  }

 private:
  DriverApi api_;
  CUdeviceptr block_ = 0;
} object;

}  // namespace
