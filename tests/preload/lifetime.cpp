// Device memory used before main and after it: in a static constructor, in atexit handlers registered before
// and after the first allocation, in a static destructor.
#include "driver_api.h"

namespace {

CUdeviceptr early_block = 0;

const DriverApi& driver() {
  static const DriverApi api = [] {
    void* handle = open_driver();
    return by_elf_name([&](const char* name) { return dlsym(handle, name); });
  }();
  return api;
}

void late(const char* where) {
  CUdeviceptr block = 0;
  std::printf("%s: alloc %d", where, driver().alloc(&block, 3000));
  std::printf(" free %d\n", driver().free(block));
}

struct Static {
  Static() {
    std::atexit([] { late("handler registered before the first allocation"); });
    use_device(driver());
    std::printf("constructor alloc: %d\n", driver().alloc(&early_block, 2000));
  }
  ~Static() {
    std::printf("destructor free: %d\n", driver().free(early_block));
    late("destructor");
  }
} object;

}  // namespace

int main() {
  std::atexit([] { late("handler registered in main"); });
  exercise_memory(driver());
  return 9;
}
