// Python: the interpreter's frames of the calling thread, where a CPython interpreter is in the process.
//
// Invariant: no function of Python's is called but the one that tells a thread its own state, and nothing of it is
// written: the frames are read where they lie, so the program cannot tell. That needs no lock of Python's (the GIL):
// the calling thread's frames change only by what that thread does, and it is here. Code objects are alive while a
// frame runs them; what is kept of one is a copy of its names, found again by what it is made of and compared with it.
//
// How CPython lays them out differs with its version: python.cpp has the table (3.10 to 3.14, builds with a GIL). The
// first walk of a process reads every word through the kernel, which answers an error where a fault would be, and holds
// the types to what they must be; if anything is not as the table says, there are no Python frames in this process.
// Cost: about 50 ns a frame that is known; 1 µs for one that is new. Thread safety: any thread.
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
    std::uint64_t object = 0;  // where the code object was, and its names; they may be gone by now
    std::uint64_t name = 0;
    std::uint64_t filename = 0;
    std::uint32_t first_line = 0;
    const char* function = "";  // as UTF-8; ends with 0, as file
    const char* file = "";
  };
  struct Frame {
    std::uint32_t code;  // its place in code()
    std::uint32_t line;  // 0: none
  };

  // Whether there is an interpreter whose frames can be read. Looks for one, seldom.
  bool is_there() noexcept { return layout_.load(std::memory_order_acquire) != nullptr || find_interpreter(); }
  // Whether the address is the interpreter's own: what a native walk meets first of it stands for all Python frames.
  bool contains(std::uint64_t address) const noexcept {
    return address >= low_.load(std::memory_order_relaxed) && address < high_.load(std::memory_order_relaxed);
  }
  // Where is_there(): of the calling thread, innermost first; answers how many.
  std::uint32_t frames(Frame* out, std::uint32_t most) noexcept;

  const Code& code(std::uint32_t i) const noexcept { return codes_[i]; }

  struct Layout;

 private:
  template <class Memory>
  std::uint32_t walk(const Layout& layout, Memory memory, Frame* out, std::uint32_t most, bool& good) noexcept;
  template <class Memory>
  std::int64_t intern(const Layout& layout, Memory memory, std::uint64_t object, bool& good) noexcept;
  bool find_interpreter() noexcept;
  const char* keep(const char* text) noexcept;

  std::atomic<const Layout*> layout_{nullptr};  // release shows the rest of what was found
  std::atomic<bool> proven_{false};             // a first walk found everything as the table says
  std::atomic<bool> refused_{false};            // ... or did not
  std::atomic<std::uint32_t> asked_{0};         // so often it was looked for
  std::atomic<std::uint64_t> low_{0};           // the library that holds it
  std::atomic<std::uint64_t> high_{0};
  std::uint64_t (*own_state_)() = nullptr;  // PyGILState_GetThisThreadState: no lock needed, null in other threads
  std::uint64_t code_type_ = 0;             // PyCode_Type, PyUnicode_Type, PyBytes_Type
  std::uint64_t text_type_ = 0;
  std::uint64_t bytes_type_ = 0;

  SpinLock lock_;  // protects adding to what follows; a leaf
  Ledger<Code, kMost> codes_;
  Index<2 * kMost> index_;
  char* text_ = nullptr;  // where the next text goes
  std::size_t text_left_ = 0;
};

}  // namespace cushion
