// Route: the per-thread-stream variants, as `--default-stream per-thread` programs find them: by their _ptsz
// ELF names, and from cuGetProcAddress with flag 2. Stream 0 then means the calling thread's own stream.
#include "driver_api.h"

int main() {
  void* driver = open_driver();
  std::printf("by name\n");
  exercise(by_elf_name([&](const char* name) { return dlsym(driver, name); }, true));

  auto get = reinterpret_cast<GetProcAddress5>(dlsym(driver, "cuGetProcAddress_v2"));
  require(get, "cuGetProcAddress_v2");
  std::printf("by flag\n");
  return exercise(by_name([&](const char* name) {
    void* found = nullptr;
    CUdriverProcAddressQueryResult status{};
    get(name, &found, 12000, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, &status);
    return found;
  }));
}
