// The two allocation APIs of the CUDA runtime as workloads see them, and what every runtime program needs.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>

#include "workloads.h"

namespace bench {

// Ends the program on a failure that no benchmark expects.
inline void check(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(result));
  std::exit(1);
}

// Ends the program with ctest's and automake's code for "skipped" where there is no GPU.
inline void require_device() {
  int devices = 0;
  const cudaError_t result = cudaGetDeviceCount(&devices);
  if (result == cudaSuccess && devices > 0) return;
  std::fprintf(stderr, "SKIP: no CUDA device (%s)\n", cudaGetErrorString(result));
  std::exit(77);
}

class Stream {
 public:
  Stream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags"); }
  ~Stream() { check(cudaStreamDestroy(stream_), "cudaStreamDestroy"); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// cudaMalloc and cudaFree.
struct MallocApi {
  bool allocate(void*& block, std::size_t bytes) const { return cudaMalloc(&block, bytes) == cudaSuccess; }
  bool free(void* block, std::size_t) const { return cudaFree(block) == cudaSuccess; }
};

// cudaMallocAsync and cudaFreeAsync on one stream.
struct AsyncApi {
  cudaStream_t stream;

  bool allocate(void*& block, std::size_t bytes) const { return cudaMallocAsync(&block, bytes, stream) == cudaSuccess; }
  bool free(void* block, std::size_t) const { return cudaFreeAsync(block, stream) == cudaSuccess; }
};

}  // namespace bench
