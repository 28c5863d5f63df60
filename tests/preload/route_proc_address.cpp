// Route: dlsym("cuGetProcAddress"), the four-argument form of CUDA 11.3. A wrapper with the later ABI would
// write its query result through a register that holds whatever the caller left there.
#include "driver_api.h"

int main() {
  auto get = reinterpret_cast<GetProcAddress4>(dlsym(open_driver(), "cuGetProcAddress"));
  require(get, "cuGetProcAddress");
  return exercise(by_name([&](const char* name) {
    void* found = nullptr;
    const CUresult result = get(name, &found, 11030, CU_GET_PROC_ADDRESS_DEFAULT);
    std::printf("%s: %d\n", name, result);
    return found;
  }));
}
