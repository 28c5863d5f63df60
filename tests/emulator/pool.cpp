#include "pool.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "capture.h"
#include "driver.h"
#include "stepped.h"

namespace emu {
namespace {

constexpr std::size_t kAlignment = 512;
constexpr std::size_t kChunk = std::size_t{2} << 20;

std::shared_ptr<Pool> PoolOf(CUmemoryPool handle) {
  std::shared_ptr<Pool> pool = driver().pools.Find(handle);
  Require(pool != nullptr);
  return pool;
}

// The place of an allocation or free on its stream.
TaskPtr Mark(Stream& stream, Work on_reached) {
  if (!Stepped()) return Submit(stream, nullptr, {}, std::move(on_reached));
  Clock before = stream.seen;
  stream.seen[stream.id] = ++stream.count;
  Remember(stream, std::move(before));
  return Join(Pending(stream), std::move(on_reached));
}

std::vector<std::shared_ptr<Pool>>& all_pools() {
  static auto* const pools = new std::vector<std::shared_ptr<Pool>>;
  return *pools;
}

// §4: an allocation on a capturing stream is a node of the graph, and its memory the graph's.
CUdeviceptr AllocateInGraph(Stream& stream, std::size_t bytes) {
  const Range range = TakeOrRefuse(DeviceAt(stream.context->device), bytes);
  const BlockPtr block = NewBlock(Block::Kind::kGraph, stream.context, range, bytes);
  stream.capture->graph->memory->blocks.push_back(block);
  AddNode(stream, [] {});
  return block->base;
}

CUresult Allocate(CUdeviceptr* out, std::size_t bytes, CUmemoryPool pool, CUstream handle) {
  Lock lock(global_mutex());
  Require(out != nullptr && bytes > 0);
  const StreamPtr stream = StreamOf(handle);
  if (stream->capture != nullptr) {
    *out = AllocateInGraph(*stream, bytes);
  } else {
    RefuseDuringCapture();
    if (pool == nullptr) pool = DeviceAt(stream->context->device).current_pool;
    *out = PoolOf(pool)->Allocate(*stream, bytes);
  }
  return CUDA_SUCCESS;
}

int* Flag(Pool& pool, CUmemPool_attribute attribute) {
  switch (attribute) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
      return &pool.reuse_follow_events;
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
      return &pool.reuse_opportunistic;
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
      return &pool.reuse_internal;
    default:
      return nullptr;
  }
}

std::uint64_t* Counter(Pool& pool, CUmemPool_attribute attribute) {
  switch (attribute) {
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
      return &pool.threshold;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
      return &pool.reserved;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
      return &pool.reserved_high;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
      return &pool.used;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
      return &pool.used_high;
    default:
      return nullptr;
  }
}

}  // namespace

template <class Predicate>
void Pool::Notice(Predicate noticed) {
  std::erase_if(free, [&](const Free& entry) {
    if (!noticed(entry) || !AllDone(entry.fence)) return false;
    ObserveInside(entry.clock);
    used -= entry.bytes;
    space.Give(entry.range);
    return true;
  });
}

// Takes out of the free list the best fit that `allowed` admits, and makes the stream wait for its free (for nothing,
// where the order is known). Work that is still to come on a freed block may touch all of it: such a block is not cut.
template <class Allowed>
std::optional<Range> Pool::Reuse(Stream& stream, std::size_t size, const Allowed& allowed) {
  auto best = free.end();
  for (auto entry = free.begin(); entry != free.end(); ++entry) {
    if (entry->range.size < size || (entry->range.size / 2 > size && !AllDone(entry->fence))) continue;
    if (best != free.end() && best->range.size <= entry->range.size) continue;
    if (OnlyGuaranteed() && !AllDone(entry->fence)) continue;  // a wait would order more
    if (allowed(*entry)) best = entry;
  }
  if (best == free.end()) return std::nullopt;
  if (AllDone(best->fence)) {
    ObserveInside(best->clock);
  } else {
    MakeWait(stream, best->fence, best->clock);
  }
  used -= std::exchange(best->bytes, 0);
  Range taken = best->range;
  if (AllDone(best->fence)) taken.size = size;
  best->range = {taken.base + taken.size, best->range.size - taken.size};
  if (best->range.size == 0) free.erase(best);
  return taken;
}

std::optional<Range> Pool::Grow(std::size_t size) {
  NoticeAll();
  if (const auto base = space.Take(size)) return Range{*base, size};
  const std::size_t chunk_size = (size + kChunk - 1) / kChunk * kChunk;
  auto chunk = DeviceAt(device).Take(chunk_size);
  if (!chunk) {
    Trim(0);
    chunk = DeviceAt(device).Take(chunk_size);
  }
  if (!chunk) return std::nullopt;
  chunks[chunk->base] = chunk->size;
  space.Give(*chunk);
  reserved += chunk->size;
  reserved_high = std::max(reserved_high, reserved);
  return Range{*space.Take(size), size};
}

