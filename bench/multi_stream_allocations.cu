// multi_stream_allocations: whether allocating serialises streams that are independent of each other.
//
//   BM_MultiStreamAllocations/<allocator>/<streams>/<kernels>/<prewarm>
//   BM_MultiStreamKernels/...   the same kernels with no allocation at all: what a first step costs in itself
//
// One step gives each of `kernels` compute-bound kernels of one thread a block of its own, round robin over
// `streams`, and waits for the device. The kernels overlap if reuse of freed blocks adds no wait: 4 on 4 streams
// then take as long as 1.
//   prewarm 0: no stream has allocated yet.
//   prewarm 1: every stream has allocated and freed once.
// A repetition times one step, because a single step takes longer than the mean of many. Before it the process starts
// anew with new streams: memory is reserved, if the allocator reserves any, and everything else is warm: the context,
// the module, the clocks, the streams.
//
// --profile: one repetition of each, whatever --benchmark_repetitions says, for a profiler.

#include <chrono>
#include <memory>
#include <vector>

#include "allocator.h"

namespace {

constexpr long long kernel_cycles = 1'000'000;  // about half a millisecond

__global__ void compute(long long* out, long long cycles) {
  const long long begin = clock64();
  long long elapsed = 0;
  while (elapsed < cycles) elapsed = clock64() - begin;
  if (out != nullptr) *out = elapsed;
}

using Streams = std::vector<std::unique_ptr<bench::Stream>>;

template <bench::Api A>
bool allocate_and_launch(const A& api, cudaStream_t stream) {
  void* block = nullptr;
  if (!api.allocate(block, sizeof(long long))) return false;
  compute<<<1, 1, 0, stream>>>(static_cast<long long*>(block), kernel_cycles);
  return api.free(block, sizeof(long long));
}

struct NoAllocation {
  bool allocate(void*& block, std::size_t) const {
    block = nullptr;
    return true;
  }
  bool free(void*, std::size_t) const { return true; }
};
struct NoResource {
  NoAllocation on(cudaStream_t) const { return {}; }
};

// Streams that have run a kernel and never allocated.
Streams make_streams(int count) {
  compute<<<1, 1>>>(nullptr, 20 * kernel_cycles);
  Streams streams(static_cast<std::size_t>(count));
  for (auto& stream : streams) {
    stream = std::make_unique<bench::Stream>();
    compute<<<1, 1, 0, *stream>>>(nullptr, 1);
  }
  bench::check(cudaDeviceSynchronize(), "the first kernels");
  return streams;
}

template <typename Resource>
void multi_stream(benchmark::State& state, const Resource& resource, int stream_count, int kernels, bool prewarm) {
  const Streams streams = make_streams(stream_count);
  if (prewarm) {
    for (const auto& stream : streams) {
      if (!allocate_and_launch(resource.on(*stream), *stream)) return state.SkipWithError("prewarming failed");
    }
    bench::check(cudaDeviceSynchronize(), "prewarming");
  }
  for (auto _ : state) {  // once
    const auto begin = std::chrono::steady_clock::now();
    bool ok = true;
    for (int i = 0; i < kernels; ++i) {
      const bench::Stream& stream = *streams[static_cast<std::size_t>(i % stream_count)];
      ok = allocate_and_launch(resource.on(stream), stream) && ok;
    }
    ok = cudaDeviceSynchronize() == cudaSuccess && ok;
    state.SetIterationTime(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    if (!ok) return state.SkipWithError("an allocation, kernel or free failed");
  }
}

}  // namespace

int main(int argc, char** argv) {
  const bench::Allocator allocator{argc, argv};
  const bool profile = bench::take_flag(argc, argv, "profile", "no").empty();
  bench::require_device();
  for (const bool prewarm : {false, true}) {
    for (const int streams : {1, 2, 4}) {
      for (const int kernels : {1, 4}) {
        const std::string name = "/" + allocator.name() + "/" + std::to_string(streams) + "/" +
                                 std::to_string(kernels) + "/" + std::to_string(prewarm);
        const auto add = [&](const std::string& family, auto workload) {
          auto* registered = benchmark::RegisterBenchmark((family + name).c_str(), workload);
          registered->Unit(benchmark::kMicrosecond)->UseManualTime()->Iterations(1);
          if (profile) registered->Repetitions(1);
        };
        add("BM_MultiStreamAllocations", [=, &allocator](benchmark::State& state) {
          allocator.start_anew();
          allocator.use([&](const auto& resource) { multi_stream(state, resource, streams, kernels, prewarm); });
        });
        add("BM_MultiStreamKernels", [=, &allocator](benchmark::State& state) {
          allocator.start_anew();
          multi_stream(state, NoResource{}, streams, kernels, prewarm);
        });
      }
    }
  }
  return bench::run(argc, argv);
}
