// Driver hooks: the bodies, one for each line of hooks.def. A body says whose call it is and hands it to core; it
// decides nothing. Errors leave as the native call would give them.
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "core/format.h"
#include "core/log.h"
#include "core/thread.h"
#include "shim/hooks.h"
#include "shim/process.h"

namespace cushion {
namespace {

Shared& shared() noexcept { return runtime().shared(); }

// In a child forked after our start CUDA is the parent's: its calls get their native errors, and nothing else is done.
bool in_forked_child() noexcept { return g_life.load(std::memory_order_acquire) == Life::forked; }

// Before a call after which a cudaFree that did not wait could be told from the native one (core/single_order.h).
void ends_order(const char* call) noexcept {
  if (!in_forked_child() && shared().order.holds()) runtime().end_order(call);
}
// The same for a thread that makes a context current.
void thread_comes(CUcontext context) noexcept {
  if (context == nullptr || in_forked_child()) return;
  shared().order.thread_comes(shared().driver, thread_id());
}
// And for a variable of a module, if it is one that the host sees too.
void variable_found(const CUdeviceptr* address) noexcept {
  unsigned managed = 0;
  if (address != nullptr && shared().order.holds() &&
      real_cuPointerGetAttribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, *address) == CUDA_SUCCESS && managed != 0)
    ends_order("a managed variable");
}
// Before a question how far the device is: what a free owes is paid.
void pay() noexcept {
  if (!in_forked_child()) shared().order.pay(shared().driver);
}

// Passes a call on, and once more if the driver was out of memory and the pool could give some back: Cushion's cache
// must never make another allocation fail (contract §6).
template <class Fn, class... Args>
CUresult with_room_for(std::size_t bytes, const Real<Fn>& real, Args... args) noexcept {
  const CUresult result = real(args...);
  if (result == CUDA_SUCCESS) [[likely]]
    return result;
  Runtime* rt = serving();
  if (rt == nullptr) return result;
  rt->failed(result);
  return result == CUDA_ERROR_OUT_OF_MEMORY && rt->relieve(bytes) ? real(args...) : result;
}
template <class Fn, class... Args>
CUresult with_room(const Real<Fn>& real, Args... args) noexcept {
  return with_room_for(0, real, args...);
}

// How large the program is to think the device, if not as large as it is: also before the first allocation.
std::optional<Size> shown_limit() noexcept try {
  const auto shown = [](const Options& options) -> std::optional<Size> {
    if (options.limit.percent >= 100 || options.limit_shown == ShownMemory::device) return std::nullopt;
    return options.limit;
  };
  if (serving() != nullptr) return shown(runtime().options());
  if (std::getenv("CUSHION_LIMIT") == nullptr || !may_start()) return std::nullopt;
  const OptionsResult read = read_options(environ);
  return read.errors.empty() ? shown(read.options) : std::nullopt;
} catch (...) {
  return std::nullopt;
}

// Passes on an allocation that core did not serve, counts it and remembers its block.
template <class Fn, class... Args>
CUresult forward(Runtime& rt, Api api, CUdeviceptr* out, std::size_t bytes, CUstream stream, const Real<Fn>& real,
                 Args... args) noexcept {
  const bool ordered = api == Api::malloc_async || api == Api::from_pool;
  const bool graph_owned = ordered && shared().gate.capturing(shared().driver, stream);
  const Limit::Claim claim = graph_owned ? Limit::Claim() : rt.claim(api, bytes, ordered ? stream : nullptr);
  const CUresult result = claim ? with_room_for(bytes, real, args...) : CUDA_ERROR_OUT_OF_MEMORY;
  rt.forwarded(api);
  if (result == CUDA_ERROR_OUT_OF_MEMORY) rt.out_of_memory(bytes, api);
  if (result == CUDA_SUCCESS && out != nullptr && !graph_owned) rt.forwarded_block(api, *out, bytes, stream, ordered);
  return result;
}

template <class Fn>
CUresult allocate_async(CUdeviceptr* out, std::size_t bytes, CUstream stream, CUstream as_given,
                        const Real<Fn>& real) noexcept {
  Runtime* rt = serving_allocation();
  if (rt == nullptr) return real(out, bytes, as_given);
  if (rt->malloc_async(out, bytes, stream)) return CUDA_SUCCESS;
  return forward(*rt, Api::malloc_async, out, bytes, stream, real, out, bytes, as_given);
}

template <class Fn>
CUresult allocate_from_pool(CUdeviceptr* out, std::size_t bytes, CUmemoryPool pool, CUstream stream, CUstream as_given,
                            const Real<Fn>& real) noexcept {
  ends_order("a pool of the program's");
  Runtime* rt = serving_allocation();
  if (rt == nullptr) return real(out, bytes, pool, as_given);
  return forward(*rt, Api::from_pool, out, bytes, stream, real, out, bytes, pool, as_given);
}

// A free of one of our blocks outside our service: in a forked child CUDA is not initialised; on the way out the
// driver says whether it is gone.
CUresult late_free() noexcept {
  if (g_life.load(std::memory_order_acquire) == Life::forked) return CUDA_ERROR_NOT_INITIALIZED;
  CUcontext ignored = nullptr;
  InsideDriver inside;
  return shared().driver.cuCtxGetCurrent(&ignored) == CUDA_ERROR_DEINITIALIZED ? CUDA_ERROR_DEINITIALIZED
                                                                               : CUDA_SUCCESS;
}

// `ours` frees a pointer of ours through core. Never lets such a pointer reach the driver.
template <class Ours, class Fn, class... Args>
CUresult free_block(CUdeviceptr address, Ours ours, const Real<Fn>& real, Args... args) noexcept {
  if (g_life.load(std::memory_order_acquire) != Life::serving)
    return runtime().owns(address) ? late_free() : real(args...);
  Runtime& rt = runtime();
  if (const std::optional<CUresult> answer = ours(rt)) return *answer;
  const std::optional<ForeignBlock> foreign = rt.forget_foreign(address);
  const CUresult result = real(args...);
  if (result != CUDA_SUCCESS && foreign) rt.restore_foreign(address, *foreign);
  if (result == CUDA_SUCCESS && foreign) rt.foreign_freed(address, *foreign);
  if (result == CUDA_SUCCESS && address != 0) count(shared().counters.frees_forwarded);
  return result;
}

template <class Fn>
CUresult free_async(CUdeviceptr address, CUstream stream, CUstream as_given, const Real<Fn>& real) noexcept {
  return free_block(
      address, [&](Runtime& rt) { return rt.free_async(address, stream); }, real, address, as_given);
}

CUcontext context_of(CUstream stream) noexcept {
  const Driver& driver = shared().driver;
  CUcontext context = nullptr;
  if (is_per_thread(stream)) {
    driver.call(driver.cuCtxGetCurrent, &context);
  } else {
    driver.call(driver.cuStreamGetCtx, stream, &context);
  }
  return context;
}

template <class Fn, class... Args>
CUresult begin_capture(CUstream stream, const Real<Fn>& real, Args... args) noexcept {
  if (in_forked_child()) return real(args...);
  shared().gate.begin();
  const CUresult result = real(args...);
  const bool success = result == CUDA_SUCCESS;
  shared().gate.begun(stream, success ? context_of(stream) : nullptr, thread_id(), success);
  return result;
}

template <class Fn, class... Args>
CUresult end_capture(CUstream stream, const Real<Fn>& real, Args... args) noexcept {
  const CUresult result = real(args...);
  if (in_forked_child()) return result;
  if (result == CUDA_SUCCESS) shared().gate.forget(stream, thread_id());
  shared().gate.refresh(shared().driver, thread_id());
  return result;
}

template <class Fn, class... Args>
CUresult create_stream(CUstream* out, unsigned flags, const Real<Fn>& real, Args... args) noexcept {
  ends_order("a second stream");
  const CUresult result = with_room(real, out, flags, args...);
  if (result == CUDA_SUCCESS && !in_forked_child()) runtime().stream_created(*out, flags);
  return result;
}

template <class Fn>
CUresult destroy_stream(CUstream stream, const Real<Fn>& real) noexcept {
  if (in_forked_child()) return real(stream);
  shared().gate.forget(stream, thread_id());
  if (Runtime* rt = serving()) rt->stream_going(stream);
  shared().streams.remove(stream);
  return real(stream);
}

template <class Fn, class... Args>
CUresult record(CUevent event, CUstream stream, const Real<Fn>& real, Args... args) noexcept {
  Runtime* rt = serving();
  if (rt == nullptr) return real(event, args...);
  Runtime::Mark mark = rt->before_record(event, stream);
  const CUresult result = real(event, args...);
  rt->after_record(event, std::move(mark), result == CUDA_SUCCESS);
  return result;
}

template <class Fn>
CUresult wait(CUstream stream, CUevent event, unsigned flags, CUstream as_given, const Real<Fn>& real) noexcept {
  Runtime* rt = serving();
  if (rt == nullptr) return real(as_given, event, flags);
  const Runtime::Mark mark = rt->before_wait(event);
  const CUresult result = real(as_given, event, flags);
  if (result == CUDA_SUCCESS) rt->after_wait(event, stream, mark);
  return result;
}

void note_external_record(unsigned flags) noexcept {
  if ((flags & CU_EVENT_RECORD_EXTERNAL) != 0) shared().foreign_events.store(true, std::memory_order_relaxed);
}

// An event whose last record is not on a stream says nothing that we know how to use.
template <class Fn, class Context>
CUresult record_context(Context context, CUevent event, const Real<Fn>& real) noexcept {
  if (Runtime* rt = serving()) rt->forget_event(event);
  return real(context, event);
}

template <class Fn>
CUresult destroy_event(CUevent event, const Real<Fn>& real) noexcept {
  if (Runtime* rt = serving()) rt->forget_event(event);
  return real(event);
}

// Events recorded by graphs or other processes escape our sight: from then on no order is concluded from any event.
template <class Fn, class... Args>
CUresult with_foreign_events(const Real<Fn>& real, Args... args) noexcept {
  ends_order("events of graphs or other processes");
  shared().foreign_events.store(true, std::memory_order_relaxed);
  return real(args...);
}

// A call that may end the context `handle`; `ended` says after success whether it did.
template <class Ended, class Fn, class... Args>
CUresult end_context(CUcontext handle, Ended ended, const Real<Fn>& real, Args... args) noexcept {
  if (in_forked_child()) return real(args...);
  Context* context = runtime().find_context(handle);
  const auto no_background = runtime().no_background();
  if (context != nullptr) context->closing(true);
  const CUresult result = real(args...);
  if (result == CUDA_SUCCESS && ended()) runtime().ended(handle);
  if (context != nullptr) context->closing(false);
  return result;
}

template <class Fn>
CUresult destroy_context(CUcontext handle, const Real<Fn>& real) noexcept {
  return end_context(
      handle, [] { return true; }, real, handle);
}

// The device's primary context, if it is active.
CUcontext primary_of(CUdevice device) noexcept {
  if (const Context* primary = runtime().find_primary(device)) return primary->handle();
  if (serving() == nullptr) return nullptr;
  // The pool holds nothing there; the driver's own blocks are remembered by context.
  const Driver& driver = shared().driver;
  CUcontext handle = nullptr;
  unsigned flags = 0;
  int active = 0;
  if (driver.call(driver.cuDevicePrimaryCtxGetState, device, &flags, &active) == CUDA_SUCCESS && active != 0 &&
      driver.call(driver.cuDevicePrimaryCtxRetain, &handle, device) == CUDA_SUCCESS) {
    driver.call(driver.cuDevicePrimaryCtxRelease_v2, device);
  }
  return handle;
}

template <class Fn>
CUresult release_primary(CUdevice device, const Real<Fn>& real) noexcept {
  const auto was_last = [device] {
    unsigned flags = 0;
    int active = 1;
    return shared().driver.call(shared().driver.cuDevicePrimaryCtxGetState, device, &flags, &active) == CUDA_SUCCESS &&
           active == 0;
  };
  return end_context(primary_of(device), was_last, real, device);
}

template <class Fn>
CUresult reset_primary(CUdevice device, const Real<Fn>& real) noexcept {
  return end_context(
      primary_of(device), [] { return true; }, real, device);
}

template <class Fn, class... Args>
CUresult create_context(CUcontext* out, const Real<Fn>& real, Args... args) noexcept {
  ends_order("a context of the program's");
  const CUresult result = with_room(real, out, args...);
  if (result == CUDA_SUCCESS && !in_forked_child()) runtime().context_created(*out);
  return result;
}

template <class Fn, class... Args>
CUresult synchronize(CUcontext context, const Real<Fn>& real, Args... args) noexcept {
  Runtime* rt = serving();
  if (rt == nullptr) return real(args...);
  const Runtime::SyncMark mark = rt->before_synchronize(context);
  const CUresult result = real(args...);
  result == CUDA_SUCCESS ? rt->after_synchronize(mark) : rt->failed(result);
  return result;
}

// A program that asks for per-thread variants has streams that only their own threads can ask, and that block.
void note_per_thread(cuuint64_t flags) noexcept {
  if ((flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) == 0) return;
  shared().streams.lose();
  shared().blocking_streams.store(true, std::memory_order_relaxed);
}

template <class Fn, class... Args>
CUresult launch(CUstream stream, const Real<Fn>& real, Args... args) noexcept {
  if (is_per_thread(stream)) [[unlikely]]
    shared().blocking_streams.store(true, std::memory_order_relaxed);
  if (is_legacy(stream) && !shared().legacy_launches.load(std::memory_order_relaxed)) [[unlikely]]
    shared().legacy_launches.store(true, std::memory_order_relaxed);
  return with_room(real, args...);
}

// One line for the first handle that cannot be given or opened.
void complain_of_handle(const char* call, CUresult answer, const char* why) noexcept {
  static constinit std::atomic<bool> told{false};
  if (told.exchange(true)) return;
  char line[240];
  log::complain(format_into(line, "{} answers error {}: {}; CUSHION_ALLOCATOR=cuda shares memory natively", call,
                            static_cast<int>(answer), why));
}

std::optional<Runtime::NativeBlock> native_block(CUdeviceptr address) noexcept {
  CUdeviceptr start = 0;
  if (real_cuPointerGetAttribute(&start, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address) != CUDA_SUCCESS)
    return std::nullopt;
  if (const auto ours = runtime().native_block(address, start)) return ours;
  const std::optional<Ipc::Opened> other = shared().ipc.opened_at(address);
  if (!other) return std::nullopt;
  return Runtime::NativeBlock{other->context, other->block, other->bytes, Api::malloc};
}

// cuIpcGetMemHandle of a block of the pool: a ticket (core/ipc.h).
CUresult export_block(CUipcMemHandle* handle, CUdeviceptr address) noexcept {
  const std::optional<Runtime::NativeBlock> block = native_block(address);
  if (!block || block->api == Api::malloc_async) return CUDA_ERROR_INVALID_VALUE;  // as natively
  Ipc::Place place{};
  CUdeviceptr segment = 0;
  CUresult result = real_cuIpcGetMemHandle(&place.segment, block->base);
  if (result == CUDA_SUCCESS) result = real_cuMemGetAddressRange_v2(&segment, nullptr, block->base);
  const char* why = "the driver exports no memory of CUSHION_BACKING=vmm";
  if (result == CUDA_SUCCESS) {
    place.offset = block->base - segment;
    place.bytes = block->bytes;
    if (const std::optional<CUipcMemHandle> ticket = shared().ipc.issue(block->base, block->context, place, why)) {
      *handle = *ticket;
      count(shared().counters.ipc_exported);
      return CUDA_SUCCESS;
    }
    result = CUDA_ERROR_NOT_SUPPORTED;
  }
  count(shared().counters.ipc_refused);
  complain_of_handle("cuIpcGetMemHandle", result, why);
  return result;
}

template <class Fn>
CUresult open_handle(CUdeviceptr* out, const CUipcMemHandle& handle, unsigned flags, const Real<Fn>& real) noexcept {
  ends_order("cuIpcOpenMemHandle");
  if (out == nullptr || !Ipc::is_ticket(handle)) return with_room(real, out, handle, flags);
  const char* why = "";
  const std::optional<Ipc::Place> place = Ipc::redeem(handle, why);
  if (!place) {
    complain_of_handle("cuIpcOpenMemHandle", CUDA_ERROR_INVALID_HANDLE, why);
    return CUDA_ERROR_INVALID_HANDLE;
  }
  CUdeviceptr segment = 0;
  const CUresult result = with_room(real, &segment, place->segment, flags);
  if (result != CUDA_SUCCESS) return result;
  // What the other process says is held to what the driver opened.
  CUcontext context = nullptr;
  CUdeviceptr start = 0;
  std::size_t size = 0;
  const bool lies_within = bind_driver() &&
                           shared().driver.call(shared().driver.cuCtxGetCurrent, &context) == CUDA_SUCCESS &&
                           real_cuMemGetAddressRange_v2(&start, &size, segment) == CUDA_SUCCESS && start == segment &&
                           place->offset <= size && place->bytes <= size - place->offset;
  const CUdeviceptr block = lies_within ? shared().ipc.opened(segment, context, *place) : 0;
  if (block != 0) {
    *out = block;
    return CUDA_SUCCESS;
  }
  real_cuIpcCloseMemHandle(segment);
  return lies_within ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_HANDLE;
}

// What the driver has answered of a block of the pool, or of one that a ticket opened, and natively would not.
void correct(CUpointer_attribute attribute, void* data, CUdeviceptr address) noexcept {
  if (attribute == CU_POINTER_ATTRIBUTE_P2P_TOKENS) ends_order("a token for another device");
  if (data == nullptr) return;
  const bool lacks_context = attribute == CU_POINTER_ATTRIBUTE_CONTEXT && *static_cast<CUcontext*>(data) == nullptr;
  if (!lacks_context && attribute != CU_POINTER_ATTRIBUTE_RANGE_START_ADDR &&
      attribute != CU_POINTER_ATTRIBUTE_RANGE_SIZE && attribute != CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE)
    return;
  const auto block = native_block(address);
  if (!block) return;
  if (lacks_context) *static_cast<CUcontext*>(data) = block->context;
  if (attribute == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR) *static_cast<CUdeviceptr*>(data) = block->base;
  if (attribute == CU_POINTER_ATTRIBUTE_RANGE_SIZE) *static_cast<std::size_t*>(data) = block->bytes;
  if (attribute == CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE && block->api == Api::malloc_async)
    *static_cast<unsigned char*>(data) = 0;  // makes a true false whatever its width
}

}  // namespace
}  // namespace cushion

