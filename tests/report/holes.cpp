// A driver-API program that has holes between its blocks when most of them are live, and says where they are then, an
// address and a size a line: `holes FILE` ends so, `holes FILE freed` frees them all first.
#include <unistd.h>

#include <cstdio>
#include <map>

#include "tests/preload/driver_api.h"

int main(int argc, char** argv) {
  void* const driver = open_driver();
  const DriverApi api = by_elf_name([=](const char* name) { return dlsym(driver, name); });
  use_device(api);
  std::map<CUdeviceptr, std::size_t> blocks;
  const auto allocate = [&](std::size_t size) {
    CUdeviceptr block = 0;
    if (api.alloc(&block, size) != CUDA_SUCCESS) std::exit(1);
    blocks[block] = size;
  };
  const auto release = [&](auto block) {
    api.free(block->first);
    return blocks.erase(block);
  };
  for (int i = 0; i < 64; ++i) allocate(std::size_t{1} << 20);
  for (auto block = blocks.begin(); block != blocks.end(); block == blocks.end() ? block : ++block)
    block = release(block);
  allocate(std::size_t{64} << 10);
  for (int i = 0; i < 3; ++i) allocate(std::size_t{40} << 20);  // more than any hole
  std::FILE* const file = argc > 1 ? std::fopen(argv[1], "w") : nullptr;
  if (file == nullptr) return 1;
  for (const auto& [address, size] : blocks) std::fprintf(file, "%llu %zu\n", address, size);
  std::fclose(file);
  if (argc > 2) {
    usleep(100'000);  // so that a point of the time line is due
    allocate(512);
    for (auto block = blocks.begin(); block != blocks.end();) block = release(block);
  }
  return 0;
}
