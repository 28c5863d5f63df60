// fragmentation: what an allocator holds from the driver for the bytes that a program has live (workloads.h).
//
//   BM_Fragmentation/<allocator>/<mix>
//
// A preload holds memory for the life of the process: run one mix a process, then its report's peak is the mix's.

#include "allocator.h"

int main(int argc, char** argv) {
  const bench::Allocator allocator{argc, argv, false};
  bench::require_device();
  for (const bench::Mix& mix : bench::mixes) {
    const std::string name = "BM_Fragmentation/" + allocator.name() + "/" + mix.name;
    const auto workload = [&allocator, &mix](benchmark::State& state) {
      const bench::Trace trace = mix.trace();
      const bench::Stream stream;
      allocator.use([&](const auto& resource) {
        bench::fragmentation(state, resource.on(stream), trace, [&] { return resource.held(); });
      });
    };
    benchmark::RegisterBenchmark(name.c_str(), workload)->Unit(benchmark::kMillisecond)->Iterations(1);
  }
  return bench::run(argc, argv);
}