using namespace cushion;

// ---- lookup ------------------------------------------------------------------------------------------------------

CUresult hook_cuGetProcAddress(const char* symbol, void** function, int version, cuuint64_t flags) noexcept {
  const CUresult result = real_cuGetProcAddress(symbol, function, version, flags);
  if (result == CUDA_SUCCESS && function != nullptr && *function != nullptr) *function = replacement_of(*function);
  note_per_thread(flags);
  return result;
}
CUresult hook_cuGetProcAddress_v2(const char* symbol, void** function, int version, cuuint64_t flags,
                                  CUdriverProcAddressQueryResult* status) noexcept {
  const CUresult result = real_cuGetProcAddress_v2(symbol, function, version, flags, status);
  if (result == CUDA_SUCCESS && function != nullptr && *function != nullptr) *function = replacement_of(*function);
  note_per_thread(flags);
  return result;
}

// ---- allocation and free -----------------------------------------------------------------------------------------

CUresult hook_cuMemAlloc_v2(CUdeviceptr* out, std::size_t bytes) noexcept {
  Runtime* rt = serving_allocation();
  if (rt == nullptr) return real_cuMemAlloc_v2(out, bytes);
  if (rt->malloc(out, bytes, Api::malloc)) return CUDA_SUCCESS;
  return forward(*rt, Api::malloc, out, bytes, nullptr, real_cuMemAlloc_v2, out, bytes);
}

