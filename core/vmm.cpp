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

// Null: the device's memory can be mapped; else why not.
const char* obstacle(const Driver& driver, int device) noexcept {
  const bool has_all = driver.cuMemAddressReserve != nullptr && driver.cuMemAddressFree != nullptr &&
                       driver.cuMemCreate != nullptr && driver.cuMemRelease != nullptr && driver.cuMemMap != nullptr &&
                       driver.cuMemUnmap != nullptr && driver.cuMemSetAccess != nullptr &&
                       driver.cuCtxRecordEvent != nullptr;
  if (!has_all) return "the driver is older than 12.5";
  if (attribute_of(driver, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device) == 0)
    return "the device has no virtual memory management";
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

}  // namespace

Vmm::Vmm(Shared& shared, Context& context)
    : shared_(shared), context_(context), on_([&] {
        const Backing wanted = shared.options->backing;
        if (wanted == Backing::driver || !shared.options->suballocates()) {
          why_ = "CUSHION_BACKING=driver";
          return false;
        }
        why_ = obstacle(driver(), context.device());
        if (why_ != nullptr && wanted == Backing::vmm)
          log::complain(std::string("CUSHION_BACKING=vmm has no effect: ") + why_);
        if (why_ == nullptr && wanted == Backing::automatic) why_ = objection(shared);
        if (why_ != nullptr) return false;
        why_ = wanted == Backing::vmm ? "CUSHION_BACKING=vmm" : "one device, one process";
        return true;
      }()) {
  if (!on_) return;
  properties_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties_.location = {CU_MEM_LOCATION_TYPE_DEVICE, {context.device()}};
  properties_.allocFlags.gpuDirectRDMACapable =
      attribute_of(driver(), CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, context.device()) != 0;
  access_.push_back({properties_.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE});
}

// ---- what is mapped where ----------------------------------------------------------------------------------------

Vmm::Piece& Vmm::piece_at(std::uint64_t address) const noexcept {
  auto range = ranges_.begin();
  while (address - range->address >= range->bytes) ++range;
  return range->pages[(address - range->address) / kPage];
}

std::uint64_t Vmm::number_in(const Run& run) const noexcept {
  std::uint64_t number = 0;
  for (std::uint64_t at = run.address; at < run.address + run.bytes; at += piece_at(at).bytes) ++number;
  return number;
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

std::vector<Vmm::Run> Vmm::idle(const Plan* but) const {
  std::vector<Run> runs;
  const auto look = [&](Block* block) {
    if (block->size < kPage || (but != nullptr && (block == but->below || block == but->above))) return;
    if (const Run run = whole_in(*block); run.bytes != 0) runs.push_back(run);
  };
  context_.global().clean->bins.for_each(look);
  if (mutated(Mutation::pending_memory_is_unmapped)) context_.global().pending->bins.for_each(look);
  return runs;
}

std::uint64_t Vmm::unused() {
  std::lock_guard calls(calls_);
  std::lock_guard lock(context_.global().mutex);
  std::uint64_t bytes = 0;
  for (const Run& run : idle(nullptr)) bytes += run.bytes;
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

std::vector<Vmm::Run> Vmm::choose(std::vector<Run> runs, std::uint64_t bytes) const {
  std::sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.bytes > b.bytes; });
  std::size_t number = 0;
  for (Run& run : runs) {
    if (bytes == 0) break;
    std::uint64_t size = 0;
    while (size < std::min(run.bytes, bytes)) size += piece_at(run.address + size).bytes;
    run.bytes = size;
    bytes -= std::min(bytes, size);
    ++number;
  }
  runs.resize(number);
  return runs;
}

// ---- calls to the driver -----------------------------------------------------------------------------------------

CUresult Vmm::reserve(std::uint64_t bytes) {
  Range range{0, bytes, nullptr};
  ranges_.reserve(ranges_.size() + 1);
  range.pages = static_cast<Piece*>(map_pages(bytes / kPage * sizeof(Piece)));
  if (range.pages == nullptr) return CUDA_ERROR_NOT_SUPPORTED;
  CUdeviceptr address = 0;
  const CUresult result = driver().call(driver().cuMemAddressReserve, &address, static_cast<std::size_t>(bytes),
                                        static_cast<std::size_t>(kPage), CUdeviceptr{0}, 0ull);
  range.address = address;
  Arena& arena = context_.global();
  bool known = false;
  if (result == CUDA_SUCCESS) {
    std::lock_guard lock(arena.mutex);
    known = arena.pool.reserve(address, bytes, *arena.unmapped);
  }
  if (known) {
    ranges_.push_back(range);
    return CUDA_SUCCESS;
  }
  if (result == CUDA_SUCCESS) driver().call(driver().cuMemAddressFree, address, static_cast<std::size_t>(bytes));
  munmap(range.pages, bytes / kPage * sizeof(Piece));
  return result != CUDA_SUCCESS ? result : CUDA_ERROR_NOT_SUPPORTED;
}

