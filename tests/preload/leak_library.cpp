// The library that leak opens.
#include <cuda.h>

namespace {
[[gnu::noinline]] CUdeviceptr hidden_function(decltype(&::cuMemAlloc) alloc) {
  CUdeviceptr block = 0;
  alloc(&block, 65539);  // LEAK hidden_function
  return block + 1;
}
}  // namespace

extern "C" __attribute__((visibility("default"))) CUdeviceptr library_leak(decltype(&::cuMemAlloc) alloc) {
  return hidden_function(alloc) + 1;  // LEAK library_leak
}
