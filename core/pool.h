// Pool: which bytes serve an allocation. The segments of one arena, cut into blocks; free blocks lie in the bins
// of their heap (heap.h). Best fit within size bins, split exactly, merge at once with free neighbours of the same
// heap. Constant time: a take or a give is a few bit scans and list links, and no device memory is touched.
//
// The pool does not know what order means: it never moves a block to another heap unless told to. Not thread safe:
// every function wants the arena's lock held.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/address_map.h"
#include "core/block.h"
#include "core/heap.h"
#include "core/segment.h"
#include "core/slab.h"

namespace cushion {

class Pool {
 public:
  Pool(AddressMap& map, Arena* arena) noexcept : map_(map), arena_(arena) {}
  // Has host memory ready for a first segment of `size` bytes, which then comes without a page fault.
  void prepare(std::uint64_t size) noexcept;

  // Heaps. A new heap's index stays its own until drop(); drop() wants it empty.
  Heap* make_heap(Order order);
  void drop(Heap* heap) noexcept;
  Heap* heap(std::uint32_t index) const noexcept { return heaps_[index]; }
  const std::vector<Heap*>& heaps() const noexcept { return heaps_; }  // entries may be null

  // A block of `size` bytes (a multiple of kUnit) aligned to `alignment` out of `heap`, from what was freed no later
  // than `stamp`; null if it has none. It is live, or as told, and in the address map.
  Block* take(Heap& heap, std::uint64_t size, std::uint64_t alignment, std::uint64_t stamp,
              BlockState as = BlockState::live) noexcept;
  // The same from whichever of two heaps has the better fit.
  Block* take_best(Heap& first, Heap& second, std::uint64_t size, std::uint64_t alignment,
                   BlockState as = BlockState::live) noexcept;
  // Puts a block that the program gave back into `heap`, merging it with its free neighbours there.
  void give(Block* block, Heap& heap, std::uint64_t stamp) noexcept;
  // Moves a free block to another heap, merging there.
  void move(Block* block, Heap& to) noexcept;

  // Evented blocks lie beside the bins: free, unmerged, each with an event of its own elsewhere.
  void give_evented(Block* block, Heap& heap, std::uint64_t stamp) noexcept;
  void take_evented(Block* block, BlockState as = BlockState::live) noexcept;  // whole
  void settle_evented(Block* block, Heap& to) noexcept;                        // becomes an ordinary free block of `to`
  void trim(Block* live, std::uint64_t size, Heap& rest_to, std::uint64_t stamp) noexcept;  // gives back the tail

  // Segments. add() makes the whole range one block of `heap`, freed at `stamp`; false when the host is out of memory.
  // A range that the map knows already is a superblock: remove() gives the map its old entry back.
  bool add(std::uint64_t address, std::uint64_t size, Heap& heap, std::uint64_t stamp = 0) noexcept;
  // Address space for memory that is mapped in pieces (vmm.h): a segment that begins as one block of `unmapped`, all
  // but its first page, which stays nobody's, so that no such segment is ever one free block.
  bool reserve(std::uint64_t address, std::uint64_t size, Heap& unmapped) noexcept;
  // Takes a part out of a free block of such a segment, for its memory to come or go; out of the map too, if it has
  // memory. Null when the host is out of memory.
  Block* detach(Block* block, std::uint64_t address, std::uint64_t size) noexcept;
  // What was detached is free in `heap`; with memory now, unless that is of order `unmapped`. False, and unchanged,
  // when the host is out of memory.
  bool attach(Block* moving, Heap& heap) noexcept;
  // Takes a segment that is one free block out of the pool and the map; the range is then the caller's.
  void remove(Segment* segment) noexcept;
  // Takes out every segment, whatever is live in it: the context is gone.
  void abandon() noexcept;
  Segment* segments() const noexcept { return segments_; }
  // The segment's one block if all of it is free, else null.
  static Block* wholly_free(const Segment& segment) noexcept {
    return segment.first->upper == nullptr && segment.first->state() == BlockState::free ? segment.first : nullptr;
  }

