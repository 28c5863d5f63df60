// Route: one dlsym of the five-argument cuGetProcAddress_v2, everything else through it, before cuInit.
// It is what NVIDIA's static runtime does, so it is how most programs arrive.
#include "driver_api.h"

int main() {
  auto get = reinterpret_cast<GetProcAddress5>(dlsym(open_driver(), "cuGetProcAddress_v2"));
  require(get, "cuGetProcAddress_v2");
  return exercise(by_name([&](const char* name) {
    void* found = nullptr;
    CUdriverProcAddressQueryResult status{};
    const CUresult result = get(name, &found, 12000, CU_GET_PROC_ADDRESS_DEFAULT, &status);
    std::printf("%s: %d status %d\n", name, result, status);
    return found;
  }));
}