CUresult hook_cuMemAllocPitch_v2(CUdeviceptr* out, std::size_t* pitch, std::size_t width, std::size_t height,
                                 unsigned element) noexcept {
  constexpr std::size_t kPitch = 512;  // measured: the driver rounds every width up to this
  Runtime* rt = serving_allocation();
  if (rt == nullptr) return real_cuMemAllocPitch_v2(out, pitch, width, height, element);
  const bool plain = pitch != nullptr && (element == 4 || element == 8 || element == 16) && width != 0 && height != 0 &&
                     width <= std::size_t{1} << 31 && height <= std::size_t{1} << 31;
  const std::size_t row = round_up(width, kPitch);
  if (plain && rt->malloc(out, row * height, Api::pitch)) {
    *pitch = row;
    return CUDA_SUCCESS;
  }
  return forward(*rt, Api::pitch, out, row * height, nullptr, real_cuMemAllocPitch_v2, out, pitch, width, height,
                 element);
}

CUresult hook_cuMemFree_v2(CUdeviceptr address) noexcept {
  return free_block(
      address, [&](Runtime& rt) { return rt.free(address); }, real_cuMemFree_v2, address);
}

CUresult hook_cuMemAllocAsync(CUdeviceptr* out, std::size_t bytes, CUstream stream) noexcept {
  return allocate_async(out, bytes, stream, stream, real_cuMemAllocAsync);
}
CUresult hook_cuMemAllocAsync_ptsz(CUdeviceptr* out, std::size_t bytes, CUstream stream) noexcept {
  return allocate_async(out, bytes, per_thread(stream), stream, real_cuMemAllocAsync_ptsz);
}
CUresult hook_cuMemFreeAsync(CUdeviceptr address, CUstream stream) noexcept {
  return free_async(address, stream, stream, real_cuMemFreeAsync);
}
CUresult hook_cuMemFreeAsync_ptsz(CUdeviceptr address, CUstream stream) noexcept {
  return free_async(address, per_thread(stream), stream, real_cuMemFreeAsync_ptsz);
}

