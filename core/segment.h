// Segment: a range of device memory that a pool holds from its upstream (cuMemAlloc, or a superblock of the global
// arena's pool), and the table that finds a block by its address.
//
// The table has an entry for each 64 KiB page: the one block in the program's hands that begins in it, or a leaf with
// an entry for each 512-byte unit once a second one does. Large blocks so cost 8 bytes of table a page, which stay in
// the processor's caches, and small ones one load more. Whatever begins nowhere reads null, so interior pointers and
// second frees are told from real ones.
//
// A Segment record is never unmapped, its table and leaves only recycled, because the lookup takes no lock: a racing
// lookup of a pointer that the program does not own can meet a recycled record, and then finds nothing or a block
// whose word (block.h) shows it to be another. Writers hold the arena's lock.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "core/block.h"
#include "core/slab.h"

namespace cushion {

class Arena;

// The units of one page of which several blocks begin.
struct Leaf {
  static constexpr std::uint64_t kPage = std::uint64_t{64} << 10;
  static constexpr std::uint64_t kUnits = kPage / kUnit;
  std::array<std::atomic<Block*>, kUnits> unit{};
  std::uint64_t used = 0;
  Leaf* next = nullptr;  // of the spare ones
};

// Leaves for the segments of one pool. Not thread safe: the arena's lock protects it.
class Leaves {
 public:
  Leaf* take() noexcept {
    if (spare_ == nullptr) return slab_.make();
    Leaf* leaf = spare_;
    spare_ = leaf->next;
    return leaf;
  }
  void put(Leaf* leaf) noexcept {  // an empty one
    leaf->next = spare_;
    spare_ = leaf;
  }

 private:
  Slab<Leaf> slab_;
  Leaf* spare_ = nullptr;
};

class Segment {
 public:
  std::uint64_t address() const noexcept { return address_.load(std::memory_order_relaxed); }
  // Acquire, paired with open's release: who sees a size sees the table that is large enough for it.
  std::uint64_t size() const noexcept { return size_.load(std::memory_order_acquire); }
  Arena* arena() const noexcept { return arena_.load(std::memory_order_relaxed); }

  // The block in the program's hands, or cached, that begins exactly at `address`, or null. Lock-free; valid only once
  // claimed (Block::change).
  Block* block_at(std::uint64_t at) const noexcept {
    const std::uint64_t offset = at - address();
    if (offset >= size() || offset % kUnit != 0) return nullptr;
    const std::uintptr_t entry =
        table_.load(std::memory_order_acquire)[offset / Leaf::kPage].load(std::memory_order_acquire);
    Block* block = (entry & kIsLeaf) == 0
                       ? reinterpret_cast<Block*>(entry)
                       : leaf_of(entry)->unit[offset / kUnit % Leaf::kUnits].load(std::memory_order_acquire);
    return block != nullptr && block->address() == at ? block : nullptr;
  }
  // visit(const Block&) for the blocks entered that begin from `from` to below `to`, both at pages of the table, in
  // order. Under the arena's lock.
  template <class Visit>
  void for_each_block(std::uint64_t from, std::uint64_t to, Visit visit) const noexcept {
    for (std::uint64_t at = from; at < to; at += Leaf::kPage) {
      const std::uintptr_t entry = entry_of(at).load(std::memory_order_relaxed);
      if (entry == 0) continue;
      if ((entry & kIsLeaf) == 0) {
        visit(*reinterpret_cast<const Block*>(entry));
        continue;
      }
      for (const auto& unit : leaf_of(entry)->unit) {
        if (const Block* block = unit.load(std::memory_order_relaxed)) visit(*block);
      }
    }
  }
  // Of the same blocks the last that begins no later than `address`, or null. Under the arena's lock; costs a load for
  // each page between them.
  const Block* last_before(std::uint64_t address) const noexcept {
    const std::uint64_t offset = address - this->address();
    for (std::uint64_t page = offset / Leaf::kPage + 1; page-- > 0;) {
      const Block* last = nullptr;
      for_each_block(this->address() + page * Leaf::kPage, this->address() + (page + 1) * Leaf::kPage,
                     [&](const Block& block) {
                       if (block.address() <= address) last = &block;
                     });
      if (last != nullptr) return last;
    }
    return nullptr;
  }
  // False when the host has no memory for a leaf.
  bool enter(Block* block, Leaves& leaves) noexcept {
    Entry& entry = entry_of(block->address());
    const std::uintptr_t old = entry.load(std::memory_order_relaxed);
    if (old == 0) {
      entry.store(reinterpret_cast<std::uintptr_t>(block), std::memory_order_release);
      return true;
    }
    if ((old & kIsLeaf) != 0) {
      unit_of(*leaf_of(old), *block).store(block, std::memory_order_release);
      ++leaf_of(old)->used;
      return true;
    }
    Leaf* leaf = leaves.take();
    if (leaf == nullptr) return false;
    auto* other = reinterpret_cast<Block*>(old);
    unit_of(*leaf, *other).store(other, std::memory_order_relaxed);
    unit_of(*leaf, *block).store(block, std::memory_order_relaxed);
    leaf->used = 2;
    entry.store(reinterpret_cast<std::uintptr_t>(leaf) | kIsLeaf, std::memory_order_release);
    return true;
  }
  void leave(const Block& block, Leaves& leaves) noexcept {
    Entry& entry = entry_of(block.address());
    const std::uintptr_t old = entry.load(std::memory_order_relaxed);
    if ((old & kIsLeaf) != 0) {
      unit_of(*leaf_of(old), block).store(nullptr, std::memory_order_relaxed);
      if (--leaf_of(old)->used != 0) return;
      leaves.put(leaf_of(old));
    }
    entry.store(0, std::memory_order_relaxed);
  }

