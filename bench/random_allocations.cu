// random_allocations: an allocator under a mix of sizes, with many blocks live; one thread, one stream.
//
//   BM_RandomAllocations/<allocator>/<count>/<max MiB>
//
// One iteration makes `count` allocations, of 1 byte to `max MiB` uniformly, and as many frees of blocks chosen
// at random, with at most 16000 MiB in use (uniform_trace in traces.h).
//
// Linked with the shared CUDA runtime, whose own symbols a preload can serve, so that what is measured is the
// allocator: under the static runtime every call also passes through that (pair.cu measures both). The build with RMM
// is linked with the static runtime, as RMM itself is.

#include "allocator.h"

int main(int argc, char** argv) {
  const bench::Allocator allocator{argc, argv};
  bench::require_device();
  for (const std::size_t count : {1000, 10000, 100000}) {
    for (const std::size_t max_mib : {1, 4, 64, 256, 1024, 4096}) {
      const std::string name =
          "BM_RandomAllocations/" + allocator.name() + "/" + std::to_string(count) + "/" + std::to_string(max_mib);
      const auto workload = [&allocator, count, max_mib](benchmark::State& state) {
        const bench::Trace trace = bench::uniform_trace(count, max_mib * bench::MiB, 16000 * bench::MiB);
        const bench::Stream stream;
        allocator.use([&](const auto& resource) { bench::random_allocations(state, resource.on(stream), trace); });
      };
      benchmark::RegisterBenchmark(name.c_str(), workload)->Unit(benchmark::kMillisecond)->UseRealTime();
    }
  }
  return bench::run(argc, argv);
}
