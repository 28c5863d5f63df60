// backing: what it costs to take memory from the driver, and what becomes of memory that lies scattered.
//
//   BM_Growth/<allocator>/<bytes>   eight blocks that nothing held serves, kept until all are made: the median
//   BM_Scattered/<allocator>        blocks of 1 MiB and of 64 MiB in turn until the device is full; then those of 64
//   MiB
//                                   are freed, and one block of half their bytes is asked for. Counters: freed, asked,
//                                   served (1 or 0). The time is the request's
//
// Under Cushion with CUSHION_RELEASE_THRESHOLD=0, so that each benchmark begins with nothing held.

#include <algorithm>
#include <chrono>
#include <vector>

#include "allocator.h"

namespace {

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

template <typename Api>
bool free_all(const Api& api, std::vector<void*>& blocks, std::size_t bytes) {
  bool ok = true;
  for (void* block : blocks) ok = api.free(block, bytes) && ok;
  blocks.clear();
  return cudaDeviceSynchronize() == cudaSuccess && ok;
}

template <typename Resource>
void growth(benchmark::State& state, const Resource& resource, std::size_t bytes) {
  const bench::Stream stream;
  const auto api = resource.on(stream);
  std::vector<void*> blocks;
  std::vector<double> times;
  bool ok = cudaDeviceSynchronize() == cudaSuccess;  // what the last one held goes back
  for (auto _ : state) {
    for (int i = 0; i < 8 && ok; ++i) {
      void* block = nullptr;
      const auto begin = Clock::now();
      ok = api.allocate(block, bytes);
      times.push_back(seconds_since(begin));
      if (ok) blocks.push_back(block);
    }
    std::sort(times.begin(), times.end());
    state.SetIterationTime(times[times.size() / 2]);
  }
  if (!free_all(api, blocks, bytes) || !ok) state.SkipWithError("an allocation or a free failed");
}

template <typename Resource>
void scattered(benchmark::State& state, const Resource& resource) {
  const bench::Stream stream;
  const auto api = resource.on(stream);
  std::vector<void*> small;
  std::vector<void*> large;
  for (auto _ : state) {
    for (;;) {
      void* block = nullptr;
      if (!api.allocate(block, bench::MiB)) break;
      small.push_back(block);
      if (!api.allocate(block, 64 * bench::MiB)) break;
      large.push_back(block);
    }
    cudaGetLastError();
    const std::size_t freed = large.size() * 64 * bench::MiB;
    if (!free_all(api, large, 64 * bench::MiB)) return state.SkipWithError("a free failed");
    void* block = nullptr;
    const auto begin = Clock::now();
    const bool served = api.allocate(block, freed / 2);
    state.SetIterationTime(seconds_since(begin));
    cudaGetLastError();
    state.counters["freed"] = static_cast<double>(freed);
    state.counters["asked"] = static_cast<double>(freed / 2);
    state.counters["served"] = served ? 1 : 0;
    if (served && !api.free(block, freed / 2)) return state.SkipWithError("a free failed");
  }
  if (!free_all(api, small, bench::MiB)) state.SkipWithError("a free failed");
}

}  // namespace

int main(int argc, char** argv) {
  const bench::Allocator allocator{argc, argv, false};
  bench::require_device();
  for (const std::size_t bytes :
       {2 * bench::MiB, 8 * bench::MiB, 64 * bench::MiB, 256 * bench::MiB, bench::GiB, 4 * bench::GiB}) {
    const std::string name = "BM_Growth/" + allocator.name() + "/" + std::to_string(bytes);
    const auto run = [&allocator, bytes](benchmark::State& state) {
      allocator.use([&](const auto& resource) { growth(state, resource, bytes); });
    };
    benchmark::RegisterBenchmark(name.c_str(), run)->UseManualTime()->Iterations(1);
  }
  const auto run = [&allocator](benchmark::State& state) {
    allocator.use([&](const auto& resource) { scattered(state, resource); });
  };
  benchmark::RegisterBenchmark(("BM_Scattered/" + allocator.name()).c_str(), run)->UseManualTime()->Iterations(1);
  return bench::run(argc, argv);
}
