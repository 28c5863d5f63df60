// Driver functions found through the runtime: cudaGetDriverEntryPointByVersion at several versions and stream
// flags. Their blocks and the runtime's are the same kind: each frees the other's.
#include <cuda.h>

#include "gpu_program.h"

namespace {

template <class Function>
Function entry(const char* name, unsigned version, unsigned long long flags = cudaEnableDefault) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult status{};
  std::printf("%s at %u: %d", name, version, cudaGetDriverEntryPointByVersion(name, &found, version, flags, &status));
  std::printf(" status %d, found %d\n", status, found != nullptr);
  return reinterpret_cast<Function>(found);
}

using GetProcAddress4 = CUresult (*)(const char*, void**, int, cuuint64_t);
using GetProcAddress5 = CUresult (*)(const char*, void**, int, cuuint64_t, CUdriverProcAddressQueryResult*);

}  // namespace

int main() {
  SHOW(cudaFree(nullptr));
  auto alloc = entry<decltype(&cuMemAlloc)>("cuMemAlloc", 12000);
  auto free = entry<decltype(&cuMemFree)>("cuMemFree", 12000);
  auto alloc_async = entry<decltype(&cuMemAllocAsync)>("cuMemAllocAsync", 12000);
  auto alloc_thread = entry<decltype(&cuMemAllocAsync)>("cuMemAllocAsync", 12000, cudaEnablePerThreadDefaultStream);
  auto free_thread = entry<decltype(&cuMemFreeAsync)>("cuMemFreeAsync", 12000, cudaEnablePerThreadDefaultStream);
  entry<void*>("cuNoSuchFunction", 12000);
  auto get4 = entry<GetProcAddress4>("cuGetProcAddress", 11030);
  auto get5 = entry<GetProcAddress5>("cuGetProcAddress", 12000);

  CUdeviceptr block = 0;
  void* pointer = nullptr;
  SHOW(alloc(&block, 1000));
  SHOW(cudaMemset(reinterpret_cast<void*>(block), 1, 1000));
  SHOW(cudaFree(reinterpret_cast<void*>(block)));
  SHOW(free(block));
  SHOW(cudaMalloc(&pointer, 1000));
  SHOW(free(reinterpret_cast<CUdeviceptr>(pointer)));
  SHOW(cudaFree(pointer));
  SHOW(alloc_async(&block, 1000, nullptr));
  SHOW(cudaFreeAsync(reinterpret_cast<void*>(block), nullptr));
  SHOW(alloc_thread(&block, 1000, nullptr));
  SHOW(cudaMemsetAsync(reinterpret_cast<void*>(block), 1, 1000, cudaStreamPerThread));
  SHOW(free_thread(block, nullptr));
  SHOW(cudaDeviceSynchronize());

  void* found = nullptr;
  CUdriverProcAddressQueryResult status{};
  SHOW(get4("cuMemAlloc", &found, 12000, 0));
  std::printf("the same: %d\n", found == reinterpret_cast<void*>(alloc));
  SHOW(get5("cuMemAlloc", &found, 12000, 0, &status));
  std::printf("the same: %d, status %d\n", found == reinterpret_cast<void*>(alloc), status);
  return 0;
}