CUdeviceptr Pool::Allocate(Stream& stream, std::size_t bytes) {
  // The kinds of reuse, in the order in which they are tried.
  const auto same_stream = [&](const Free& entry) { return entry.stream == stream.id; };
  const auto after_event = [&](const Free& entry) {
    const auto known = stream.seen.find(entry.stream);
    return reuse_follow_events != 0 && entry.stream != 0 && known != stream.seen.end() && known->second >= entry.count;
  };
  const auto complete = [&](const Free& entry) { return reuse_opportunistic != 0 && AllDone(entry.fence); };
  const auto any = [&](const Free&) { return reuse_internal != 0; };
  const std::size_t size = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  auto range = Reuse(stream, size, same_stream);
  if (!range) range = Reuse(stream, size, after_event);
  if (!range) {
    if (const auto base = space.Take(size)) range = Range{*base, size};
  }
  if (!range) range = Reuse(stream, size, complete);
  if (!range) range = Grow(size);
  if (!range) range = Reuse(stream, size, any);  // memory is short: the stream waits for another one's free
  Require(range.has_value(), CUDA_ERROR_OUT_OF_MEMORY);
  used += bytes;
  used_high = std::max(used_high, used);
  const BlockPtr block = NewBlock(Block::Kind::kPool, stream.context, *range, bytes);
  block->device = device;
  block->pool = shared_from_this();
  block->reach = range->size;  // of its last owner, whose work may be on its way, the size is not remembered
  Mark(stream, {});
  return block->base;
}

void Pool::FreeOn(Stream& stream, const BlockPtr& block) {
  // The block stays accessible to work put on the stream before, until the free itself is reached.
  block->freed = true;
  const TaskPtr reached = Mark(stream, [block] { driver().blocks.Remove(block); });
  free.push_back({block->range, block->size, stream.context->id, stream.id, stream.count, {reached}, stream.seen});
}

void Pool::FreeAfter(const BlockPtr& block, const Tasks& fence) {
  block->freed = true;
  const TaskPtr reached = Join(fence, [block] { driver().blocks.Remove(block); });
  free.push_back({block->range, block->size, 0, 0, 0, {reached}, Covered(*block->context)});
}

void Pool::Discard(const Block& block) {
  used -= block.size;
  space.Give(block.range);
}

void Pool::NoticeAll() {
  Notice([](const Free&) { return true; });
}

void Pool::Trim(std::uint64_t keep) {
  if (reserved <= keep) return;
  Notice([](const Free& entry) { return entry.context == 0; });
  for (auto chunk = chunks.begin(); chunk != chunks.end() && reserved > keep;) {
    const Range range{chunk->first, chunk->second};
    if (!space.TakeAt(range)) {
      ++chunk;
      continue;
    }
    reserved -= range.size;
    DeviceAt(device).Give(range);
    chunk = chunks.erase(chunk);
  }
}

bool Pool::Admits(CUdevice other) const {
  const auto found = access.find(other);
  return found != access.end() && found->second == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
}

void AfterSynchronize(const Stream& stream) {
  for (const auto& pool : all_pools()) pool->Notice([&](const auto& entry) { return entry.stream == stream.id; });
  AfterSynchronize(stream.context->device);
}

void AfterSynchronize(const Context& context) {
  for (const auto& pool : all_pools()) pool->Notice([&](const auto& entry) { return entry.context == context.id; });
  AfterSynchronize(context.device);
}

void AfterSynchronize(CUdevice device) {
  for (const auto& pool : all_pools()) {
    if (pool->device != device) continue;
    if (!pool->alive) pool->NoticeAll();
    pool->Trim(pool->alive ? pool->threshold : 0);
  }
  std::erase_if(all_pools(), [](const auto& pool) { return !pool->alive && pool->reserved == 0; });
}

void ResetDefaultPool(Device& device) {
  const std::shared_ptr<Pool> pool = PoolOf(device.default_pool);
  pool->NoticeAll();
  pool->Trim(0);
  device.current_pool = device.default_pool;
}

CUresult MemAllocAsync(CUdeviceptr* out, size_t bytes, CUstream stream) {
  return Allocate(out, bytes, nullptr, stream);
}

CUresult MemAllocFromPoolAsync(CUdeviceptr* out, size_t bytes, CUmemoryPool pool, CUstream stream) {
  Require(pool != nullptr);
  return Allocate(out, bytes, pool, stream);
}