  // Takes on a range; false when the host has no memory for the table. A recycled record keeps its table when it is
  // large enough; it is empty by then.
  bool open(Arena* arena, std::uint64_t address, std::uint64_t size) noexcept {
    const std::uint64_t pages = pages_of(size);
    if (pages_ < pages) {
      auto* table = static_cast<Entry*>(map_pages(pages * sizeof(Entry)));
      if (table == nullptr) return false;
      pages_ = pages;
      table_.store(table, std::memory_order_release);  // the old one, if any, stays mapped for racing readers
    }
    arena_.store(arena, std::memory_order_relaxed);
    address_.store(address, std::memory_order_relaxed);
    size_.store(size, std::memory_order_release);
    return true;
  }
  void close(Leaves& leaves) noexcept {
    const std::uint64_t pages = pages_of(size_.load(std::memory_order_relaxed));
    size_.store(0, std::memory_order_relaxed);
    Entry* table = table_.load(std::memory_order_relaxed);
    for (std::uint64_t i = 0; i < pages; ++i) {
      const std::uintptr_t old = table[i].load(std::memory_order_relaxed);
      if (old == 0) continue;
      table[i].store(0, std::memory_order_relaxed);
      if ((old & kIsLeaf) == 0) continue;
      Leaf* leaf = leaf_of(old);
      for (auto& unit : leaf->unit) unit.store(nullptr, std::memory_order_relaxed);
      leaves.put(leaf);
    }
  }

  Block* first = nullptr;   // its lowest block
  Segment* next = nullptr;  // the pool's list, or the list of spare records
  Segment* previous = nullptr;
  // For a superblock: the segment that it was cut from, which the map names again afterwards.
  Segment* beneath = nullptr;

 private:
  using Entry = std::atomic<std::uintptr_t>;  // a Block, a Leaf with kIsLeaf, or 0
  static constexpr std::uintptr_t kIsLeaf = 1;

  static std::uint64_t pages_of(std::uint64_t size) noexcept { return round_up(size, Leaf::kPage) / Leaf::kPage; }
  static Leaf* leaf_of(std::uintptr_t entry) noexcept { return reinterpret_cast<Leaf*>(entry & ~kIsLeaf); }
  Entry& entry_of(std::uint64_t at) const noexcept {
    return table_.load(std::memory_order_relaxed)[(at - address()) / Leaf::kPage];
  }
  std::atomic<Block*>& unit_of(Leaf& leaf, const Block& block) const noexcept {
    return leaf.unit[(block.address() - address()) / kUnit % Leaf::kUnits];
  }

  std::atomic<Arena*> arena_{nullptr};
  std::atomic<std::uint64_t> address_{0};
  std::atomic<std::uint64_t> size_{0};
  std::atomic<Entry*> table_{nullptr};
  std::uint64_t pages_ = 0;  // of the table
};

}  // namespace cushion
