// Block: the record of one contiguous piece of a segment, handed out or free. Records live in host memory only, one
// cache line each, and exist whether or not tracking is on, so that tracking can be switched at any time.
//
// Invariant: the blocks of a segment, linked by `lower` and `upper`, cover it without gap or overlap; two neighbours
// that are both free in the same heap and not evented are one block. A block is protected by its arena's lock, with one
// exception: between `live`, `freeing` and `cached` it changes hands without it, by compare-and-swap of `word`, which
// names address and state at once, so that a free can claim no record that has become another block meanwhile. What a
// reader beside its owner may see in those states (the report) is a Relaxed.
#pragma once

#include <atomic>
#include <cstdint>

namespace cushion {

// Sizes and addresses of blocks are multiples of this: cudaMalloc's alignment (contract §2).
inline constexpr std::uint64_t kUnit = 512;
// Requests above kBigRequest are aligned to kBigAlignment: GDRCopy and dma-buf pin pages of that size (contract §2).
inline constexpr std::uint64_t kBigRequest = std::uint64_t{1} << 20;
inline constexpr std::uint64_t kBigAlignment = std::uint64_t{64} << 10;

// Later than every stamp (fence.h).
inline constexpr std::uint64_t kAnyStamp = ~std::uint64_t{0};

// To a multiple of a power of two.
constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t power) noexcept {
  return (value + power - 1) & ~(power - 1);
}

// What was noted of an allocation when it was made (track.h); zeros: nothing.
struct Note {
  std::uint64_t time = 0;  // on the monotonic clock, ns; without a stack up to 10 ms early; grows within a thread
  std::uint32_t thread = 0;
  std::uint32_t stack = 0;  // its id (stacks.h)
};

// The call that allocated a block; `kApiNames` is what the report calls it.
// Superblocks are the arenas' own (arena.h), in no program's hands, and in no report.
enum class Api : std::uint8_t { malloc, malloc_async, pitch, managed, from_pool, vmm, host, superblock };
inline constexpr const char* kApiNames[] = {"cuMemAlloc",        "cuMemAllocAsync",         "cuMemAllocPitch",
                                            "cuMemAllocManaged", "cuMemAllocFromPoolAsync", "cuMemCreate",
                                            "cuMemHostAlloc"};

enum class BlockState : std::uint8_t {
  unused,   // a recycled record
  moving,   // memory is being mapped or unmapped there (vmm.h): in no bins, and nobody's
  free,     // in a heap's bins
  evented,  // free, held beside the bins with an event of its own
  live,     // the program's
  freeing,  // claimed by the program's free, which may be waiting for the device; a second free of it is an error
  cached,   // free, in a lane's magazine, or a superblock; its arena still counts it as handed out
};

// A field with one writer at a time that others may read beside it; it orders nothing.
template <class T>
class Relaxed {
 public:
  operator T() const noexcept { return std::atomic_ref(value_).load(std::memory_order_relaxed); }
  // What is read after it is no older.
  T acquire() const noexcept { return std::atomic_ref(value_).load(std::memory_order_acquire); }
  Relaxed& operator=(T value) noexcept {
    std::atomic_ref(value_).store(value, std::memory_order_relaxed);
    return *this;
  }

 private:
  mutable T value_;  // mutable: atomic_ref has no const view of it
};

struct Block {
  // What a free that a reset overtook may still look at is atomic also while a recycled record is made anew.
  Block() noexcept {
    word().store(0, std::memory_order_relaxed);
    api = Api::malloc;
  }

  std::uint64_t size = 0;  // bytes handed out, a multiple of kUnit
  Block* lower = nullptr;  // neighbours by address in the segment
  Block* upper = nullptr;
  struct Idle {
    Block* previous;  // the other free blocks of its bin
    Block* next;
    std::uint64_t stamp;  // the free's place in the context's order; of merged frees, the last
  };
  struct Live {
    Relaxed<std::uint64_t> requested;  // bytes the program asked for
    Relaxed<std::uint64_t> time;       // as Note::time; 0: allocated while tracking was off
    Relaxed<std::uint32_t> thread;
    Relaxed<std::uint32_t> stream;  // low half of the stream's id; 0: host-ordered
  };
  union {
    Idle idle{};  // while free or evented
    Live live;    // while live, freeing or cached
  };
  union {
    std::uint32_t heap = 0;        // while free: index of its heap in the pool
    Relaxed<std::uint32_t> stack;  // while live or freeing: as Note::stack
  };
  Relaxed<Api> api;

  void set(const Note& note) noexcept {
    live.time = note.time;
    live.thread = note.thread;
    stack = note.stack;
  }
  Note note() const noexcept { return {live.time, live.thread, stack}; }

  std::uint64_t address() const noexcept { return word().load(std::memory_order_relaxed) & ~(kUnit - 1); }
  BlockState state() const noexcept { return static_cast<BlockState>(word().load(std::memory_order_relaxed) % kUnit); }
  void set(std::uint64_t address, BlockState state) noexcept {
    // Release: who finds a live block sees its fields.
    word().store(address | static_cast<std::uint64_t>(state), std::memory_order_release);
  }
  void set(BlockState state) noexcept { set(address(), state); }
  // Changes the state of the block that begins at `address`, if it is that block and in state `from`: of several
  // callers one wins. Acquire: the winner sees what the last owner wrote.
  bool change(std::uint64_t address, BlockState from, BlockState to) noexcept {
    std::uint64_t expected = address | static_cast<std::uint64_t>(from);
    return word().compare_exchange_strong(expected, address | static_cast<std::uint64_t>(to), std::memory_order_acq_rel,
                                          std::memory_order_relaxed);
  }
  // An arena looks at both neighbours of what it gets back, and they lie anywhere in host memory: asked for before its
  // lock is taken, they come together. Never on a path that takes no arena's lock: it would fetch other threads' blocks
  // away. What is read here without the lock is only a hint.
#if defined(__SANITIZE_THREAD__)
  void prefetch_neighbours() const noexcept {}
#else
  void prefetch_neighbours() const noexcept {
    __builtin_prefetch(lower, 1);
    __builtin_prefetch(upper, 1);
  }
#endif

 private:
  std::atomic_ref<std::uint64_t> word() const noexcept { return std::atomic_ref(word_); }
  mutable std::uint64_t word_;  // address, a multiple of kUnit, and below it the state; only used by word()
};
static_assert(sizeof(Block) == 64);

}  // namespace cushion
