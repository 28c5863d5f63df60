// A driver-API program that keeps blocks of several kinds, and frees others, so that its report has something to show:
// two streams, both ways of allocating, sizes that repeat. `leaks N` keeps N blocks more.
#include <cstdlib>
#include <vector>

#include "tests/preload/driver_api.h"

namespace {

DriverApi api;

CUdeviceptr keep(std::size_t size) {
  CUdeviceptr block = 0;
  if (api.alloc(&block, size) != CUDA_SUCCESS) std::exit(1);
  return block;
}

CUdeviceptr keep_async(std::size_t size, CUstream stream) {
  CUdeviceptr block = 0;
  if (api.alloc_async(&block, size, stream) != CUDA_SUCCESS) std::exit(1);
  return block;
}

}  // namespace

int main(int argc, char** argv) {
  void* const driver = open_driver();
  api = by_elf_name([=](const char* name) { return dlsym(driver, name); });
  const auto create = reinterpret_cast<decltype(&cuStreamCreate)>(dlsym(driver, "cuStreamCreate"));
  use_device(api);
  CUstream stream = nullptr;
  if (create(&stream, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS) return 1;
  std::vector<CUdeviceptr> temporaries;
  for (std::size_t i = 1; i <= 200; ++i) temporaries.push_back(keep(i * 10'000));
  for (const CUdeviceptr block : temporaries) api.free(block);
  for (int i = 0; i < 5; ++i) keep(3'000'000);
  for (int i = 0; i < 3; ++i) keep_async(70'000, stream);
  keep_async(1'000, nullptr);
  for (int i = 0; argc > 1 && i < std::atoi(argv[1]); ++i) keep(12'345);
  std::printf("kept\n");
  return 0;
}
