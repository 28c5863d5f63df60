// Bins: the free blocks of one heap, by size, in two levels: a power of two and 32 steps within it, with a bitmap
// over each level. Finding the smallest bin that can serve a request is two bit scans whatever the number of
// blocks; within a bin (3 % wide) the best of the first few blocks is taken. Only when none of those serves, because of
// alignment or age, is every block looked at. Metadata only: device memory is never touched. Not thread safe: the
// pool's lock protects it.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <limits>

#include "core/block.h"

namespace cushion {

class Bins {
 public:
  // Sizes below 32 units have a bin each; above, the bin's first five bits after the leading one name the column.
  static constexpr unsigned bin_of(std::uint64_t size) noexcept {
    const std::uint64_t units = size / kUnit;
    if (units < kColumns) return static_cast<unsigned>(units);
    const unsigned shift = shift_of(units);
    return (shift + 1) * kColumns + static_cast<unsigned>(units >> shift) - kColumns;
  }
  // The smallest size that is no less than `size` and begins a bin: at most 3 % more.
  static constexpr std::uint64_t round_up_to_bin(std::uint64_t size) noexcept {
    const std::uint64_t units = size / kUnit;
    return units < kColumns ? size : round_up(size, kUnit << shift_of(units));
  }

  bool empty() const noexcept { return rows_ == 0; }

  void insert(Block* block) noexcept {
    const unsigned bin = bin_of(block->size);
    Block*& head = heads_[bin];
    block->idle.previous = nullptr;
    block->idle.next = head;
    if (head != nullptr) head->idle.previous = block;
    head = block;
    columns_[bin / kColumns] |= 1u << (bin % kColumns);
    rows_ |= 1ull << (bin / kColumns);
  }

  void remove(Block* block) noexcept {
    const unsigned bin = bin_of(block->size);
    if (block->idle.next != nullptr) block->idle.next->idle.previous = block->idle.previous;
    if (block->idle.previous != nullptr) {
      block->idle.previous->idle.next = block->idle.next;
      return;
    }
    heads_[bin] = block->idle.next;
    if (heads_[bin] != nullptr) return;
    columns_[bin / kColumns] &= ~(1u << (bin % kColumns));
    if (columns_[bin / kColumns] == 0) rows_ &= ~(1ull << (bin / kColumns));
  }

  // The block to serve `size` bytes aligned to `alignment` from, freed no later than `stamp`; null if there is none.
  Block* find(std::uint64_t size, std::uint64_t alignment, std::uint64_t stamp) const noexcept {
    Block* found = find(size, alignment, stamp, kLooks);
    return found != nullptr ? found : find(size, alignment, stamp, kAllLooks);
  }

  // Calls visit(block) for every block; visit may remove that block.
  template <class Visit>
  void for_each(Visit visit) const noexcept {
    for (unsigned bin = next_used(0); bin < kBins; bin = next_used(bin + 1)) {
      for (Block* block = heads_[bin]; block != nullptr;) {
        Block* next = block->idle.next;
        visit(block);
        block = next;
      }
    }
  }

  // Bytes to skip at the start of `block` to reach the alignment.
  static std::uint64_t lead(const Block& block, std::uint64_t alignment) noexcept {
    const std::uint64_t at = block.address();
    return round_up(at, alignment) - at;
  }
  static bool fits(const Block& block, std::uint64_t size, std::uint64_t alignment) noexcept {
    return block.size >= size && block.size - size >= lead(block, alignment);
  }

 private:
  // The same with at most `looks` blocks of a bin looked at.
  Block* find(std::uint64_t size, std::uint64_t alignment, std::uint64_t stamp, int looks) const noexcept {
    for (unsigned bin = next_used(bin_of(size)); bin < kBins; bin = next_used(bin + 1)) {
      Block* best = nullptr;
      int left = looks;
      for (Block* block = heads_[bin]; block != nullptr && left-- > 0; block = block->idle.next) {
        if (!fits(*block, size, alignment) || block->idle.stamp > stamp) continue;
        if (best == nullptr || block->size < best->size) best = block;
        if (best->size == size) break;
      }
      if (best != nullptr) return best;
    }
    return nullptr;
  }

  static constexpr unsigned shift_of(std::uint64_t units) noexcept {
    return static_cast<unsigned>(std::bit_width(units)) - 1 - kColumnBits;
  }

  static constexpr unsigned kColumnBits = 5;
  static constexpr unsigned kColumns = 1u << kColumnBits;
  static constexpr unsigned kRows = 36;  // up to 2^40 units of 512 bytes
  static constexpr unsigned kBins = kRows * kColumns;
  static constexpr int kLooks = 16;
  static constexpr int kAllLooks = std::numeric_limits<int>::max();

  unsigned next_used(unsigned bin) const noexcept {
    unsigned row = bin / kColumns;
    if (row >= kRows) return kBins;
    const std::uint32_t here = columns_[row] >> (bin % kColumns);
    if (here != 0) return bin + static_cast<unsigned>(std::countr_zero(here));
    const std::uint64_t rows = row + 1 < 64 ? rows_ >> (row + 1) : 0;
    if (rows == 0) return kBins;
    row += 1 + static_cast<unsigned>(std::countr_zero(rows));
    return row * kColumns + static_cast<unsigned>(std::countr_zero(columns_[row]));
  }

  std::uint64_t rows_ = 0;
  std::array<std::uint32_t, kRows> columns_{};
  std::array<Block*, kBins> heads_{};
};

}  // namespace cushion
