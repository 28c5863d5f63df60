// Magazine: the cache of freed blocks in front of a lane (lane.h), by size class, so that the common allocation and
// free take no shared lock, touch no bins and merge nothing (about 10 ns both ways).
//
// Classes are the bins' steps, 3 % apart; requests are rounded up to them (Context::need_of), so that a block of a
// class serves every request of it. A class is cached once its lane has allocated from it: a thread or stream that only
// frees caches nothing, and blocks that one allocates and another frees go to the arena, where everybody finds them.
// What is cached is bounded by CUSHION_MAGAZINE_SIZE a lane, and the context empties every magazine before it asks the
// driver for memory or gives some back.
//
// Invariant: a block carries the stamp of its free (fence.h; 0 is clean), and stamps of one lane never get younger. So
// of `fresh`, a stack, all is clean once the newest is; then it becomes `ready`. What is not clean yet is good for the
// stream that it was freed on only: its lane says so by `through`.
//
// Not thread safe: the lane's lock protects it. Blocks are linked through their Live fields, which mean nothing while
// they are cached.
#pragma once

#include <cstdint>
#include <utility>

#include "core/bins.h"
#include "core/block.h"
#include "core/slab.h"

namespace cushion {

class Magazine {
 public:
  static constexpr std::uint64_t kLargest = std::uint64_t{32} << 20;  // bytes; larger blocks are not cached
  static constexpr unsigned kBatch = 64;  // so many unclean frees of a class are worth a fence

  static bool caches(std::uint64_t size) noexcept { return size <= kLargest; }

  // A block of the class of `size` freed no later than `through`; null if there is none.
  Block* take(std::uint64_t size, std::uint64_t through) noexcept {
    if (!caches(size) || slots_ == nullptr) return nullptr;
    Slot& slot = slots_[Bins::bin_of(size)];
    slot.wanted = true;
    Stack* from = &slot.fresh;
    if (from->top == nullptr || stamp_of(*from->top) > through) {
      from = &slot.ready;
    } else if (through != kAnyStamp && slot.ready.top == nullptr) {
      slot.ready = std::exchange(slot.fresh, {});
      from = &slot.ready;
    }
    Block* block = from->top;
    if (block == nullptr) return nullptr;
    from->top = next_of(*block);
    --from->count;
    bytes_ -= block->size;
    if (from->top != nullptr) __builtin_prefetch(from->top, 1);
    return block;
  }

  enum class Given {
    kept,
    due,       // kept; a fence would clean a batch now
    unwanted,  // its class is not allocated here
    full,      // no room
    crowded,   // no room, all of it taken by other classes
  };
  Given give(Block* block, std::uint64_t stamp, std::uint64_t limit) noexcept {
    if (!caches(block->size) || slots_ == nullptr) return Given::unwanted;
    Slot& slot = slots_[Bins::bin_of(block->size)];
    if (!slot.wanted || block->size > limit) return Given::unwanted;
    if (bytes_ > limit - block->size) return slot.ready.count + slot.fresh.count != 0 ? Given::full : Given::crowded;
    Stack& to = stamp == 0 ? slot.ready : slot.fresh;
    block->live.requested = reinterpret_cast<std::uintptr_t>(to.top);
    block->live.time = stamp;
    to.top = block;
    bytes_ += block->size;
    return ++to.count % kBatch == 0 && stamp != 0 ? Given::due : Given::kept;
  }

  bool empty() const noexcept { return bytes_ == 0; }
  // Takes out one stack, linked by next_of(); null once every class was visited. `at`, 0 at first, is where it goes on:
  // a class is visited once, so that this ends though the lane's owner frees on. What was emptied must be wanted again.
  Block* drain(unsigned& at) noexcept {
    for (; bytes_ != 0 && at < 2 * kSlots; ++at) {
      Slot& slot = slots_[at / 2];
      slot.wanted = false;
      const Stack stack = std::exchange(at % 2 == 0 ? slot.ready : slot.fresh, {});
      if (stack.top == nullptr) continue;
      ++at;
      for (const Block* block = stack.top; block != nullptr; block = next_of(*block)) bytes_ -= block->size;
      return stack.top;
    }
    return nullptr;
  }
  static Block* next_of(const Block& block) noexcept {
    return reinterpret_cast<Block*>(static_cast<std::uintptr_t>(block.live.requested));
  }
  static std::uint64_t stamp_of(const Block& block) noexcept { return block.live.time; }

 private:
  struct Stack {
    Block* top = nullptr;
    std::uint64_t count = 0;
  };
  struct Slot {
    Stack ready;  // clean
    Stack fresh;  // by stamp, the latest on top
    bool wanted = false;
  };
  static constexpr unsigned kSlots = Bins::bin_of(kLargest) + 1;

  // Null if the host has no memory: then nothing is cached.
  static Slot* make_slots() noexcept {
    return static_cast<Slot*>(map_pages(kSlots * sizeof(Slot), true));  // zero pages: empty slots
  }

  std::uint64_t bytes_ = 0;
  Slot* const slots_ = make_slots();  // kept for ever: lanes are never destroyed
};

}  // namespace cushion
