// pair: the latency of one allocation and its free, on an idle device, from one thread; alone, and around a
// short kernel.
//
//   BM_MallocFreePair/<allocator>/<bytes>         cudaMalloc, cudaFree
//   BM_MallocFreeAsyncPair/<allocator>/<bytes>    cudaMallocAsync, cudaFreeAsync on one stream
//   BM_MallocKernelFree/<allocator>/<bytes>       the same with a kernel in between that writes to the block,
//   BM_MallocKernelFreeAsync/<allocator>/<bytes>  so that cudaFree has something to wait for
//   BM_Chain/<allocator>/<bytes>                  the same a hundred times with a kernel of 20 µs, until the device is
//                                                 done; the counter host_ns is what the host spent on one of them
//
// Built twice from this source, with the static runtime and with the shared one (pair_static, pair_shared): a
// preload reaches the two by different ways.

#include <chrono>

#include "cuda_api.h"

namespace {

__global__ void touch(int* block) { *block = 1; }

__global__ void hold(int* block, long long ns) {
  long long begin = 0;
  long long now = 0;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - begin < ns);
  *block = 1;
}

void chain(benchmark::State& state, std::size_t bytes) {
  constexpr int kSteps = 100;
  const bench::MallocApi api;
  double host_ns = 0;
  for (auto _ : state) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kSteps; ++i) {
      void* block = nullptr;
      if (!api.allocate(block, bytes)) return state.SkipWithError("an allocation failed");
      hold<<<1, 1>>>(static_cast<int*>(block), 20'000);
      if (!api.free(block, bytes)) return state.SkipWithError("a free failed");
    }
    host_ns += std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count() / kSteps;
    bench::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  state.SetItemsProcessed(state.iterations() * kSteps);
  state.counters["host_ns"] = host_ns / static_cast<double>(state.iterations());
}

template <bench::Api A>
void malloc_kernel_free(benchmark::State& state, const A& api, cudaStream_t stream, std::size_t bytes) {
  const auto once = [&] {
    void* block = nullptr;
    if (!api.allocate(block, bytes)) return false;
    touch<<<1, 1, 0, stream>>>(static_cast<int*>(block));
    return api.free(block, bytes) && cudaPeekAtLastError() == cudaSuccess;
  };
  if (!once()) return state.SkipWithError("the first allocation, kernel or free failed");
  for (auto _ : state) {
    if (!once()) return state.SkipWithError("an allocation, kernel or free failed");
  }
  state.SetItemsProcessed(state.iterations());
}

}  // namespace

int main(int argc, char** argv) {
  const std::string allocator = bench::take_flag(argc, argv, "allocator", "native");
  bench::require_device();
  const auto add = [&](const char* name, std::size_t bytes, auto workload) {
    const std::string full = std::string{name} + "/" + allocator + "/" + std::to_string(bytes);
    benchmark::RegisterBenchmark(full.c_str(), workload)->UseRealTime();
  };
  for (const std::size_t bytes : {bench::KiB, 64 * bench::KiB, bench::MiB, 32 * bench::MiB}) {
    add("BM_MallocFreePair", bytes, [=](benchmark::State& state) { bench::pair(state, bench::MallocApi{}, bytes); });
    add("BM_MallocFreeAsyncPair", bytes, [=](benchmark::State& state) {
      const bench::Stream stream;
      bench::pair(state, bench::AsyncApi{stream}, bytes);
    });
  }
  add("BM_MallocKernelFree", bench::MiB,
      [](benchmark::State& state) { malloc_kernel_free(state, bench::MallocApi{}, nullptr, bench::MiB); });
  add("BM_Chain", bench::MiB, [](benchmark::State& state) { chain(state, bench::MiB); });
  add("BM_MallocKernelFreeAsync", bench::MiB, [](benchmark::State& state) {
    const bench::Stream stream;
    malloc_kernel_free(state, bench::AsyncApi{stream}, stream, bench::MiB);
  });
  return bench::run(argc, argv);
}
