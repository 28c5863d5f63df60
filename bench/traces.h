// Traces: reproducible series of allocations and frees, drawn before anything is timed, so that what is compared is
// allocators and not random number generators. Every block of a trace is freed in it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <utility>
#include <vector>

namespace bench {

inline constexpr std::size_t KiB = 1024;
inline constexpr std::size_t MiB = 1024 * KiB;
inline constexpr std::size_t GiB = 1024 * MiB;

class Trace {
 public:
  struct Step {
    std::size_t bytes;
    std::uint32_t slot;  // where the block's address is kept; reused once the block is freed
    bool allocation;     // else the free of the block in this slot
  };

  std::uint32_t allocate(std::size_t bytes) {
    if (unused_.empty()) {
      unused_.push_back(slots());
      bytes_.push_back(0);
    }
    const std::uint32_t slot = unused_.back();
    unused_.pop_back();
    bytes_[slot] = bytes;
    live_ += bytes;
    peak_ = std::max(peak_, live_);
    steps_.push_back({bytes, slot, true});
    return slot;
  }
  void free(std::uint32_t slot) {
    live_ -= bytes_[slot];
    unused_.push_back(slot);
    steps_.push_back({bytes_[slot], slot, false});
  }

  const std::vector<Step>& steps() const { return steps_; }
  std::uint32_t slots() const { return static_cast<std::uint32_t>(bytes_.size()); }
  std::size_t live() const { return live_; }
  std::size_t peak() const { return peak_; }  // of the bytes in live blocks

