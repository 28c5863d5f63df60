#include "core/peak_map.h"

#include <algorithm>
#include <bit>
#include <new>
#include <utility>

#include "core/context.h"

namespace cushion {
namespace {

using Map = PeakMap::Map;
using Strip = PeakMap::Strip;

// Of the processor's, not of the clock's: a thread that lost its processor has cost nothing.
std::uint64_t own_ns() noexcept {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<std::uint64_t>(t.tv_sec) * 1'000'000'000u + static_cast<std::uint64_t>(t.tv_nsec);
}

// While strips are collected they are a heap, the smallest first.
void keep(Map& map, const Strip& strip) noexcept {
  const auto larger = [](const Strip& a, const Strip& b) { return a.size > b.size; };
  Strip* const strips = map.strips.data();
  if (map.size == map.strips.size()) {
    ++map.left_out;
    if (strip.size <= strips[0].size) return;
    std::pop_heap(strips, strips + map.size--, larger);
  }
  strips[map.size++] = strip;
  std::push_heap(strips, strips + map.size, larger);
}

// The segments held from the driver, and of mapped memory (vmm.h) each stretch without a gap: the largest, each with
// its place among the cells.
bool lay_out(Map& map, Shared& shared, Patience patience) noexcept {
  bool all = true;
  shared.for_each_context([&](Context& context) {
    if (context.vmm().on()) {
      all = context.vmm().inspect([&](std::uint64_t address, std::uint64_t bytes) {
        keep(map, {context.device(), address, bytes});
      }) && all;
      return;
    }
    all = context.inspect(patience, [&](const Pool& pool) {  // of those in the global arena nothing is beneath
      for (const Segment* s = pool.segments(); s != nullptr && s->beneath == nullptr; s = s->next)
        keep(map, {context.device(), s->address(), s->size()});
    }) && all;
  });
  std::sort(map.strips.data(), map.strips.data() + map.size, [](const Strip& a, const Strip& b) {
    return std::pair(a.device, a.address) < std::pair(b.device, b.address);
  });
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < map.size; ++i) bytes += map.strips[i].size;
  // Every strip may have one cell that is cut off; the others fill what is left.
  map.cell = std::bit_ceil(std::max(kUnit, bytes / (PeakMap::kCells - PeakMap::kStrips) + 1));
  std::size_t cells = 0;
  for (std::size_t i = 0; i < map.size; ++i) {
    map.strips[i].first = cells;
    cells += map.cells(map.strips[i]);
  }
  return all;
}

// visit(const Block&) for the program's blocks that begin in a page of the address map, in order; false if the lock of
// the arena that has the page now cannot be had.
template <class Visit>
bool for_each_block(const AddressMap& addresses, std::uint64_t page, Patience patience, Visit visit) noexcept {
  int blocks = 0;
  while (const Segment* segment = addresses.find(page)) {
    std::unique_lock lock(segment->arena()->mutex, std::defer_lock);
    if (!lock_within(lock, patience)) return false;
    if (addresses.find(page) != segment) continue;  // it changed hands before we had the lock
    segment->for_each_block(page, page + AddressMap::kPage, [&](const Block& block) {
      ++blocks;
      if (Pool::in_use(block)) visit(block);
    });
    break;
  }
  for (int i = 0; blocks > 64 && i < 128; ++i) pause();  // a waiter needs a moment to see that the lock is free
  return true;
}

bool fill(Map& map, Strip& strip, const AddressMap& addresses, Patience patience) noexcept {
  const std::uint64_t end = strip.address + strip.size;
  std::uint64_t through = strip.address;  // what is below it is counted
  const auto free_until = [&](std::uint64_t at) {
    strip.largest_free_run = std::max(strip.largest_free_run, at - through);
    through = at;
  };
  const auto used_until = [&](std::uint64_t at) {
    strip.used += at - through;
    while (through < at) {
      const std::uint64_t i = (through - strip.address) / map.cell;
      const std::uint64_t next = std::min(at, strip.address + (i + 1) * map.cell);
      map.used[strip.first + i] += next - through;
      through = next;
    }
  };
  // Pages that one block covers have no others.
  for (std::uint64_t page = strip.address; page < end;
       page = std::max(page + AddressMap::kPage, through / AddressMap::kPage * AddressMap::kPage)) {
    const bool known = for_each_block(addresses, page, patience, [&](const Block& block) {
      free_until(std::max(through, block.address()));  // lower: it came where one was that is counted
      used_until(std::clamp(block.address() + block.size, through, end));
    });
    if (!known) return false;
  }
  free_until(end);
  return true;
}

}  // namespace

char Map::digit(const Strip& strip, std::size_t i) const noexcept {
  const std::uint64_t of = std::min(cell, strip.size - i * cell);
  const std::uint64_t in_use = used[strip.first + i];
  return static_cast<char>('0' + (in_use == of ? 9 : (8 * in_use + of - 1) / of));
}

std::uint64_t PeakMap::live_in(Shared& shared) noexcept {
  std::uint64_t bytes = 0;
  shared.for_each_context([&](const Context& context) { bytes += context.usage().requested.current(); });
  return bytes;
}

void PeakMap::update(Shared& shared) noexcept {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || monotonic_ns() < rests_until_) return;
  if (const std::uint64_t live = live_in(shared); live >= due_) draw(shared, live, Patience::some);
}

void PeakMap::draw(Shared& shared, std::uint64_t live, Patience patience) noexcept {
  const std::uint64_t begun = own_ns();
  if (spare_ == nullptr) spare_ = static_cast<Map*>(map_pages(sizeof(Map)));
  if (spare_ == nullptr) return;
  Map& map = *new (spare_) Map;
  map.ns = monotonic_ns();
  map.live = live;
  bool whole = lay_out(map, shared, patience);
  for (std::size_t i = 0; whole && i < map.size; ++i) whole = fill(map, map.strips[i], shared.map, patience);
  if (whole) {
    std::swap(last_, spare_);
    due_ = live + std::max(live / 10, std::uint64_t{1} << 20);
  }
  rests_until_ = monotonic_ns() + 49 * (own_ns() - begun);
}

}  // namespace cushion
