#include "core/runtime.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <ctime>

#include "core/asking.h"
#include "core/log.h"
#include "core/metrics.h"
#include "core/mutation.h"
#include "core/report.h"
#include "core/thread.h"

namespace cushion {
namespace {

// Constant-initialised, and never destroyed: calls come before main and after exit.
union Eternal {
  constexpr Eternal() : runtime{} {}
  ~Eternal() {}  // NOLINT(modernize-use-equals-default): a default would be deleted
  Runtime runtime;
};
constinit Eternal g_eternal;

constexpr std::uint64_t kLegacyId = 1;  // within its context; real ids begin above the driver's own streams

// What this thread knows of handles, until a stream or context goes (Shared::handle_epoch).
struct ContextCache {
  CUcontext handle;
  Context* context;
  std::uint64_t epoch;
};
constexpr std::size_t kStreamCaches = 8;
constinit thread_local ContextCache t_context{};
constinit thread_local StreamCache t_streams[kStreamCaches]{};
std::size_t slot_of(CUstream stream) noexcept {
  return (reinterpret_cast<std::uintptr_t>(stream) >> 4) % kStreamCaches;
}

// As 20261201T093000Z.
std::string start_time(timespec wall) {
  std::tm utc{};
  char text[32];
  gmtime_r(&wall.tv_sec, &utc);
  return {text, std::strftime(text, sizeof text, "%Y%m%dT%H%M%SZ", &utc)};
}

std::string read_command_line() {
  std::string text;
  if (std::FILE* file = std::fopen("/proc/self/cmdline", "re")) {
    char buffer[4096];
    const std::size_t n = std::fread(buffer, 1, sizeof buffer, file);
    std::fclose(file);
    text.assign(buffer, n);
    while (!text.empty() && text.back() == '\0') text.pop_back();
    std::replace(text.begin(), text.end(), '\0', ' ');
  }
  return text;
}

}  // namespace

Runtime& runtime() noexcept { return g_eternal.runtime; }

bool Runtime::start(const char* const* environment, const char* program, const LoadTime& loaded) noexcept try {
  OptionsResult read = read_options(environment);
  for (const std::string& line : read.warnings) log::complain(line);
  for (const std::string& line : read.errors) log::complain(line + "; running on native CUDA");
  if (!read.errors.empty()) return false;

  auto* about = new Program;
  char host[256] = "";
  gethostname(host, sizeof host - 1);
  about->name = program;
  about->command = read_command_line();
  about->host = host;
  about->pid = getpid();
  about->loaded = loaded;
  about->rank = find_rank(environment);
  shared_.one_of_many = !about->rank.empty();
  about->words = {{'p', std::to_string(about->pid)},
                  {'h', about->host},
                  {'e', about->name},
                  {'r', about->rank.empty() ? "0" : about->rank},
                  {'t', start_time(loaded.wall)}};
  if (const std::string error = about->suppressions.read(read.options.suppressions); !error.empty())
    log::complain("CUSHION_SUPPRESSIONS: cannot read " + read.options.suppressions + ": " + error);
  shared_.noticeable_wait = TickLength(loaded.clock, ClockPair::now()).ticks_in(10e-6);
  timeline_.configure(100'000);
  about->options = describe(read.options);
  program_ = about;
  events_ = new std::unordered_map<CUevent, Known>;
  {
    std::lock_guard lock(foreign_mutex_);
    foreign_ = new std::unordered_map<CUdeviceptr, ForeignBlock>;
  }
  shared_.limit.set(read.options.limit);
  shared_.options = new Options(std::move(read.options));

  log::open(options().log_level, expand_path(options().log_file, about->words));
  if (ControlPage* page = control_file_.create(about->name, options().ctl == CtlMode::on)) {
    page->word.store(shared_.own_page.word.load(std::memory_order_relaxed), std::memory_order_relaxed);
    shared_.page = page;
  }
  shared_.stacks.configure(options().stack_depth.value, options().python == PythonMode::automatic);
  begin_tracking();

  if (!options().report.empty()) {
    about->report = claim_file("REPORT", expand_path(options().report, about->words), about->pid, loaded.wall);
  }
  if (!options().metrics.empty()) {
    about->metrics = expand_path(options().metrics, about->words);
    write_metrics(*this, true);
  }
  std::vector<CUcontext> accessors;
  {
    std::lock_guard lock(contexts_mutex_);
    accessors.swap(accessors_);
  }
  for (CUcontext handle : accessors) context_of(handle);
  log::info("{} (pid {}): serving, driver {}", about->name, about->pid, shared_.driver.version);
  return true;
} catch (...) {
  log::complain("no host memory to start with; running on native CUDA");
  return false;
}

// ---- finding the context and the stream --------------------------------------------------------------------------

Context* Runtime::find_context(CUcontext handle) noexcept {
  const int n = shared_.context_count.load(std::memory_order_acquire);
  for (int i = 0; i < n; ++i) {
    Context* context = shared_.contexts[static_cast<std::size_t>(i)].load(std::memory_order_relaxed);
    if (context->handle() == handle) return context;
  }
  return nullptr;
}

Context* Runtime::find_primary(CUdevice device) noexcept {
  Context* found = nullptr;
  shared_.for_each_context([&](Context& c) {
    if (c.primary() && c.device() == device && c.alive()) found = &c;
  });
  return found;
}

bool Runtime::make_context(CUcontext handle, Context*& out) noexcept try {
  const Driver& driver = shared_.driver;
  CUdevice device = 0;
  {
    CurrentContext current(driver, handle);
    if (current.result() != CUDA_SUCCESS || driver.call(driver.cuCtxGetDevice, &device) != CUDA_SUCCESS || device < 0 ||
        device >= Shared::kDevices)
      return false;
  }
  // Only contexts whose fences are known to cover all their work are served: the device's primary one, and those
  // the program created. One made from a green context is neither (contract §3).
  bool primary = false;
  unsigned flags = 0;
  int active = 0;
  if (driver.call(driver.cuDevicePrimaryCtxGetState, device, &flags, &active) == CUDA_SUCCESS && active != 0) {
    CUcontext first = nullptr;
    if (driver.call(driver.cuDevicePrimaryCtxRetain, &first, device) == CUDA_SUCCESS) {
      primary = first == handle;
      driver.call(driver.cuDevicePrimaryCtxRelease_v2, device);
    }
  }
  std::size_t total = 0;
  if (driver.call(driver.cuDeviceTotalMem_v2, &total, device) != CUDA_SUCCESS) return false;

  std::lock_guard lock(contexts_mutex_);
  if (!primary && std::find(created_.begin(), created_.end(), handle) == created_.end()) return false;
  out = find_context(handle);
  const auto admit = [&] {
    for (const Admission& one : admitted_) {
      if (one.owner == handle) out->admit(one.device, true);
    }
  };
  if (out != nullptr && out->device() == device && out->primary() == primary) {
    out->revive();
    admit();
    return true;
  }
  const int n = shared_.context_count.load(std::memory_order_relaxed);
  if (out != nullptr || n == Shared::kContexts) return false;  // the handle came again as another kind: leave it native
  out = new Context(shared_, handle, device, total, primary);
  admit();
  look_at_order(device, n != 0);
  if (out->vmm().on()) end_order("CUSHION_BACKING=vmm");  // what is clean may be unmapped, though its wait is owed
  if (total > shared_.largest_device.load(std::memory_order_relaxed))
    shared_.largest_device.store(total, std::memory_order_relaxed);
  name_device(device);
  shared_.contexts[static_cast<std::size_t>(n)].store(out, std::memory_order_relaxed);
  shared_.context_count.store(n + 1, std::memory_order_release);
  return true;
} catch (...) {
  return false;
}

void Runtime::name_device(CUdevice device) noexcept {
  auto& text = shared_.uuids[index_of(device)];
  CUuuid uuid{};
  const Driver& driver = shared_.driver;
  if (text[0] != 0 || driver.cuDeviceGetUuid_v2 == nullptr ||
      driver.call(driver.cuDeviceGetUuid_v2, &uuid, device) != CUDA_SUCCESS)
    return;
  char* to = text.data();
  for (int i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) *to++ = '-';
    const auto byte = static_cast<unsigned char>(uuid.bytes[i]);
    *to++ = "0123456789abcdef"[byte >> 4];
    *to++ = "0123456789abcdef"[byte & 15];
  }
}

// What is known against FREE=auto once a context is there.
void Runtime::look_at_order(CUdevice device, bool another) noexcept {
  int pageable = 1;
  const Driver& driver = shared_.driver;
  driver.call(driver.cuDeviceGetAttribute, &pageable, CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS, device);
  if (pageable != 0) end_order("pageable memory access");
  if (driver.cuCtxRecordEvent == nullptr) end_order("a driver before 12.5");
  if (another) end_order("a second context");
  // Their fills have a stream of their own.
  if (options().init != InitMode::none) end_order("CUSHION_INIT");
  if (options().watches()) end_order("CUSHION_GUARD or CUSHION_QUARANTINE");
}

Context* Runtime::context_of(CUcontext handle) noexcept {
  if (handle == nullptr) return nullptr;
  const std::uint64_t epoch = shared_.handle_epoch.load(std::memory_order_acquire);
  if (t_context.handle == handle && t_context.epoch == epoch) return t_context.context;
  Context* context = find_context(handle);
  if (context == nullptr || !context->alive()) {
    if (!make_context(handle, context)) context = nullptr;
  }
  t_context = {handle, context, epoch};
  return context;
}

Context* Runtime::current_context() noexcept {
  CUcontext handle = nullptr;
  InsideDriver inside;
  return shared_.driver.cuCtxGetCurrent(&handle) == CUDA_SUCCESS ? context_of(handle) : nullptr;
}

inline CUresult Runtime::identify(CUstream stream, const StreamIdentity*& identity, Context*& context) noexcept {
  const StreamCache& cache = t_streams[slot_of(stream)];
  if (cache.identity.handle != stream || !cache.named ||
      cache.epoch != shared_.handle_epoch.load(std::memory_order_acquire)) [[unlikely]]
    return identify_anew(stream, identity, context);
  identity = &cache.identity;
  context = cache.context;
  return CUDA_SUCCESS;
}

// Handles 0, 1 and 2, which mean another stream in each context, and streams that this thread has not met yet.
CUresult Runtime::identify_anew(CUstream stream, const StreamIdentity*& identity, Context*& context) noexcept {
  StreamCache& cache = t_streams[slot_of(stream)];
  const std::uint64_t epoch = shared_.handle_epoch.load(std::memory_order_acquire);
  CUcontext current = nullptr;
  if (is_legacy(stream) || is_per_thread(stream)) {
    InsideDriver inside;
    const CUresult result = shared_.driver.cuCtxGetCurrent(&current);
    if (result != CUDA_SUCCESS) return result;
    if (current == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  }
  if (cache.identity.handle != stream || cache.current != current || cache.epoch != epoch || cache.context == nullptr) {
    cache = {{stream, kLegacyId, 0, {}}, current, nullptr, epoch, false};
    if (const CUresult result = ask_identity(cache); result != CUDA_SUCCESS) {
      cache = {};
      return result;
    }
    cache.named = current == nullptr && cache.context != nullptr;
  }
  identity = &cache.identity;
  context = cache.context;
  return CUDA_SUCCESS;
}

CUresult Runtime::ask_identity(StreamCache& cache) noexcept {
  const Driver& driver = shared_.driver;
  const CUstream stream = cache.identity.handle;
  InsideDriver inside;
  CUcontext owner = cache.current;
  if (owner == nullptr) {
    if (driver.cuStreamGetCtx == nullptr) return CUDA_ERROR_NOT_SUPPORTED;
    if (const CUresult result = driver.cuStreamGetCtx(stream, &owner); result != CUDA_SUCCESS) return result;
  }
  if (!is_legacy(stream)) {
    // Before driver 12.0 there are no ids. A handle serves: the destroy hook ends its lane before it is reused.
    unsigned long long id = is_per_thread(stream) ? static_cast<std::uint64_t>(thread_id()) | std::uint64_t{1} << 63
                                                  : reinterpret_cast<std::uintptr_t>(stream);
    if (driver.cuStreamGetId != nullptr && !mutated(Mutation::stream_known_by_handle)) {
      if (const CUresult result = driver.cuStreamGetId(stream, &id); result != CUDA_SUCCESS) return result;
    }
    cache.identity.id = id;
  }
  if (!is_legacy(stream)) {
    unsigned flags = 0;
    cache.identity.blocking = is_per_thread(stream) || driver.cuStreamGetFlags == nullptr ||
                              driver.cuStreamGetFlags(stream, &flags) != CUDA_SUCCESS ||
                              (flags & CU_STREAM_NON_BLOCKING) == 0;
  }
  if (is_per_thread(stream)) {
    cache.identity.owner_thread = thread_id();
    shared_.blocking_streams.store(true, std::memory_order_relaxed);
    shared_.streams.lose();  // only its own thread can ask it
  }
  cache.context = context_of(owner);
  return CUDA_SUCCESS;
}

// ---- allocation and free -----------------------------------------------------------------------------------------

bool Runtime::malloc(CUdeviceptr* out, std::size_t bytes, Api api) noexcept {
  if (out == nullptr || bytes == 0 || options().allocator == AllocatorKind::cuda) return false;
  Context* context = current_context();
  if (context == nullptr) return false;
  return options().allocator == AllocatorKind::async ? serve_from_driver_pool(*context, out, bytes, api)
                                                     : serve(*context, {bytes, api, nullptr, note(bytes)}, out);
}

inline bool Runtime::serve(Context& context, const Request& request, CUdeviceptr* out) noexcept {
  if (!context.allocate(request, out)) return false;
  came(request.note, *out, request.bytes);
  return true;
}

void Runtime::use(std::uint64_t& live, std::uint64_t& held) noexcept {
  live = held = 0;
  shared_.for_each_context([&](const Context& context) {
    const Usage usage = context.usage();
    live += usage.requested.current();
    held += usage.held.current();
  });
  for (int device = 0; device < kDevices; ++device) {
    const std::uint64_t of_driver = shared_.forwarded(device).current() + shared_.from_driver_pool(device).current();
    live += of_driver;
    held += of_driver;
  }
}

void Runtime::add_to_timeline(std::uint64_t ns) noexcept {
  timeline_.add(ns, [&](std::uint64_t& live, std::uint64_t& held) { use(live, held); });
  peak_map_.update(shared_);
}

Note Runtime::note_now(std::uint64_t bytes) noexcept {
  Note note{0, static_cast<std::uint32_t>(thread_id()), 0};
  const Tracking tracking = shared_.page->tracking();
  if (tracking.level == TrackLevel::stacks) note.stack = shared_.stacks.take(0);
  if (tracking.level == TrackLevel::sampled) note.stack = shared_.stacks.sample(bytes, tracking.interval);
  // Where that costs little, blocks have exact lifetimes. A thread's times grow by 1 ns at least: they say the order.
  static constinit thread_local std::uint64_t t_last = 0;
  note.time = t_last = std::max(note.stack != 0 ? monotonic_ns() : coarse_ns(), t_last + 1);
  if (timeline_.due(note.time)) [[unlikely]]
    add_to_timeline(note.time);
  return note;
}

bool Runtime::malloc_async(CUdeviceptr* out, std::size_t bytes, CUstream stream) noexcept {
  if (out == nullptr || bytes == 0 || options().allocator == AllocatorKind::cuda) return false;
  if (shared_.gate.capturing(shared_.driver, stream)) return false;  // a graph node
  const StreamIdentity* identity = nullptr;
  Context* context = nullptr;
  if (identify(stream, identity, context) != CUDA_SUCCESS || context == nullptr ||
      native_async_[index_of(context->device())].load(std::memory_order_relaxed)) {
    return false;
  }
  if (options().allocator == AllocatorKind::async) {
    context->async().prepare();
    return false;
  }
  return serve(*context, {bytes, Api::malloc_async, identity, note(bytes)}, out);
}

bool Runtime::serve_from_driver_pool(Context& context, CUdeviceptr* out, std::size_t bytes, Api api) noexcept {
  if (native_async_[index_of(context.device())].load(std::memory_order_relaxed)) return false;
  const std::uint64_t generation = context.generation();
  const Limit::Claim claim = shared_.limit.claim(shared_, context.device(), bytes, bytes, bytes);
  if (!claim) return false;
  PoolBlock served;
  if (!context.async().allocate(bytes, &served)) return false;
  ForeignBlock block{bytes, note(bytes), context.handle(), context.device(), api};
  block.server = &context;
  block.base = served.base;
  try {
    std::lock_guard lock(foreign_mutex_);
    if (generation != context.generation()) return false;  // reset meanwhile: the block went along
    block.serial = ++foreign_serial_;
    add_foreign(served.address, block);
  } catch (...) {  // no host memory to remember it by: its free would not wait
    context.async().free(served.base);
    return false;
  }
  came(block.note, served.address, bytes);
  if (block.note.time != 0) count(shared_.counters.sizes[size_class(bytes)]);
  count(shared_.counters.served[static_cast<int>(api)]);
  *out = served.address;
  return true;
}

template <class Free>
std::optional<CUresult> Runtime::free_to_driver_pool(CUdeviceptr address, Free free) noexcept {
  if (options().allocator != AllocatorKind::async) return std::nullopt;
  ForeignBlock block;
  {
    std::lock_guard lock(foreign_mutex_);
    const auto found = foreign_->find(address);
    if (found == foreign_->end() || found->second.server == nullptr) return std::nullopt;
    if (found->second.freeing) return CUDA_ERROR_INVALID_VALUE;
    found->second.freeing = true;
    block = found->second;
  }
  const CUresult result = free(*block.server, block.base);
  if (result == CUDA_SUCCESS) count(shared_.counters.frees_served);
  std::lock_guard lock(foreign_mutex_);
  const auto found = foreign_->find(address);
  if (found == foreign_->end() || found->second.serial != block.serial) return result;  // reset, or handed out anew
  if (result == CUDA_SUCCESS) {
    left(block.note, address, block.size);
    uncount(block);
    foreign_->erase(found);
  } else {
    found->second.freeing = false;
  }
  return result;
}

std::optional<CUresult> Runtime::free_stream_ordered(CUdeviceptr address) noexcept {
  if (options().allocator != AllocatorKind::async) return std::nullopt;
  const std::optional<ForeignBlock> block = forget_foreign(address);
  if (!block) return std::nullopt;
  Context* context = nullptr;
  if (block->api == Api::malloc_async && !native_async_[index_of(block->device)].load(std::memory_order_relaxed))
    context = find_context(block->context);
  const std::optional<CUresult> result = context != nullptr ? context->async().free_in_order(address) : std::nullopt;
  if (result == CUDA_SUCCESS) {
    count(shared_.counters.frees_forwarded);
    foreign_freed(address, *block);
  } else {
    restore_foreign(address, *block);
  }
  return result;
}

bool Runtime::owns(CUdeviceptr address) noexcept {
  if (shared_.map.find(address) != nullptr) return true;
  std::unique_lock lock(foreign_mutex_, std::defer_lock);  // in a forked child it may be held for ever
  if (!lock_within(lock, Patience::some) || foreign_ == nullptr) return false;
  const auto found = foreign_->find(address);
  return found != foreign_->end() && found->second.server != nullptr;
}

std::optional<Runtime::NativeBlock> Runtime::native_block(CUdeviceptr address, CUdeviceptr range_start) noexcept {
  const Segment* segment = shared_.map.find(address);
  if (segment == nullptr) {
    if (shared_.options == nullptr || options().allocator != AllocatorKind::async) return std::nullopt;
    std::lock_guard lock(foreign_mutex_);
    for (const CUdeviceptr base : {range_start, CUdeviceptr{round_up(range_start, kBigAlignment)}}) {  // async.h
      const auto found = foreign_->find(base);
      if (found == foreign_->end() || found->second.base != range_start) continue;
      if (address - base >= found->second.size) break;
      return NativeBlock{found->second.context, base, found->second.size, found->second.api};
    }
    return std::nullopt;
  }
  Arena& arena = *segment->arena();
  std::lock_guard lock(arena.mutex);
  if (shared_.map.find(address) != segment) return std::nullopt;  // a superblock's that came or went
  const Block* block = segment->last_before(address);
  if (block == nullptr || !Pool::in_use(*block) || address - block->address() >= block->size) return std::nullopt;
  return NativeBlock{arena.context().handle(), block->address(), block->live.requested, block->api};
}

std::optional<CUresult> Runtime::free(CUdeviceptr address) noexcept {
  Segment* segment = shared_.map.find(address);
  if (segment == nullptr) {
    const auto answer =
        free_to_driver_pool(address, [](Context& context, CUdeviceptr base) { return context.async().free(base); });
    return answer ? answer : free_stream_ordered(address);
  }
  const Context::Found found = Context::find(*segment, address);
  if (found.block == nullptr) return Context::wrong_free(shared_, address, "cuMemFree");
  return found.arena->context().free(found, shared_.ipc.any() && shared_.ipc.has(address));
}

std::optional<CUresult> Runtime::free_async(CUdeviceptr address, CUstream stream) noexcept {
  Segment* segment = shared_.map.find(address);
  if (segment == nullptr) {  // memory of the driver's pool has the driver's order
    return free_to_driver_pool(address, [&](Context&, CUdeviceptr base) {
      return shared_.driver.call(shared_.driver.cuMemFreeAsync, base, stream);
    });
  }
  const Context::Found found = Context::find(*segment, address);
  if (found.block == nullptr) return Context::wrong_free(shared_, address, "cuMemFreeAsync");
  if (shared_.gate.may_be_open()) {
    bool capturing = false;
    if (const CUresult result = shared_.gate.ask(shared_.driver, stream, capturing); result != CUDA_SUCCESS)
      return result;
    if (capturing) return CUDA_ERROR_INVALID_VALUE;  // as natively (contract §4)
  }
  const StreamIdentity* identity = nullptr;
  Context* stream_context = nullptr;
  const CUresult result = identify(stream, identity, stream_context);
  if (result != CUDA_SUCCESS) return result;
  if (stream_context == nullptr) {  // its context is not served: its work cannot be followed, but it can be waited for
    RelaxedCaptureMode relaxed(shared_.driver);
    const CUresult waited = shared_.driver.call(shared_.driver.cuStreamSynchronize, stream);
    return waited != CUDA_SUCCESS ? waited : free(address).value_or(CUDA_ERROR_INVALID_VALUE);
  }
  return found.arena->context().free_async(found, *identity, *stream_context);
}

// ---- what went to the driver -------------------------------------------------------------------------------------

void Runtime::forwarded_block(Api api, CUdeviceptr address, std::size_t bytes, CUstream stream,
                              bool stream_ordered) noexcept try {
  if (address == 0) return;
  const Driver& driver = shared_.driver;
  ForeignBlock block{bytes, note(bytes), nullptr, 0, api};
  {
    InsideDriver inside;
    CUdevice device = 0;
    driver.cuCtxGetCurrent(&block.context);
    if (stream_ordered) context_of_stream(stream, block.context);
    CurrentContext current(driver, block.context);
    if (driver.cuCtxGetDevice(&device) == CUDA_SUCCESS) block.device = device;
    unsigned long long id = is_legacy(stream) ? kLegacyId : 0;
    if (stream_ordered && !is_legacy(stream) && driver.cuStreamGetId != nullptr) driver.cuStreamGetId(stream, &id);
    if (stream_ordered) block.stream = static_cast<std::uint32_t>(id);
  }
  came(block.note, address, bytes);
  if (block.note.time != 0) count(shared_.counters.sizes[size_class(bytes)]);
  restore_foreign(address, block);
} catch (...) {  // no host memory to remember it by: the report will lack it
}

void Runtime::uncount(const ForeignBlock& block) noexcept {
  foreign_bytes(block).subtract(block.size);
  if (block.api != Api::managed)
    shared_.limit.foreign(static_cast<int>(index_of(block.device))).fetch_sub(block.size, std::memory_order_relaxed);
}

Limit::Claim Runtime::claim(Api api, std::uint64_t bytes, CUstream stream) noexcept {
  if (!shared_.limit.on() || api == Api::managed || bytes == 0) return {};
  CUdevice device = 0;
  {
    InsideDriver inside;
    CUcontext context = nullptr;
    shared_.driver.cuCtxGetCurrent(&context);
    context_of_stream(stream, context);
    CurrentContext current(shared_.driver, context);
    if (shared_.driver.cuCtxGetDevice(&device) != CUDA_SUCCESS) return {};  // the call will fail
  }
  const auto claimed = [&] { return shared_.limit.claim(shared_, device, bytes, bytes, bytes); };
  Limit::Claim claim = claimed();
  const bool helps = options().suballocates() && !shared_.limit.hopeless(shared_.driver, device, bytes);
  return claim || !helps || !relieve_here(bytes) ? std::move(claim) : claimed();
}

// The context that a stream-ordered call's block belongs to, if the stream says it.
void Runtime::context_of_stream(CUstream stream, CUcontext& context) noexcept {
  if (!is_legacy(stream) && !is_per_thread(stream) && shared_.driver.cuStreamGetCtx != nullptr)
    shared_.driver.cuStreamGetCtx(stream, &context);
}

std::optional<ForeignBlock> Runtime::forget_foreign(CUdeviceptr address) noexcept {
  std::lock_guard lock(foreign_mutex_);
  const auto found = foreign_->find(address);
  if (found == foreign_->end()) return std::nullopt;
  const ForeignBlock block = found->second;
  foreign_->erase(found);
  uncount(block);
  return block;
}

void Runtime::add_foreign(CUdeviceptr address, const ForeignBlock& block) {
  const auto [at, fresh] = foreign_->try_emplace(address, block);
  if (!fresh) {  // the old one was freed out of our sight, or its free has not returned yet
    left(at->second.note, address, at->second.size);
    uncount(at->second);
    at->second = block;
  }
  foreign_bytes(block).add(block.size);
  if (block.api != Api::managed)
    shared_.limit.foreign(static_cast<int>(index_of(block.device))).fetch_add(block.size, std::memory_order_relaxed);
}

void Runtime::restore_foreign(CUdeviceptr address, const ForeignBlock& block) noexcept try {
  std::lock_guard lock(foreign_mutex_);
  add_foreign(address, block);
} catch (...) {
}

std::uint64_t Runtime::trim() noexcept try {
  std::uint64_t gone = 0;
  shared_.for_each_context([&](Context& context) {
    if (!context.alive()) return;
    const bool async = options().allocator == AllocatorKind::async;
    const auto held = [&] { return async ? context.async().unused() : context.usage().held.current(); };
    const std::uint64_t before = held();
    async ? context.async().trim(0) : context.relieve(0) != 0;
    gone += before - std::min(before, held());
  });
  return gone;
} catch (...) {
  return 0;
}

void Runtime::release_idle() noexcept try {
  shared_.for_each_context([&](Context& context) {
    if (context.alive() && options().suballocates()) context.release_idle();
  });
} catch (...) {
}

bool Runtime::relieve(std::size_t bytes) noexcept {
  return relieve_here(bytes) || (options().ask_others == AskMode::on && relieve_elsewhere(bytes));
}

// One thread asks at a time, with no lock held that anybody else waits for.
bool Runtime::relieve_elsewhere(std::size_t bytes) noexcept {
  if (bytes > shared_.largest_device.load(std::memory_order_relaxed) || asking_.exchange(true)) return false;
  bool any = false;
  try {
    any = others_trim(std::chrono::milliseconds(options().oom_wait.ns / 1'000'000));
  } catch (...) {  // no host memory
  }
  asking_.store(false);
  return any;
}

bool Runtime::relieve_here(std::size_t bytes) noexcept try {
  if (bytes > shared_.largest_device.load(std::memory_order_relaxed)) return false;
  const std::uint64_t deadline = monotonic_ns() + options().oom_wait.ns;
  std::uint64_t released = 0;
  shared_.for_each_context([&](Context& context) {
    const std::uint64_t now = monotonic_ns();
    const std::uint64_t patience = now < deadline && released == 0 ? deadline - now : 0;
    if (!context.alive()) return;
    released += options().allocator == AllocatorKind::async ? std::uint64_t{context.async().trim(patience)}
                                                            : context.relieve(patience);
  });
  return released != 0;
} catch (...) {
  return false;
}

void Runtime::in_background() noexcept {
  std::lock_guard lock(background_);
  if (background_over_) return;
  if (shared_.wants_attention()) attend();
  if (options().idle_release.ns != 0) release_idle();
}

void Runtime::end_background() noexcept {
  background_over_.store(true);
  std::unique_lock lock(background_, std::defer_lock);
  lock_within(lock, Patience::some);  // what is under way
}

std::uint64_t Runtime::unused_in_current() noexcept {
  CUcontext handle = nullptr;
  InsideDriver inside;
  if (shared_.driver.cuCtxGetCurrent(&handle) != CUDA_SUCCESS) return 0;
  Context* current = find_context(handle);
  if (current == nullptr) return 0;
  if (options().allocator == AllocatorKind::async) {  // the pools are the device's
    Context* primary = find_primary(current->device());
    return primary != nullptr ? primary->async().unused() : 0;
  }
  std::uint64_t bytes = 0;
  shared_.for_each_context([&](Context& context) {
    if (context.alive() && context.device() == current->device()) bytes += context.unused();
  });
  return bytes;
}

std::uint64_t Runtime::used_in_current(std::uint64_t unused) noexcept {
  CUdevice device = 0;
  InsideDriver inside;
  if (shared_.driver.cuCtxGetDevice(&device) != CUDA_SUCCESS) return 0;
  const std::uint64_t used = shared_.limit.used(shared_, device);
  return options().suballocates() ? used - std::min(used, unused)
                                  : used;  // of the driver's pool only what is used counts
}

// ---- order -------------------------------------------------------------------------------------------------------

Runtime::Mark Runtime::before_record(CUevent event, CUstream stream) noexcept try {
  if ((shared_.stream_lanes.load(std::memory_order_relaxed) == 0 &&
       event_count_.load(std::memory_order_relaxed) == 0) ||
      shared_.foreign_events.load(std::memory_order_relaxed)) {
    return {};
  }
  Mark mark;
  const StreamIdentity* identity = nullptr;
  Context* context = nullptr;
  if (!shared_.gate.capturing(shared_.driver, stream) && identify(stream, identity, context) == CUDA_SUCCESS &&
      context != nullptr) {
    mark.position = context->position(identity->id);
    mark.context = mark.position.serial != 0 ? context : nullptr;
  }
  // From here until after_record the event says nothing: which of two records at the same time is the last, only the
  // driver knows.
  std::lock_guard lock(events_mutex_);
  Known& known = (*events_)[event];
  mark.version = ++known.version;
  mark.alone = known.recording++ == 0;
  known.context = nullptr;
  event_count_.store(static_cast<int>(events_->size()), std::memory_order_relaxed);
  return mark;
} catch (...) {
  return {};
}

void Runtime::after_record(CUevent event, Mark mark, bool success) noexcept {
  if (mark.version == 0) return;
  std::lock_guard lock(events_mutex_);
  const auto found = events_->find(event);
  if (found == events_->end()) return;
  Known& known = found->second;
  --known.recording;
  if (success && mark.alone && known.version == mark.version && mark.context != nullptr) {
    known.context = mark.context;
    known.position = std::move(mark.position);
  } else if (known.recording == 0) {
    events_->erase(found);
    event_count_.store(static_cast<int>(events_->size()), std::memory_order_relaxed);
  }
}

Runtime::Mark Runtime::before_wait(CUevent event) noexcept try {
  if (event_count_.load(std::memory_order_relaxed) == 0 || shared_.foreign_events.load(std::memory_order_relaxed))
    return {};
  std::lock_guard lock(events_mutex_);
  const auto found = events_->find(event);
  if (found == events_->end() || found->second.context == nullptr) return {};
  return {found->second.context, found->second.position, found->second.version, true};
} catch (...) {
  return {};
}

void Runtime::after_wait(CUevent event, CUstream stream, const Mark& mark) noexcept try {
  if (mark.context == nullptr || shared_.gate.capturing(shared_.driver, stream)) return;
  {
    std::lock_guard lock(events_mutex_);
    const auto found = events_->find(event);
    if (found == events_->end() || found->second.version != mark.version) return;  // recorded anew meanwhile
  }
  const StreamIdentity* identity = nullptr;
  Context* context = nullptr;
  if (identify(stream, identity, context) == CUDA_SUCCESS && context == mark.context)
    context->order_after(*identity, mark.position);
} catch (...) {
}

void Runtime::forget_event(CUevent event) noexcept {
  if (event_count_.load(std::memory_order_relaxed) == 0) return;
  std::lock_guard lock(events_mutex_);
  events_->erase(event);
  event_count_.store(static_cast<int>(events_->size()), std::memory_order_relaxed);
}

void Runtime::stream_created(CUstream stream, unsigned flags) noexcept try {
  if ((flags & CU_STREAM_NON_BLOCKING) == 0) shared_.blocking_streams.store(true, std::memory_order_relaxed);
  if (shared_.driver.cuCtxRecordEvent != nullptr) return;
  CUcontext context = nullptr;
  if (shared_.driver.call(shared_.driver.cuCtxGetCurrent, &context) == CUDA_SUCCESS) {
    shared_.streams.add(stream, context);
  } else {
    shared_.streams.lose();
  }
} catch (...) {  // unknown to streams: then nothing it might still use may be called idle
  shared_.streams.lose();
}

void Runtime::stream_going(CUstream stream) noexcept try {
  const StreamIdentity* identity = nullptr;
  Context* context = nullptr;
  const bool own = !is_legacy(stream) && !is_per_thread(stream);
  if (own && identify(stream, identity, context) == CUDA_SUCCESS && context != nullptr)
    context->stream_going(*identity);
  shared_.handle_epoch.fetch_add(1, std::memory_order_release);
} catch (...) {
}

Runtime::SyncMark Runtime::before_synchronize(CUcontext handle) noexcept {
  InsideDriver inside;
  if (handle == nullptr && shared_.driver.cuCtxGetCurrent(&handle) != CUDA_SUCCESS) return {};
  Context* context = find_context(handle);
  if (context == nullptr || !context->alive()) return {};
  return {context, context->advance(), context->generation()};
}

void Runtime::after_synchronize(const SyncMark& mark) noexcept try {
  if (mark.context != nullptr) mark.context->synchronized(mark.stamp, mark.generation);
} catch (...) {
}

// ---- contexts ----------------------------------------------------------------------------------------------------

void Runtime::context_created(CUcontext context) noexcept try {
  std::lock_guard lock(contexts_mutex_);
  created_.push_back(context);
} catch (...) {  // not remembered: it is not served
}

void Runtime::failed(CUresult result) noexcept {
  CUcontext handle = nullptr;
  InsideDriver inside;
  if (!is_sticky(result) || shared_.driver.cuCtxGetCurrent(&handle) != CUDA_SUCCESS) return;
  if (Context* context = find_context(handle)) context->note(result);
}

void Runtime::ended(CUcontext handle) noexcept try {
  shared_.ipc.forget(handle);
  shared_.gate.forget(handle);
  shared_.streams.remove_all(handle);
  if (Context* context = find_context(handle)) {
    context->discard();
    shared_.order.forget();
  }
  bool created = false;
  {
    std::lock_guard lock(contexts_mutex_);
    created = std::erase(created_, handle) != 0;
    std::erase(accessors_, handle);
    std::erase_if(admitted_, [&](const Admission& one) { return one.owner == handle || one.accessor == handle; });
  }
  if (foreign_ == nullptr) return;
  // Memory of a device's pool outlives the contexts that the program created (measured). A block whose context the
  // driver would not name may have gone with any.
  const auto gone = [&](const ForeignBlock& block) {
    const bool of_pool = block.api == Api::malloc_async || block.api == Api::from_pool;
    if (of_pool && created) return false;
    return block.context == handle || block.context == nullptr;
  };
  std::lock_guard lock(foreign_mutex_);
  std::erase_if(*foreign_, [&](const auto& entry) {
    if (!gone(entry.second)) return false;
    left(entry.second.note, entry.first, entry.second.size);
    uncount(entry.second);
    if (entry.second.server != nullptr) {
      count(shared_.counters.reset_blocks);
      count(shared_.counters.reset_bytes, entry.second.size);
    }
    return true;
  });
} catch (...) {
}

void Runtime::peer_enabled(CUcontext peer, bool started) noexcept try {
  // The accessor's context must be known even if it never allocates: its work may touch our memory.
  shared_.peers.store(true, std::memory_order_seq_cst);
  InsideDriver inside;
  CUcontext handle = nullptr;
  CUdevice device = 0;
  if (shared_.driver.cuCtxGetCurrent == nullptr || shared_.driver.cuCtxGetCurrent(&handle) != CUDA_SUCCESS ||
      shared_.driver.cuCtxGetDevice(&device) != CUDA_SUCCESS)
    return;
  if (started) context_of(handle);
  {
    std::lock_guard lock(contexts_mutex_);
    if (!started) accessors_.push_back(handle);
    admitted_.push_back({peer, handle, device});
  }
  // After that: an owner that is not found yet will find the admission.
  Context* owner = started ? find_context(peer) : nullptr;
  if (owner != nullptr && owner->alive()) owner->admit(device, true);
} catch (...) {
}

void Runtime::peer_disabled(CUcontext peer, bool started) noexcept try {
  CUcontext handle = nullptr;
  CUdevice device = 0;
  {
    InsideDriver inside;
    if (shared_.driver.cuCtxGetCurrent == nullptr || shared_.driver.cuCtxGetCurrent(&handle) != CUDA_SUCCESS ||
        shared_.driver.cuCtxGetDevice(&device) != CUDA_SUCCESS)
      return;
  }
  bool another = false;  // of the same device, which access is given to
  {
    std::lock_guard lock(contexts_mutex_);
    std::erase_if(admitted_, [&](const Admission& one) { return one.owner == peer && one.accessor == handle; });
    for (const Admission& one : admitted_) another = another || (one.owner == peer && one.device == device);
  }
  Context* owner = started && !another ? find_context(peer) : nullptr;
  if (owner != nullptr && owner->alive()) owner->admit(device, false);
} catch (...) {
}

void Runtime::every_pool_changed() noexcept {
  for (auto& device : native_async_) device.store(true, std::memory_order_relaxed);
}

void Runtime::report(const char* how, Patience patience) noexcept {
  if (program_ == nullptr || program_->pid != getpid()) return;  // a forked child, or a vfork child about to exec
  if (reported_.exchange(true)) return;
  if (options().watches() && patience != Patience::none)
    shared_.for_each_context([&](Context& context) { context.guard().finish(patience); });
  write_report(*this, how, patience);
  if (!program_->metrics.empty() && patience != Patience::none) write_metrics(*this, false);
  control_file_.remove();
}

int Runtime::exit_code(int status) noexcept {
  if (status != 0 || program_ == nullptr || program_->pid != getpid() || options().leak_exit_code.value == 0)
    return status;
  return leaks(*this) ? static_cast<int>(options().leak_exit_code.value) : status;
}

void Runtime::out_of_memory(std::uint64_t bytes, Api api) noexcept {
  const bool wanted = shared_.tracks() || options().log_level >= LogLevel::warn;
  // What no device could ever hold is a question, not a shortage.
  if (!wanted || bytes > shared_.largest_device.load(std::memory_order_relaxed) || program_->pid != getpid() ||
      said_out_of_memory_.exchange(true, std::memory_order_relaxed))
    return;
  say_out_of_memory(*this, bytes, api);
}

}  // namespace cushion
