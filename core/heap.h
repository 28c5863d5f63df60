// Heap: the free blocks of one arena that share one order, that is, one answer to "who may have this block now?"
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
//   unmapped  addresses that no memory is behind (vmm.h): nobody may have them
//
// Each free takes a stamp (fence.h). A stamp is compared with the highest stamp known complete
// (FenceSet::clean_through), and with what an event covers: the stamp at the time of its record. Merged blocks carry
// the latest stamp of their parts. When a block is known clean it moves to the clean heap, whoever freed it: nothing
// is stranded in an idle stream's heap.
//
// All fields are protected by the arena's lock.
#pragma once

#include <cstdint>

#include "core/bins.h"

namespace cushion {

class Lane;

enum class Order : std::uint8_t { clean, pending, stream, unmapped };

struct Heap {
  Order order = Order::clean;
  std::uint32_t index = 0;   // Block::heap
  std::uint64_t newest = 0;  // no block in it carries a later stamp
  Lane* lane = nullptr;      // of order stream: whose frees these are
  Bins bins;

  // Whether its blocks wait for work of the device.
  bool owes() const noexcept { return order == Order::pending || order == Order::stream; }
};

}  // namespace cushion
