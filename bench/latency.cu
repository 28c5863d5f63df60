// latency: how long the unluckiest calls of one thread take while another makes the allocator take memory from the
// driver.
//
//   BM_PairWhileGrowing/<allocator>/<bytes>  one thread's pairs, on a stream of its own, while another thread allocates
//                                            32 GiB in blocks of 64 MiB and keeps them
//   BM_OneAllocation/<allocator>/<bytes>     256 allocations alone, kept until all are made
//
// Counters: mean and percentiles of one pair, or of one allocation, in nanoseconds: p50, p99, p999 (99.9 %), max. A
// sample includes one reading of the clock. An allocator that keeps what it has grows but once in a process: run one
// of the benchmarks in it, once.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <numeric>
#include <thread>
#include <vector>

#include "allocator.h"

namespace {

using Clock = std::chrono::steady_clock;

class Samples {
 public:
  explicit Samples(std::size_t capacity) { ticks_.reserve(capacity); }

  bool full() const { return ticks_.size() == ticks_.capacity(); }
  void add(Clock::duration duration) { ticks_.push_back(duration); }

  void report(benchmark::State& state) {
    std::sort(ticks_.begin(), ticks_.end());
    const auto at = [&](double share) {
      const auto index = static_cast<std::size_t>(share * static_cast<double>(ticks_.size() - 1));
      return std::chrono::duration<double, std::nano>(ticks_[index]).count();
    };
    const auto sum = std::accumulate(ticks_.begin(), ticks_.end(), Clock::duration{});
    state.counters["mean"] = std::chrono::duration<double, std::nano>(sum).count() / static_cast<double>(ticks_.size());
    state.counters["p50"] = at(0.5);
    state.counters["p99"] = at(0.99);
    state.counters["p999"] = at(0.999);
    state.counters["max"] = at(1);
    state.counters["samples"] = static_cast<double>(ticks_.size());
  }

 private:
  std::vector<Clock::duration> ticks_;
};

// Allocates `count` blocks on the calling thread and keeps them until `release` is called on it.
template <bench::Api A>
class Grower {
 public:
  Grower(const A& api, std::size_t count, std::size_t bytes) : api_{api}, blocks_(count), bytes_{bytes} {}

  bool grow() {
    for (; kept_ < blocks_.size(); ++kept_) {
      if (!api_.allocate(blocks_[kept_], bytes_)) return false;
    }
    return true;
  }
  bool release() {
    bool ok = true;
    while (kept_ > 0) ok = api_.free(blocks_[--kept_], bytes_) && ok;
    return ok;
  }

 private:
  A api_;
  std::vector<void*> blocks_;
  std::size_t bytes_;
  std::size_t kept_ = 0;
};

template <typename Resource>
void pair_while_growing(benchmark::State& state, const Resource& resource, std::size_t bytes) {
  const bench::Stream stream;
  const bench::Stream other_stream;
  const auto api = resource.on(stream);
  Samples samples{16'000'000};
  Grower grower{resource.on(other_stream), 512, 64 * bench::MiB};
  std::atomic<bool> ready{false};
  std::atomic<bool> begun{false};
  std::atomic<bool> ended{false};
  bool ok = true;
  bool grown = false;
  std::thread other{[&] {
    bench::check(cudaSetDevice(0), "cudaSetDevice");
    ready = true;
    while (!begun) std::this_thread::yield();
    grown = grower.grow();
    ended = true;
  }};
  while (!ready) std::this_thread::yield();
  void* block = nullptr;
  ok = api.allocate(block, bytes) && api.free(block, bytes);
  for (auto _ : state) {
    begun = true;
    for (auto last = Clock::now(); ok && !ended && !samples.full();) {
      ok = api.allocate(block, bytes) && api.free(block, bytes);
      const auto now = Clock::now();
      samples.add(now - last);
      last = now;
    }
  }
  other.join();
  ok = grower.release() && ok;
  if (!ok || !grown) return state.SkipWithError("an allocation or a free failed");
  if (samples.full()) return state.SkipWithError("growing outlasted the samples");
  samples.report(state);
}

template <typename Resource>
void one_allocation(benchmark::State& state, const Resource& resource, std::size_t bytes) {
  const bench::Stream stream;
  const auto api = resource.on(stream);
  Samples samples{256};
  std::vector<void*> blocks;
  for (auto _ : state) {
    while (!samples.full()) {
      void* block = nullptr;
      const auto begin = Clock::now();
      const bool ok = api.allocate(block, bytes);
      samples.add(Clock::now() - begin);
      if (!ok) return state.SkipWithError("an allocation failed");
      blocks.push_back(block);
    }
  }
  for (void* block : blocks) {
    if (!api.free(block, bytes)) return state.SkipWithError("a free failed");
  }
  samples.report(state);
}

}  // namespace

int main(int argc, char** argv) {
  const bench::Allocator allocator{argc, argv, false};
  bench::require_device();
  const auto add = [&](const char* name, auto workload) {
    constexpr std::size_t bytes = 64 * bench::KiB;
    const std::string full = std::string{name} + "/" + allocator.name() + "/" + std::to_string(bytes);
    const auto run = [&allocator, workload](benchmark::State& state) {
      allocator.use([&](const auto& resource) { workload(state, resource, bytes); });
    };
    benchmark::RegisterBenchmark(full.c_str(), run)->UseRealTime()->Iterations(1);
  };
  add("BM_PairWhileGrowing",
      [](auto& state, const auto& resource, std::size_t bytes) { pair_while_growing(state, resource, bytes); });
  add("BM_OneAllocation",
      [](auto& state, const auto& resource, std::size_t bytes) { one_allocation(state, resource, bytes); });
  return bench::run(argc, argv);
}
