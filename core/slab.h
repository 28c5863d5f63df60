// Slab: host memory for records, taken from the kernel in 1 MiB pieces and never given back, so that a record's
// address stays readable for ever: a lock-free reader that meets a recycled record sees another record, never an
// unmapped page. Cost: a pop from a free list. Not thread safe: its owner's lock protects it.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>

namespace cushion {

// Zeroed host pages, committed when they are first used, or at once; null when the kernel has none.
inline void* map_pages(std::size_t bytes, bool at_once = false) noexcept {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (at_once ? MAP_POPULATE : 0), -1, 0);
  return p == MAP_FAILED ? nullptr : p;
}

template <class Record>
class Slab {
 public:
  // A value-initialised record, or null when the host is out of memory. Memory is touched only when it is first used.
  Record* make() noexcept {
    if (free_ != nullptr) {
      Node* node = free_;
      free_ = node->next;
      return new (node) Record{};
    }
    if (fresh_ == end_ && !grow()) return nullptr;
    return new (fresh_++) Record{};
  }
  void recycle(Record* record) noexcept {
    Node* node = new (static_cast<void*>(record)) Node{free_};
    free_ = node;
  }

 private:
  struct Node {
    Node* next;
  };
  static_assert(sizeof(Record) >= sizeof(Node));
  static constexpr std::size_t kPiece = (std::size_t{1} << 20) / sizeof(Record);  // records

  bool grow() noexcept {
    auto* piece = static_cast<Record*>(map_pages(kPiece * sizeof(Record)));
    if (piece == nullptr) return false;
    fresh_ = piece;
    end_ = piece + kPiece;
    return true;
  }

  Node* free_ = nullptr;
  Record* fresh_ = nullptr;  // the part of the last piece that was never used
  Record* end_ = nullptr;
};

}  // namespace cushion
