#include "core/stacks.h"

#include <dlfcn.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "core/ticks.h"
#include "core/unwind.h"

namespace cushion {
namespace {

// A word of a stack as it is taken: an address, or a line of Python.
constexpr std::uint64_t kPythonWord = std::uint64_t{1} << 63;
constexpr unsigned kLineBits = 40;
constexpr std::uint64_t word_of(const Python::Frame& frame) noexcept {
  return kPythonWord | std::uint64_t{frame.code} << kLineBits | frame.line;
}

// Set while a stack is taken: what is allocated meanwhile (by an interpreter's finaliser, say) has none.
constinit thread_local bool t_taking = false;

std::uint64_t hash_of(const std::uint64_t* words, std::uint32_t n, std::uint64_t interval) noexcept {
  std::uint64_t hash = interval + n;
  for (std::uint32_t i = 0; i < n; ++i) hash = (std::rotl(hash, 5) ^ words[i]) * 0x9E3779B97F4A7C15u;
  return hash;
}

std::uint64_t hash_of(const Stacks::Frame& frame) noexcept {
  return (frame.offset ^ std::uint64_t{frame.python} << 40 ^ std::uint64_t{frame.line} << 20 ^
          static_cast<std::uint64_t>(frame.module) << 48) *
         0x9E3779B97F4A7C15u;
}

}  // namespace

constinit thread_local Stacks::Sampler Stacks::t_sampler{};
constinit thread_local std::uint64_t Stacks::t_last = 0;

// ---- taking one --------------------------------------------------------------------------------------------------

std::uint32_t Stacks::take(std::uint64_t interval) noexcept {
  if (t_taking) return 0;
  t_taking = true;
  std::array<std::uint64_t, kDeepest + kOwnFrames> words;
  const std::uint32_t n = walk(words.data(), registers_here());
  const std::uint64_t* first = words.data();
  std::uint32_t depth = n;
  // Cushion's own calls come first, where it is a library.
  if (const int own = modules_.find(words[0]); own >= 0 && !modules_[static_cast<std::size_t>(own)].program) {
    const Module& library = modules_[static_cast<std::size_t>(own)];
    for (; depth > 0 && *first >= library.low && *first < library.high; --depth) ++first;
  }
  const std::uint32_t id = depth != 0 ? intern(first, std::min(depth, depth_), interval) : 0;
  t_taking = false;
  if (id == 0) lost_.fetch_add(1, std::memory_order_relaxed);
  return id;
}

std::uint32_t Stacks::walk(std::uint64_t* words, Registers at) noexcept {
  const std::uint32_t most = depth_ + kOwnFrames;
  const bool has_python = python_frames_ && python_.is_there();
  std::uint32_t n =
      unwind(modules_, at, words, most, [&](std::uint64_t call) { return has_python && python_.contains(call); });
  if (!has_python || !python_.contains(words[n - 1])) return n;
  std::array<Python::Frame, kDeepest> frames;
  const std::uint32_t lines = python_.frames(frames.data(), std::min(most - n + 1, kDeepest));
  if (lines == 0) return n;
  --n;  // the interpreter's
  for (std::uint32_t i = 0; i < lines; ++i) words[n++] = word_of(frames[i]);
  return n;
}

void Stacks::Sampler::draw() noexcept {
  if (random == 0) random = ticks() ^ reinterpret_cast<std::uint64_t>(this) * 0x9E3779B97F4A7C15u;
  random += 0x9E3779B97F4A7C15u;  // splitmix64
  std::uint64_t z = random;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
  z = (z ^ z >> 27) * 0x94D049BB133111EBu;
  z ^= z >> 31;
  const double uniform = (static_cast<double>(z >> 11) + 0.5) * 0x1p-53;
  left = static_cast<std::int64_t>(std::min(-std::log(uniform) * static_cast<double>(interval), 0x1p62));
}

std::uint32_t Stacks::sample_now(std::uint64_t bytes, std::uint64_t interval) noexcept {
  if (t_sampler.interval != interval) {  // the first in this thread, or the interval was changed
    t_sampler.interval = interval;
    t_sampler.draw();
    t_sampler.left -= static_cast<std::int64_t>(bytes);
  }
  if (t_sampler.left >= 0) {
    t_last = 0;
    return 0;
  }
  t_sampler.draw();
  return take(interval);
}

Stacks::Frame Stacks::frame_of(std::uint64_t word) noexcept {
  if ((word & kPythonWord) != 0) {
    return {.python = static_cast<std::uint32_t>((word & ~kPythonWord) >> kLineBits),
            .line = static_cast<std::uint32_t>(word)};
  }
  const int module = modules_.find(word);
  return {.offset = module >= 0 ? word - modules_[static_cast<std::size_t>(module)].bias : word, .module = module};
}

std::uint32_t Stacks::intern(const std::uint64_t* words, std::uint32_t depth, std::uint64_t interval) noexcept {
  const std::uint64_t hash = hash_of(words, depth, interval);
  const auto known = [&] {
    const std::uint32_t unloads = unloads_.load(std::memory_order_relaxed);
    const std::int64_t place = stack_index_.find(hash, [&](std::uint32_t i) {
      const Stack& s = stacks_[i];
      return s.depth == depth && s.interval == interval && s.unloads == unloads &&
             std::equal(words, words + depth, s.words);
    });
    return static_cast<std::uint32_t>(place + 1);
  };
  if (const std::uint32_t id = known(); id != 0) [[likely]]
    return id;
  if (modules_.refresh()) {
    forget_unwind_rules();
    unloads_.fetch_add(1, std::memory_order_relaxed);
  }
  std::array<Frame, kDeepest> frames;
  for (std::uint32_t i = 0; i < depth; ++i) frames[i] = frame_of(words[i]);
  std::lock_guard lock(tables_lock_);
  if (const std::uint32_t id = known(); id != 0) return id;  // another thread was first
  if (!stack_index_.reserve() || !frame_index_.reserve()) return 0;
  std::array<std::uint32_t, kDeepest> places;
  for (std::uint32_t i = 0; i < depth; ++i) {
    const std::int64_t place = intern_frame(frames[i]);
    if (place < 0) return 0;
    places[i] = static_cast<std::uint32_t>(place);
  }
  Stack* stack = stacks_.prepare();
  if (stack == nullptr || words_.size() + depth > decltype(words_)::kMost) return 0;
  const std::size_t at = words_.size();
  for (std::uint32_t i = 0; i < depth; ++i) {
    std::uint64_t* const word = words_.prepare();
    std::uint32_t* const place = chains_.prepare();
    if (word == nullptr || place == nullptr) return 0;
    *word = words[i];
    *place = places[i];
    words_.publish();
    chains_.publish();
  }
  stack->interval = interval;
  stack->words = &words_[at];
  stack->frames = &chains_[at];
  stack->depth = depth;
  stack->unloads = unloads_.load(std::memory_order_relaxed);
  stacks_.publish();
  stack_index_.add(hash, stacks_.size() - 1);
  return static_cast<std::uint32_t>(stacks_.size());
}

std::int64_t Stacks::intern_frame(const Frame& frame) noexcept {
  const std::uint64_t hash = hash_of(frame);
  const std::int64_t place = frame_index_.find(hash, [&](std::uint32_t i) { return frames_[i] == frame; });
  if (place >= 0) return place;
  Frame* const fresh = frames_.prepare();
  if (fresh == nullptr) return -1;
  *fresh = frame;
  frames_.publish();
  frame_index_.add(hash, frames_.size() - 1);
  return static_cast<std::int64_t>(frames_.size() - 1);
}

Stacks::Named Stacks::named(std::size_t frame, bool may_ask_linker) const noexcept {
  const Frame& f = frames_[frame];
  if (f.python != kNativeCode) {
    const Python::Code& code = python_.code(f.python);
    return {.function = code.function, .file = code.file, .line = f.line};
  }
  if (f.module < 0) return {.offset = f.offset};
  const Module& module = modules_[static_cast<std::size_t>(f.module)];
  Named named{.file = module.path, .offset = f.offset};
  Dl_info info{};
  if (may_ask_linker && !module.gone.load(std::memory_order_relaxed) &&
      dladdr(reinterpret_cast<void*>(module.bias + f.offset), &info) != 0 && info.dli_sname != nullptr)
    named.function = info.dli_sname;
  return named;
}

// ---- figures -----------------------------------------------------------------------------------------------------

Stacks::Amount Stacks::amount(const Stack& stack, std::uint64_t bytes) noexcept {
  if (stack.interval == 0) return {kOne, bytes};
  const double size = static_cast<double>(bytes);
  const double times = 1 / -std::expm1(-size / static_cast<double>(stack.interval));
  return {static_cast<std::uint64_t>(std::llround(static_cast<double>(kOne) * times)),
          static_cast<std::uint64_t>(std::llround(size * times))};
}

// Before it changes.
void Stacks::change(Stack& stack) noexcept {
  if (stack.peak == peaks_) return;
  stack.at_peak.count = stack.live.count;
  stack.at_peak.bytes = stack.live.bytes;
  stack.peak = peaks_;
}

void Stacks::allocated(std::uint32_t id, std::uint64_t address, std::uint64_t bytes) noexcept {
  t_last = address;
  Stack& stack = stacks_[id - 1];
  const Amount by = amount(stack, bytes);
  std::lock_guard lock(figures_lock_);
  change(stack);
  stack.allocated.add(by);
  stack.live.add(by);
  live_ = live_ + by.bytes;
  if (live_ <= most_) return;
  most_ = std::uint64_t{live_};
  peaks_ = peaks_ + 1;
}

void Stacks::freed(std::uint32_t id, std::uint64_t address, std::uint64_t bytes, std::uint64_t age) noexcept {
  const bool temporary = t_last == address;
  Stack& stack = stacks_[id - 1];
  const Amount by = amount(stack, bytes);
  Relaxed<std::uint64_t>& lived = ages_[static_cast<std::size_t>(std::bit_width(age))];
  std::lock_guard lock(figures_lock_);
  change(stack);
  stack.live.subtract(by);
  live_ = live_ - by.bytes;
  lived = lived + by.count;
  if (temporary) stack.temporary = stack.temporary + by.count;
}

void Stacks::waited(std::uint32_t id, std::uint64_t ticks) noexcept {
  Stack& stack = stacks_[id - 1];
  std::lock_guard lock(figures_lock_);
  stack.waits = stack.waits + 1;
  stack.wait_ticks = stack.wait_ticks + ticks;
}

Stacks::Amount Stacks::at_peak(const Stack& stack) const noexcept {
  const Figures& figures = stack.peak == peaks_ ? stack.at_peak : stack.live;
  return {figures.count, figures.bytes};
}

}  // namespace cushion
