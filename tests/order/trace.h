// Trace: what one run of a program did, step by step. It lies in memory that the run's process shares with the one that
// judges it, so it has no pointers.
#pragma once

#include <array>
#include <bitset>
#include <cstdint>

#include "tests/order/program.h"

namespace order {

struct Access {
  std::int16_t generation;  // the step that allocated the block
  bool writes;
  std::int16_t signer;  // the step whose signature is written; -1: none that is known
};

// What a step writes to the first bytes of a block.
constexpr std::uint64_t SignatureOf(int step) { return static_cast<std::uint64_t>(step + 1) * 0x0101010101010101; }

struct StepTrace {
  bool executed = false;
  int result = 0;  // CUresult
  // Of a step that touches memory: what, and the earlier steps that are ordered before it.
  static constexpr std::size_t kMostAccesses = 24;
  std::uint8_t accesses = 0;
  std::array<Access, kMostAccesses> access{};
  std::bitset<kMostSteps> after;
  std::uint64_t observed = 0;  // what it read
  // Of an allocation:
  std::uint64_t address = 0;
  std::uint64_t bytes = 0;
  std::int16_t freed = -1;  // the step that freed it
};

struct Trace {
  bool finished = false;
  std::int16_t at = -1;        // the step that was begun last
  std::int16_t short_at = -1;  // the first allocation that found no memory
  char finding[256] = "";
  std::array<StepTrace, kMostSteps> step{};
};

}  // namespace order