 private:
  std::vector<Step> steps_;
  std::vector<std::uint32_t> unused_;
  std::vector<std::size_t> bytes_;  // of the block in each slot
  std::size_t live_ = 0;
  std::size_t peak_ = 0;
};

// Takes a random element out of `live`.
inline std::uint32_t take_random(std::vector<std::uint32_t>& live, std::mt19937_64& random) {
  std::swap(live[std::uniform_int_distribution<std::size_t>{0, live.size() - 1}(random)], live.back());
  const std::uint32_t slot = live.back();
  live.pop_back();
  return slot;
}

// `count` allocations of sizes that `draw_bytes(random)` gives, and the frees of all of them, each of a block chosen
// at random among the live ones. While allocations are left, 73 steps in 100 allocate, so live blocks pile up to
// about 63 % of `count`, or to `in_use_limit` bytes. These are the proportions of RMM's random_allocations.
template <typename DrawBytes>
Trace random_trace(std::size_t count, std::size_t in_use_limit, std::uint64_t seed, DrawBytes draw_bytes) {
  Trace trace;
  std::mt19937_64 random{seed};
  std::bernoulli_distribution draw_allocation{0.73};
  std::vector<std::uint32_t> live;
  for (std::size_t allocated = 0; trace.steps().size() < 2 * count;) {
    const std::size_t bytes = draw_bytes(random);
    const bool allocation = live.empty() || (draw_allocation(random) && trace.live() + bytes < in_use_limit);
    if (allocation && allocated < count) {
      live.push_back(trace.allocate(bytes));
      ++allocated;
    } else {
      trace.free(take_random(live, random));
    }
  }
  return trace;
}

// Sizes of 1 to `max_bytes` bytes, all equally likely.
inline Trace uniform_trace(std::size_t count, std::size_t max_bytes, std::size_t in_use_limit) {
  return random_trace(count, in_use_limit, count ^ max_bytes, std::uniform_int_distribution<std::size_t>{1, max_bytes});
}

// Sizes of `min_bytes` to `max_bytes`; those above s are as frequent as 1 ÷ s: as many bytes in every power of two.
inline Trace power_law_trace(std::size_t count, std::size_t min_bytes, std::size_t max_bytes,
                             std::size_t in_use_limit) {
  const double low = static_cast<double>(min_bytes);
  const double tail = 1 - low / static_cast<double>(max_bytes);
  return random_trace(count, in_use_limit, count, [=](std::mt19937_64& random) {
    return static_cast<std::size_t>(low / (1 - tail * std::uniform_real_distribution<double>{}(random)));
  });
}

// The buffers of a shuffle: `count` of 1 to 64 KiB are filled, then each arriving one replaces one that was sent, in
// random order, until all are replaced and freed.
inline Trace shuffle_trace(std::size_t count) {
  Trace trace;
  std::mt19937_64 random{count};
  std::uniform_int_distribution<std::size_t> draw_bytes{KiB, 64 * KiB};
  std::vector<std::uint32_t> live;
  for (std::size_t i = 0; i < count; ++i) live.push_back(trace.allocate(draw_bytes(random)));
  for (std::size_t i = 0; i < count; ++i) {
    trace.free(take_random(live, random));
    live.push_back(trace.allocate(draw_bytes(random)));
  }
  while (!live.empty()) trace.free(take_random(live, random));
  return trace;
}

// The tensors of a transformer in training: 16 layers of width 1024 with 16 heads, 8 sequences a step in half
// precision, Adam in single precision. The lengths of the sequences change from step to step, and with them nearly
// every size, which is what fragments a pool. A layer keeps its activations for the backward pass; gradients of
// activations and workspaces live only inside a layer.
inline Trace training_trace(int steps) {
  constexpr std::size_t layers = 16;
  constexpr std::size_t width = 1024;
  constexpr std::size_t heads = 16;
  constexpr std::size_t batch = 8;
  constexpr std::size_t half = 2;
  constexpr std::size_t single = 4;
  constexpr std::size_t vocabulary = 32000;
  constexpr std::size_t workspace = 32 * MiB;
  constexpr std::size_t lengths[] = {512, 768, 640, 256, 896, 384, 704, 128, 960, 576, 1024, 832};
  constexpr std::size_t weights[] = {3 * width * width, width * width, 4 * width * width, 4 * width * width,
                                     3 * width,         width,         4 * width,         width};

  Trace trace;
  std::vector<std::uint32_t> model;
  for (std::size_t layer = 0; layer <= layers; ++layer) {
    const auto parameter = [&](std::size_t elements) {
      model.push_back(trace.allocate(elements * half));
      for (int i = 0; i < 3; ++i) model.push_back(trace.allocate(elements * single));  // master copy, two moments
    };
    if (layer == layers) {
      parameter(vocabulary * width);
    } else {
      for (const std::size_t elements : weights) parameter(elements);
    }
  }
  for (int step = 0; step < steps; ++step) {
    const std::size_t tokens = batch * lengths[static_cast<std::size_t>(step) % std::size(lengths)];
    const std::size_t hidden = tokens * width * half;
    const std::size_t scores = tokens * (tokens / batch) * heads * half;
    const auto briefly = [&](std::size_t bytes) { trace.free(trace.allocate(bytes)); };
    std::vector<std::uint32_t> kept;       // activations, in the order of the forward pass
    std::vector<std::uint32_t> gradients;  // of the weights, until the optimiser's turn
    const auto keep = [&](std::size_t bytes) { kept.push_back(trace.allocate(bytes)); };
    keep(tokens * 8);  // token numbers
    keep(hidden);      // embeddings
    for (std::size_t layer = 0; layer < layers; ++layer) {
      keep(tokens * single * 2);  // norm: mean and deviation
      keep(3 * hidden);           // queries, keys, values
      keep(scores);               // attention, then its softmax
      briefly(workspace);
      keep(hidden);      // attention's output
      keep(hidden);      // residual
      keep(4 * hidden);  // the wide layer, before and after its activation function
      keep(4 * hidden);
      keep(hidden);
      keep(hidden / half);  // dropout mask, a byte each
    }
    const std::uint32_t logits = trace.allocate(tokens * vocabulary * half);
    std::uint32_t gradient = trace.allocate(hidden);
    trace.free(logits);
    for (std::size_t layer = 0; layer < layers; ++layer) {
      for (int i = 0; i < 9; ++i) {
        if (i == 2 || i == 6) briefly(i == 6 ? scores : 4 * hidden);
        trace.free(kept.back());
        kept.pop_back();
      }
      for (const std::size_t elements : weights) gradients.push_back(trace.allocate(elements * half));
      const std::uint32_t next = trace.allocate(hidden);
      trace.free(gradient);
      gradient = next;
    }
    trace.free(gradient);
    for (const std::uint32_t slot : kept) trace.free(slot);
    briefly(workspace);
    for (const std::uint32_t slot : gradients) trace.free(slot);
  }
  for (const std::uint32_t slot : model) trace.free(slot);
  return trace;
}

// What an ideal best fit would hold for this trace at its peak: one address range that grows at its end by exactly
// what a request lacks, when no hole is large enough; the smallest hole that fits, at the lowest address; holes
// coalesce at once; sizes in multiples of 512 bytes, cudaMalloc's alignment.
inline std::size_t best_fit_peak(const Trace& trace) {
  std::map<std::size_t, std::size_t> holes;                  // address → bytes
  std::set<std::pair<std::size_t, std::size_t>> hole_sizes;  // bytes, address
  std::vector<std::size_t> addresses(trace.slots());
  std::size_t end = 0;
  const auto remove = [&](std::map<std::size_t, std::size_t>::iterator hole) {
    hole_sizes.erase({hole->second, hole->first});
    return holes.erase(hole);
  };
  const auto add = [&](std::size_t address, std::size_t bytes) {
    holes.emplace(address, bytes);
    hole_sizes.emplace(bytes, address);
  };
  for (const Trace::Step& step : trace.steps()) {
    const std::size_t bytes = (step.bytes + 511) / 512 * 512;
    std::size_t& address = addresses[step.slot];
    if (!step.allocation) {
      std::size_t first = address;
      std::size_t size = bytes;
      auto next = holes.lower_bound(address);
      if (next != holes.end() && next->first == address + bytes) {
        size += next->second;
        next = remove(next);
      }
      if (next != holes.begin() && std::prev(next)->first + std::prev(next)->second == address) {
        first = std::prev(next)->first;
        size += std::prev(next)->second;
        remove(std::prev(next));
      }
      add(first, size);
    } else if (const auto fit = hole_sizes.lower_bound({bytes, 0}); fit != hole_sizes.end()) {
      const auto [size, first] = *fit;
      address = first;
      remove(holes.find(first));
      if (size > bytes) add(first + bytes, size - bytes);
    } else if (!holes.empty() && std::prev(holes.end())->first + std::prev(holes.end())->second == end) {
      const auto last = std::prev(holes.end());
      address = last->first;
      end = address + bytes;
      remove(last);
    } else {
      address = end;
      end += bytes;
    }
  }
  return end;
}

}  // namespace bench