CUresult hook_cuMemGetInfo_v2(std::size_t* idle, std::size_t* total) noexcept {
  // Ours first: finding out may give some of it back to the driver.
  Runtime* rt = idle != nullptr ? serving() : nullptr;
  const std::uint64_t unused = rt != nullptr ? rt->unused_in_current() : 0;
  const std::optional<Size> limit = shown_limit();
  std::size_t idle_there = 0;
  std::size_t total_there = 0;
  const CUresult result = limit ? real_cuMemGetInfo_v2(&idle_there, &total_there) : real_cuMemGetInfo_v2(idle, total);
  if (result != CUDA_SUCCESS) return result;
  if (!limit) {
    if (idle != nullptr) *idle += unused;
    return result;
  }
  const std::uint64_t most = std::min<std::uint64_t>(limit->of(total_there), total_there);
  const std::uint64_t used = rt != nullptr ? rt->used_in_current(unused) : 0;
  if (idle != nullptr) *idle = std::min<std::uint64_t>(idle_there + unused, most - std::min(most, used));
  if (total != nullptr) *total = most;
  return result;
}
CUresult hook_cuDeviceTotalMem_v2(std::size_t* total, CUdevice device) noexcept {
  const CUresult result = real_cuDeviceTotalMem_v2(total, device);
  if (result != CUDA_SUCCESS || total == nullptr) return result;
  if (const std::optional<Size> limit = shown_limit()) *total = std::min<std::size_t>(limit->of(*total), *total);
  return result;
}

