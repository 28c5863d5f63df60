// Block: the record of one contiguous piece of a segment, handed out or free. Records live in host memory only, one
// cache line each, and exist whether or not tracking is on, so that tracking can be switched at any time.
//
// Invariant: the blocks of a segment, linked by `lower` and `upper`, cover it without gap or overlap; two neighbours
// that are both free in the same heap and not evented are one block. A block is protected by its context's lock; only
// `address` and `state` may be read without it (to refuse a foreign pointer early), and then prove nothing.
#pragma once

#include <atomic>
#include <cstdint>

namespace cushion {

// Sizes and addresses of blocks are multiples of this: cudaMalloc's alignment (contract §2).
inline constexpr std::uint64_t kUnit = 512;
// Requests above kBigRequest are aligned to kBigAlignment: GDRCopy and dma-buf pin pages of that size (contract §2).
inline constexpr std::uint64_t kBigRequest = std::uint64_t{1} << 20;
inline constexpr std::uint64_t kBigAlignment = std::uint64_t{64} << 10;

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t multiple) noexcept {
  return (value + multiple - 1) / multiple * multiple;
}

// The call that allocated a block; `kApiNames` is what the report calls it.
enum class Api : std::uint8_t { malloc, malloc_async, pitch, managed, from_pool, vmm, host };
inline constexpr const char* kApiNames[] = {"cuMemAlloc",        "cuMemAllocAsync",         "cuMemAllocPitch",
                                            "cuMemAllocManaged", "cuMemAllocFromPoolAsync", "cuMemCreate",
                                            "cuMemHostAlloc"};

enum class BlockState : std::uint8_t {
  unused,   // a recycled record
  free,     // in a heap's bins
  evented,  // free, held beside the bins with an event of its own
  live,     // the program's
  freeing,  // the program's free is waiting for the device; a second free of it is an error
};

struct Block {
  std::atomic<std::uint64_t> address{0};
  std::uint64_t size = 0;  // bytes handed out, a multiple of kUnit
  Block* lower = nullptr;  // neighbours by address in the segment
  Block* upper = nullptr;
  struct Idle {
    Block* previous;  // the other free blocks of its bin
    Block* next;
    std::uint64_t stamp;  // the free's place in the context's order; of merged frees, the last
  };
  struct Live {
    std::uint64_t requested;  // bytes the program asked for
    std::uint64_t time;       // ticks at allocation; 0: allocated while tracking was off
    std::uint32_t thread;
    std::uint32_t stream;  // low half of the stream's id; 0: host-ordered
  };
  union {
    Idle idle{};  // while free
    Live live;    // while the program's, or being freed
  };
  std::uint32_t heap = 0;  // while free: index of its heap in the pool
  std::atomic<BlockState> state{BlockState::unused};
  Api api = Api::malloc;
};
static_assert(sizeof(Block) == 64);

}  // namespace cushion
