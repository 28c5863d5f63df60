// Segment: a range of device memory that the pool holds from upstream (today cuMemAlloc), and the side table
// that finds a block by its address: one entry for each 512-byte unit, set where a block in the program's hands
// begins. Every other unit reads null, so interior pointers and second frees are told from real ones.
//
// A Segment record is never unmapped, and its table only recycled, because the lookup takes no lock: a racing
// lookup of a pointer that the program does not own can meet a recycled record, and then finds nothing or a block
// whose address the pool's lock shows to be another.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/block.h"
#include "core/slab.h"

namespace cushion {

class Context;

class Segment {
 public:
  std::uint64_t address() const noexcept { return address_.load(std::memory_order_relaxed); }
  // Acquire, paired with open's release: who sees a size sees the table that is large enough for it.
  std::uint64_t size() const noexcept { return size_.load(std::memory_order_acquire); }
  Context* context() const noexcept { return context_.load(std::memory_order_relaxed); }

  // The live block that begins exactly at `address`, or null. Lock-free; valid only once rechecked under the lock.
  Block* block_at(std::uint64_t at) const noexcept {
    const std::uint64_t offset = at - address();
    if (offset >= size() || offset % kUnit != 0) return nullptr;
    return table_.load(std::memory_order_acquire)[offset / kUnit].load(std::memory_order_acquire);
  }
  void enter(std::uint64_t at, Block* block) noexcept {
    table_.load(std::memory_order_relaxed)[(at - address()) / kUnit].store(block, std::memory_order_release);
  }

  // Takes on a range; false when the host has no memory for the table. A recycled record keeps its table when it is
  // large enough (it is empty by then: every live block was taken out).
  bool open(Context* context, std::uint64_t address, std::uint64_t size) noexcept {
    if (table_bytes_ < size / kUnit * sizeof(Entry)) {
      auto* table = static_cast<Entry*>(map_pages(size / kUnit * sizeof(Entry)));
      if (table == nullptr) return false;
      table_bytes_ = size / kUnit * sizeof(Entry);
      table_.store(table, std::memory_order_release);  // the old one, if any, stays mapped for racing readers
    }
    context_.store(context, std::memory_order_relaxed);
    address_.store(address, std::memory_order_relaxed);
    size_.store(size, std::memory_order_release);
    return true;
  }
  // Empties the table and gives its pages back to the kernel.
  void close() noexcept {
    madvise(static_cast<void*>(table_.load(std::memory_order_relaxed)), table_bytes_, MADV_DONTNEED);
    size_.store(0, std::memory_order_relaxed);
  }

  Block* first = nullptr;   // its lowest block
  Segment* next = nullptr;  // the pool's list, or the list of spare records
  Segment* previous = nullptr;

 private:
  using Entry = std::atomic<Block*>;
  std::atomic<Context*> context_{nullptr};
  std::atomic<std::uint64_t> address_{0};
  std::atomic<std::uint64_t> size_{0};
  std::atomic<Entry*> table_{nullptr};
  std::uint64_t table_bytes_ = 0;
};

}  // namespace cushion
