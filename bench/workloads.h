// Workloads: what the benchmarks make an allocation API do, written once for every API.
//
// An API is a small value with `bool allocate(void*& block, std::size_t bytes)` and `bool free(void* block,
// std::size_t bytes)`. The timed loops hold nothing but those calls: sizes and the order of frees are drawn beforehand
// (traces.h). Each benchmark touches its API once before it is timed, because a program's first allocation also creates
// the device's context.
#pragma once

#include <benchmark/benchmark.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <iostream>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "traces.h"

namespace bench {

template <typename T>
concept Api = requires(const T& api, void*& block) {
  { api.allocate(block, std::size_t{}) } -> std::same_as<bool>;
  { api.free(block, std::size_t{}) } -> std::same_as<bool>;
};

// Allocate and free one block: the latency of the fast path.
template <Api A>
void pair(benchmark::State& state, const A& api, std::size_t bytes) {
  void* block = nullptr;
  if (!api.allocate(block, bytes) || !api.free(block, bytes)) return state.SkipWithError("the first pair failed");
  for (auto _ : state) {
    if (!api.allocate(block, bytes) || !api.free(block, bytes)) return state.SkipWithError("a pair failed");
    benchmark::DoNotOptimize(block);
  }
  state.SetItemsProcessed(state.iterations());
}

// Replays the whole trace; false as soon as a call fails.
template <Api A>
bool replay(const A& api, const Trace& trace, std::vector<void*>& blocks) {
  for (const Trace::Step& step : trace.steps()) {
    void*& block = blocks[step.slot];
    if (!(step.allocation ? api.allocate(block, step.bytes) : api.free(block, step.bytes))) return false;
  }
  return true;
}

// Replays one trace an iteration; a failed allocation ends the benchmark.
template <Api A>
void random_allocations(benchmark::State& state, const A& api, const Trace& trace) {
  std::vector<void*> blocks(trace.slots());
  if (!api.allocate(blocks[0], 1) || !api.free(blocks[0], 1)) return state.SkipWithError("the first pair failed");
  for (auto _ : state) {
    if (!replay(api, trace, blocks)) return state.SkipWithError("an allocation or a free failed");
  }
  state.SetItemsProcessed(state.iterations() * static_cast<std::int64_t>(trace.steps().size() / 2));
}

// What an allocator holds from the driver for the bytes that are live. One replay of each mix, whose time means
// nothing. Counters, in bytes: `live`, the trace's own peak; `ideal`, what a best fit holds for it (best_fit_peak);
// `held`, the allocator's peak where `held()` knows it (a preload's is in its own report).
struct Mix {
  const char* name;
  Trace (*trace)();
};

template <std::size_t max_mib>
Trace uniform_mix() {
  return uniform_trace(100000, max_mib * MiB, 16000 * MiB);
}

inline constexpr Mix mixes[] = {
    {"uniform_1", uniform_mix<1>},  // as BM_RandomAllocations/100000/1, and so on
    {"uniform_4", uniform_mix<4>},
    {"uniform_64", uniform_mix<64>},
    {"uniform_256", uniform_mix<256>},
    {"uniform_1024", uniform_mix<1024>},
    {"uniform_4096", uniform_mix<4096>},
    {"power_law", [] { return power_law_trace(100000, KiB, GiB, 16000 * MiB); }},
    {"training", [] { return training_trace(24); }},
    {"shuffle", [] { return shuffle_trace(100000); }},
};

template <Api A, typename Held>
void fragmentation(benchmark::State& state, const A& api, const Trace& trace, Held held) {
  std::vector<void*> blocks(trace.slots());
  for (auto _ : state) {
    if (!replay(api, trace, blocks)) return state.SkipWithError("an allocation or a free failed");
  }
  const auto count = [&](const char* name, std::size_t bytes) { state.counters[name] = static_cast<double>(bytes); };
  count("live", trace.peak());
  count("ideal", best_fit_peak(trace));
  if (const std::optional<std::size_t> bytes = held()) count("held", *bytes);
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