CUresult Vmm::create(std::uint64_t bytes, std::vector<Piece>& out, std::int64_t& added) {
  out.reserve(out.size() + bytes / kLargest + 1);
  std::vector<Piece> fresh;
  fresh.reserve(bytes / kLargest + 1);
  for (std::uint64_t left = bytes; left != 0; left -= fresh.back().bytes) {
    Piece piece{0, std::min(left, kLargest)};
    const CUresult result =
        driver().call(driver().cuMemCreate, &piece.handle, static_cast<std::size_t>(piece.bytes), &properties_, 0ull);
    if (result != CUDA_SUCCESS) {
      added -= static_cast<std::int64_t>(give_up(fresh));
      return result;
    }
    added += static_cast<std::int64_t>(piece.bytes);
    fresh.push_back(piece);
  }
  out.insert(out.end(), fresh.begin(), fresh.end());
  return CUDA_SUCCESS;
}

CUresult Vmm::map(const Run& at, const std::vector<Piece>& pieces) {
  std::uint64_t to = at.address;
  CUresult result = CUDA_SUCCESS;
  for (const Piece& piece : pieces) {
    result = driver().call(driver().cuMemMap, CUdeviceptr{to}, static_cast<std::size_t>(piece.bytes), std::size_t{0},
                           piece.handle, 0ull);
    if (result != CUDA_SUCCESS) break;
    piece_at(to) = piece;
    to += piece.bytes;
  }
  if (result == CUDA_SUCCESS)
    result = driver().call(driver().cuMemSetAccess, CUdeviceptr{at.address}, static_cast<std::size_t>(at.bytes),
                           static_cast<const CUmemAccessDesc*>(access_.data()), access_.size());
  if (result != CUDA_SUCCESS && to != at.address) {
    std::vector<Piece> ignored;
    take_out({at.block, at.address, to - at.address}, ignored);
  }
  return result;
}

CUresult Vmm::take_out(const Run& run, std::vector<Piece>& out) {
  out.reserve(out.size() + number_in(run));
  const CUresult result =
      driver().call(driver().cuMemUnmap, CUdeviceptr{run.address}, static_cast<std::size_t>(run.bytes));
  if (result != CUDA_SUCCESS) return result;
  for (std::uint64_t at = run.address; at < run.address + run.bytes; at += out.back().bytes) {
    out.push_back(piece_at(at));
    piece_at(at) = {};
  }
  return CUDA_SUCCESS;
}

std::uint64_t Vmm::give_up(const std::vector<Piece>& pieces) {
  refused_.insert(refused_.end(), pieces.begin(), pieces.end());
  std::uint64_t gone = 0;
  std::erase_if(refused_, [&](const Piece& piece) {
    const bool took = driver().call(driver().cuMemRelease, piece.handle) == CUDA_SUCCESS;
    gone += took ? piece.bytes : 0;
    return took;
  });
  return gone;
}

// ---- growing and giving back -------------------------------------------------------------------------------------

CUresult Vmm::extend(const Need& need, std::uint64_t most, std::uint64_t roomy, std::int64_t& added) {
  std::lock_guard calls(calls_);
  CurrentContext current(driver(), context_.handle());
  if (current.result() != CUDA_SUCCESS) return current.result();
  const CUresult result = extend_by(need, most, roomy, false, added);
  const bool none_new = result == CUDA_ERROR_OUT_OF_MEMORY || result == CUDA_ERROR_NOT_SUPPORTED;
  return none_new ? extend_by(need, most, 0, true, added) : result;
}

