// The two allocation APIs of the CUDA runtime as workloads see them, and what every runtime program needs.
//
// These are ordinary CUDA programs: which allocator serves them is whatever is preloaded, and only the label in
// the benchmarks' names (--allocator=NAME) says which.
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
  bool free(void* block) const { return cudaFree(block) == cudaSuccess; }
};

// cudaMallocAsync and cudaFreeAsync on one stream.
struct AsyncApi {
  cudaStream_t stream;

  bool allocate(void*& block, std::size_t bytes) const { return cudaMallocAsync(&block, bytes, stream) == cudaSuccess; }
  bool free(void* block) const { return cudaFreeAsync(block, stream) == cudaSuccess; }
};

// Whether --api asks for the stream-ordered API; `malloc` is the other word, and the default.
inline bool take_async(int& argc, char** argv) {
  const std::string api = take_flag(argc, argv, "api", "malloc");
  if (api == "malloc" || api == "async") return api == "async";
  std::fprintf(stderr, "--api=%s: must be malloc or async\n", api.c_str());
  std::exit(2);
}

}  // namespace bench
