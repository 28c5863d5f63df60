// Device memory used before main and after it: static constructors allocate, static destructors free, where the
// runtime is unloading already and answers 4 (an object constructed before the runtime's own).
#include "gpu_program.h"

namespace {

struct Static {
  void* block = nullptr;
  void* async = nullptr;
  Static() {
    SHOW(cudaMalloc(&block, 5000));
    SHOW(cudaMallocAsync(&async, 5000, nullptr));
    SHOW(cudaMemset(block, 1, 5000));
  }
  ~Static() {
    SHOW(cudaFreeAsync(async, nullptr));
    SHOW(cudaFree(block));
    SHOW(cudaMalloc(&block, 100));
    std::fflush(stdout);
  }
} object;

// Allocates only in main, so that it is constructed before anything of CUDA is.
struct Early {
  void* block = nullptr;
  ~Early() {
    SHOW(cudaFree(block));
    std::fflush(stdout);
  }
} early;

}  // namespace

int main() {
  std::atexit([] {
    void* block = nullptr;
    SHOW(cudaMalloc(&block, 3000));
    SHOW(cudaFree(block));
  });
  SHOW(cudaMalloc(&early.block, 5000));
  SHOW(cudaFree(nullptr));
  std::printf("main ends\n");
  return 3;
}
