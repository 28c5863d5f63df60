// Workloads: what the benchmarks make an allocation API do, written once for every API.
//
// An API is a small value with `bool allocate(void*& block, std::size_t bytes)` and `bool free(void* block)`.
// The timed loops hold nothing but those calls: sizes and the order of frees are drawn beforehand (Trace), so
// that what is compared is allocators and not random number generators. Each benchmark touches its API once
// before it is timed, because a program's first allocation also creates the device's context.
#pragma once

#include <benchmark/benchmark.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <iostream>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace bench {

inline constexpr std::size_t KiB = 1024;
inline constexpr std::size_t MiB = 1024 * KiB;

template <typename T>
concept Api = requires(const T& api, void*& block) {
  { api.allocate(block, std::size_t{}) } -> std::same_as<bool>;
  { api.free(block) } -> std::same_as<bool>;
};

// Allocate and free one block: the latency of the fast path.
template <Api A>
void pair(benchmark::State& state, const A& api, std::size_t bytes) {
  void* block = nullptr;
  if (!api.allocate(block, bytes) || !api.free(block)) return state.SkipWithError("the first pair failed");
  for (auto _ : state) {
    if (!api.allocate(block, bytes) || !api.free(block)) return state.SkipWithError("a pair failed");
    benchmark::DoNotOptimize(block);
  }
  state.SetItemsProcessed(state.iterations());
}

// A reproducible series of `count` allocations of 1 to `max_bytes` bytes, uniformly distributed, and the frees
// of all of them, each of a block chosen at random among the live ones. While allocations are left, 73 steps
// in 100 allocate, so live blocks pile up to about 63 % of `count`, or to `in_use_limit` bytes. These are the
// proportions of RMM's random_allocations.
class Trace {
 public:
  struct Step {
    std::size_t bytes;   // 0: free the block in this slot
    std::uint32_t slot;  // where the block's address is kept; reused once the block is freed
  };

  Trace(std::size_t count, std::size_t max_bytes, std::size_t in_use_limit) {
    struct Live {
      std::uint32_t slot;
      std::size_t bytes;
    };
    std::mt19937_64 random{count ^ max_bytes};
    std::uniform_int_distribution<std::size_t> draw_bytes{1, max_bytes};
    std::bernoulli_distribution draw_allocation{0.73};
    std::vector<Live> live;
    std::vector<std::uint32_t> unused;
    std::size_t in_use = 0;
    steps_.reserve(2 * count);
    for (std::size_t allocated = 0; steps_.size() < 2 * count;) {
      const std::size_t bytes = draw_bytes(random);
      const bool allocation = live.empty() || (draw_allocation(random) && in_use + bytes < in_use_limit);
      if (allocation && allocated < count) {
        if (unused.empty()) unused.push_back(slots_++);
        live.push_back({unused.back(), bytes});
        unused.pop_back();
        steps_.push_back({bytes, live.back().slot});
        in_use += bytes;
        ++allocated;
      } else {
        std::swap(live[std::uniform_int_distribution<std::size_t>{0, live.size() - 1}(random)], live.back());
        steps_.push_back({0, live.back().slot});
        unused.push_back(live.back().slot);
        in_use -= live.back().bytes;
        live.pop_back();
      }
    }
  }

  const std::vector<Step>& steps() const { return steps_; }
  std::uint32_t slots() const { return slots_; }

 private:
  std::vector<Step> steps_;
  std::uint32_t slots_ = 0;
};

// Replays one Trace an iteration; a failed allocation ends the benchmark.
template <Api A>
void random_allocations(benchmark::State& state, const A& api, const Trace& trace) {
  std::vector<void*> blocks(trace.slots());
  if (!api.allocate(blocks[0], 1) || !api.free(blocks[0])) return state.SkipWithError("the first pair failed");
  for (auto _ : state) {
    for (const Trace::Step& step : trace.steps()) {
      void*& block = blocks[step.slot];
      if (!(step.bytes != 0 ? api.allocate(block, step.bytes) : api.free(block))) {
        return state.SkipWithError(step.bytes != 0 ? "an allocation failed" : "a free failed");
      }
    }
  }
  state.SetItemsProcessed(state.iterations() * static_cast<std::int64_t>(trace.steps().size() / 2));
}

// Takes `--name=value` (or, with an empty value, `--name`) out of the command line.
inline std::string take_flag(int& argc, char** argv, std::string_view name, std::string fallback) {
  const std::string flag = "--" + std::string{name};
  int kept = 1;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == flag) {
      fallback.clear();
    } else if (argument.starts_with(flag + "=")) {
      fallback = argument.substr(flag.size() + 1);
    } else {
      argv[kept++] = argv[i];
    }
  }
  argc = kept;
  argv[argc] = nullptr;
  return fallback;
}

// Runs what was registered and the command line selects, and returns main's exit code. The benchmarks' own
// errors are in the output: "error_occurred" in JSON.
inline int run(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  const std::size_t benchmarks = benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  if (benchmarks == 0) std::cerr << "no benchmark matches the filter\n";
  return benchmarks == 0 ? 1 : 0;
}

}  // namespace bench
