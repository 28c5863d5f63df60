// Unwind: the return addresses above a call, fast enough for every allocation.
//
// On x86-64 how to go from a frame to its caller is read from .eh_frame once for each return address, and kept in a
// table of one word each; so a frame costs a look into the table and two loads (README says what was measured, beside
// frame pointers alone). Code without such information (just-in-time compiled, for one) is passed by its frame pointer,
// if that leads up the stack. On arm64, whose compilers keep frame pointers, those are all that is used.
//
// Invariant: nothing but the calling thread's own stack is read, between its stack pointer and its end; on a stack that
// is not the thread's (fibers, an alternate signal stack) only up to the end of the page. A wrong rule, of a library
// that was unloaded or of a corrupt file, costs a wrong name, never a fault.
//
// Thread safety: any thread; no lock but Modules'. Cost: about 10 ns a frame that is known; 1 to 20 µs for one that is
// new; once in a thread, about 10 µs to ask where its stack ends.
#pragma once

#include <cstdint>

#include "core/modules.h"

namespace cushion {

// Who holds the frame that the walk begins at.
struct Registers {
  std::uint64_t pc;
  std::uint64_t sp;
  std::uint64_t fp;
};

// Of the function that this is inlined into.
[[gnu::always_inline]] inline Registers registers_here() noexcept {
  Registers r{};
#if defined(__x86_64__)
  asm volatile("leaq 0(%%rip), %0\n\tmovq %%rsp, %1\n\tmovq %%rbp, %2" : "=r"(r.pc), "=r"(r.sp), "=r"(r.fp));
#elif defined(__aarch64__)
  asm volatile("adr %0, .\n\tmov %1, sp\n\tmov %2, x29" : "=r"(r.pc), "=r"(r.sp), "=r"(r.fp));
#endif
  return r;
}

struct StackRange {
  std::uint64_t low;
  std::uint64_t high;
};
// What may be read of the stack from this stack pointer on.
StackRange readable_stack(std::uint64_t sp) noexcept;
// To the caller's frame; false: there is none, or it cannot be found. `call`: where the frame stands.
bool step_to_caller(Modules& modules, const StackRange& stack, Registers& r, std::uint64_t call) noexcept;

// Writes the addresses of the calls above (each one byte before its return address, so that it lies in the calling
// line), innermost first, at most `most` of them, and answers how many. The first is the frame's own pc's; the last,
// the first for which ends(address).
template <class Ends>
std::uint32_t unwind(Modules& modules, Registers at, std::uint64_t* calls, std::uint32_t most, Ends ends) noexcept {
  const StackRange stack = readable_stack(at.sp);
  std::uint64_t call = at.pc;
  std::uint32_t n = 0;
  while (n < most) {
    calls[n++] = call;
    if (ends(call) || !step_to_caller(modules, stack, at, call) || at.pc < 2) break;
    call = at.pc - 1;
  }
  return n;
}

// The same by frame pointers alone: to measure against.
std::uint32_t unwind_by_frame_pointers(Registers at, std::uint64_t* calls, std::uint32_t most) noexcept;

// After libraries were unloaded: the rules are read anew.
void forget_unwind_rules() noexcept;

}  // namespace cushion