CUresult MemFreeAsync(CUdeviceptr address, CUstream handle) {
  Lock lock(global_mutex());
  const StreamPtr stream = StreamOf(handle);
  const BlockPtr block = LiveBlock(address);
  Require(block != nullptr && block->base == address);
  if (stream->capture != nullptr) {
    // §4: memory from outside answers 1, and the capture survives.
    const auto& own = stream->capture->graph->memory->blocks;
    Require(std::find(own.begin(), own.end(), block) != own.end());
    block->freed = true;
    AddNode(*stream, [] {});
    return CUDA_SUCCESS;
  }
  switch (block->kind) {
    case Block::Kind::kPool:
      block->pool->FreeOn(*stream, block);
      return CUDA_SUCCESS;
    case Block::Kind::kDevice:  // §3: accepted, and does not wait
      block->freed = true;
      Mark(*stream, [block, clock = Covered(*stream)] {
        ObserveInside(clock);
        Release(block);
      });
      return CUDA_SUCCESS;
    case Block::Kind::kGraph:
      block->freed = true;
      Submit(*stream, nullptr);
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUmemoryPool NewPool(Driver& owner, CUdevice device) {
  auto pool = std::make_shared<Pool>();
  pool->device = device;
  pool->handle = owner.pools.Add(pool);
  all_pools().push_back(pool);
  return pool->handle;
}

CUresult DeviceGetDefaultMemPool(CUmemoryPool* out, CUdevice ordinal) {
  Lock lock(global_mutex());
  Require(out != nullptr);
  *out = DeviceAt(ordinal).default_pool;
  return CUDA_SUCCESS;
}

CUresult DeviceGetMemPool(CUmemoryPool* out, CUdevice ordinal) {
  Lock lock(global_mutex());
  Require(out != nullptr);
  *out = DeviceAt(ordinal).current_pool;
  return CUDA_SUCCESS;
}

CUresult DeviceSetMemPool(CUdevice ordinal, CUmemoryPool handle) {
  Lock lock(global_mutex());
  Require(PoolOf(handle)->device == ordinal);
  DeviceAt(ordinal).current_pool = handle;
  return CUDA_SUCCESS;
}

CUresult MemPoolCreate(CUmemoryPool* out, const CUmemPoolProps* properties) {
  Lock lock(global_mutex());
  RefuseDuringCapture();
  Require(out != nullptr && properties != nullptr);
  Require(properties->allocType == CU_MEM_ALLOCATION_TYPE_PINNED &&
          properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE);
  DeviceAt(properties->location.id);
  *out = NewPool(driver(), properties->location.id);
  return CUDA_SUCCESS;
}

// The pool's blocks stay valid; its memory goes back as they are freed.
CUresult MemPoolDestroy(CUmemoryPool handle) {
  Lock lock(global_mutex());
  RefuseDuringCapture();
  const std::shared_ptr<Pool> pool = PoolOf(handle);
  Device& device = DeviceAt(pool->device);
  Require(handle != device.default_pool);
  if (device.current_pool == handle) device.current_pool = device.default_pool;
  driver().pools.Take(handle);
  pool->alive = false;
  pool->NoticeAll();
  pool->Trim(0);
  return CUDA_SUCCESS;
}

CUresult MemPoolTrimTo(CUmemoryPool handle, size_t keep) {
  Lock lock(global_mutex());
  RefuseDuringCapture();
  PoolOf(handle)->Trim(keep);
  return CUDA_SUCCESS;
}

CUresult MemPoolSetAttribute(CUmemoryPool handle, CUmemPool_attribute attribute, void* value) {
  Lock lock(global_mutex());
  RefuseDuringCapture();
  const std::shared_ptr<Pool> pool = PoolOf(handle);
  Require(value != nullptr);
  if (int* const flag = Flag(*pool, attribute)) {
    std::memcpy(flag, value, sizeof *flag);
    return CUDA_SUCCESS;
  }
  std::uint64_t number;
  std::memcpy(&number, value, sizeof number);
  switch (attribute) {
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
      pool->threshold = number;
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:  // high water marks can only be set back
      Require(number == 0);
      pool->reserved_high = pool->reserved;
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
      Require(number == 0);
      pool->used_high = pool->used;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult MemPoolGetAttribute(CUmemoryPool handle, CUmemPool_attribute attribute, void* value) {
  Lock lock(global_mutex());
  RefuseDuringCapture();
  const std::shared_ptr<Pool> pool = PoolOf(handle);
  Require(value != nullptr);
  if (const int* const flag = Flag(*pool, attribute)) {
    std::memcpy(value, flag, sizeof *flag);
    return CUDA_SUCCESS;
  }
  const std::uint64_t* const counter = Counter(*pool, attribute);
  Require(counter != nullptr);
  std::memcpy(value, counter, sizeof *counter);
  return CUDA_SUCCESS;
}

CUresult MemPoolSetAccess(CUmemoryPool handle, const CUmemAccessDesc* descriptions, size_t count) {
  Lock lock(global_mutex());
  RefuseDuringCapture();
  const std::shared_ptr<Pool> pool = PoolOf(handle);
  Require(descriptions != nullptr);
  for (size_t i = 0; i < count; ++i) {
    DeviceAt(descriptions[i].location.id);
    pool->access[descriptions[i].location.id] = descriptions[i].flags;
  }
  return CUDA_SUCCESS;
}

CUresult MemPoolGetAccess(CUmemAccess_flags* flags, CUmemoryPool handle, CUmemLocation* location) {
  Lock lock(global_mutex());
  RefuseDuringCapture();
  const std::shared_ptr<Pool> pool = PoolOf(handle);
  Require(flags != nullptr && location != nullptr);
  const auto found = pool->access.find(location->id);
  *flags = location->id == pool->device  ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
           : found != pool->access.end() ? found->second
                                         : CU_MEM_ACCESS_FLAGS_PROT_NONE;
  return CUDA_SUCCESS;
}

}  // namespace emu
