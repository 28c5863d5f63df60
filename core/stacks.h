// Stacks: the call stacks of allocations, each kept once, and what was allocated through each.
//
// Invariants
//   - A stack's id, and the frames that it names, never change; ids begin at 1, 0 is no stack. A stack taken for every
//     block (interval 0) and one taken of a sample are two, so that a block's id also says for how much it stands:
//     blocks of `size` bytes are sampled with the probability 1 - exp(-size / interval), and each counts as its
//     inverse. What a block adds when it is allocated, and what it takes away when it is freed, is computed from its
//     size and its stack alone, so it cancels, whatever the level is by then.
//   - `at_peak` of each stack is what it had live at the moment when the bytes of all of them together were at their
//     highest. It is kept without a copy of all at each peak: a stack that changes after a peak first notes what it
//     had.
//   - No lock of Cushion's but its own is held while a stack is taken: the dynamic linker's list lock is taken there.
//
// Thread safety: any thread. Reading (the report) takes no lock and may run in a signal handler; figures that change
// meanwhile may then not belong together. Cost: README.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>

#include "core/block.h"
#include "core/ledger.h"
#include "core/modules.h"
#include "core/python.h"
#include "core/spin_lock.h"
#include "core/unwind.h"

namespace cushion {

class Stacks {
 public:
  static constexpr std::size_t kMost = std::size_t{1} << 18;
  static constexpr std::size_t kMostFrames = std::size_t{1} << 18;
  static constexpr std::uint32_t kDeepest = 128;
  static constexpr std::uint32_t kOwnFrames = 16;  // of Cushion's own, at most
  static constexpr std::uint32_t kNativeCode = ~std::uint32_t{0};

  // A place in the program: an address of a module (-1: none known), or a line of Python.
  struct Frame {
    std::uint64_t offset = 0;            // of a module, in its file's own addresses; without one the address
    std::int32_t module = -1;            // in modules()
    std::uint32_t python = kNativeCode;  // in python()
    std::uint32_t line = 0;              // of Python

    bool operator==(const Frame&) const = default;
  };

  // In 1/65536 of a block where it is sampled, so that sums stay whole.
  struct Amount {
    std::uint64_t count = 0;
    std::uint64_t bytes = 0;
  };
  static constexpr std::uint64_t kOne = 65536;
  struct Figures {
    Relaxed<std::uint64_t> count;
    Relaxed<std::uint64_t> bytes;
    void add(Amount by) noexcept {
      count = count + by.count;
      bytes = bytes + by.bytes;
    }
    void subtract(Amount by) noexcept {
      count = count - by.count;
      bytes = bytes - by.bytes;
    }
  };
  struct Stack {
    std::uint64_t interval = 0;             // bytes; 0: of every allocation
    const std::uint64_t* words = nullptr;   // as they were taken (word_of)
    const std::uint32_t* frames = nullptr;  // the same as places in frame(), innermost first
    std::uint32_t depth = 0;
    std::uint32_t unloads = 0;  // before it: addresses of another count are others
    Figures allocated{};        // ever
    Figures live{};
    Figures at_peak{};  // what it was at the peak `peak`; live, if there was a later one
    Relaxed<std::uint64_t> peak{};
    Relaxed<std::uint64_t> temporary{};  // freed by their thread before its next allocation, as Amount::count
    Relaxed<std::uint64_t> waits{};      // of frees called from there
    Relaxed<std::uint64_t> wait_ticks{};
  };

  // What start() sets, before anything is taken.
  void configure(std::uint32_t depth, bool python) noexcept {
    depth_ = depth < kDeepest ? depth : kDeepest;
    python_frames_ = python;
  }

  // The caller's stack without Cushion's own frames, 0 where none can be had.
  [[gnu::noinline]] std::uint32_t take(std::uint64_t interval) noexcept;
  // The same of a sample `interval` bytes apart: 0 for what is not in it.
  std::uint32_t sample(std::uint64_t bytes, std::uint64_t interval) noexcept {
    if (t_sampler.interval == interval && (t_sampler.left -= static_cast<std::int64_t>(bytes)) >= 0) [[likely]] {
      t_last = 0;
      return 0;
    }
    return sample_now(bytes, interval);
  }

