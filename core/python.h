// Python: the interpreter's frames of the calling thread, where a Python interpreter is in the process and this thread
// holds its lock (the GIL).
//
// Invariant: nothing is imported, no Python code runs, the GIL is never taken, and what the program can see stays: an
// exception that is set, and the garbage collector, which is off while frames are read (a finaliser could call back
// into whoever allocates). A code object that was met is kept for ever, so that its address means it for ever; there
// are kMost of them at most.
//
// The interpreter is found by its public functions, in whatever library or program exports them (CPython 3.10 and
// later). Cost: 0.1 µs a frame that is known; the interpreter makes an object for each frame that has none yet. Thread
// safety: any thread.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/ledger.h"
#include "core/spin_lock.h"

namespace cushion {

class Python {
 public:
  static constexpr std::size_t kMost = std::size_t{1} << 16;

  struct Code {
    const void* object = nullptr;
    const char* function = "";  // ends with 0, as file
    const char* file = "";
  };
  struct Frame {
    std::uint32_t code;  // its place in codes
    std::uint32_t line;
  };

  // Whether this thread may be asked for its frames now. Looks for the interpreter first, seldom.
  bool holds_lock() noexcept;
  // Whether the address is the interpreter's own: what a native walk meets first of it stands for all Python frames.
  bool contains(std::uint64_t address) const noexcept {
    return address >= low_.load(std::memory_order_relaxed) && address < high_.load(std::memory_order_relaxed);
  }
  // Where holds_lock(): innermost first; answers how many.
  std::uint32_t frames(Frame* out, std::uint32_t most) noexcept;

  const Code& code(std::uint32_t i) const noexcept { return codes_[i]; }

 private:
  struct Functions;
  bool find_interpreter() noexcept;
  // The code's place, or -1 if there is no more room. Takes over the caller's reference.
  std::int64_t intern(void* object) noexcept;
  std::int64_t known(const void* object) const noexcept;
  const char* keep(const char* text, std::size_t bytes) noexcept;

  std::atomic<const Functions*> functions_{nullptr};  // release shows what it points to
  std::atomic<std::uint32_t> asked_{0};               // so often it was looked for, without success
  std::atomic<std::uint64_t> low_{0};                 // the library that holds it
  std::atomic<std::uint64_t> high_{0};

  SpinLock lock_;  // protects adding to all below; a leaf, and no Python function is called under it
  Ledger<Code, kMost> codes_;
  Index<2 * kMost> index_;  // by object
  char* text_ = nullptr;    // where the next text goes
  std::size_t text_left_ = 0;
};

}  // namespace cushion
