// The driver functions that the route programs call, and what every one of them does with those: allocate
// in each way, use the memory, free it, provoke the errors that programs rely on, and print what was seen.
//
// Each program differs in one thing only: how it *finds* the functions. So each fills a DriverApi by its
// own route and hands it to exercise(). What is printed holds no address and no time: it must be the same
// line for line with and without a preload.
#pragma once

#include <cuda.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

// X(field, function in cuda.h, name for cuGetProcAddress, ELF name, ELF name of the per-thread-stream variant)
#define DRIVER_API(X)                                                                                 \
  X(init, cuInit, "cuInit", "cuInit", "cuInit")                                                       \
  X(device_get, cuDeviceGet, "cuDeviceGet", "cuDeviceGet", "cuDeviceGet")                             \
  X(primary_retain, cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRetain", \
    "cuDevicePrimaryCtxRetain")                                                                       \
  X(set_current, cuCtxSetCurrent, "cuCtxSetCurrent", "cuCtxSetCurrent", "cuCtxSetCurrent")            \
  X(alloc, cuMemAlloc, "cuMemAlloc", "cuMemAlloc_v2", "cuMemAlloc_v2")                                \
  X(free, cuMemFree, "cuMemFree", "cuMemFree_v2", "cuMemFree_v2")                                     \
  X(alloc_async, cuMemAllocAsync, "cuMemAllocAsync", "cuMemAllocAsync", "cuMemAllocAsync_ptsz")       \
  X(free_async, cuMemFreeAsync, "cuMemFreeAsync", "cuMemFreeAsync", "cuMemFreeAsync_ptsz")            \
  X(get_info, cuMemGetInfo, "cuMemGetInfo", "cuMemGetInfo_v2", "cuMemGetInfo_v2")                     \
  X(memset, cuMemsetD8, "cuMemsetD8", "cuMemsetD8_v2", "cuMemsetD8_v2_ptds")                          \
  X(to_host, cuMemcpyDtoH, "cuMemcpyDtoH", "cuMemcpyDtoH_v2", "cuMemcpyDtoH_v2_ptds")                 \
  X(stream_synchronize, cuStreamSynchronize, "cuStreamSynchronize", "cuStreamSynchronize", "cuStreamSynchronize_ptsz")

struct DriverApi {
#define X(field, function, name, elf, elf_per_thread) decltype(&::function) field = nullptr;
  DRIVER_API(X)
#undef X
};

// What a route found is nothing to go on with: say so and end, natively too.
template <class Function>
void require(Function* found, const char* name) {
  if (found != nullptr) return;
  std::printf("not found: %s\n", name);
  std::exit(70);
}

// Fills the table by ELF name. `find` maps a name to an address, as dlsym does.
template <class Find>
DriverApi by_elf_name(Find find, bool per_thread = false) {
  DriverApi api;
#define X(field, function, name, elf, elf_per_thread)                                         \
  api.field = reinterpret_cast<decltype(api.field)>(find(per_thread ? elf_per_thread : elf)); \
  require(api.field, name);
  DRIVER_API(X)
#undef X
  return api;
}

// Fills the table by versionless name. `find` maps a name to an address, as cuGetProcAddress does.
template <class Find>
DriverApi by_name(Find find) {
  DriverApi api;
#define X(field, function, name, elf, elf_per_thread)            \
  api.field = reinterpret_cast<decltype(api.field)>(find(name)); \
  require(api.field, name);
  DRIVER_API(X)
#undef X
  return api;
}

// cuGetProcAddress as CUDA 11.3 defined it, and as 12.0 does.
using GetProcAddress4 = CUresult (*)(const char*, void**, int, cuuint64_t);
using GetProcAddress5 = CUresult (*)(const char*, void**, int, cuuint64_t, CUdriverProcAddressQueryResult*);

inline void* open_driver() {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (driver == nullptr) {
    std::printf("no driver: %s\n", dlerror());
    std::exit(71);
  }
  return driver;
}

// Makes the device's primary context current on this thread.
inline void use_device(const DriverApi& api) {
  CUdevice device = 0;
  CUcontext context = nullptr;
  std::printf("init %d\n", api.init(0));
  std::printf("device %d\n", api.device_get(&device, 0));
  std::printf("context %d\n", api.primary_retain(&context, device));
  std::printf("current %d\n", api.set_current(context));
}

// Writes `value` all over the block, reads it back and says whether every byte came.
inline const char* bytes_survive(const DriverApi& api, CUdeviceptr block, std::size_t size, unsigned char value) {
  std::vector<unsigned char> seen(size, static_cast<unsigned char>(~value));
  if (api.memset(block, value, size) != CUDA_SUCCESS) return "memset failed";
  if (api.to_host(seen.data(), block, size) != CUDA_SUCCESS) return "copy failed";
  return seen == std::vector<unsigned char>(size, value) ? "bytes kept" : "wrong bytes";
}

inline void exercise_memory(const DriverApi& api) {
  constexpr std::size_t kSizes[] = {1, 1000, 64 << 10, 1 << 20, (3 << 20) + 1};
  std::vector<CUdeviceptr> blocks;
  for (std::size_t size : kSizes) {
    CUdeviceptr block = 0;
    std::printf("alloc %zu: %d\n", size, api.alloc(&block, size));
    std::printf("  aligned %d\n", block != 0 && block % 512 == 0);
    blocks.push_back(block);
  }
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    std::printf("  %s\n", bytes_survive(api, blocks[i], kSizes[i], static_cast<unsigned char>(i + 1)));
  }
  std::printf("free interior: %d\n", api.free(blocks[3] + 512));
  for (CUdeviceptr block : blocks) std::printf("free: %d\n", api.free(block));
  std::printf("free again: %d\n", api.free(blocks.front()));
  std::printf("free null: %d\n", api.free(0));

  CUdeviceptr unwritten = 42;
  std::printf("alloc 0: %d\n", api.alloc(&unwritten, 0));
  std::printf("alloc 1<<50: %d\n", api.alloc(&unwritten, std::size_t{1} << 50));

  CUdeviceptr block = 0;
  std::printf("alloc async: %d\n", api.alloc_async(&block, 4096, nullptr));
  std::printf("  %s\n", bytes_survive(api, block, 4096, 7));
  std::printf("free async: %d\n", api.free_async(block, nullptr));
  std::printf("synchronize: %d\n", api.stream_synchronize(nullptr));

  std::size_t available = 0, total = 0;
  const CUresult info = api.get_info(&available, &total);
  std::printf("info %d, free within total %d\n", info, available > 0 && available <= total);
}

inline int exercise(const DriverApi& api) {
  use_device(api);
  exercise_memory(api);
  std::printf("done\n");
  return 0;
}
