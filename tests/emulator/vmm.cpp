#include "vmm.h"

#include <sys/mman.h>
#include <unistd.h>

#include <iterator>
#include <set>
#include <utility>

#include "capture.h"
#include "driver.h"

namespace emu {
namespace {

constexpr std::size_t kGranularity = std::size_t{2} << 20;

bool Aligned(std::size_t value) { return value % kGranularity == 0; }

// The mappings that make up a range exactly.
template <class Function>
void ForEachMapping(std::uintptr_t address, std::size_t size, Function function) {
  auto& mappings = driver().virtual_memory.mappings;
  auto mapping = mappings.find(address);
  while (size > 0) {
    Require(mapping != mappings.end() && mapping->first == address && mapping->second.size <= size);
    address += mapping->second.size;
    size -= mapping->second.size;
    mapping = function(mapping);
  }
}

}  // namespace

Physical::Physical(Device& owner, std::size_t bytes) : device(owner), size(bytes) {
  Require(device.Reserve(bytes), CUDA_ERROR_OUT_OF_MEMORY);
  file = memfd_create("device memory", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) {
    if (file >= 0) close(file);
    device.used -= bytes;
    Fail(CUDA_ERROR_OUT_OF_MEMORY);
  }
}

Physical::~Physical() {
  close(file);
  device.used -= size;
}

CUresult MemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp* properties,
                                     CUmemAllocationGranularity_flags) {
  Require(granularity != nullptr && properties != nullptr);
  *granularity = kGranularity;
  return CUDA_SUCCESS;
}

CUresult MemAddressReserve(CUdeviceptr* out, size_t size, size_t alignment, CUdeviceptr, unsigned long long flags) {
  Lock lock(global_mutex());
  Require(out != nullptr && size > 0 && Aligned(size) && Aligned(alignment) && flags == 0);
  const std::size_t align = alignment > kGranularity ? alignment : kGranularity;
  void* const pages = mmap(nullptr, size + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  Require(pages != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
  const std::uintptr_t begin = AddressOf(pages);
  const std::uintptr_t base = (begin + align - 1) / align * align;
  if (base > begin) munmap(pages, base - begin);
  munmap(PointerTo(base + size), begin + align - base);
  driver().virtual_memory.reservations[base] = size;
  *out = base;
  return CUDA_SUCCESS;
}

CUresult MemAddressFree(CUdeviceptr address, size_t size) {
  Lock lock(global_mutex());
  auto& memory = driver().virtual_memory;
  const auto reservation = memory.reservations.find(address);
  Require(reservation != memory.reservations.end() && reservation->second == size);
  const auto mapping = memory.mappings.lower_bound(address);
  Require(mapping == memory.mappings.end() || mapping->first >= address + size);
  munmap(PointerTo(address), size);
  memory.reservations.erase(reservation);
  return CUDA_SUCCESS;
}

CUresult MemCreate(CUmemGenericAllocationHandle* out, size_t size, const CUmemAllocationProp* properties,
                   unsigned long long flags) {
  Lock lock(global_mutex());
  Require(out != nullptr && properties != nullptr && size > 0 && Aligned(size) && flags == 0);
  Require(properties->type == CU_MEM_ALLOCATION_TYPE_PINNED &&
          properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE);
  RefuseDuringCapture();
  auto& memory = driver().virtual_memory;
  auto physical = std::make_shared<Physical>(DeviceAt(properties->location.id), size);
  *out = ++memory.last_handle;
  memory.handles[*out] = std::move(physical);
  return CUDA_SUCCESS;
}

// The memory lives on while it is mapped.
CUresult MemRelease(CUmemGenericAllocationHandle handle) {
  Lock lock(global_mutex());
  Require(driver().virtual_memory.handles.erase(handle) == 1);
  return CUDA_SUCCESS;
}

CUresult MemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                unsigned long long flags) {
  Lock lock(global_mutex());
  auto& memory = driver().virtual_memory;
  const auto physical = memory.handles.find(handle);
  Require(physical != memory.handles.end() && flags == 0 && size > 0 && Aligned(address) && Aligned(size));
  Require(Aligned(offset) && offset + size <= physical->second->size);
  auto reservation = memory.reservations.upper_bound(address);
  Require(reservation != memory.reservations.begin());
  reservation = std::prev(reservation);
  Require(address + size <= reservation->first + reservation->second);
  const auto next = memory.mappings.lower_bound(address);
  Require(next == memory.mappings.end() || next->first >= address + size);
  Require(next == memory.mappings.begin() || std::prev(next)->first + std::prev(next)->second.size <= address);
  void* const pages = mmap(PointerTo(address), size, PROT_NONE, MAP_SHARED | MAP_FIXED, physical->second->file,
                           static_cast<off_t>(offset));
  Require(pages != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
  memory.mappings[address] = {physical->second, size, nullptr};
  return CUDA_SUCCESS;
}

CUresult MemUnmap(CUdeviceptr address, size_t size) {
  Lock lock(global_mutex());
  auto& mappings = driver().virtual_memory.mappings;
  ForEachMapping(address, size, [](auto mapping) { return std::next(mapping); });
  ForEachMapping(address, size, [&](auto mapping) {
    if (mapping->second.block != nullptr) Release(mapping->second.block);
    mmap(PointerTo(mapping->first), mapping->second.size, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return mappings.erase(mapping);
  });
  return CUDA_SUCCESS;
}

CUresult MemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc* descriptions, size_t count) {
  Lock lock(global_mutex());
  Require(descriptions != nullptr && count > 0);
  const ContextPtr context = CurrentContext();
  ForEachMapping(address, size, [](auto mapping) { return std::next(mapping); });
  ForEachMapping(address, size, [&](auto mapping) {
    Mapping& mapped = mapping->second;
    std::set<CUdevice> admitted = mapped.block != nullptr ? mapped.block->admitted : std::set<CUdevice>{};
    int protection = PROT_NONE;
    for (std::size_t i = 0; i < count; ++i) {
      DeviceAt(descriptions[i].location.id);
      if (descriptions[i].flags == CU_MEM_ACCESS_FLAGS_PROT_NONE) {
        admitted.erase(descriptions[i].location.id);
      } else {
        admitted.insert(descriptions[i].location.id);
        protection = descriptions[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READ ? PROT_READ : PROT_READ | PROT_WRITE;
      }
    }
    if (admitted.empty() || protection != PROT_NONE) mprotect(PointerTo(mapping->first), mapped.size, protection);
    if (mapped.block != nullptr) Release(mapped.block);
    mapped.block = nullptr;
    if (!admitted.empty()) {
      mapped.block = NewBlock(Block::Kind::kMapped, context, {mapping->first, mapped.size}, mapped.size);
      mapped.block->device = mapped.physical->device.ordinal;
      mapped.block->admitted = std::move(admitted);
    }
    return std::next(mapping);
  });
  return CUDA_SUCCESS;
}

}  // namespace emu
