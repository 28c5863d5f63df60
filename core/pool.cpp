#include "core/pool.h"

#include <algorithm>

#include "core/mutation.h"

namespace cushion {
namespace {

// The stamp of blocks that become one.
std::uint64_t later(std::uint64_t a, std::uint64_t b) noexcept {
  return mutated(Mutation::merge_keeps_older_stamp) ? std::min(a, b) : std::max(a, b);
}

}  // namespace

Heap* Pool::make_heap(Order order) {
  Heap* heap = nullptr;
  if (spare_heaps_.empty()) {
    heaps_.push_back(nullptr);
    heap = new Heap;
    heap->index = static_cast<std::uint32_t>(heaps_.size() - 1);
    spare_heaps_.reserve(heaps_.size());  // so that drop() never allocates
  } else {
    heap = spare_heaps_.back();
    spare_heaps_.pop_back();
    const std::uint32_t index = heap->index;
    *heap = Heap{};
    heap->index = index;
  }
  heap->order = order;
  heaps_[heap->index] = heap;
  return heap;
}

void Pool::drop(Heap* heap) noexcept {
  heaps_[heap->index] = nullptr;
  spare_heaps_.push_back(heap);
}

Block* Pool::cut(Block* block, std::uint64_t size) noexcept {
  Block* rest = blocks_.make();
  if (rest == nullptr) return nullptr;
  rest->set(block->address() + size, BlockState::unused);
  rest->size = block->size - size;
  rest->lower = block;
  rest->upper = block->upper;
  if (rest->upper != nullptr) rest->upper->lower = rest;
  block->upper = rest;
  block->size = size;
  return rest;
}

Block* Pool::take(Heap& heap, std::uint64_t size, std::uint64_t alignment, std::uint64_t stamp,
                  BlockState as) noexcept {
  Block* block = heap.bins.find(size, alignment, stamp);
  return block != nullptr ? carve(block, size, alignment, as) : nullptr;
}

Block* Pool::take_best(Heap& first, Heap& second, std::uint64_t size, std::uint64_t alignment, BlockState as) noexcept {
  Block* block = first.bins.find(size, alignment, kAnyStamp);
  if (block == nullptr || block->size != size) {
    Block* other = second.bins.find(size, alignment, kAnyStamp);
    if (other != nullptr && (block == nullptr || other->size < block->size)) block = other;
  }
  return block != nullptr ? carve(block, size, alignment, as) : nullptr;
}

Block* Pool::isolate(Block* block, std::uint64_t lead, std::uint64_t size) noexcept {
  Heap& heap = *heaps_[block->heap];
  const std::uint64_t freed = block->idle.stamp;
  heap.bins.remove(block);
  if (lead != 0) {
    Block* aligned = cut(block, lead);
    block->idle.stamp = freed;
    heap.bins.insert(block);
    if (aligned == nullptr) return nullptr;
    block = aligned;
  }
  if (block->size > size) {
    if (Block* rest = cut(block, size); rest != nullptr) {
      rest->set(BlockState::free);
      rest->heap = heap.index;
      rest->idle.stamp = freed;
      heap.bins.insert(rest);
    }
  }
  block->heap = heap.index;
  return block;
}

Block* Pool::carve(Block* block, std::uint64_t size, std::uint64_t alignment, BlockState as) noexcept {
  Heap& heap = *heaps_[block->heap];
  const std::uint64_t freed = block->idle.stamp;
  const std::uint64_t whole = block->lower == nullptr && block->upper == nullptr ? block->size : 0;
  std::uint64_t lead = Bins::lead(*block, alignment);
  if (reserves_ && size < AddressMap::kPage && block->size >= 2 * AddressMap::kPage)
    lead = (block->address() + block->size - size) / alignment * alignment - block->address();
  block = isolate(block, lead, size);
  if (block == nullptr) return nullptr;
  unused_ -= whole;
  if (!segment_of(*block)->enter(block, leaves_)) {
    put(block, heap, freed);
    return nullptr;
  }
  use(block->size);
  block->live = {};
  block->set(as);
  return block;
}

void Pool::put(Block* block, Heap& heap, std::uint64_t stamp) noexcept {
  if (Block* upper = block->upper; free_in(upper, heap)) {
    heap.bins.remove(upper);
    stamp = later(stamp, upper->idle.stamp);
    block->size += upper->size;
    block->upper = upper->upper;
    if (block->upper != nullptr) block->upper->lower = block;
    upper->set(BlockState::unused);
    blocks_.recycle(upper);
  }
  if (Block* lower = block->lower; free_in(lower, heap)) {
    heap.bins.remove(lower);
    stamp = later(stamp, lower->idle.stamp);
    lower->size += block->size;
    lower->upper = block->upper;
    if (lower->upper != nullptr) lower->upper->lower = lower;
    block->set(BlockState::unused);
    blocks_.recycle(block);
    block = lower;
  }
  block->set(BlockState::free);
  block->heap = heap.index;
  block->idle.stamp = stamp;
  heap.newest = std::max(heap.newest, stamp);
  heap.bins.insert(block);
  if (block->lower == nullptr && block->upper == nullptr) unused_ += block->size;
}

void Pool::give(Block* block, Heap& heap, std::uint64_t stamp) noexcept {
  segment_of(*block)->leave(*block, leaves_);
  free_ += block->size;
  put(block, heap, stamp);
}

void Pool::move(Block* block, Heap& to) noexcept {
  heaps_[block->heap]->bins.remove(block);
  if (block->lower == nullptr && block->upper == nullptr) unused_ -= block->size;
  put(block, to, block->idle.stamp);
}

void Pool::give_evented(Block* block, Heap& heap, std::uint64_t stamp) noexcept {
  free_ += block->size;
  block->set(BlockState::evented);
  block->heap = heap.index;
  block->idle = {nullptr, nullptr, stamp};
  heap.newest = std::max(heap.newest, stamp);
}

void Pool::take_evented(Block* block, BlockState as) noexcept {
  use(block->size);
  block->live = {};
  block->set(as);
}

void Pool::settle_evented(Block* block, Heap& to) noexcept {
  segment_of(*block)->leave(*block, leaves_);
  put(block, to, block->idle.stamp);
}

void Pool::trim(Block* live, std::uint64_t size, Heap& rest_to, std::uint64_t stamp) noexcept {
  if (live->size <= size) return;
  if (Block* rest = cut(live, size); rest != nullptr) {
    free_ += rest->size;
    put(rest, rest_to, stamp);
  }
}

void Pool::prepare(std::uint64_t size) noexcept {
  for (int i = 0; i < 2; ++i) {
    if (Block* block = blocks_.make()) blocks_.recycle(block);
  }
  Segment* segment = segment_records_.make();
  if (segment == nullptr) return;
  if (segment->open(arena_, 0, size)) segment->close(leaves_);
  keep_spare(segment);
}

Segment* Pool::open(std::uint64_t address, std::uint64_t size) noexcept {
  Segment* segment = spare_segments_;
  if (segment != nullptr) {
    spare_segments_ = segment->next;
  } else {
    segment = segment_records_.make();
  }
  Block* block = blocks_.make();
  if (segment == nullptr || block == nullptr || !segment->open(arena_, address, size)) {
    if (segment != nullptr) keep_spare(segment);
    if (block != nullptr) blocks_.recycle(block);
    return nullptr;
  }
  block->set(address, BlockState::unused);
  block->size = size;
  segment->first = block;
  segment->beneath = nullptr;
  segment->previous = nullptr;
  segment->next = segments_;
  if (segments_ != nullptr) segments_->previous = segment;
  segments_ = segment;
  return segment;
}

void Pool::close(Segment* segment) noexcept {
  Block* block = segment->first;
  block->set(BlockState::unused);
  blocks_.recycle(block);
  if (segment->previous != nullptr) {
    segment->previous->next = segment->next;
  } else {
    segments_ = segment->next;
  }
  if (segment->next != nullptr) segment->next->previous = segment->previous;
  segment->close(leaves_);
  keep_spare(segment);
}

bool Pool::add(std::uint64_t address, std::uint64_t size, Heap& heap, std::uint64_t stamp) noexcept {
  Segment* segment = open(address, size);
  if (segment == nullptr) return false;
  segment->beneath = map_.find(address);
  if (!map_.set(address, size, segment)) {
    close(segment);
    return false;
  }
  held_ += size;
  free_ += size;
  put(segment->first, heap, stamp);
  return true;
}

void Pool::remove(Segment* segment) noexcept {
  if (segment->beneath != nullptr) {
    map_.set(segment->address(), segment->size(), segment->beneath);
  } else {
    map_.clear(segment->address(), segment->size());
  }
  Block* block = segment->first;
  heaps_[block->heap]->bins.remove(block);
  held_ -= block->size;
  free_ -= block->size;
  unused_ -= block->size;
  close(segment);
}

bool Pool::reserve(std::uint64_t address, std::uint64_t size, Heap& unmapped) noexcept {
  Segment* segment = open(address, size);
  if (segment == nullptr) return false;
  Block* rest = cut(segment->first, AddressMap::kPage);
  if (rest == nullptr) {
    close(segment);
    return false;
  }
  reserves_ = true;
  segment->first->set(BlockState::moving);
  put(rest, unmapped, 0);
  return true;
}

Block* Pool::detach(Block* block, std::uint64_t address, std::uint64_t size) noexcept {
  const bool mapped = is_mapped(*block);
  Heap& heap = *heaps_[block->heap];
  const std::uint64_t freed = block->idle.stamp;
  block = isolate(block, address - block->address(), size);
  if (block == nullptr) return nullptr;
  if (block->size != size) {  // its rest could not be cut off
    put(block, heap, freed);
    return nullptr;
  }
  block->set(BlockState::moving);
  if (mapped) {
    held_ -= block->size;
    free_ -= block->size;
    map_.clear(block->address(), block->size);
  }
  return block;
}

bool Pool::attach(Block* moving, Heap& heap) noexcept {
  if (heap.order != Order::unmapped) {
    if (!map_.set(moving->address(), moving->size, reservation_of(moving->address()))) return false;
    held_ += moving->size;
    free_ += moving->size;
  }
  put(moving, heap, 0);
  return true;
}

Segment* Pool::reservation_of(std::uint64_t address) const noexcept {
  Segment* segment = segments_;
  while (address - segment->address() >= segment->size()) segment = segment->next;
  return segment;
}

void Pool::abandon() noexcept {
  while (segments_ != nullptr) {
    Segment* segment = segments_;
    segments_ = segment->next;
    map_.clear(segment->address(), segment->size());
    for (Block* block = segment->first; block != nullptr;) {
      Block* upper = block->upper;
      block->set(BlockState::unused);
      blocks_.recycle(block);
      block = upper;
    }
    segment->close(leaves_);
    keep_spare(segment);
  }
  for (Heap*& heap : heaps_) {
    if (heap != nullptr) {
      heap->bins = Bins{};
      spare_heaps_.push_back(heap);
      heap = nullptr;
    }
  }
  held_ = free_ = unused_ = 0;
}

Pool::Fragments Pool::fragments() const noexcept {
  Fragments fragments;
  for (const Segment* s = segments_; s != nullptr; s = s->next) {
    for (const Block* b = s->first; b != nullptr; b = b->upper) {
      if (b->state() != BlockState::free || !is_mapped(*b)) continue;
      fragments.largest = std::max(fragments.largest, b->size);
      fragments.bytes += b->size;
      fragments.squares += static_cast<double>(b->size) * static_cast<double>(b->size);
    }
  }
  return fragments;
}

bool Pool::valid() const noexcept {
  std::uint64_t held = 0;
  std::uint64_t idle = 0;
  std::uint64_t unused = 0;
  std::uint64_t binned = 0;
  for (const Segment* s = segments_; s != nullptr; s = s->next) {
    std::uint64_t expected = s->address();
    const Block* lower = nullptr;
    for (const Block* b = s->first; b != nullptr; lower = b, b = b->upper) {
      if (b->address() != expected || b->lower != lower || b->size == 0 || b->size % kUnit != 0) return false;
      const BlockState state = b->state();
      const bool memory = state != BlockState::moving && (state != BlockState::free || is_mapped(*b));
      if (map_.find(b->address()) != (memory ? s : nullptr) && b->api != Api::superblock) return false;
      expected += b->size;
      held += memory ? b->size : 0;
      const bool is_live = state == BlockState::live || state == BlockState::freeing || state == BlockState::cached;
      if (s->block_at(b->address()) != (is_live || state == BlockState::evented ? b : nullptr)) return false;
      if (state == BlockState::unused) return false;
      if (is_live || state == BlockState::moving) continue;
      idle += memory ? b->size : 0;
      if (heaps_[b->heap] == nullptr || b->idle.stamp > heaps_[b->heap]->newest) return false;
      if (state == BlockState::free) {
        binned += b->size;
        if (lower != nullptr && lower->state() == BlockState::free && lower->heap == b->heap) return false;
      }
    }
    if (expected != s->address() + s->size()) return false;
    if (wholly_free(*s) != nullptr) unused += s->size();
  }
  std::uint64_t in_bins = 0;
  for (const Heap* heap : heaps_) {
    if (heap != nullptr) heap->bins.for_each([&](const Block* b) { in_bins += b->heap == heap->index ? b->size : 0; });
  }
  return held == held_ && idle == free_ && unused == unused_ && in_bins == binned;
}

}  // namespace cushion
