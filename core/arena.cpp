#include "core/arena.h"

#include <algorithm>

#include "core/mutation.h"

namespace cushion {

Arena::Arena(AddressMap& map, Context& context, int index) : pool(map, this), context_(context), index_(index) {
  make_heaps();
}

void Arena::make_heaps() {
  clean = pool.make_heap(Order::clean);
  pending = pool.make_heap(Order::pending);
  if (index_ == 0) unmapped = pool.make_heap(Order::unmapped);
}

Heap* Arena::heap_of(LaneRef by) noexcept try {
  if (by.lane == nullptr || !by.lane->is_stream() || !by.lane->is(by.serial)) return pending;
  Heap*& heap = by.lane->heaps[static_cast<std::size_t>(index_)];
  if (heap == nullptr) {
    heap = pool.make_heap(Order::stream);
    heap->lane = by.lane;
  }
  return heap;
} catch (...) {  // no host memory
  return pending;
}

Block* Arena::take(const Need& need, LaneRef by, BlockState as) noexcept {
  const bool stream = by.lane->is_stream() && by.lane->is(by.serial);
  if (Heap* own = stream ? by.lane->heaps[static_cast<std::size_t>(index_)] : nullptr; own != nullptr) {
    if (Block* block = pool.take_best(*own, *clean, need.size, need.alignment, as)) return block;
  } else if (Block* block = pool.take(*clean, need.size, need.alignment, kAnyStamp, as)) {
    return block;
  }
  if (!stream) return nullptr;
  for (Evented& e : evented) {  // its own, freed under pressure: no wait is needed
    if (e.serial != by.serial || e.being_queried || !Bins::fits(*e.block, need.size, need.alignment) ||
        Bins::lead(*e.block, need.alignment) != 0) {
      continue;
    }
    Block* block = e.block;
    const std::uint64_t freed = block->idle.stamp;
    Heap* heap = heap_of(by);
    pool.take_evented(block, as);
    pool.trim(block, need.size, *heap, freed);
    e.event.release();
    evented.erase(evented.begin() + (&e - evented.data()));
    return block;
  }
  if (!by.lane->enter(by.serial)) return nullptr;
  Block* block = nullptr;
  for (const Lane::Before& earlier : by.lane->before) {
    Heap* heap = earlier.lane->is(earlier.serial) ? earlier.lane->heaps[static_cast<std::size_t>(index_)] : nullptr;
    if (heap == nullptr) continue;
    block = pool.take(*heap, need.size, need.alignment, earlier.stamp, as);
    if (block != nullptr) break;
  }
  by.lane->leave();
  return block;
}

void Arena::give(Block* block, LaneRef by, std::uint64_t stamp) noexcept { pool.give(block, *heap_of(by), stamp); }

bool Arena::add_superblock(const Block& superblock, bool was_clean, LaneRef by, std::uint64_t stamp) noexcept {
  Heap* heap = was_clean ? clean : heap_of(by);
  return pool.add(superblock.address(), superblock.size, *heap, was_clean ? 0 : stamp);
}

void Arena::detach_superblocks(std::uint64_t keep, std::vector<Superblock>& out) {
  std::size_t most = 0;
  for (const Segment* segment = pool.segments(); segment != nullptr; segment = segment->next) ++most;
  out.reserve(most);  // before any is taken out: none is lost if the host has no memory
  for (Segment* segment = pool.segments(); segment != nullptr && pool.unused() > keep;) {
    Segment* next = segment->next;
    if (const Block* block = Pool::wholly_free(*segment)) {
      const Heap& heap = *pool.heap(block->heap);
      LaneRef lane;
      if (heap.lane != nullptr) lane = {heap.lane, heap.lane->serial()};
      out.push_back({segment->address(), heap.order, lane, block->idle.stamp});
      pool.remove(segment);
    }
    segment = next;
  }
}

void Arena::forget(Lane& lane) noexcept {
  Heap*& heap = lane.heaps[static_cast<std::size_t>(index_)];
  if (heap == nullptr) return;
  Heap* to = mutated(Mutation::destroyed_stream_is_clean) ? clean : pending;
  heap->bins.for_each([&](Block* block) { pool.move(block, *to); });
  pool.drop(heap);
  heap = nullptr;
}

void Arena::clean_up(std::uint64_t through) noexcept {
  for (Evented& e : evented) {
    if (e.serial == 0 || e.being_queried || e.block->idle.stamp > through) continue;
    pool.settle_evented(e.block, *clean);
    e.event.release();
    e.block = nullptr;
  }
  std::erase_if(evented, [](const Evented& e) { return e.block == nullptr; });
  for (Heap* heap : pool.heaps()) {
    if (heap == nullptr || !heap->owes()) continue;
    heap->bins.for_each([&](Block* block) {
      if (block->idle.stamp <= through) pool.move(block, *clean);
    });
  }
}

std::uint64_t Arena::newest_unclean() const noexcept {
  std::uint64_t newest = 0;
  for (const Heap* heap : pool.heaps()) {
    if (heap != nullptr && heap->owes() && !heap->bins.empty()) newest = std::max(newest, heap->newest);
  }
  return newest;
}

// The generation changes before the first record is recycled, for who reads one without the lock and looks again; and
// after the last, for who found one meanwhile.
void Arena::abandon() {
  generation_.fetch_add(1, std::memory_order_seq_cst);
  for (Heap* heap : pool.heaps()) {
    if (heap != nullptr && heap->lane != nullptr) heap->lane->heaps[static_cast<std::size_t>(index_)] = nullptr;
  }
  evented.clear();
  pool.abandon();
  make_heaps();
  generation_.fetch_add(1, std::memory_order_release);
}

}  // namespace cushion
