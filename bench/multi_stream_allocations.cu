// multi_stream_allocations: whether allocating serialises streams that are independent of each other.
//
//   BM_MultiStreamAllocations/<allocator>/<streams>/<kernels>/<prewarm>
//
// One iteration gives each of `kernels` compute-bound kernels of one thread a block of its own, round robin over
// `streams`, and waits for the device. The kernels overlap if reuse of freed blocks adds no wait: 4 on 4 streams
// then take as long as 1.
//   prewarm 1: every stream has allocated and freed before.
//   prewarm 0: the device is reset before every iteration and no stream has allocated yet; one
//              cudaMalloc/cudaFree pair has let an allocator reserve what it reserves.
//
// --api=async (cudaMallocAsync, cudaFreeAsync) or --api=malloc, the default, with which cudaFree itself waits.
// --profile runs every selected benchmark once, for a profiler.

#include <chrono>
#include <memory>
#include <vector>

#include "cuda_api.h"

namespace {

constexpr long long kernel_cycles = 1'000'000;  // about half a millisecond

__global__ void compute(long long* out, long long cycles) {
  const long long begin = clock64();
  long long elapsed = 0;
  while (elapsed < cycles) elapsed = clock64() - begin;
  if (out != nullptr) *out = elapsed;
}

using Streams = std::vector<std::unique_ptr<bench::Stream>>;

bool allocate_and_launch(cudaStream_t stream, bool async) {
  const auto once = [&](const auto& api) {
    void* block = nullptr;
    if (!api.allocate(block, sizeof(long long))) return false;
    compute<<<1, 1, 0, stream>>>(static_cast<long long*>(block), kernel_cycles);
    return api.free(block);
  };
  return async ? once(bench::AsyncApi{stream}) : once(bench::MallocApi{});
}

Streams make_streams(int count) {
  Streams streams(static_cast<std::size_t>(count));
  for (auto& stream : streams) stream = std::make_unique<bench::Stream>();
  return streams;
}

// Everything but the allocator's state: the context, the module, and the device's clocks.
void warm_device() {
  compute<<<1, 1>>>(nullptr, 20 * kernel_cycles);
  bench::check(cudaDeviceSynchronize(), "the first kernel");
}

void multi_stream(benchmark::State& state, bool async, int stream_count, int kernels, bool prewarm) {
  warm_device();
  Streams streams = make_streams(stream_count);
  if (prewarm) {
    for (const auto& stream : streams) {
      if (!allocate_and_launch(*stream, async)) return state.SkipWithError("prewarming failed");
    }
    bench::check(cudaDeviceSynchronize(), "prewarming");
  }
  for (auto _ : state) {
    if (!prewarm) {
      streams.clear();
      bench::check(cudaDeviceReset(), "cudaDeviceReset");
      void* block = nullptr;
      if (!bench::MallocApi{}.allocate(block, 1) || !bench::MallocApi{}.free(block)) {
        return state.SkipWithError("the first pair failed");
      }
      streams = make_streams(stream_count);
      warm_device();
    }
    const auto begin = std::chrono::steady_clock::now();
    bool ok = true;
    for (int i = 0; i < kernels; ++i) {
      ok = allocate_and_launch(*streams[static_cast<std::size_t>(i % stream_count)], async) && ok;
    }
    ok = cudaDeviceSynchronize() == cudaSuccess && ok;
    state.SetIterationTime(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    if (!ok) return state.SkipWithError("an allocation, kernel or free failed");
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string allocator = bench::take_flag(argc, argv, "allocator", "native");
  const bool async = bench::take_async(argc, argv);
  const bool profile = bench::take_flag(argc, argv, "profile", "no").empty();
  bench::require_device();
  for (const bool prewarm : {false, true}) {
    for (const int streams : {1, 2, 4}) {
      for (const int kernels : {1, 4}) {
        const std::string name = "BM_MultiStreamAllocations/" + allocator + "/" + std::to_string(streams) + "/" +
                                 std::to_string(kernels) + "/" + std::to_string(prewarm);
        auto* registered = benchmark::RegisterBenchmark(
            name.c_str(), [=](benchmark::State& state) { multi_stream(state, async, streams, kernels, prewarm); });
        registered->Unit(benchmark::kMicrosecond)->UseManualTime();
        if (profile || !prewarm) registered->Iterations(1);
      }
    }
  }
  return bench::run(argc, argv);
}
