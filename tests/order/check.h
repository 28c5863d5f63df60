// Check: runs a program natively and under Cushion, each in a process of its own, and compares.
//
// What must hold (contract §3):
//   two lives      steps that touch the same bytes in different generations, one of them writing, are ordered; a block
//                  is never handed out while another one has some of its bytes
//   native order   steps that touch one generation, one of them writing, and are ordered natively, are ordered
//   data           a read sees what the last write before it left, where only one write can be the last
//   answers        every step answers what it answers natively. A query that is not bound to be complete may be, and an
//                  allocation may find no memory where there is less of it; from there on only two lives and progress
//                  are asked, up to the first step that needed the block
//   progress       no wait comes after a kernel that nobody will let go on; and the run ends
#pragma once

#include <cstdint>
#include <string>

#include "tests/order/program.h"

namespace order {

struct Counts {
  std::uint64_t programs = 0;
  std::uint64_t steps = 0;      // executed
  std::uint64_t conflicts = 0;  // pairs of steps whose order was asked
  std::uint64_t reads = 0;      // whose value was known
};

// In a process that can become a Cushion's (that was started with the preload, and has not used CUDA yet): what is
// wrong; empty where nothing is. `free_returns`: cudaFree's wait is not asked for.
std::string Check(const Program& program, std::uint64_t seed, bool free_returns, Counts& counts);

// The shortest program that still fails, by leaving out steps and changing what is left to something simpler.
Program Shrink(Program program, std::uint64_t seed, bool free_returns);

}  // namespace order