CUresult Vmm::extend_by(const Need& need, std::uint64_t most, std::uint64_t roomy, bool move, std::int64_t& added) {
  Arena& arena = context_.global();
  const auto bytes_of = [](const std::vector<Run>& those) {
    std::uint64_t bytes = 0;
    for (const Run& run : those) bytes += run.bytes;
    return bytes;
  };
  std::vector<Run> runs;
  std::vector<Piece> pieces;
  Run target{};
  std::uint64_t fresh = 0;
  for (bool reserved = false;; reserved = true) {
    {
      std::lock_guard lock(arena.mutex);
      if (arena.clean->bins.find(need.size, need.alignment, kAnyStamp) != nullptr) return CUDA_SUCCESS;
      if (const Plan place = plan(need); place.at != nullptr) {
        runs = idle(&place);
        runs = move || bytes_of(runs) > arena.pool.held() / kIdleShare ? choose(std::move(runs), place.bytes)
                                                                       : std::vector<Run>{};
        if (bytes_of(runs) > place.at->size) runs.clear();
        const std::uint64_t moved = bytes_of(runs);
        const std::uint64_t lacking = place.bytes - std::min(place.bytes, moved);
        if (lacking > most) return CUDA_ERROR_NOT_SUPPORTED;
        if (lacking != 0) fresh = std::min({std::max(lacking, roomy), most, place.at->size - moved}) / kPage * kPage;
        target = {nullptr, place.at->address(), moved + fresh};
        bool detached = true;
        for (Run& run : runs) {
          run.block = detached ? arena.pool.detach(run.block, run.address, run.bytes) : nullptr;
          detached = run.block != nullptr;
        }
        if (detached) target.block = arena.pool.detach(place.at, target.address, target.bytes);
        break;
      }
    }
    if (reserved) return CUDA_ERROR_NOT_SUPPORTED;
    const std::uint64_t room = 2 * std::max(context_.device_bytes(), need.size + need.alignment);
    if (const CUresult result = reserve(round_up(room, kPage)); result != CUDA_SUCCESS) return result;
  }
  // New ones first: if there are none, nothing has changed.
  CUresult result = target.block != nullptr ? create(fresh, pieces, added) : CUDA_ERROR_NOT_SUPPORTED;
  std::size_t emptied = 0;
  while (result == CUDA_SUCCESS && emptied < runs.size()) {
    result = take_out(runs[emptied], pieces);
    if (result == CUDA_SUCCESS) ++emptied;
  }
  if (result == CUDA_SUCCESS) result = map(target, pieces);
  if (result != CUDA_SUCCESS) {
    added -= static_cast<std::int64_t>(give_up(pieces));
  } else if (!runs.empty()) {
    count(shared_.counters.remaps);
  }
  std::lock_guard lock(arena.mutex);
  // What the host has no memory to note stays nobody's until the context ends.
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (runs[i].block != nullptr) arena.pool.attach(runs[i].block, i < emptied ? *arena.unmapped : *arena.clean);
  }
  if (target.block != nullptr) arena.pool.attach(target.block, result == CUDA_SUCCESS ? *arena.clean : *arena.unmapped);
  return result;
}

Vmm::Released Vmm::release(std::uint64_t keep) {
  std::lock_guard calls(calls_);
  Arena& arena = context_.global();
  std::vector<Run> runs;
  {
    std::lock_guard lock(arena.mutex);
    runs = idle(nullptr);
    std::uint64_t there = 0;
    for (const Run& run : runs) there += run.bytes;
    runs = choose(std::move(runs), there - std::min(there, keep));
    for (Run& run : runs) run.block = arena.pool.detach(run.block, run.address, run.bytes);
  }
  Released released;
  for (const Run& run : runs) {
    if (run.block == nullptr) continue;
    std::vector<Piece> pieces;
    const bool out = context_.note(take_out(run, pieces));
    if (out) {
      released.bytes += give_up(pieces);
      released.handles += pieces.size();
    }
    std::lock_guard lock(arena.mutex);
    arena.pool.attach(run.block, out ? *arena.unmapped : *arena.clean);
  }
  return released;
}

// ---- other devices, and the end ----------------------------------------------------------------------------------

void Vmm::admit(int device, bool on) {
  if (device == context_.device()) return;
  std::lock_guard calls(calls_);
  const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, {device}},
                               on ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE};
  std::erase_if(access_, [&](const CUmemAccessDesc& known) { return known.location.id == device; });
  if (on) access_.push_back(access);
  CurrentContext current(driver(), context_.handle());
  for (const Range& range : ranges_) {
    for_each_mapped(range, [&](const Run& run) {
      driver().call(driver().cuMemSetAccess, CUdeviceptr{run.address}, static_cast<std::size_t>(run.bytes), &access,
                    std::size_t{1});
    });
  }
}

std::int64_t Vmm::discard() {
  std::lock_guard calls(calls_);
  const auto kept = [&] {
    std::int64_t bytes = 0;
    for (const Piece& piece : refused_) bytes += static_cast<std::int64_t>(piece.bytes);
    for (const Range& range : stale_)
      for_each_mapped(range, [&](const Run& run) { bytes += static_cast<std::int64_t>(run.bytes); });
    return bytes;
  };
  const std::int64_t before = kept();
  ranges_.insert(ranges_.end(), stale_.begin(), stale_.end());
  stale_.clear();
  std::erase_if(ranges_, [&](const Range& range) {
    bool empty = true;
    for_each_mapped(range, [&](const Run& run) {
      std::vector<Piece> pieces;
      if (take_out(run, pieces) == CUDA_SUCCESS) {
        give_up(pieces);
      } else {
        empty = false;
      }
    });
    if (!empty) return false;
    driver().call(driver().cuMemAddressFree, CUdeviceptr{range.address}, static_cast<std::size_t>(range.bytes));
    munmap(range.pages, range.bytes / kPage * sizeof(Piece));
    return true;
  });
  stale_.swap(ranges_);
  give_up({});
  return kept() - before;
}

}  // namespace cushion
