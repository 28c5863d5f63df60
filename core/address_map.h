// Address map: from a device pointer to its segment, without a lock on the read path.
//
// A radix tree over the address's 2 MiB pages (a segment is 2 MiB aligned and a multiple of 2 MiB long, so a page
// belongs to one segment at most). Three levels of 4096 entries cover 57 bits. Nodes are never freed.
// Cost: three dependent loads; a pointer that is not ours usually stops at the first.
//
// Order: a reader takes a node or segment pointer with acquire and the writer publishes it with release, so that a
// reader that finds a segment sees its fields. A segment leaves the map before its memory goes back to the driver
// (contract §6), so that a pointer the driver hands out anew is never taken for ours.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>

#include "core/slab.h"

namespace cushion {

class Segment;

class AddressMap {
 public:
  static constexpr std::uint64_t kPage = std::uint64_t{2} << 20;

  Segment* find(std::uint64_t address) const noexcept {
    const std::uint64_t page = address / kPage;
    if (page >> (3 * kBits) != 0) return nullptr;
    const Middle* middle = root_[page >> (2 * kBits)].load(std::memory_order_acquire);
    if (middle == nullptr) return nullptr;
    const Leaf* leaf = (*middle)[(page >> kBits) % kEntries].load(std::memory_order_acquire);
    if (leaf == nullptr) return nullptr;
    return (*leaf)[page % kEntries].load(std::memory_order_acquire);
  }

  // Maps [address, address + size) to `segment`. False when the host has no memory for a node; nothing is then mapped.
  // Callers on different ranges may race: nodes are published by compare-and-swap.
  bool set(std::uint64_t address, std::uint64_t size, Segment* segment) noexcept {
    for (std::uint64_t at = address; at < address + size; at += kPage) {
      std::atomic<Segment*>* entry = entry_of(at);
      if (entry == nullptr) {
        clear(address, at - address);
        return false;
      }
      entry->store(segment, std::memory_order_release);
    }
    return true;
  }
  // Takes the range out. What was never mapped in it costs nothing.
  void clear(std::uint64_t address, std::uint64_t size) noexcept {
    for (std::uint64_t at = address; at < address + size;) {
      const std::uint64_t page = at / kPage;
      const Middle* middle = root_[page >> (2 * kBits)].load(std::memory_order_acquire);
      Leaf* leaf = middle != nullptr ? (*middle)[(page >> kBits) % kEntries].load(std::memory_order_acquire) : nullptr;
      const std::uint64_t end = std::min(address + size, (page / kEntries + 1) * kEntries * kPage);  // of the leaf
      for (; at < end; at += kPage) {
        if (leaf != nullptr) (*leaf)[at / kPage % kEntries].store(nullptr, std::memory_order_release);
      }
    }
  }

 private:
  static constexpr unsigned kBits = 12;
  static constexpr std::uint64_t kEntries = std::uint64_t{1} << kBits;
  using Leaf = std::array<std::atomic<Segment*>, kEntries>;
  using Middle = std::array<std::atomic<Leaf*>, kEntries>;

  std::atomic<Segment*>* entry_of(std::uint64_t address) noexcept {
    const std::uint64_t page = address / kPage;
    if (page >> (3 * kBits) != 0) return nullptr;
    Middle* middle = node(root_[page >> (2 * kBits)]);
    if (middle == nullptr) return nullptr;
    Leaf* leaf = node((*middle)[(page >> kBits) % kEntries]);
    return leaf == nullptr ? nullptr : &(*leaf)[page % kEntries];
  }

  template <class Node>
  static Node* node(std::atomic<Node*>& slot) noexcept {
    Node* found = slot.load(std::memory_order_acquire);
    if (found != nullptr) return found;
    auto* fresh = static_cast<Node*>(map_pages(sizeof(Node)));  // zero pages: all entries null
    if (fresh == nullptr) return nullptr;
    if (slot.compare_exchange_strong(found, fresh, std::memory_order_acq_rel)) return fresh;
    munmap(fresh, sizeof(Node));  // another thread was first, and nobody has seen ours
    return found;
  }

  std::array<std::atomic<Middle*>, kEntries> root_{};
};

}  // namespace cushion
