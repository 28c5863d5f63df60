// Magazine: the cache of freed blocks in front of a lane (lane.h), by exact size, so that the common pair of an
// allocation and a free takes no shared lock and touches no bins (about 10 ns both ways).
//
// What it caches is decided by allocations alone: a slot belongs to a size that its lane allocates again and again, and
// loses it to another size that is asked for more often. A thread or stream that only frees caches nothing, so blocks
// that one allocates and another frees go to the arena, where everybody finds them; and a load without repeated sizes
// does not pass through here at all. What is cached is bounded by CUSHION_MAGAZINE_SIZE a lane, and the context empties
// every magazine before it asks the driver for memory or gives some back.
//
// An entry carries the stamp of its free (fence.h): 0 is clean. Its lane decides who it is good for. Oldest entries are
// cleanest, newest warmest in the processor's caches. Not thread safe: the lane's lock protects it.
#pragma once

#include <array>
#include <cstdint>
#include <new>

#include "core/block.h"

namespace cushion {

class Magazine {
 public:
  static constexpr unsigned kDepth = 64;  // blocks of one size

  struct Entry {
    Block* block;
    std::uint64_t stamp;
  };
  struct Entries {        // what left a slot
    Entry entry[kDepth];  // not initialised: it lies on the allocation path
    unsigned count = 0;
  };

  // A block of exactly `size` bytes freed no later than `through`; null if there is none.
  Block* take(std::uint64_t size, std::uint64_t through) noexcept {
    Slot& slot = slot_of(size);
    if (slot.size != size || slot.count == 0) return nullptr;
    unsigned at = slot.first + slot.count - 1u;
    if (slot.ring[at % kDepth].stamp > through) {
      at = slot.first;
      if (slot.ring[at % kDepth].stamp > through) return nullptr;
      ++slot.first;
    }
    if (slot.heat < kHottest) ++slot.heat;
    --slot.count;
    bytes_ -= size;
    return slot.ring[at % kDepth].block;
  }
  // An allocation found nothing: its size may take the slot over, and what that held is then in `displaced`.
  void missed(std::uint64_t size, Entries& displaced) noexcept {
    Slot& slot = slot_of(size);
    if (slot.size == size) {
      if (slot.heat < kHottest) ++slot.heat;
    } else if (slot.heat != 0) {
      --slot.heat;
    } else {
      empty(slot, displaced);
      slot.size = size;
      slot.heat = 1;
    }
  }

  enum class Given { kept, unwanted, full };
  // Caches a block, unless its size has no slot here or there is no room: at most `limit` bytes in all.
  Given give(Block* block, std::uint64_t stamp, std::uint64_t limit) noexcept {
    Slot& slot = slot_of(block->size);
    if (slot.size != block->size || slot.heat < kWarm || block->size > limit) return Given::unwanted;
    if (slot.count == kDepth || bytes_ > limit - block->size) return Given::full;
    if (slot.ring == nullptr && (slot.ring = new (std::nothrow) Entry[kDepth]) == nullptr) return Given::unwanted;
    slot.ring[(slot.first + slot.count++) % kDepth] = {block, stamp};
    bytes_ += block->size;
    return Given::kept;
  }
  // Whether most of the room is taken by other sizes than this.
  bool crowded(std::uint64_t size, std::uint64_t limit) noexcept {
    const Slot& slot = slot_of(size);
    return bytes_ - (slot.size == size ? slot.count * size : 0) > limit / 2;
  }

  bool empty() const noexcept { return bytes_ == 0; }
  // Takes out everything that one slot holds; false once nothing is left.
  bool drain(Entries& out) noexcept {
    out.count = 0;
    if (bytes_ == 0) return false;
    for (Slot& slot : slots_) {
      if (slot.count == 0) continue;
      empty(slot, out);
      break;
    }
    return true;
  }

 private:
  static constexpr unsigned kSlotBits = 6;
  static constexpr std::uint8_t kWarm = 2;  // from here on its blocks are cached: it came again before another
  static constexpr std::uint8_t kHottest = 4;
  struct Slot {
    std::uint64_t size = 0;
    Entry* ring = nullptr;  // made at the first give, and kept: lanes are never destroyed
    std::uint16_t first = 0;
    std::uint16_t count = 0;
    std::uint8_t heat = 0;  // how often its size was asked for lately, against others that want the slot
  };

  static unsigned index_of(std::uint64_t size) noexcept {
    return static_cast<unsigned>((size / kUnit * 0x9E3779B97F4A7C15u) >> (64 - kSlotBits));
  }
  Slot& slot_of(std::uint64_t size) noexcept { return slots_[index_of(size)]; }

  void empty(Slot& slot, Entries& out) noexcept {
    for (; slot.count != 0; --slot.count) out.entry[out.count++] = slot.ring[slot.first++ % kDepth];
    bytes_ -= out.count * slot.size;
  }

  std::uint64_t bytes_ = 0;
  std::array<Slot, std::size_t{1} << kSlotBits> slots_{};
};

}  // namespace cushion
