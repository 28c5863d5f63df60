// A program that uses device memory wrongly, in ways that natively go unnoticed but for a code:
//
//     misuse frees      frees what is no block: a second time, inside a block, what was never allocated
//     misuse many       frees a block 30 times
//     misuse guard      writes behind blocks: 3 bytes of one by cudaMalloc, 1 of one by cudaMallocAsync
//     misuse late       writes to blocks after their free, one by each kind of call, and goes on allocating
//     misuse none       uses memory of all sizes as it should
#include <string_view>
#include <vector>

#include "driver_api.h"

namespace {

DriverApi g_api;
decltype(&::cuCtxSynchronize) g_synchronize = nullptr;

[[gnu::noinline]] CUdeviceptr allocate(std::size_t bytes) {
  CUdeviceptr block = 0;
  g_api.alloc(&block, bytes);
  return block + 0;
}

[[gnu::noinline]] int wrong_frees() {
  const CUdeviceptr kept = allocate(5000);
  const CUdeviceptr twice = allocate(70000);
  std::printf("inside %d\n", g_api.free(kept + 512));
  std::printf("inside %d\n", g_api.free(kept + 100));
  std::printf("inside %d\n", g_api.free_async(kept + 1024, nullptr));
  std::printf("first %d\n", g_api.free(twice));
  std::printf("second %d\n", g_api.free(twice));
  std::printf("second %d\n", g_api.free_async(twice, nullptr));
  std::printf("never %d\n", g_api.free(kept + (std::size_t{1} << 20)));
  std::printf("last %d\n", g_api.free(kept));
  return 0;
}

[[gnu::noinline]] int many_frees() {
  const CUdeviceptr block = allocate(5000);
  int refused = 0;
  for (int i = 0; i < 30; ++i) refused += g_api.free(block) != CUDA_SUCCESS;
  std::printf("refused %d\n", refused);
  return 0;
}

[[gnu::noinline]] int write_behind() {
  const CUdeviceptr block = allocate(5000);
  CUdeviceptr ordered = 0;
  g_api.alloc_async(&ordered, 6000, nullptr);
  const CUdeviceptr good = allocate(7000);
  g_api.memset(block + 5008, 1, 3);
  g_api.memset(ordered + 6000, 1, 1);
  g_api.memset(good, 1, 7000);
  std::printf("%d\n", g_api.free(block));
  std::printf("%d\n", g_api.free_async(ordered, nullptr));
  std::printf("%d\n", g_api.stream_synchronize(nullptr));
  std::printf("%d\n", g_api.free(good));
  std::printf("%d\n", g_synchronize());
  return 0;
}

[[gnu::noinline]] int write_late() {
  const CUdeviceptr block = allocate(5000);
  CUdeviceptr ordered = 0;
  g_api.alloc_async(&ordered, 6000, nullptr);
  std::printf("%d\n", g_api.free(block));
  std::printf("%d\n", g_api.free_async(ordered, nullptr));
  std::printf("%d\n", g_synchronize());
  g_api.memset(block + 40, 1, 3);
  g_api.memset(ordered, 1, 1);
  std::printf("%d\n", g_synchronize());
  for (int i = 0; i < 100; ++i) std::printf("%d", g_api.free(allocate(50000)));
  std::printf("\n%d\n", g_api.free(block));
  return 0;
}

[[gnu::noinline]] int right_use() {
  std::vector<CUdeviceptr> blocks;
  for (std::size_t bytes = 1; bytes < (std::size_t{8} << 20); bytes = bytes * 3 + 1) {
    blocks.push_back(allocate(bytes));
    CUdeviceptr ordered = 0;
    g_api.alloc_async(&ordered, bytes, nullptr);
    std::printf("%s, %s\n", bytes_survive(g_api, blocks.back(), bytes, 1), bytes_survive(g_api, ordered, bytes, 2));
    std::printf("%d\n", bytes % 2 == 0 ? g_api.free_async(ordered, nullptr) : g_api.free(ordered));
  }
  for (const CUdeviceptr block : blocks)
    std::printf("%d\n", block % 1024 == 0 ? g_api.free(block) : g_api.free_async(block, nullptr));
  std::printf("%d\n", g_api.stream_synchronize(nullptr));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  void* const driver = open_driver();
  g_api = by_elf_name([&](const char* name) { return dlsym(driver, name); });
  g_synchronize = reinterpret_cast<decltype(g_synchronize)>(dlsym(driver, "cuCtxSynchronize"));
  use_device(g_api);
  const std::string_view mode = argc > 1 ? argv[1] : "";
  if (mode == "frees") return wrong_frees();
  if (mode == "many") return many_frees();
  if (mode == "guard") return write_behind();
  if (mode == "late") return write_late();
  return mode == "none" ? right_use() : 64;
}
