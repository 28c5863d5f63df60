// Signature: what a block holds while the torture program owns it. Every word says whose it is and where it lies, so a
// wrong word tells who wrote it. The words look random: zeros, junk and another block's words are all wrong in nearly
// every byte. Cost: one multiplication a word, on the device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu_program.h"

// A serial is never 0: the thread in the upper 8 bits, a count that begins at 1 in the lower 32.
constexpr std::uint64_t kSerialBits = 40;
constexpr std::uint64_t kOffsetBits = 24;  // in words: blocks of up to 128 MiB
constexpr std::uint64_t serial_of(unsigned thread, std::uint32_t count) {
  return static_cast<std::uint64_t>(thread) << 32 | count;
}

constexpr std::uint64_t kFactor = 0x9E3779B97F4A7C15;
constexpr std::uint64_t inverse(std::uint64_t odd) {
  std::uint64_t x = odd;
  for (int i = 0; i < 6; ++i) x *= 2 - odd * x;
  return x;
}
static_assert(kFactor * inverse(kFactor) == 1);

__host__ __device__ constexpr std::uint64_t signed_word(std::uint64_t serial, std::uint64_t offset) {
  std::uint64_t x = serial << kOffsetBits | offset;
  x ^= x >> 32;
  x *= kFactor;
  return x ^ x >> 32;
}
struct Origin {
  std::uint64_t serial;
  std::uint64_t offset;  // in words
};
constexpr Origin origin_of(std::uint64_t word) {
  std::uint64_t x = word ^ word >> 32;
  x *= inverse(kFactor);
  x ^= x >> 32;
  return {x >> kOffsetBits, x & ((std::uint64_t{1} << kOffsetBits) - 1)};
}
static_assert(origin_of(signed_word(serial_of(7, 12345), 678)).serial == serial_of(7, 12345));
static_assert(origin_of(signed_word(serial_of(7, 12345), 678)).offset == 678);

// What the checks found. In pinned host memory that the device sees: none of any pool's, and the host can look at it
// while kernels run.
struct Wrong {
  const unsigned char* at;  // the word's first byte
  std::uint64_t serial;     // whose it should be
  std::uint64_t found;
  std::uint64_t device_ns;
  unsigned width;  // bytes of the word that belong to the block
};
struct Findings {
  static constexpr unsigned kMost = 16;
  unsigned long long verified;  // bytes
  unsigned long long wrong;     // bytes
  unsigned count;               // words; the first ones are kept
  Wrong first[kMost];
};

__device__ inline void check_word(const volatile unsigned char* at, std::uint64_t serial, std::uint64_t offset,
                                  unsigned width, Findings* findings) {
  const std::uint64_t expected = signed_word(serial, offset);
  std::uint64_t found = 0;
  if (width == 8) {
    found = *reinterpret_cast<const volatile std::uint64_t*>(at);
  } else {
    for (unsigned i = 0; i < width; ++i) found |= static_cast<std::uint64_t>(at[i]) << (8 * i);
  }
  unsigned wrong = 0;
  for (unsigned i = 0; i < width; ++i) wrong += ((found ^ expected) >> (8 * i) & 0xFF) != 0;
  if (wrong == 0) return;
  atomicAdd(&findings->wrong, static_cast<unsigned long long>(wrong));
  const unsigned slot = atomicAdd(&findings->count, 1u);
  if (slot < Findings::kMost) {
    findings->first[slot] = {const_cast<const unsigned char*>(at), serial, found, device_now(), width};
  }
}

__device__ inline void write_word(volatile unsigned char* at, std::uint64_t word, unsigned width) {
  if (width == 8) {
    *reinterpret_cast<volatile std::uint64_t*>(at) = word;
  } else {
    for (unsigned i = 0; i < width; ++i) at[i] = static_cast<unsigned char>(word >> (8 * i));
  }
}

// The one kernel: waits, checks that the block holds the signature `expected`, writes `next`, waits, and checks that
// too. 0 as a signature leaves its part out. A block handed out early is seen by this kernel if the new owner writes
// while it waits, and by the new owner's if this one writes after its first wait.
static __global__ void work(unsigned char* block, std::size_t size, std::uint64_t expected, std::uint64_t next,
                            unsigned long long wait_before, unsigned long long wait_after, Findings* findings) {
  const std::size_t first = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x;
  const std::size_t step = gridDim.x * static_cast<std::size_t>(blockDim.x);
  const std::size_t words = (size + 7) / 8;
  const auto width = [&](std::size_t word) { return word == size / 8 ? static_cast<unsigned>(size % 8) : 8u; };
  device_wait(wait_before);
  if (expected != 0) {
    for (std::size_t w = first; w < words; w += step) check_word(block + 8 * w, expected, w, width(w), findings);
  }
  if (next != 0) {
    for (std::size_t w = first; w < words; w += step) write_word(block + 8 * w, signed_word(next, w), width(w));
    __threadfence();
    device_wait(wait_after);
    for (std::size_t w = first; w < words; w += step) check_word(block + 8 * w, next, w, width(w), findings);
  }
  if (first == 0) {
    const unsigned checks = (expected != 0 ? 1 : 0) + (next != 0 ? 1 : 0);
    atomicAdd(&findings->verified, static_cast<unsigned long long>(size) * checks);
  }
}
