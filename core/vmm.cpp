#include "core/vmm.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/context.h"
#include "core/log.h"
#include "core/mutation.h"

namespace cushion {
namespace {

constexpr std::uint64_t kPage = Vmm::kSmallest;
constexpr std::uint64_t kIdleShare = 20;  // of what is held, that may lie idle before it is moved

int attribute_of(const Driver& driver, CUdevice_attribute attribute, int device) noexcept {
  int value = 0;
  driver.call(driver.cuDeviceGetAttribute, &value, attribute, device);
  return value;
}

CUmemLocation location_of(int device) noexcept {
  CUmemLocation location{};
  location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  location.id = device;
  return location;
}

CUmemAllocationProp properties_of(const Driver& driver, int device) noexcept {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = location_of(device);
  properties.allocFlags.gpuDirectRDMACapable =
      attribute_of(driver, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, device) != 0;
  return properties;
}

// Null: the device's memory can be mapped; else why not.
const char* obstacle(const Driver& driver, int device) noexcept {
  const bool has_all = driver.cuMemAddressReserve != nullptr && driver.cuMemAddressFree != nullptr &&
                       driver.cuMemCreate != nullptr && driver.cuMemRelease != nullptr && driver.cuMemMap != nullptr &&
                       driver.cuMemUnmap != nullptr && driver.cuMemSetAccess != nullptr &&
                       driver.cuCtxRecordEvent != nullptr;
  if (!has_all) return "the driver is older than 12.5";
  const CUmemAllocationProp properties = properties_of(driver, device);
  std::size_t granularity = 0;
  if (attribute_of(driver, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device) == 0 ||
      driver.call(driver.cuMemGetAllocationGranularity, &granularity, &properties,
                  CU_MEM_ALLOC_GRANULARITY_RECOMMENDED) != CUDA_SUCCESS ||
      granularity == 0 || kPage % granularity != 0)
    return "the device has no virtual memory management in pages of 2 MiB";
  return nullptr;
}

// The choice of CUSHION_BACKING=auto: null for vmm, else why not.
const char* objection(const Shared& shared) noexcept {
  if (shared.one_of_many) return "one of several processes: libraries that share memory want cuMemAlloc's";
  int devices = 0;
  if (shared.driver.call(shared.driver.cuDeviceGetCount, &devices) != CUDA_SUCCESS || devices != 1)
    return "several devices: each would need access to each handle";
  return nullptr;
}

void warn_unless_open(CUresult result, const CUmemAccessDesc& access) noexcept {
  if (result != CUDA_SUCCESS)
    log::warn("memory cannot be made accessible to device {} (error {})", access.location.id, static_cast<int>(result));
}

}  // namespace

Vmm::Vmm(Shared& shared, Context& context, Gauge& held)
    : shared_(shared), context_(context), held_(held), on_([&] {
        const Backing wanted = shared.options->backing;
        if (wanted == Backing::driver) {
          why_ = "CUSHION_BACKING=driver";
          return false;
        }
        why_ = !shared.options->suballocates() ? "this allocator has no memory of its own"
                                               : obstacle(driver(), context.device());
        if (why_ != nullptr && wanted == Backing::vmm)
          log::complain(std::string("CUSHION_BACKING=vmm has no effect: ") + why_);
        if (why_ == nullptr && wanted == Backing::automatic) why_ = objection(shared);
        if (why_ != nullptr) return false;
        why_ = wanted == Backing::vmm ? "CUSHION_BACKING=vmm" : "one device, one process";
        return true;
      }()) {
  if (!on_) return;
  properties_ = properties_of(driver(), context.device());
  access_.push_back({properties_.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE});
}

// ---- what is mapped where ----------------------------------------------------------------------------------------

Vmm::Piece& Vmm::piece_at(std::uint64_t address) const noexcept {
  auto range = ranges_.begin();
  while (address - range->address >= range->bytes) ++range;
  return range->pages[(address - range->address) / kPage];
}

Vmm::Run Vmm::whole_in(Block& free) const noexcept {
  const std::uint64_t end = free.address() + free.size;
  std::uint64_t at = round_up(free.address(), kPage);
  while (at + kPage <= end && piece_at(at).bytes == 0) at += kPage;  // the rest of one that begins below
  Run run{&free, at, 0};
  while (at + kPage <= end && at + piece_at(at).bytes <= end) at += piece_at(at).bytes;
  run.bytes = at - run.address;
  return run;
}

template <class Visit>
void Vmm::for_each_idle(const Plan* but, Visit visit) const noexcept {
  const auto look = [&](Block* block) {
    if (block->size < kPage || (but != nullptr && (block == but->below || block == but->above))) return;
    if (const Run run = whole_in(*block); run.bytes != 0) visit(run);
  };
  context_.global().clean->bins.for_each(look);
  if (mutated(Mutation::pending_memory_is_unmapped)) context_.global().pending->bins.for_each(look);
}

std::uint64_t Vmm::unused() noexcept {
  std::lock_guard calls(calls_);
  std::lock_guard lock(context_.global().mutex);
  std::uint64_t bytes = 0;
  for_each_idle(nullptr, [&](const Run& run) { bytes += run.bytes; });
  return bytes;
}

std::uint64_t Vmm::gather(const Plan* but) noexcept {
  runs_.clear();
  std::uint64_t bytes = 0;
  for_each_idle(but, [&](const Run& run) {
    runs_.push_back(run);
    bytes += run.bytes;
  });
  return bytes;
}

// Where the fewest bytes lack; of such places the smallest, so that the large ones stay whole.
Vmm::Plan Vmm::plan(const Need& need) const noexcept {
  const Arena& arena = context_.global();
  const auto is_clean = [&](const Block* block) {
    return block != nullptr && block->state() == BlockState::free && block->heap == arena.clean->index;
  };
  Plan best;
  arena.unmapped->bins.for_each([&](Block* block) {
    Plan here{block, 0, is_clean(block->lower) ? block->lower : nullptr, nullptr};
    const std::uint64_t end = block->address() + block->size;
    const std::uint64_t begin = here.below != nullptr ? here.below->address() : block->address();
    const std::uint64_t wanted = round_up(round_up(begin, need.alignment) + need.size, kPage);
    here.bytes = std::min(wanted, end) - block->address();
    if (wanted > end) {
      if (!is_clean(block->upper) || wanted > end + block->upper->size) return;
      here.above = block->upper;
    }
    if (best.at == nullptr || std::make_pair(here.bytes, block->size) < std::make_pair(best.bytes, best.at->size))
      best = here;
  });
  return best;
}

std::uint64_t Vmm::choose(std::uint64_t bytes) noexcept {
  std::sort(runs_.begin(), runs_.end(), [](const Run& a, const Run& b) { return a.bytes > b.bytes; });
  std::uint64_t chosen = 0;
  std::size_t number = 0;
  while (chosen < bytes && number < runs_.size()) {
    Run& run = runs_[number++];
    std::uint64_t size = 0;
    while (size < std::min(run.bytes, bytes - chosen)) size += piece_at(run.address + size).bytes;
    run.bytes = size;
    chosen += size;
  }
  runs_.resize(number);
  return chosen;
}

// ---- calls to the driver -----------------------------------------------------------------------------------------

void Vmm::prepare(std::uint64_t fresh) {
  const std::size_t most = handles_ + fresh / kLargest + 2;
  runs_.reserve(most);  // each has a handle at least
  pieces_.reserve(most);
  refused_.reserve(most);
}

CUresult Vmm::reserve(std::uint64_t bytes) {
  ranges_.reserve(ranges_.size() + stale_.size() + 1);  // discard() needs no more
  stale_.reserve(ranges_.size() + stale_.size() + 1);
  Range range{0, bytes, static_cast<Piece*>(map_pages(bytes / kPage * sizeof(Piece)))};
  if (range.pages == nullptr) return CUDA_ERROR_OPERATING_SYSTEM;
  CUdeviceptr address = 0;
  CUresult result = driver().call(driver().cuMemAddressReserve, &address, static_cast<std::size_t>(bytes),
                                  static_cast<std::size_t>(kPage), CUdeviceptr{0}, 0ull);
  range.address = address;
  if (result == CUDA_SUCCESS) {
    Arena& arena = context_.global();
    std::lock_guard lock(arena.mutex);
    if (arena.pool.reserve(address, bytes, *arena.unmapped)) {
      ranges_.push_back(range);
      return CUDA_SUCCESS;
    }
  }
  if (result == CUDA_SUCCESS) {
    driver().call(driver().cuMemAddressFree, address, static_cast<std::size_t>(bytes));
    result = CUDA_ERROR_OPERATING_SYSTEM;
  }
  munmap(range.pages, bytes / kPage * sizeof(Piece));
  return result;
}

CUresult Vmm::create(std::uint64_t bytes) noexcept {
  const std::size_t before = pieces_.size();
  for (std::uint64_t left = bytes; left != 0; left -= pieces_.back().bytes) {
    Piece piece{0, std::min(left, kLargest)};
    const CUresult result = driver().call(driver().cuMemCreate, &piece.handle, static_cast<std::size_t>(piece.bytes),
                                          static_cast<const CUmemAllocationProp*>(&properties_), 0ull);
    if (result != CUDA_SUCCESS) {
      give_up(before);
      return result;
    }
    pieces_.push_back(piece);
    held_.add(piece.bytes);
    ++handles_;
  }
  return CUDA_SUCCESS;
}

CUresult Vmm::take_out(const Run& run) noexcept {
  const CUresult result =
      driver().call(driver().cuMemUnmap, CUdeviceptr{run.address}, static_cast<std::size_t>(run.bytes));
  if (result != CUDA_SUCCESS) return result;
  for (std::uint64_t at = run.address; at < run.address + run.bytes; at += pieces_.back().bytes)
    pieces_.push_back(std::exchange(piece_at(at), {}));
  return CUDA_SUCCESS;
}

CUresult Vmm::map(const Run& at, std::size_t& stuck) noexcept {
  std::uint64_t to = at.address;
  std::size_t mapped = 0;
  CUresult result = CUDA_SUCCESS;
  for (; mapped < pieces_.size(); ++mapped) {
    const Piece& piece = pieces_[mapped];
    result = driver().call(driver().cuMemMap, CUdeviceptr{to}, static_cast<std::size_t>(piece.bytes), std::size_t{0},
                           piece.handle, 0ull);
    if (result != CUDA_SUCCESS) break;
    piece_at(to) = piece;
    to += piece.bytes;
  }
  const auto open = [&](const CUmemAccessDesc& access) {
    return driver().call(driver().cuMemSetAccess, CUdeviceptr{at.address}, static_cast<std::size_t>(at.bytes), &access,
                         std::size_t{1});
  };
  if (result == CUDA_SUCCESS) result = open(access_.front());
  if (result == CUDA_SUCCESS) {
    for (std::size_t i = 1; i < access_.size(); ++i) warn_unless_open(open(access_[i]), access_[i]);
    return result;
  }
  if (mapped == 0) return result;
  if (driver().call(driver().cuMemUnmap, CUdeviceptr{at.address}, static_cast<std::size_t>(to - at.address)) ==
      CUDA_SUCCESS) {
    for (std::uint64_t p = at.address; p < to;) p += std::exchange(piece_at(p), {}).bytes;
  } else {
    stuck = mapped;
  }
  return result;
}

void Vmm::give_up(std::size_t from) noexcept {
  for (; pieces_.size() > from; pieces_.pop_back()) refused_.push_back(pieces_.back());
  std::erase_if(refused_, [&](const Piece& piece) {
    if (driver().call(driver().cuMemRelease, piece.handle) != CUDA_SUCCESS) return false;
    held_.subtract(piece.bytes);
    --handles_;
    return true;
  });
}

// ---- growing and giving back -------------------------------------------------------------------------------------

Vmm::Growth Vmm::extend(const Need& need, std::uint64_t most, std::uint64_t roomy, std::uint64_t generation) {
  std::lock_guard calls(calls_);
  if (generation != context_.generation()) return {CUDA_ERROR_OPERATING_SYSTEM};
  prepare(most);
  const auto none = [](const Growth& growth) { return growth.limited || growth.result == CUDA_ERROR_OUT_OF_MEMORY; };
  Growth growth = extend_by(need, most, roomy, false);
  if (none(growth) && roomy != 0) growth = extend_by(need, most, 0, false);
  if (none(growth)) growth = extend_by(need, most, 0, true);
  return growth;
}

Vmm::Growth Vmm::extend_by(const Need& need, std::uint64_t most, std::uint64_t roomy, bool move) {
  Arena& arena = context_.global();
  Run target{};
  std::uint64_t fresh = 0;
  bool detached = true;
  pieces_.clear();
  for (bool reserved = false; target.bytes == 0; reserved = true) {
    {
      std::lock_guard lock(arena.mutex);
      if (arena.clean->bins.find(need.size, need.alignment, kAnyStamp) != nullptr) return {};
      if (const Plan place = plan(need); place.at != nullptr) {
        const std::uint64_t idle = gather(&place);
        move = (move || idle > arena.pool.held() / kIdleShare) && !shared_.gate.may_be_open();
        std::uint64_t moved = choose(move ? place.bytes : 0);
        if (moved > place.at->size) moved = choose(0);
        const std::uint64_t lacking = place.bytes - std::min(place.bytes, moved);
        if (lacking > most) return {CUDA_ERROR_OUT_OF_MEMORY, true};
        if (lacking != 0) fresh = std::min({std::max(lacking, roomy), most, place.at->size - moved}) / kPage * kPage;
        target = {nullptr, place.at->address(), moved + fresh};
        for (Run& run : runs_) {
          run.block = detached ? arena.pool.detach(run.block, run.address, run.bytes) : nullptr;
          detached = run.block != nullptr;
        }
        if (detached) target.block = arena.pool.detach(place.at, target.address, target.bytes);
        detached = target.block != nullptr;
        continue;
      }
    }
    if (reserved) return {CUDA_ERROR_OPERATING_SYSTEM};
    const std::uint64_t room = 2 * std::max(context_.device_bytes(), need.size + need.alignment);
    if (const CUresult result = reserve(round_up(room, kPage)); result != CUDA_SUCCESS) return {result};
  }
  // New ones first: if there are none, nothing has changed.
  Growth growth{detached ? create(fresh) : CUDA_ERROR_OPERATING_SYSTEM};
  if (growth.result == CUDA_SUCCESS) growth.added = fresh;
  std::size_t emptied = 0;
  while (growth.result == CUDA_SUCCESS && emptied < runs_.size()) {
    growth.result = take_out(runs_[emptied]);
    if (growth.result == CUDA_SUCCESS) ++emptied;
  }
  std::size_t stuck = 0;
  if (growth.result == CUDA_SUCCESS) growth.result = map(target, stuck);
  if (growth.result != CUDA_SUCCESS) {
    pieces_.erase(pieces_.begin(), pieces_.begin() + static_cast<std::ptrdiff_t>(stuck));
    give_up(0);
  } else if (!runs_.empty()) {
    count(shared_.counters.remaps);
  }
  std::lock_guard lock(arena.mutex);
  // What the driver would not unmap, or the host has no memory to note, stays nobody's until the context ends.
  for (std::size_t i = 0; i < runs_.size(); ++i) {
    if (runs_[i].block != nullptr) arena.pool.attach(runs_[i].block, i < emptied ? *arena.unmapped : *arena.clean);
  }
  if (target.block != nullptr && stuck == 0)
    arena.pool.attach(target.block, growth.result == CUDA_SUCCESS ? *arena.clean : *arena.unmapped);
  return growth;
}

std::uint64_t Vmm::release(std::uint64_t keep, std::uint64_t generation) {
  std::lock_guard calls(calls_);
  if (generation != context_.generation()) return 0;
  prepare(0);
  Arena& arena = context_.global();
  {
    std::lock_guard lock(arena.mutex);
    const std::uint64_t idle = gather(nullptr);
    choose(idle - std::min(idle, keep));
    for (Run& run : runs_) run.block = arena.pool.detach(run.block, run.address, run.bytes);
  }
  std::uint64_t handles = 0;
  pieces_.clear();
  give_up(0);
  for (const Run& run : runs_) {
    if (run.block == nullptr) continue;
    const bool out = context_.note(take_out(run));
    handles += pieces_.size();
    give_up(0);
    std::lock_guard lock(arena.mutex);
    arena.pool.attach(run.block, out ? *arena.unmapped : *arena.clean);
  }
  return handles;
}

// ---- other devices, and the end ----------------------------------------------------------------------------------

void Vmm::admit(int device, bool on) {
  if (device == context_.device()) return;
  std::lock_guard calls(calls_);
  const CUmemAccessDesc access{location_of(device),
                               on ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE};
  access_.reserve(access_.size() + 1);
  std::erase_if(access_, [&](const CUmemAccessDesc& known) { return known.location.id == device; });
  if (on) access_.push_back(access);
  RelaxedCaptureMode relaxed(driver());
  CurrentContext current(driver(), context_.handle());
  for (const Range& range : ranges_) {
    for_each_mapped(range, [&](const Run& run) {
      warn_unless_open(driver().call(driver().cuMemSetAccess, CUdeviceptr{run.address},
                                     static_cast<std::size_t>(run.bytes), &access, std::size_t{1}),
                       access);
    });
  }
}

void Vmm::discard() noexcept {
  RelaxedCaptureMode relaxed(driver());
  for (const Range& range : stale_) ranges_.push_back(range);  // reserve() made room
  stale_.clear();
  pieces_.clear();
  for (const Range& range : ranges_) {
    bool empty = true;
    for_each_mapped(range, [&](const Run& run) {
      empty = take_out(run) == CUDA_SUCCESS && empty;
      give_up(0);
    });
    if (!empty) {
      stale_.push_back(range);
      continue;
    }
    driver().call(driver().cuMemAddressFree, CUdeviceptr{range.address}, static_cast<std::size_t>(range.bytes));
    munmap(range.pages, range.bytes / kPage * sizeof(Piece));
  }
  ranges_.clear();
  access_.erase(access_.begin() + 1, access_.end());  // the next context has peers of its own
}

}  // namespace cushion
