// Device memory in host memory, and the blocks handed out of it.
//
// Each device owns a reserved range of addresses. Requests above 1 MiB take whole 2 MiB pages at 2 MiB alignment;
// smaller ones share 2 MiB slabs at 512 bytes alignment, which is the footprint measured on the real driver (contract
// §2). Pages are committed when handed out and given back when freed, so that new memory is zero and a stale access by
// the host faults. A kernel's access is checked against the live blocks.
#pragma once

#include <map>
#include <optional>
#include <set>

#include "context.h"

namespace emu {

struct Pool;

struct Range {
  std::uintptr_t base = 0;
  std::size_t size = 0;
};

// Free address ranges, lowest first; neighbours are joined.
class FreeRanges {
 public:
  std::optional<std::uintptr_t> Take(std::size_t size);
  void Give(Range range);
  bool TakeAt(Range range);  // false, and nothing taken, where not all of it is free
  bool Whole(Range range) const;

 private:
  std::map<std::uintptr_t, std::size_t> free_;
};

struct Device {
  Device(CUdevice ordinal, std::size_t capacity);

  // Zeroed memory, or nothing when the device is full.
  std::optional<Range> Take(std::size_t bytes);
  void Give(Range range);

  // Where an address of the device's lies in its file, which other processes can map.
  int file() const { return file_; }
  std::size_t PlaceOf(std::uintptr_t address) const { return address - first_; }

  // Physical memory without an address (virtual memory management).
  bool Reserve(std::size_t bytes);

  const CUdevice ordinal;
  const std::size_t total;
  std::size_t used = 0;

  CUcontext primary = nullptr;
  unsigned primary_flags = 0;
  unsigned primary_users = 0;

  CUmemoryPool default_pool = nullptr;
  CUmemoryPool current_pool = nullptr;

 private:
  int file_ = -1;
  std::uintptr_t first_ = 0;
  std::optional<Range> TakePages(std::size_t bytes);
  void GivePages(Range range);

  FreeRanges pages_;
  std::map<std::uintptr_t, FreeRanges> slabs_;
};

struct Block {
  enum class Kind { kDevice, kPool, kGraph, kManaged, kHost, kRegistered, kMapped, kImported };

  Kind kind = Kind::kDevice;
  std::uintptr_t base = 0;
  std::size_t size = 0;   // as requested
  std::size_t reach = 0;  // what work may touch: of memory that work put on a stream before may still use, all of it
  Range range;            // as taken
  CUdevice device = 0;
  ContextPtr context;
  std::shared_ptr<Pool> pool;
  std::set<CUdevice> admitted;  // of mapped memory: the devices with access to it
  bool freed = false;           // by the program; its range may still be in use by work put on streams before
  unsigned flags = 0;
  std::uint64_t id = 0;
};

using BlockPtr = std::shared_ptr<Block>;

// Live blocks of all kinds by address.
class AddressMap {
 public:
  void Add(const BlockPtr& block) { blocks_[block->base] = block; }
  bool Remove(const BlockPtr& block);           // false where it was not, or another block is there now
  BlockPtr Find(std::uintptr_t address) const;  // the block that an address lies in

  template <class Predicate>
  std::vector<BlockPtr> Select(Predicate predicate) const {
    std::vector<BlockPtr> selected;
    for (const auto& [base, block] : blocks_) {
      if (predicate(*block)) selected.push_back(block);
    }
    return selected;
  }

 private:
  std::map<std::uintptr_t, BlockPtr> blocks_;
};

// The block the program may still use at an address, or null.
BlockPtr LiveBlock(std::uintptr_t address);

BlockPtr NewBlock(Block::Kind kind, const ContextPtr& context, Range range, std::size_t size);

// The block is gone and its memory is the device's (or the host's) again; of a block gone already, nothing.
void Release(const BlockPtr& block);

// Device memory for a block; refuses with out of memory. What pools hold and do not use is not the device's.
Range TakeOrRefuse(Device& device, std::size_t bytes);

// Whether work of the context may touch the bytes now.
bool Accessible(const Context& context, std::uintptr_t address, std::size_t bytes);

inline std::uintptr_t AddressOf(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }
inline std::byte* PointerTo(std::uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

}  // namespace emu
