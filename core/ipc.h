// Ipc: handles by which other processes open blocks of the pool (contract §5).
//
// The driver's handle of a block names the whole segment, and who opens it gets the segment's start: somebody else's
// memory. So the program gets a ticket instead: it names this process and a record that the process keeps, in a file
// without a name that others of its user find under /proc. The record holds the driver's handle and where the block
// lies in it; who redeems the ticket opens that handle and hands out the block.
//
// Invariants, each of which a test breaks:
//  - never another pointer: a ticket is redeemed only where the process of that pid is the one that made it and the
//    record holds the ticket's own 16 random bytes. Everything else is an error, also in a driver without Cushion,
//    which a ticket's first bytes mean nothing to (measured: error 1);
//  - the same block gives the same ticket until it is freed, as the driver's handle is the same: programs compare them;
//  - a record goes before its block's memory can be another's;
//  - what a ticket opened is closed by its own address: the driver is told the segment's.
//
// The records are mapped: the program may close the file's descriptor, and is then not found, but what else gets its
// number is never written to. A forked child's blocks are its parent's: it issues nothing.
//
// Thread safety: any thread. Costs: a few µs beside the driver's call; a free looks at a count while nothing is
// exported.
#pragma once

#include <cuda.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <unordered_map>

namespace cushion {

class Ipc {
 public:
  constexpr Ipc() = default;
  static constexpr std::uint32_t kMost = 4096;  // blocks exported at a time

  struct Place {             // of a block
    CUipcMemHandle segment;  // the driver's
    std::uint64_t offset;    // in it
    std::uint64_t bytes;     // as requested
  };

  // ---- the process that has the block
  // The block's ticket; nothing if there can be none, with `why`.
  std::optional<CUipcMemHandle> issue(CUdeviceptr block, CUcontext context, const Place& place,
                                      const char*& why) noexcept;
  bool any() const noexcept { return issued_.load(std::memory_order_relaxed) != 0; }
  bool has(CUdeviceptr block) noexcept;
  // The block is about to be another's.
  void withdraw(CUdeviceptr block) noexcept;
  // The context has ended: what lay in it is gone, and what was opened in it.
  void forget(CUcontext context) noexcept;

  // ---- the process that opens it
  static bool is_ticket(const CUipcMemHandle& handle) noexcept;
  // Where the block lies; nothing, with `why`, if the ticket is not good (any more).
  static std::optional<Place> redeem(const CUipcMemHandle& ticket, const char*& why) noexcept;
  // What the driver opened at `segment` is handed out as the block in it. Null: no host memory to remember it by.
  CUdeviceptr opened(CUdeviceptr segment, CUcontext context, const Place& place) noexcept;
  struct Opened {
    CUdeviceptr block;
    std::uint64_t bytes;
    CUdeviceptr segment;
    CUcontext context;
    unsigned times;
  };
  // The opened block that the pointer lies in; nothing if it came from no ticket.
  std::optional<Opened> opened_at(CUdeviceptr address) noexcept;
  void closed(CUdeviceptr block) noexcept;

 private:
  struct Record {
    std::array<std::uint64_t, 2> token;  // zeros: unused
    Place place;
  };
  struct Issued {
    std::uint32_t slot;
    CUcontext context;
  };
  bool open_records(const char*& why) noexcept;
  // A reader sees a record whole or not at all: its token's first half goes first and comes last, and the reader looks
  // twice.
  static void clear(Record& record) noexcept;

  std::mutex mutex_;  // protects all that follows; a leaf
  Record* records_ = nullptr;
  int file_ = -1;
  std::atomic<std::uint32_t> issued_{0};  // readable without the lock; relaxed: a block is exported before it is freed
  std::unordered_map<CUdeviceptr, Issued>* issued_blocks_ = nullptr;
  std::map<CUdeviceptr, Opened>* opened_ = nullptr;  // by block
};

}  // namespace cushion
