// Heap: the free blocks of one context that share one order, that is, one answer to "who may have this block now?"
//
// Handing a block out too early is silent corruption of somebody's data, so every free block lies in exactly one heap
// (contract §3):
//
//   clean     its freeing is known complete on the device: anybody may have it
//   pending   freed with the whole context's order (cudaFree of a stream-ordered block; cudaFree under
//             CUSHION_FREE=deferred): clean once a fence over the context, taken at or after the free, is complete. The
//             blocks of a destroyed stream come here too
//   stream    freed by cudaFreeAsync(s): s itself may have it at once; another stream t may once the work of s up to
//             the free is complete, or is ordered before t by an event that the program recorded after the free and
//             made t wait for; cudaMalloc only once it is complete
//
// Each free takes a stamp from its context's counter. A stamp is compared with the highest stamp known complete
// (FenceSet::clean_through), and with what an event covers: the stamp at the time of its record. Merged blocks carry
// the latest stamp of their parts. When a block is known clean it moves to the clean heap, whoever freed it: nothing
// is stranded in an idle stream's heap.
//
// All fields are protected by the context's lock. Heaps are type-stable and recycled; `serial` tells incarnations
// apart.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/bins.h"

namespace cushion {

enum class Order : std::uint8_t { clean, pending, stream };

struct Heap {
  Order order = Order::clean;
  std::uint32_t index = 0;      // Block::heap
  std::uint64_t serial = 0;     // of this incarnation, unique in the process
  std::uint64_t stream_id = 0;  // identity of the stream, never its handle: handles are reused after destroy
  CUstream stream = nullptr;    // the handle, for old drivers' stream queries
  long owner_thread = 0;        // the only thread that may use handle 2 (its per-thread stream); 0: any
  int queries = 0;              // threads querying `stream` just now; destroying it waits for them
  std::uint64_t newest = 0;     // no block in it carries a later stamp
  Bins bins;

  // What the program has ordered before this stream's next work: of the heap `serial`, frees up to `stamp`. At most
  // kMostBefore of them: an order that is forgotten only costs a chance to reuse.
  struct Before {
    std::uint64_t serial;
    std::uint64_t stamp;
    std::uint32_t index = 0;  // the heap's
  };
  static constexpr std::size_t kMostBefore = 32;
  std::vector<Before> before;

  void order_after(Before earlier) {
    if (earlier.serial == serial) return;
    for (Before& b : before) {
      if (b.serial == earlier.serial) {
        if (b.stamp < earlier.stamp) b.stamp = earlier.stamp;
        return;
      }
    }
    if (before.size() < kMostBefore) {
      before.push_back(earlier);
      return;
    }
    const auto oldest = std::min_element(before.begin(), before.end(),
                                         [](const Before& a, const Before& b) { return a.stamp < b.stamp; });
    if (oldest->stamp < earlier.stamp) *oldest = earlier;
  }
};

}  // namespace cushion