CUresult hook_cuMemAllocManaged(CUdeviceptr* out, std::size_t bytes, unsigned flags) noexcept {
  ends_order("managed memory");
  Runtime* rt = serving_allocation();
  if (rt == nullptr) return real_cuMemAllocManaged(out, bytes, flags);
  return forward(*rt, Api::managed, out, bytes, nullptr, real_cuMemAllocManaged, out, bytes, flags);
}
CUresult hook_cuMemAllocFromPoolAsync(CUdeviceptr* out, std::size_t bytes, CUmemoryPool pool,
                                      CUstream stream) noexcept {
  return allocate_from_pool(out, bytes, pool, stream, stream, real_cuMemAllocFromPoolAsync);
}
CUresult hook_cuMemAllocFromPoolAsync_ptsz(CUdeviceptr* out, std::size_t bytes, CUmemoryPool pool,
                                           CUstream stream) noexcept {
  return allocate_from_pool(out, bytes, pool, per_thread(stream), stream, real_cuMemAllocFromPoolAsync_ptsz);
}
CUresult hook_cuMemCreate(CUmemGenericAllocationHandle* out, std::size_t bytes, const CUmemAllocationProp* properties,
                          unsigned long long flags) noexcept {
  ends_order("cuMemCreate");
  if (Runtime* rt = serving_allocation()) rt->forwarded(Api::vmm);
  return with_room_for(bytes, real_cuMemCreate, out, bytes, properties, flags);
}
CUresult hook_cuMemHostAlloc(void** out, std::size_t bytes, unsigned flags) noexcept {
  ends_order("pinned memory");
  if (Runtime* rt = serving()) rt->forwarded(Api::host);
  return real_cuMemHostAlloc(out, bytes, flags);
}
CUresult hook_cuMemAllocHost_v2(void** out, std::size_t bytes) noexcept {
  ends_order("pinned memory");
  if (Runtime* rt = serving()) rt->forwarded(Api::host);
  return real_cuMemAllocHost_v2(out, bytes);
}

// ---- passed on, with room made -----------------------------------------------------------------------------------

#define CUSHION_WITH_ROOM(elf, parameters, ...) \
  CUresult hook_##elf parameters noexcept { return with_room(real_##elf, __VA_ARGS__); }
