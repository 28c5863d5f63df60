// random_allocations: an allocator under a mix of sizes, with many blocks live; one thread, one stream.
//
//   BM_RandomAllocations/<allocator>/<count>/<max MiB>
//
// One iteration makes `count` allocations, of 1 byte to `max MiB` uniformly, and as many frees of blocks chosen
// at random, with at most 16000 MiB in use (Trace in workloads.h). --api=malloc (the default) or --api=async.

#include "cuda_api.h"

int main(int argc, char** argv) {
  const std::string allocator = bench::take_flag(argc, argv, "allocator", "native");
  const bool async = bench::take_async(argc, argv);
  bench::require_device();
  for (const std::size_t count : {1000, 10000, 100000}) {
    for (const std::size_t max_mib : {1, 4, 64, 256, 1024, 4096}) {
      const std::string name =
          "BM_RandomAllocations/" + allocator + "/" + std::to_string(count) + "/" + std::to_string(max_mib);
      benchmark::RegisterBenchmark(name.c_str(),
                                   [=](benchmark::State& state) {
                                     const bench::Trace trace{count, max_mib * bench::MiB, 16000 * bench::MiB};
                                     if (async) {
                                       const bench::Stream stream;
                                       bench::random_allocations(state, bench::AsyncApi{stream}, trace);
                                     } else {
                                       bench::random_allocations(state, bench::MallocApi{}, trace);
                                     }
                                   })
          ->Unit(benchmark::kMillisecond)
          ->UseRealTime();
    }
  }
  return bench::run(argc, argv);
}
