// fragmentation: what an allocator holds from the driver for the bytes that a program has live (workloads.h).
//
//   BM_Fragmentation/<allocator>/<mix>
//   --print=<mix> writes the mix instead
//
// A preload holds memory for the life of the process: run one mix a process, then its report's peak is the mix's.

#include <cstdio>

#include "allocator.h"

namespace {

// A mix as text, for allocators that no C++ program reaches: a slot and its bytes, 0 for the free of what it holds.
int print(const std::string& wanted) {
  for (const bench::Mix& mix : bench::mixes) {
    if (mix.name != wanted) continue;
    const bench::Trace trace = mix.trace();
    for (const bench::Trace::Step& step : trace.steps())
      std::printf("%u %zu\n", step.slot, step.allocation ? step.bytes : std::size_t{0});
    return 0;
  }
  std::fprintf(stderr, "--print=%s: no such mix\n", wanted.c_str());
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  if (const std::string mix = bench::take_flag(argc, argv, "print", ""); !mix.empty()) return print(mix);
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