#define CUSHION_ENDS_ORDER(elf, parameters, ...) \
  CUresult hook_##elf parameters noexcept {      \
    ends_order(#elf);                            \
    return with_room(real_##elf, __VA_ARGS__);   \
  }

CUSHION_WITH_ROOM(cuArrayCreate_v2, (CUarray * a, const CUDA_ARRAY_DESCRIPTOR* b), a, b)
CUSHION_WITH_ROOM(cuArray3DCreate_v2, (CUarray * a, const CUDA_ARRAY3D_DESCRIPTOR* b), a, b)
CUSHION_WITH_ROOM(cuMipmappedArrayCreate, (CUmipmappedArray * a, const CUDA_ARRAY3D_DESCRIPTOR* b, unsigned c), a, b, c)
CUSHION_ENDS_ORDER(cuMemPoolCreate, (CUmemoryPool * a, const CUmemPoolProps* b), a, b)
CUSHION_WITH_ROOM(cuModuleLoad, (CUmodule * a, const char* b), a, b)
CUSHION_WITH_ROOM(cuModuleLoadData, (CUmodule * a, const void* b), a, b)
CUSHION_WITH_ROOM(cuModuleLoadDataEx, (CUmodule * a, const void* b, unsigned c, CUjit_option* d, void** e), a, b, c, d,
                  e)
CUSHION_WITH_ROOM(cuModuleLoadFatBinary, (CUmodule * a, const void* b), a, b)
CUSHION_WITH_ROOM(cuLibraryLoadData,
                  (CUlibrary * a, const void* b, CUjit_option* c, void** d, unsigned e, CUlibraryOption* f, void** g,
                   unsigned h),
                  a, b, c, d, e, f, g, h)
CUSHION_WITH_ROOM(cuLibraryLoadFromFile,
                  (CUlibrary * a, const char* b, CUjit_option* c, void** d, unsigned e, CUlibraryOption* f, void** g,
                   unsigned h),
                  a, b, c, d, e, f, g, h)
CUSHION_WITH_ROOM(cuEventCreate, (CUevent * a, unsigned b), a, b)
CUSHION_WITH_ROOM(cuGraphInstantiate, (CUgraphExec * a, CUgraph b, CUgraphNode* c, char* d, std::size_t e), a, b, c, d,
                  e)
CUSHION_WITH_ROOM(cuGraphInstantiate_v2, (CUgraphExec * a, CUgraph b, CUgraphNode* c, char* d, std::size_t e), a, b, c,
                  d, e)
CUSHION_WITH_ROOM(cuGraphInstantiateWithFlags, (CUgraphExec * a, CUgraph b, unsigned long long c), a, b, c)
CUSHION_WITH_ROOM(cuGraphInstantiateWithParams, (CUgraphExec * a, CUgraph b, CUDA_GRAPH_INSTANTIATE_PARAMS* c), a, b, c)
CUSHION_WITH_ROOM(cuGraphInstantiateWithParams_ptsz, (CUgraphExec * a, CUgraph b, CUDA_GRAPH_INSTANTIATE_PARAMS* c), a,
                  b, c)
CUresult hook_cuGraphLaunch(CUgraphExec a, CUstream b) noexcept {
  ends_order("cuGraphLaunch");
  return launch(b, real_cuGraphLaunch, a, b);
}
CUSHION_ENDS_ORDER(cuGraphLaunch_ptsz, (CUgraphExec a, CUstream b), a, b)
CUresult hook_cuLaunchKernel(CUfunction a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned f, unsigned g,
                             unsigned h, CUstream i, void** j, void** k) noexcept {
  return launch(i, real_cuLaunchKernel, a, b, c, d, e, f, g, h, i, j, k);
}
CUSHION_WITH_ROOM(cuLaunchKernel_ptsz,
                  (CUfunction a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned f, unsigned g, unsigned h,
                   CUstream i, void** j, void** k),
                  a, b, c, d, e, f, g, h, i, j, k)
CUresult hook_cuLaunchKernelEx(const CUlaunchConfig* a, CUfunction b, void** c, void** d) noexcept {
  return launch(a != nullptr ? a->hStream : nullptr, real_cuLaunchKernelEx, a, b, c, d);
}
CUSHION_WITH_ROOM(cuLaunchKernelEx_ptsz, (const CUlaunchConfig* a, CUfunction b, void** c, void** d), a, b, c, d)
CUresult hook_cuLaunchCooperativeKernel(CUfunction a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned f,
                                        unsigned g, unsigned h, CUstream i, void** j) noexcept {
  return launch(i, real_cuLaunchCooperativeKernel, a, b, c, d, e, f, g, h, i, j);
}
CUSHION_WITH_ROOM(cuLaunchCooperativeKernel_ptsz,
                  (CUfunction a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned f, unsigned g, unsigned h,
                   CUstream i, void** j),
                  a, b, c, d, e, f, g, h, i, j)

CUSHION_WITH_ROOM(cuGraphUpload, (CUgraphExec a, CUstream b), a, b)
CUSHION_WITH_ROOM(cuGraphUpload_ptsz, (CUgraphExec a, CUstream b), a, b)
CUSHION_WITH_ROOM(cuModuleGetFunction, (CUfunction * a, CUmodule b, const char* c), a, b, c)
CUSHION_WITH_ROOM(cuLibraryGetModule, (CUmodule * a, CUlibrary b), a, b)
CUSHION_WITH_ROOM(cuKernelGetFunction, (CUfunction * a, CUkernel b), a, b)
CUSHION_WITH_ROOM(cuFuncLoad, (CUfunction a), a)
CUSHION_WITH_ROOM(cuCtxSetLimit, (CUlimit a, std::size_t b), a, b)
CUresult hook_cuDevicePrimaryCtxRetain(CUcontext* out, CUdevice device) noexcept {
  if (!in_forked_child()) shared().order.device_comes(shared().driver, device);
  return with_room(real_cuDevicePrimaryCtxRetain, out, device);
}

// ---- what ends a single order, and what asks how far it is -------------------------------------------------------

CUSHION_ENDS_ORDER(cuMemHostRegister, (void* a, std::size_t b, unsigned c), a, b, c)
CUSHION_ENDS_ORDER(cuMemHostRegister_v2, (void* a, std::size_t b, unsigned c), a, b, c)
CUSHION_ENDS_ORDER(cuLaunchHostFunc, (CUstream a, CUhostFn b, void* c), a, b, c)
CUSHION_ENDS_ORDER(cuLaunchHostFunc_ptsz, (CUstream a, CUhostFn b, void* c), a, b, c)
CUSHION_ENDS_ORDER(cuStreamAddCallback, (CUstream a, CUstreamCallback b, void* c, unsigned d), a, b, c, d)
CUSHION_ENDS_ORDER(cuStreamAddCallback_ptsz, (CUstream a, CUstreamCallback b, void* c, unsigned d), a, b, c, d)
CUSHION_ENDS_ORDER(cuMemExportToShareableHandle,
                   (void* a, CUmemGenericAllocationHandle b, CUmemAllocationHandleType c, unsigned long long d), a, b,
                   c, d)
CUSHION_ENDS_ORDER(cuMemImportFromShareableHandle,
                   (CUmemGenericAllocationHandle * a, void* b, CUmemAllocationHandleType c), a, b, c)
CUSHION_ENDS_ORDER(cuMemGetHandleForAddressRange,
                   (void* a, CUdeviceptr b, std::size_t c, CUmemRangeHandleType d, unsigned long long e), a, b, c, d, e)
CUSHION_ENDS_ORDER(cuImportExternalMemory, (CUexternalMemory * a, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC* b), a, b)
CUSHION_ENDS_ORDER(cuImportExternalSemaphore, (CUexternalSemaphore * a, const CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC* b),
                   a, b)
CUSHION_ENDS_ORDER(cuGraphicsMapResources, (unsigned a, CUgraphicsResource* b, CUstream c), a, b, c)
CUSHION_ENDS_ORDER(cuGraphicsMapResources_ptsz, (unsigned a, CUgraphicsResource* b, CUstream c), a, b, c)
CUSHION_ENDS_ORDER(cuPointerSetAttribute, (const void* a, CUpointer_attribute b, CUdeviceptr c), a, b, c)
CUSHION_ENDS_ORDER(cuLibraryGetManaged, (CUdeviceptr * a, std::size_t* b, CUlibrary c, const char* d), a, b, c, d)

CUresult hook_cuModuleGetGlobal_v2(CUdeviceptr* address, std::size_t* bytes, CUmodule module,
                                   const char* name) noexcept {
  const CUresult result = real_cuModuleGetGlobal_v2(address, bytes, module, name);
  if (result == CUDA_SUCCESS) variable_found(address);
  return result;
}
CUresult hook_cuLibraryGetGlobal(CUdeviceptr* address, std::size_t* bytes, CUlibrary library,
                                 const char* name) noexcept {
  const CUresult result = real_cuLibraryGetGlobal(address, bytes, library, name);
  if (result == CUDA_SUCCESS) variable_found(address);
  return result;
}
CUresult hook_cuCtxSetCurrent(CUcontext context) noexcept {
  thread_comes(context);
  return real_cuCtxSetCurrent(context);
}
CUresult hook_cuCtxPushCurrent_v2(CUcontext context) noexcept {
  thread_comes(context);
  return real_cuCtxPushCurrent_v2(context);
}

CUresult hook_cuEventQuery(CUevent event) noexcept {
  pay();
  return real_cuEventQuery(event);
}
CUresult hook_cuEventElapsedTime(float* milliseconds, CUevent start, CUevent end) noexcept {
  pay();
  return real_cuEventElapsedTime(milliseconds, start, end);
}
CUresult hook_cuEventElapsedTime_v2(float* milliseconds, CUevent start, CUevent end) noexcept {
  pay();
  return real_cuEventElapsedTime_v2(milliseconds, start, end);
}
CUresult hook_cuStreamQuery(CUstream stream) noexcept {
  pay();
  return real_cuStreamQuery(stream);
}
CUresult hook_cuStreamQuery_ptsz(CUstream stream) noexcept {
  pay();
  return real_cuStreamQuery_ptsz(stream);
}

// ---- streams and captures ----------------------------------------------------------------------------------------

CUresult hook_cuStreamCreate(CUstream* out, unsigned flags) noexcept {
  return create_stream(out, flags, real_cuStreamCreate);
}
CUresult hook_cuStreamCreateWithPriority(CUstream* out, unsigned flags, int priority) noexcept {
  return create_stream(out, flags, real_cuStreamCreateWithPriority, priority);
}
CUresult hook_cuStreamDestroy(CUstream stream) noexcept { return destroy_stream(stream, real_cuStreamDestroy); }
CUresult hook_cuStreamDestroy_v2(CUstream stream) noexcept { return destroy_stream(stream, real_cuStreamDestroy_v2); }

CUresult hook_cuStreamBeginCapture(CUstream stream) noexcept {
  return begin_capture(stream, real_cuStreamBeginCapture, stream);
}
CUresult hook_cuStreamBeginCapture_ptsz(CUstream stream) noexcept {
  return begin_capture(per_thread(stream), real_cuStreamBeginCapture_ptsz, stream);
}
CUresult hook_cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) noexcept {
  return begin_capture(stream, real_cuStreamBeginCapture_v2, stream, mode);
}
CUresult hook_cuStreamBeginCapture_v2_ptsz(CUstream stream, CUstreamCaptureMode mode) noexcept {
  return begin_capture(per_thread(stream), real_cuStreamBeginCapture_v2_ptsz, stream, mode);
}
CUresult hook_cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode* nodes,
                                          const CUgraphEdgeData* edges, std::size_t n,
                                          CUstreamCaptureMode mode) noexcept {
  return begin_capture(stream, real_cuStreamBeginCaptureToGraph, stream, graph, nodes, edges, n, mode);
}
CUresult hook_cuStreamBeginCaptureToGraph_ptsz(CUstream stream, CUgraph graph, const CUgraphNode* nodes,
                                               const CUgraphEdgeData* edges, std::size_t n,
                                               CUstreamCaptureMode mode) noexcept {
  return begin_capture(per_thread(stream), real_cuStreamBeginCaptureToGraph_ptsz, stream, graph, nodes, edges, n, mode);
}
CUresult hook_cuStreamEndCapture(CUstream stream, CUgraph* graph) noexcept {
  return end_capture(stream, real_cuStreamEndCapture, stream, graph);
}
CUresult hook_cuStreamEndCapture_ptsz(CUstream stream, CUgraph* graph) noexcept {
  return end_capture(per_thread(stream), real_cuStreamEndCapture_ptsz, stream, graph);
}

