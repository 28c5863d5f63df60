#include "memory.h"

#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "capture.h"
#include "driver.h"
#include "pool.h"
#include "settings.h"
#include "stepped.h"

namespace emu {
namespace {

constexpr std::size_t kPage = std::size_t{2} << 20;
constexpr std::size_t kSmall = std::size_t{1} << 20;  // the largest request that shares a page
constexpr std::size_t kAlignment = 512;

std::size_t RoundUp(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

Range MapHost(std::size_t bytes) {
  const std::size_t size = RoundUp(bytes, 4096);
  void* const pages = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  Require(pages != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
  return {AddressOf(pages), size};
}

// A block the program frees with the call for its kind; 1 for anything else: interior pointers, second frees, others'
// memory (contract §2).
BlockPtr Freeable(std::uintptr_t address) {
  BlockPtr block = LiveBlock(address);
  Require(block != nullptr && block->base == address);
  return block;
}

// §3: cuMemFree and cuMemFreeHost wait for all work of the block's own context, on every stream, and for no other
// context's; the block is the program's no longer from the call on.
void WaitAndRelease(Lock& lock, const BlockPtr& block) {
  Require(block->context->broken == CUDA_SUCCESS, block->context->broken);
  block->freed = true;
  if (FreeReturns() && block->kind == Block::Kind::kDevice) {
    Join(Pending(*block->context), [block] { Release(block); });
    return;
  }
  WaitFor(lock, Pending(*block->context));
  Observe(Covered(*block->context));
  Release(block);
  Require(block->context->broken == CUDA_SUCCESS, block->context->broken);
}

void Allocate(CUdeviceptr* out, std::size_t bytes) {
  Require(out != nullptr && bytes > 0);
  const ContextPtr context = CurrentContext();
  RefuseDuringCapture();
  const Range range = TakeOrRefuse(DeviceAt(context->device), bytes);
  *out = NewBlock(Block::Kind::kDevice, context, range, bytes)->base;
}

CUresult AllocateHost(void** out, std::size_t bytes, unsigned flags) {
  Lock lock(global_mutex());
  Require(out != nullptr && bytes > 0);
  const ContextPtr context = CurrentContext();
  RefuseDuringCapture();
  const BlockPtr block = NewBlock(Block::Kind::kHost, context, MapHost(bytes), bytes);
  block->flags = flags;
  *out = PointerTo(block->base);
  return CUDA_SUCCESS;
}

bool OnHost(const Block& block) { return block.kind == Block::Kind::kHost || block.kind == Block::Kind::kRegistered; }

template <class Value>
void Store(void* data, Value value) {
  std::memcpy(data, &value, sizeof value);
}

// As attributes: of mapped memory the reservation (measured), though cuMemGetAddressRange says the mapping.
Range ReportedRange(const Block& block) {
  if (block.kind != Block::Kind::kMapped) return {block.base, block.size};
  const auto& [base, size] = *std::prev(driver().virtual_memory.reservations.upper_bound(block.base));
  return {base, size};
}

// One attribute of the block; of no block, zeros where the plural function asks for them.
CUresult Attribute(void* data, CUpointer_attribute attribute, const Block* block) {
  const bool known = block != nullptr;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:  // of mapped memory and a pool's none, measured
      Store(data, known && block->kind != Block::Kind::kMapped && block->kind != Block::Kind::kPool
                      ? block->context->handle
                      : nullptr);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      Store(data, !known ? 0U : static_cast<unsigned>(OnHost(*block) ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE));
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      Store(data, CUdeviceptr{known ? block->base : 0});
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      Store(data, known && (OnHost(*block) || block->kind == Block::Kind::kManaged) ? block->base : 0);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
      Store(data, 0U);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      Store(data, known ? block->id : std::uint64_t{0});
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      Store(data, known && block->kind == Block::Kind::kManaged ? 1U : 0U);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      Store(data, known ? block->device : -2);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:  // §5, measured: 1 for cuMemAlloc, 0 for async memory
      Store(data, known && block->kind == Block::Kind::kDevice ? 1 : 0);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      Store(data, CUdeviceptr{known ? ReportedRange(*block).base : 0});
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      Store(data, known ? ReportedRange(*block).size : std::size_t{0});
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MAPPED:
      Store(data, known ? 1 : 0);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
      Store(data, known && block->pool != nullptr ? block->pool->handle : nullptr);
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

}  // namespace

std::optional<std::uintptr_t> FreeRanges::Take(std::size_t size) {
  for (auto range = free_.begin(); range != free_.end(); ++range) {
    if (range->second < size) continue;
    const auto [base, available] = *range;
    free_.erase(range);
    if (available > size) free_[base + size] = available - size;
    return base;
  }
  return std::nullopt;
}

void FreeRanges::Give(Range range) {
  auto next = free_.lower_bound(range.base);
  if (next != free_.end() && range.base + range.size == next->first) {
    range.size += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == range.base) {
      previous->second += range.size;
      return;
    }
  }
  free_[range.base] = range.size;
}

bool FreeRanges::TakeAt(Range range) {
  const auto next = free_.upper_bound(range.base);
  if (next == free_.begin()) return false;
  const auto [base, size] = *std::prev(next);
  if (range.base + range.size > base + size) return false;
  free_.erase(base);
  if (range.base > base) free_[base] = range.base - base;
  const std::uintptr_t end = range.base + range.size;
  if (base + size > end) free_[end] = base + size - end;
  return true;
}

bool FreeRanges::Whole(Range range) const {
  const auto found = free_.find(range.base);
  return found != free_.end() && found->second == range.size;
}

Device::Device(CUdevice number, std::size_t capacity) : ordinal(number), total(capacity) {
  // Addresses are cheap: room for four times the memory, so that fragmentation does not end a long test.
  const std::size_t addresses = RoundUp(std::max(capacity * 4, std::size_t{1} << 34), kPage) + kPage;
  // In a file, so that other processes can map it; where files may not be so large, it cannot be exported.
  rlimit largest{};
  getrlimit(RLIMIT_FSIZE, &largest);
  if (largest.rlim_cur > addresses) {
    file_ = memfd_create("emulated-device", MFD_CLOEXEC);
    Require(file_ >= 0 && ftruncate(file_, static_cast<off_t>(addresses)) == 0, CUDA_ERROR_OUT_OF_MEMORY);
  }
  const int kind = file_ >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
  void* const reserved = mmap(nullptr, addresses, PROT_NONE, kind | MAP_NORESERVE, file_, 0);
  Require(reserved != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
  first_ = AddressOf(reserved);
  pages_.Give({RoundUp(first_, kPage), addresses - kPage});
}

bool Device::Reserve(std::size_t bytes) {
  if (bytes > total - used) return false;
  used += bytes;
  return true;
}

std::optional<Range> Device::TakePages(std::size_t bytes) {
  if (bytes > total || !Reserve(RoundUp(bytes, kPage))) return std::nullopt;
  const Range range{0, RoundUp(bytes, kPage)};
  const auto base = pages_.Take(range.size);
  if (!base || mprotect(PointerTo(*base), range.size, PROT_READ | PROT_WRITE) != 0) {
    if (base) pages_.Give({*base, range.size});
    used -= range.size;
    return std::nullopt;
  }
  return Range{*base, range.size};
}

void Device::GivePages(Range range) {
  madvise(PointerTo(range.base), range.size, file_ >= 0 ? MADV_REMOVE : MADV_DONTNEED);
  mprotect(PointerTo(range.base), range.size, PROT_NONE);
  pages_.Give(range);
  used -= range.size;
}

std::optional<Range> Device::Take(std::size_t bytes) {
  if (bytes > kSmall) return TakePages(bytes);
  const std::size_t size = RoundUp(bytes, kAlignment);
  const auto fresh = [&](std::uintptr_t base) {
    std::memset(PointerTo(base), 0, size);
    return Range{base, size};
  };
  for (auto& [slab, ranges] : slabs_) {
    if (const auto base = ranges.Take(size)) return fresh(*base);
  }
  const auto slab = TakePages(kPage);
  if (!slab) return std::nullopt;
  FreeRanges& ranges = slabs_[slab->base];
  ranges.Give(*slab);
  return fresh(*ranges.Take(size));
}

void Device::Give(Range range) {
  if (range.size > kSmall) return GivePages(range);
  const auto slab = std::prev(slabs_.upper_bound(range.base));
  slab->second.Give(range);
  const Range whole{slab->first, kPage};
  if (!slab->second.Whole(whole)) return;
  slabs_.erase(slab);
  GivePages(whole);
}

bool AddressMap::Remove(const BlockPtr& block) {
  const auto found = blocks_.find(block->base);
  if (found == blocks_.end() || found->second != block) return false;
  blocks_.erase(found);
  return true;
}

BlockPtr AddressMap::Find(std::uintptr_t address) const {
  auto next = blocks_.upper_bound(address);
  if (next == blocks_.begin()) return nullptr;
  const BlockPtr& block = std::prev(next)->second;
  return address - block->base < block->reach ? block : nullptr;
}

BlockPtr LiveBlock(std::uintptr_t address) {
  BlockPtr block = driver().blocks.Find(address);
  return block != nullptr && !block->freed ? block : nullptr;
}

BlockPtr NewBlock(Block::Kind kind, const ContextPtr& context, Range range, std::size_t size) {
  static std::uint64_t last_id = 0;
  auto block = std::make_shared<Block>();
  block->kind = kind;
  block->base = range.base;
  block->size = size;
  block->reach = size;
  block->range = range;
  block->device = context->device;
  block->context = context;
  block->id = ++last_id;
  driver().blocks.Add(block);
  return block;
}

void Release(const BlockPtr& block) {
  block->freed = true;
  if (!driver().blocks.Remove(block)) return;
  switch (block->kind) {
    case Block::Kind::kDevice:
    case Block::Kind::kGraph:
      DeviceAt(block->device).Give(block->range);
      break;
    case Block::Kind::kPool:
      block->pool->Discard(*block);
      break;
    case Block::Kind::kManaged:
    case Block::Kind::kHost:
      munmap(PointerTo(block->range.base), block->range.size);
      break;
    case Block::Kind::kRegistered:
    case Block::Kind::kMapped:
    case Block::Kind::kImported:
      break;
  }
}

Range TakeOrRefuse(Device& device, std::size_t bytes) {
  const auto range = device.Take(bytes);
  Require(range.has_value(), CUDA_ERROR_OUT_OF_MEMORY);
  return *range;
}

bool Accessible(const Context& context, std::uintptr_t address, std::size_t bytes) {
  while (bytes > 0) {
    const BlockPtr block = driver().blocks.Find(address);
    if (block == nullptr) return false;
    const bool elsewhere = block->device != context.device;
    if (elsewhere && block->kind == Block::Kind::kDevice && !context.peers.contains(block->context->id)) return false;
    if (elsewhere && block->kind == Block::Kind::kPool && !block->pool->Admits(context.device)) return false;
    if (block->kind == Block::Kind::kMapped && !block->admitted.contains(context.device)) return false;
    const std::size_t here = std::min(bytes, block->reach - (address - block->base));
    address += here;
    bytes -= here;
  }
  return true;
}

CUresult MemAlloc(CUdeviceptr* out, size_t bytes) {
  Lock lock(global_mutex());
  Allocate(out, bytes);
  return CUDA_SUCCESS;
}

CUresult MemAllocPitch(CUdeviceptr* out, size_t* pitch, size_t width, size_t height, unsigned element) {
  Lock lock(global_mutex());
  Require(pitch != nullptr && width > 0 && height > 0 && (element == 4 || element == 8 || element == 16));
  const std::size_t rounded = RoundUp(width, kAlignment);
  Allocate(out, rounded * height);
  *pitch = rounded;
  return CUDA_SUCCESS;
}

// Managed memory lives in host pages that both sides reach, and takes none of the device's.
CUresult MemAllocManaged(CUdeviceptr* out, size_t bytes, unsigned flags) {
  Lock lock(global_mutex());
  Require(out != nullptr && bytes > 0 && (flags == CU_MEM_ATTACH_GLOBAL || flags == CU_MEM_ATTACH_HOST));
  const ContextPtr context = CurrentContext();
  RefuseDuringCapture();
  *out = NewBlock(Block::Kind::kManaged, context, MapHost(bytes), bytes)->base;
  return CUDA_SUCCESS;
}

// §2, §3. Works whatever context is current, or none.
CUresult MemFree(CUdeviceptr address) {
  Lock lock(global_mutex());
  RefuseDuringCapture();
  if (address == 0) return CUDA_SUCCESS;
  const BlockPtr block = Freeable(address);
  switch (block->kind) {
    case Block::Kind::kDevice:
    case Block::Kind::kManaged:
      WaitAndRelease(lock, block);
      return CUDA_SUCCESS;
    case Block::Kind::kPool:  // measured: does not wait, and nobody gets the block before the context's work is over
      Require(block->context->broken == CUDA_SUCCESS, block->context->broken);
      block->pool->FreeAfter(block, Pending(*block->context));
      return CUDA_SUCCESS;
    case Block::Kind::kGraph:
      block->freed = true;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult MemHostAlloc(void** out, size_t bytes, unsigned flags) { return AllocateHost(out, bytes, flags); }

CUresult MemAllocHost(void** out, size_t bytes) { return AllocateHost(out, bytes, 0); }

CUresult MemFreeHost(void* pointer) {
  Lock lock(global_mutex());
  RefuseDuringCapture();
  const BlockPtr block = Freeable(AddressOf(pointer));
  Require(block->kind == Block::Kind::kHost);
  WaitAndRelease(lock, block);
  return CUDA_SUCCESS;
}

CUresult MemHostGetDevicePointer(CUdeviceptr* out, void* pointer, unsigned flags) {
  Lock lock(global_mutex());
  const BlockPtr block = LiveBlock(AddressOf(pointer));
  Require(out != nullptr && flags == 0 && block != nullptr && OnHost(*block));
  *out = AddressOf(pointer);
  return CUDA_SUCCESS;
}

CUresult MemHostRegister(void* pointer, size_t bytes, unsigned flags) {
  Lock lock(global_mutex());
  Require(pointer != nullptr && bytes > 0);
  const ContextPtr context = CurrentContext();
  RefuseDuringCapture();
  Require(driver().blocks.Find(AddressOf(pointer)) == nullptr, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
  NewBlock(Block::Kind::kRegistered, context, {AddressOf(pointer), bytes}, bytes)->flags = flags;
  return CUDA_SUCCESS;
}

CUresult MemHostUnregister(void* pointer) {
  Lock lock(global_mutex());
  RefuseDuringCapture();
  const BlockPtr block = LiveBlock(AddressOf(pointer));
  Require(block != nullptr && block->base == AddressOf(pointer) && block->kind == Block::Kind::kRegistered,
          CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
  WaitAndRelease(lock, block);
  return CUDA_SUCCESS;
}

// Harmless under capture in every mode (§4).
CUresult MemGetInfo(size_t* free, size_t* total) {
  Lock lock(global_mutex());
  const Device& device = DeviceAt(CurrentContext()->device);
  if (free != nullptr) *free = device.total - device.used;
  if (total != nullptr) *total = device.total;
  return CUDA_SUCCESS;
}

CUresult MemGetAddressRange(CUdeviceptr* base, size_t* size, CUdeviceptr address) {
  Lock lock(global_mutex());
  CurrentContext();
  const BlockPtr block = LiveBlock(address);
  Require(block != nullptr, CUDA_ERROR_NOT_FOUND);
  if (base != nullptr) *base = block->base;
  if (size != nullptr) *size = block->size;
  return CUDA_SUCCESS;
}

CUresult PointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr address) {
  Lock lock(global_mutex());
  const BlockPtr block = LiveBlock(address);
  Require(data != nullptr && block != nullptr);
  return Attribute(data, attribute, block.get());
}

CUresult PointerGetAttributes(unsigned count, CUpointer_attribute* attributes, void** data, CUdeviceptr address) {
  Lock lock(global_mutex());
  Require(count > 0 && attributes != nullptr && data != nullptr);
  const BlockPtr block = LiveBlock(address);
  for (unsigned i = 0; i < count; ++i) {
    const CUresult result = Attribute(data[i], attributes[i], block.get());
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

}  // namespace emu
