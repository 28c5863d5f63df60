// Misuse: what a program does wrong with Cushion's blocks, told on stderr when it is found: a free of what is no block,
// an overwritten guard (guard.h), a write to freed memory (quarantine.h).
//
// Invariants
//   - What is told is true: every text stands for a call that answered CUDA_ERROR_INVALID_VALUE, or for bytes that the
//     device has in a place where no correct program writes. What is only likely is said to be so.
//   - Nothing else changes: the call answers what it answered before, and one write(2) tells.
//   - The ring of frees is a help for words alone. It holds the last kFrees of them, with their stacks, while the level
//     of tracking is stacks or CUSHION_QUARANTINE is set; nothing is decided by it.
//
// Thread safety: any thread that may allocate host memory (no signal handler); the ring's lock is a leaf.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "core/counters.h"
#include "core/spin_lock.h"
#include "core/stacks.h"

namespace cushion {

// A block that left the program's hands, or is leaving them.
struct FreedBlock {
  std::uint64_t address = 0;
  std::uint64_t bytes = 0;      // requested
  std::uint32_t allocated = 0;  // stacks; 0: not known
  std::uint32_t freed = 0;
};

// Bytes of a block that should hold a pattern and do not.
struct Overwritten {
  FreedBlock block;
  std::uint64_t first = 0;  // where, in what was looked at
  std::uint64_t count = 0;

  // Counts on, `at` bytes further; whether anything was found so far. The device may still be writing there (guard.h).
  __attribute__((no_sanitize("thread"))) bool differs(const unsigned char* seen, std::uint64_t size,
                                                      unsigned char pattern, std::uint64_t at = 0) noexcept {
    for (std::uint64_t i = 0; i < size; ++i) {
      if (seen[i] == pattern) continue;
      if (count++ == 0) first = at + i;
    }
    return count != 0;
  }
};

class Misuse {
 public:
  static constexpr std::size_t kFrees = 4096;
  static constexpr std::uint64_t kMostFrees = 20;  // wrong frees told in a process

  void remember(const FreedBlock& block) noexcept;
  // The last one known of which `address` is a part.
  std::optional<FreedBlock> recall(std::uint64_t address) const noexcept;

  // `call`, by its caller's stack, was given `address`, which begins no block of the program's. `around`: the block
  // that it lies in; `before`: one that was there. Each may be null.
  void wrong_free(Stacks& stacks, const char* call, std::uint64_t address, const FreedBlock* around,
                  const FreedBlock* before) noexcept;
  // Of `guard` bytes behind the block.
  void overwritten_guard(const Stacks& stacks, const Overwritten& found, std::uint64_t guard) noexcept;
  void written_after_free(const Stacks& stacks, const Overwritten& found) noexcept;

 private:
  mutable SpinLock lock_;  // protects the ring
  std::array<FreedBlock, kFrees> frees_{};
  std::uint64_t count_ = 0;  // ever
  Counter told_{0};          // wrong frees
};

}  // namespace cushion