  std::uint64_t held() const noexcept { return held_; }        // bytes of all segments
  std::uint64_t unused() const noexcept { return unused_; }    // bytes of segments wholly free, in whatever heap
  std::uint64_t free_bytes() const noexcept { return free_; }  // bytes of free blocks, evented ones too
  // What was unused all the time since this was last called, in bytes: of memory mapped in pieces, what was free.
  std::uint64_t take_least_unused() noexcept {
    const std::uint64_t now = reserves_ ? free_ : unused_;
    return std::min(std::exchange(least_unused_, now), now);
  }
  // How free memory is cut up; evented blocks are left out. Walks the blocks: for diagnosis only.
  struct Fragments {
    std::uint64_t largest = 0;  // bytes
    std::uint64_t bytes = 0;    // of all
    double squares = 0;         // of their sizes, added up; divided by bytes²: 1 if there is one piece
  };
  Fragments fragments() const noexcept;

  // Whether every invariant holds (block.h, heap.h, the sums above). For tests and debug builds: walks everything.
  bool valid() const noexcept;

  // Whether the block is in the program's hands.
  static bool in_use(const Block& block) noexcept {
    const BlockState state = block.state();
    return (state == BlockState::live || state == BlockState::freeing) && block.api != Api::superblock;
  }
  // Calls visit(const LiveBlock&) for each block in the program's hands. Such blocks change hands without the arena's
  // lock: one that becomes cached while it is read is left out.
  struct LiveBlock {
    std::uint64_t address;
    std::uint64_t size;
    std::uint64_t requested;
    Note note;
    std::uint32_t stream;
    Api api;
  };
  template <class Visit>
  void for_each_live(Visit visit) const noexcept {
    for (const Segment* s = segments_; s != nullptr; s = s->next) {
      for (const Block* b = s->first; b != nullptr; b = b->upper) {
        if (!in_use(*b)) continue;
        const LiveBlock live{b->address(),
                             b->size,
                             b->live.requested.acquire(),
                             {b->live.time.acquire(), b->live.thread.acquire(), b->stack.acquire()},
                             b->live.stream.acquire(),
                             b->api.acquire()};
        if (in_use(*b)) visit(live);  // still: what was read belongs together
      }
    }
  }

 private:
  // Whether a free block has memory.
  bool is_mapped(const Block& block) const noexcept { return heaps_[block.heap]->order != Order::unmapped; }
  bool free_in(const Block* block, const Heap& heap) const noexcept {
    return block != nullptr && block->state() == BlockState::free && block->heap == heap.index;
  }
  Block* carve(Block* block, std::uint64_t size, std::uint64_t alignment, BlockState as) noexcept;  // a free block
  // `size` bytes of a free block, `lead` from its start, in no bins; what is left of it stays free. More bytes where
  // the host has no memory for a block of the rest.
  Block* isolate(Block* block, std::uint64_t lead, std::uint64_t size) noexcept;
  // A segment of which all is one block, in no bins and not in the map; null when the host is out of memory.
  Segment* open(std::uint64_t address, std::uint64_t size) noexcept;
  void close(Segment* segment) noexcept;
  Segment* reservation_of(std::uint64_t address) const noexcept;
  Block* cut(Block* block, std::uint64_t size) noexcept;  // splits; returns the upper part, unlinked from any bin
  void put(Block* block, Heap& heap, std::uint64_t stamp) noexcept;  // merges and inserts a block that is in no bin
  void keep_spare(Segment* segment) noexcept {
    segment->next = spare_segments_;
    spare_segments_ = segment;
  }
  Segment* segment_of(const Block& block) const noexcept { return map_.find(block.address()); }

  AddressMap& map_;
  Arena* arena_;
  std::vector<Heap*> heaps_;
  std::vector<Heap*> spare_heaps_;
  Segment* segments_ = nullptr;
  Segment* spare_segments_ = nullptr;
  Slab<Block> blocks_;
  Slab<Segment> segment_records_;
  Leaves leaves_;
  std::uint64_t held_ = 0;
  std::uint64_t unused_ = 0;
  std::uint64_t free_ = 0;
  std::uint64_t least_unused_ = 0;  // since it was last asked for
  void use(std::uint64_t bytes) noexcept {
    free_ -= bytes;
    least_unused_ = std::min(least_unused_, reserves_ ? free_ : unused_);
  }
  // Has memory mapped in pieces. Blocks of less than a page then come from the upper end of a free block of pages, the
  // others from the lower: small ones lie together, and keep few handles from going back.
  bool reserves_ = false;
};

}  // namespace cushion
