// threads: whether an allocator lets threads work side by side. 1 to 16 threads each allocate and free a block
// in a loop.
//
//   BM_ThreadsAsync/<allocator>/<bytes>/threads:<n>   cudaMallocAsync, cudaFreeAsync, each thread on its own stream
//   BM_ThreadsMalloc/<allocator>/<bytes>/threads:<n>  cudaMalloc, cudaFree
//
// items_per_second is the pairs of all threads together in a second of wall-clock time.

#include "cuda_api.h"

int main(int argc, char** argv) {
  const std::string allocator = bench::take_flag(argc, argv, "allocator", "native");
  bench::require_device();
  const auto add = [&](const char* name, std::size_t bytes, auto workload) {
    const std::string full = std::string{name} + "/" + allocator + "/" + std::to_string(bytes);
    benchmark::RegisterBenchmark(full.c_str(), workload)->ThreadRange(1, 16)->UseRealTime();
  };
  constexpr std::size_t bytes = 64 * bench::KiB;
  add("BM_ThreadsAsync", bytes, [](benchmark::State& state) {
    const bench::Stream stream;
    bench::pair(state, bench::AsyncApi{stream}, bytes);
  });
  add("BM_ThreadsMalloc", bytes, [](benchmark::State& state) { bench::pair(state, bench::MallocApi{}, bytes); });
  return bench::run(argc, argv);
}
