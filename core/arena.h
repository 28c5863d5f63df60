// Arena: a pool with its heaps and a lock of its own. The global arena (index 0) holds the segments that the context
// has from the driver. The others hold superblocks: large blocks of the global arena, cut up on their own account, so
// that streams, threads or bins share neither a lock nor a superblock. Which arena serves a request is
// CUSHION_ALLOCATOR's choice and nothing else (Context::arena_of).
//
// A superblock that is wholly free goes back to the global arena with the order that its bytes have: clean, or still
// owed to a stream or a fence. Others can have it when they could have had any other block freed that way.
//
// Everything is protected by `mutex`, held for list and bit operations only, never across a driver call, and never two
// arenas' at once. A lane's lock may be taken under it.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "core/fence.h"
#include "core/lane.h"
#include "core/pool.h"

namespace cushion {

class Context;

struct Need {
  std::uint64_t size;  // bytes, rounded up
  std::uint64_t alignment;
};

class Arena {
 public:
  struct Evented {  // a free block beside the bins, with the event recorded inside its free
    Block* block;
    FenceEvent event;
    std::uint64_t serial;  // of the lane it was freed in; 0: another context's stream, only the event counts
    bool being_queried;
  };

  Arena(AddressMap& map, Context& context, int index);

  Context& context() const noexcept { return context_; }
  int index() const noexcept { return index_; }

  // A block for the lane, from what it may have now; null if there is none. It is live, or as told.
  Block* take(const Need& need, LaneRef by, BlockState as = BlockState::live) noexcept;
  // Puts a block that was handed out into the lane's heap, where its stream may have it at once and others as heap.h
  // says; a host lane's is the pending heap.
  void give(Block* block, LaneRef by, std::uint64_t stamp) noexcept;
  void give_clean(Block* block) noexcept { pool.give(block, *clean, 0); }
  void give_pending(Block* block, std::uint64_t stamp) noexcept { pool.give(block, *pending, stamp); }

  // Adds a superblock with the order that `superblock`, a block just taken for the lane, came with.
  bool add_superblock(const Block& superblock, bool was_clean, LaneRef by, std::uint64_t stamp) noexcept;
  // Takes out wholly free superblocks until no more than `keep` bytes of them are left.
  struct Superblock {
    std::uint64_t address;
    Order order;
    LaneRef lane;
    std::uint64_t stamp;
  };
  void detach_superblocks(std::uint64_t keep, std::vector<Superblock>& out);

  Heap* heap_of(LaneRef lane) noexcept;           // the pending heap if the lane is gone, or a host lane
  void forget(Lane& lane) noexcept;               // the lane has ended: its blocks go to the pending heap
  void clean_up(std::uint64_t through) noexcept;  // moves what is known clean to the clean heap
  std::uint64_t newest_unclean() const noexcept;  // the latest stamp of a free block that is not clean; 0: none
  void abandon();                                 // the context is gone, its memory with it

  // How often the context's memory was lost. Written under the mutex, once no record of the old memory is left. A free
  // reads it before it claims its block, and gives the block back only if it reads the same under the mutex (or under a
  // lane's lock, see Context::discard): else the record is another block's by now.
  std::uint64_t generation() const noexcept { return generation_.load(std::memory_order_acquire); }

  SpinLock mutex;
  Pool pool;
  Heap* clean = nullptr;
  Heap* pending = nullptr;
  Heap* unmapped = nullptr;  // of the global arena (vmm.h)
  std::vector<Evented> evented;

 private:
  void make_heaps();

  Context& context_;
  const int index_;
  std::atomic<std::uint64_t> generation_{0};
};

}  // namespace cushion