// ---- events ------------------------------------------------------------------------------------------------------

CUresult hook_cuEventRecord(CUevent event, CUstream stream) noexcept {
  return record(event, stream, real_cuEventRecord, stream);
}
CUresult hook_cuEventRecord_ptsz(CUevent event, CUstream stream) noexcept {
  return record(event, per_thread(stream), real_cuEventRecord_ptsz, stream);
}
CUresult hook_cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned flags) noexcept {
  note_external_record(flags);
  return record(event, stream, real_cuEventRecordWithFlags, stream, flags);
}
CUresult hook_cuEventRecordWithFlags_ptsz(CUevent event, CUstream stream, unsigned flags) noexcept {
  note_external_record(flags);
  return record(event, per_thread(stream), real_cuEventRecordWithFlags_ptsz, stream, flags);
}
CUresult hook_cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) noexcept {
  return wait(stream, event, flags, stream, real_cuStreamWaitEvent);
}
CUresult hook_cuStreamWaitEvent_ptsz(CUstream stream, CUevent event, unsigned flags) noexcept {
  return wait(per_thread(stream), event, flags, stream, real_cuStreamWaitEvent_ptsz);
}
CUresult hook_cuEventDestroy(CUevent event) noexcept { return destroy_event(event, real_cuEventDestroy); }
CUresult hook_cuEventDestroy_v2(CUevent event) noexcept { return destroy_event(event, real_cuEventDestroy_v2); }
CUresult hook_cuCtxRecordEvent(CUcontext context, CUevent event) noexcept {
  return record_context(context, event, real_cuCtxRecordEvent);
}
CUresult hook_cuGreenCtxRecordEvent(CUgreenCtx context, CUevent event) noexcept {
  return record_context(context, event, real_cuGreenCtxRecordEvent);
}
CUresult hook_cuGraphAddEventRecordNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* after, std::size_t n,
                                        CUevent event) noexcept {
  return with_foreign_events(real_cuGraphAddEventRecordNode, node, graph, after, n, event);
}
CUresult hook_cuGraphAddNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* after, std::size_t n,
                             CUgraphNodeParams* params) noexcept {
  if (params == nullptr || params->type != CU_GRAPH_NODE_TYPE_EVENT_RECORD)
    return real_cuGraphAddNode(node, graph, after, n, params);
  return with_foreign_events(real_cuGraphAddNode, node, graph, after, n, params);
}
CUresult hook_cuGraphAddNode_v2(CUgraphNode* node, CUgraph graph, const CUgraphNode* after,
                                const CUgraphEdgeData* edges, std::size_t n, CUgraphNodeParams* params) noexcept {
  if (params == nullptr || params->type != CU_GRAPH_NODE_TYPE_EVENT_RECORD) {
    return real_cuGraphAddNode_v2(node, graph, after, edges, n, params);
  }
  return with_foreign_events(real_cuGraphAddNode_v2, node, graph, after, edges, n, params);
}
CUresult hook_cuIpcGetEventHandle(CUipcEventHandle* handle, CUevent event) noexcept {
  return with_foreign_events(real_cuIpcGetEventHandle, handle, event);
}
CUresult hook_cuIpcOpenEventHandle(CUevent* event, CUipcEventHandle handle) noexcept {
  return with_foreign_events(real_cuIpcOpenEventHandle, event, handle);
}

// ---- contexts ----------------------------------------------------------------------------------------------------

CUresult hook_cuCtxSynchronize() noexcept { return synchronize(nullptr, real_cuCtxSynchronize); }
CUresult hook_cuCtxSynchronize_v2(CUcontext context) noexcept {
  return synchronize(context, real_cuCtxSynchronize_v2, context);
}

