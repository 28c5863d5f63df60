// Ledger: a table that only grows, of entries that never move: whoever sees its size reads the entries below it without
// a lock, in a signal handler too. Its memory is reserved when the first entry comes, and committed as it is used.
//
// Thread safety: one thread adds at a time (its owner's lock); anybody reads.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>

#include "core/slab.h"

namespace cushion {

template <class Entry, std::size_t kCapacity>
class Ledger {
 public:
  static constexpr std::size_t kMost = kCapacity;

  // The new entry, null when there is no more room. The caller fills it, then publish()es it.
  Entry* prepare() noexcept {
    const std::size_t n = size_.load(std::memory_order_relaxed);
    if (n == kMost) return nullptr;
    Entry* entries = entries_.load(std::memory_order_relaxed);
    if (entries == nullptr) {
      entries = static_cast<Entry*>(map_pages(kMost * sizeof(Entry)));
      if (entries == nullptr) return nullptr;
      entries_.store(entries, std::memory_order_release);
    }
    return new (entries + n) Entry{};
  }
  void publish() noexcept { size_.store(size() + 1, std::memory_order_release); }

  std::size_t size() const noexcept { return size_.load(std::memory_order_acquire); }
  Entry& operator[](std::size_t i) noexcept { return entries_.load(std::memory_order_acquire)[i]; }
  const Entry& operator[](std::size_t i) const noexcept { return entries_.load(std::memory_order_acquire)[i]; }

 private:
  std::atomic<Entry*> entries_{nullptr};
  std::atomic<std::size_t> size_{0};
};

// Index: the entries of a Ledger by hash, open addressing. Memory and threads as there; nothing is ever removed.
template <std::size_t kSlots>  // a power of two, more than there are entries
class Index {
 public:
  // The place of the entry of this hash for which same(place); -1: there is none.
  template <class Same>
  std::int64_t find(std::uint64_t hash, Same same) const noexcept {
    const std::atomic<std::uint32_t>* const slots = slots_.load(std::memory_order_acquire);
    if (slots == nullptr) return -1;
    for (std::size_t at = first(hash);; at = (at + 1) % kSlots) {
      const std::uint32_t one = slots[at].load(std::memory_order_acquire);  // shows the entry
      if (one == 0) return -1;
      if (same(one - 1)) return one - 1;
    }
  }
  // Once before the first add(); false: no memory.
  bool reserve() noexcept {
    if (slots_.load(std::memory_order_relaxed) != nullptr) return true;
    void* const pages = map_pages(kSlots * sizeof(std::atomic<std::uint32_t>));  // zeros: all free
    slots_.store(static_cast<std::atomic<std::uint32_t>*>(pages), std::memory_order_release);
    return pages != nullptr;
  }
  // Of a published entry.
  void add(std::uint64_t hash, std::size_t place) noexcept {
    std::atomic<std::uint32_t>* const slots = slots_.load(std::memory_order_relaxed);
    std::size_t at = first(hash);
    while (slots[at].load(std::memory_order_relaxed) != 0) at = (at + 1) % kSlots;
    slots[at].store(static_cast<std::uint32_t>(place + 1), std::memory_order_release);
  }

 private:
  static std::size_t first(std::uint64_t hash) noexcept { return (hash * 0x9E3779B97F4A7C15u >> 32) % kSlots; }

  std::atomic<std::atomic<std::uint32_t>*> slots_{nullptr};
};

}  // namespace cushion
