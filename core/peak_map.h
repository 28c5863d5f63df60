// Peak map: which parts of the memory held from the driver were in the program's hands, and which were free, when most
// bytes were live. Each segment is a strip of cells, all of one size, and each cell knows how many of its bytes were in
// the program's blocks; what lay in a magazine, waited for the device or was an arena's superblock was free.
//
// Invariant: one map in bounded memory: of a point of the time line, the last one with a tenth more live bytes (1 MiB
// at least) than the map before it. A report draws one of its own moment if more is live then.
//
// Thread safety: any thread draws, the second one at a time goes without. Nothing here allocates but two mappings, at
// the first two maps: a signal handler may draw and read, and leaves out what a lock protects that it cannot get.
//
// Cost: 10 ns a block, borne by the thread that meets the point: 10 ms for a million. As many maps as live bytes grow
// by a tenth, and at most a fiftieth of the time in drawing them: after each comes a rest. An arena's lock is held for
// the blocks of one 2 MiB page, at most 4096 (40 µs), and given back in between, long enough for a waiter to have it: a
// map is of no one moment, but counts no byte twice.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "core/patience.h"
#include "core/shared.h"

namespace cushion {

class PeakMap {
 public:
  static constexpr std::size_t kStrips = 256;  // at most; the largest segments
  static constexpr std::size_t kCells = 4096;  // of all strips together, at most

  struct Strip {  // of one segment
    int device = 0;
    std::uint64_t address = 0;
    std::uint64_t size = 0;
    std::uint64_t used = 0;              // bytes in the program's hands
    std::uint64_t largest_free_run = 0;  // bytes between them
    std::size_t first = 0;               // its first cell
  };
  struct Map {
    std::uint64_t ns = 0;      // when: on the monotonic clock
    std::uint64_t live = 0;    // bytes requested of the pools then
    std::uint64_t cell = 0;    // bytes of a cell, a power of two; a strip's last one may be cut off
    std::size_t left_out = 0;  // segments without a strip
    std::size_t size = 0;      // strips, in the order of device and address
    std::array<Strip, kStrips> strips{};
    std::array<std::uint64_t, kCells> used{};  // bytes in the program's hands, by cell

    std::size_t cells(const Strip& strip) const noexcept { return (strip.size + cell - 1) / cell; }
    // '0': nothing of the cell is in the program's hands; '9': all; else the eighths begun, '1' to '8'.
    char digit(const Strip& strip, std::size_t i) const noexcept;
  };

  // A point of the time line was taken: draws a map if live bytes have grown so far.
  void update(Shared& shared) noexcept;

  // visit(const Map&) for the last one, after a new one if more is live now and tracking is on.
  template <class Visit>
  void read(Shared& shared, Patience patience, Visit visit) noexcept {
    std::unique_lock lock(mutex_, std::defer_lock);
    if (!lock_within(lock, patience)) return;
    const std::uint64_t live = live_in(shared);
    if (shared.tracks() && live > (last_ != nullptr ? last_->live : 0)) draw(shared, live, patience);
    if (last_ != nullptr && last_->size != 0) visit(static_cast<const Map&>(*last_));
  }

 private:
  static std::uint64_t live_in(Shared& shared) noexcept;
  void draw(Shared& shared, std::uint64_t live, Patience patience) noexcept;  // with the lock held

  // Protects everything below; arenas' locks are taken under it. Held for as long as a map takes, and while a report
  // writes it: allocations only try it.
  std::mutex mutex_;
  Map* last_ = nullptr;   // the map; null: there is none yet
  Map* spare_ = nullptr;  // where the next one is drawn: one that cannot be finished spoils nothing
  std::uint64_t due_ = std::uint64_t{1} << 20;  // so many live bytes: time for the next one
  std::uint64_t rests_until_ = 0;               // and not before, on the monotonic clock
};

}  // namespace cushion