  // A block came into the program's hands, and left them. `id` is not 0.
  void allocated(std::uint32_t id, std::uint64_t address, std::uint64_t bytes) noexcept;
  void freed(std::uint32_t id, std::uint64_t address, std::uint64_t bytes, std::uint64_t age) noexcept;
  // A free called from there has waited.
  void waited(std::uint32_t id, std::uint64_t ticks) noexcept;

  // ---- for the report: ids go from 1 to size()
  std::size_t size() const noexcept { return stacks_.size(); }
  const Stack& operator[](std::uint32_t id) const noexcept { return stacks_[id - 1]; }
  Amount at_peak(const Stack& stack) const noexcept;
  std::size_t frame_count() const noexcept { return frames_.size(); }
  const Frame& frame(std::size_t i) const noexcept { return frames_[i]; }
  const Modules& modules() const noexcept { return modules_; }
  // The frame for a person. `function` is empty where nothing is known of it: of native code only what the dynamic
  // linker knows, which may not be asked in a signal handler. `file`: of Python the source, else the module's path.
  struct Named {
    const char* function = "";
    const char* file = "";
    std::uint32_t line = 0;    // of Python
    std::uint64_t offset = 0;  // in the module; without one the address
  };
  Named named(std::size_t frame, bool may_ask_linker) const noexcept;
  const Python& python() const noexcept { return python_; }
  std::uint64_t lost() const noexcept { return lost_.load(std::memory_order_relaxed); }
  // How long blocks lived, of those with a stack: by the number of bits of their age in ns, as Amount::count.
  static constexpr std::size_t kAges = 65;
  const std::array<Relaxed<std::uint64_t>, kAges>& ages() const noexcept { return ages_; }

 private:
  struct Sampler {  // of a thread
    std::uint64_t interval = 0;
    std::int64_t left = 0;  // bytes to go to the next sample
    std::uint64_t random = 0;
    void draw() noexcept;
  };
  static constinit thread_local Sampler t_sampler;
  static constinit thread_local std::uint64_t t_last;  // the thread's last allocation, if it had a stack

  std::uint32_t sample_now(std::uint64_t bytes, std::uint64_t interval) noexcept;
  std::uint32_t walk(std::uint64_t* words, Registers at) noexcept;
  std::uint32_t intern(const std::uint64_t* words, std::uint32_t depth, std::uint64_t interval) noexcept;
  std::int64_t intern_frame(const Frame& frame) noexcept;  // with tables_lock_ held
  Frame frame_of(std::uint64_t word) noexcept;
  static Amount amount(const Stack& stack, std::uint64_t bytes) noexcept;
  void change(Stack& stack) noexcept;

  std::uint32_t depth_ = 32;
  bool python_frames_ = true;
  Modules modules_;
  Python python_;
  std::atomic<std::uint64_t> lost_{0};     // allocations whose stack could not be kept
  std::atomic<std::uint32_t> unloads_{0};  // how often libraries were found to have been unloaded

  SpinLock figures_lock_;  // protects writing the figures of all stacks and those below; a leaf
  Relaxed<std::uint64_t> live_{};
  Relaxed<std::uint64_t> most_{};   // that live_ was
  Relaxed<std::uint64_t> peaks_{};  // how often it was passed
  std::array<Relaxed<std::uint64_t>, kAges> ages_{};

  std::mutex tables_lock_;  // protects adding to the tables; a leaf
  Ledger<Frame, kMostFrames> frames_;
  Index<2 * kMostFrames> frame_index_;
  // The stacks' words and frames, one stack behind another.
  Ledger<std::uint64_t, kMost * 24> words_;
  Ledger<std::uint32_t, kMost * 24> chains_;
  Ledger<Stack, kMost> stacks_;
  Index<2 * kMost> stack_index_;
};

}  // namespace cushion