CUresult hook_cuCtxCreate_v2(CUcontext* out, unsigned flags, CUdevice device) noexcept {
  return create_context(out, real_cuCtxCreate_v2, flags, device);
}
CUresult hook_cuCtxCreate_v3(CUcontext* out, CUexecAffinityParam* affinity, int n, unsigned flags,
                             CUdevice device) noexcept {
  return create_context(out, real_cuCtxCreate_v3, affinity, n, flags, device);
}
CUresult hook_cuCtxCreate_v4(CUcontext* out, CUctxCreateParams* params, unsigned flags, CUdevice device) noexcept {
  return create_context(out, real_cuCtxCreate_v4, params, flags, device);
}
CUresult hook_cuCtxDestroy(CUcontext context) noexcept { return destroy_context(context, real_cuCtxDestroy); }
CUresult hook_cuCtxDestroy_v2(CUcontext context) noexcept { return destroy_context(context, real_cuCtxDestroy_v2); }
CUresult hook_cuCtxDetach(CUcontext context) noexcept {
  // It ends the context only if nobody is attached to it any more.
  const auto gone = [context] {
    CUcontext popped = nullptr;
    const Driver& driver = shared().driver;
    return driver.call(driver.cuCtxPushCurrent_v2, context) != CUDA_SUCCESS ||
           driver.call(driver.cuCtxPopCurrent_v2, &popped) != CUDA_SUCCESS;
  };
  return end_context(context, gone, real_cuCtxDetach, context);
}
CUresult hook_cuDevicePrimaryCtxRelease(CUdevice device) noexcept {
  return release_primary(device, real_cuDevicePrimaryCtxRelease);
}
CUresult hook_cuDevicePrimaryCtxRelease_v2(CUdevice device) noexcept {
  return release_primary(device, real_cuDevicePrimaryCtxRelease_v2);
}
CUresult hook_cuDevicePrimaryCtxReset(CUdevice device) noexcept {
  return reset_primary(device, real_cuDevicePrimaryCtxReset);
}
CUresult hook_cuDevicePrimaryCtxReset_v2(CUdevice device) noexcept {
  return reset_primary(device, real_cuDevicePrimaryCtxReset_v2);
}
CUresult hook_cuGreenCtxCreate(CUgreenCtx* out, CUdevResourceDesc resources, CUdevice device, unsigned flags) noexcept {
  ends_order("a green context");
  shared().green_contexts.store(true, std::memory_order_relaxed);
  return with_room(real_cuGreenCtxCreate, out, resources, device, flags);
}
CUresult hook_cuGreenCtxDestroy(CUgreenCtx context) noexcept {
  const CUresult result = real_cuGreenCtxDestroy(context);
  shared().handle_epoch.fetch_add(1, std::memory_order_release);  // its streams went with it
  return result;
}
CUresult hook_cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) noexcept {
  ends_order("a peer");
  const CUresult result = real_cuCtxEnablePeerAccess(peer, flags);
  if (result == CUDA_SUCCESS && !in_forked_child()) runtime().peer_enabled(peer, serving() != nullptr);
  return result;
}
CUresult hook_cuCtxDisablePeerAccess(CUcontext peer) noexcept {
  const CUresult result = real_cuCtxDisablePeerAccess(peer);
  if (result == CUDA_SUCCESS && !in_forked_child()) runtime().peer_disabled(peer, serving() != nullptr);
  return result;
}

// ---- pools and sharing between processes -------------------------------------------------------------------------

CUresult hook_cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc* map, std::size_t n) noexcept {
  ends_order("a pool of the program's");
  runtime().every_pool_changed();
  return real_cuMemPoolSetAccess(pool, map, n);
}
CUresult hook_cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool) noexcept {
  ends_order("a pool of the program's");
  runtime().pool_changed(device);
  return real_cuDeviceSetMemPool(device, pool);
}
CUresult hook_cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr address) noexcept {
  ends_order("cuIpcGetMemHandle");
  return handle != nullptr && runtime().owns(address) ? export_block(handle, address)
                                                      : real_cuIpcGetMemHandle(handle, address);
}
CUresult hook_cuIpcOpenMemHandle(CUdeviceptr* out, CUipcMemHandle handle, unsigned flags) noexcept {
  return open_handle(out, handle, flags, real_cuIpcOpenMemHandle);
}
CUresult hook_cuIpcOpenMemHandle_v2(CUdeviceptr* out, CUipcMemHandle handle, unsigned flags) noexcept {
  return open_handle(out, handle, flags, real_cuIpcOpenMemHandle_v2);
}
CUresult hook_cuIpcCloseMemHandle(CUdeviceptr address) noexcept {
  const std::optional<Ipc::Opened> ours = shared().ipc.opened_at(address);
  const bool is_block = ours && ours->block == address;
  const CUresult result = real_cuIpcCloseMemHandle(is_block ? ours->segment : address);
  if (result == CUDA_SUCCESS && is_block) shared().ipc.closed(address);
  return result;
}
CUresult hook_cuMemGetAddressRange_v2(CUdeviceptr* base, std::size_t* bytes, CUdeviceptr address) noexcept {
  const CUresult result = real_cuMemGetAddressRange_v2(base, bytes, address);
  const auto block = result == CUDA_SUCCESS ? native_block(address) : std::nullopt;
  if (block && base != nullptr) *base = block->base;
  if (block && bytes != nullptr) *bytes = block->bytes;
  return result;
}
CUresult hook_cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr address) noexcept {
  const CUresult result = real_cuPointerGetAttribute(data, attribute, address);
  if (result == CUDA_SUCCESS) correct(attribute, data, address);
  return result;
}
CUresult hook_cuPointerGetAttributes(unsigned n, CUpointer_attribute* attributes, void** data,
                                     CUdeviceptr address) noexcept {
  const CUresult result = real_cuPointerGetAttributes(n, attributes, data, address);
  if (result == CUDA_SUCCESS) {
    for (unsigned i = 0; i < n; ++i) correct(attributes[i], data[i], address);
  }
  return result;
}
