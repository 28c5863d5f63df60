// What a call stack costs: finding it, by each way there is, and finding it again in the table. No driver, no preload.
//
// BM_Unwind/WAY/DEPTH     the frames alone: cached (what Cushion does), frame_pointers, compiler (libgcc's own
// unwinder) BM_TakeStack/DEPTH      the whole of what the level `stacks` adds to an allocation, and takes away at its
// free BM_Sample/BYTES         what the level `sampled` (2 MiB) adds to an allocation of so many bytes
#include "core/stacks.h"

#include <benchmark/benchmark.h>
#include <unwind.h>

#include "core/track.h"

namespace {

using namespace cushion;

constexpr std::uint32_t kMost = Stacks::kDeepest;

Stacks& stacks() {
  static Stacks all;
  return all;
}

enum Way { cached, frame_pointers, compiler };
constexpr const char* kWays[] = {"cached", "frame_pointers", "compiler"};

std::uint32_t unwind_by(Way way, std::uint64_t* calls) {
  static Modules modules;
  if (way == cached) return unwind(modules, registers_here(), calls, kMost, [](std::uint64_t) { return false; });
  if (way == frame_pointers) return unwind_by_frame_pointers(registers_here(), calls, kMost);
  struct Seen {
    std::uint64_t* calls;
    std::uint32_t n = 0;
  } seen{calls};
  _Unwind_Backtrace(
      [](_Unwind_Context* context, void* to) {
        auto& into = *static_cast<Seen*>(to);
        if (into.n < kMost) into.calls[into.n++] = _Unwind_GetIP(context);
        return _URC_NO_REASON;
      },
      &seen);
  return seen.n;
}

// Runs `body` so many calls deeper.
template <class Body>
[[gnu::noinline, gnu::optimize("no-omit-frame-pointer")]] void deeper(std::int64_t depth, const Body& body) {
  depth > 0 ? deeper(depth - 1, body) : body();
  asm volatile("" ::: "memory");  // no tail call
}

void BM_Unwind(benchmark::State& state) {
  const auto way = static_cast<Way>(state.range(0));
  state.SetLabel(kWays[way]);
  deeper(state.range(1), [&] {
    std::uint64_t calls[kMost];
    std::uint32_t n = 0;
    for (auto _ : state) n = unwind_by(way, calls);
    state.counters["frames"] = n;
    state.counters["ns/frame"] = benchmark::Counter(static_cast<double>(state.iterations()) * n,
                                                    benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
  });
}
BENCHMARK(BM_Unwind)->ArgsProduct({{cached, frame_pointers, compiler}, {5, 20, 50}});

void BM_TakeStack(benchmark::State& state) {
  stacks().configure(kMost, false);
  deeper(state.range(0), [&] {
    for (auto _ : state) {
      const std::uint32_t id = stacks().take(0);
      stacks().allocated(id, 0x1000, 4096);
      stacks().freed(id, 0x1000, 4096, 100);
    }
  });
}
BENCHMARK(BM_TakeStack)->Arg(5)->Arg(20)->Arg(50);

void BM_Sample(benchmark::State& state) {
  stacks().configure(kMost, false);
  const auto bytes = static_cast<std::uint64_t>(state.range(0));
  deeper(20, [&] {
    for (auto _ : state) {
      const std::uint32_t id = stacks().sample(bytes, Tracking::kInterval);
      if (id == 0) continue;
      stacks().allocated(id, 0x1000, bytes);
      stacks().freed(id, 0x1000, bytes, 100);
    }
  });
}
BENCHMARK(BM_Sample)->Arg(1 << 10)->Arg(256 << 10)->Arg(4 << 20);

}  // namespace

BENCHMARK_MAIN();
