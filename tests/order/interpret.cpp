#include "tests/order/interpret.h"

#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <deque>
#include <optional>

#include "tests/emulator/stepped_api.h"
#include "tests/harness/driver.h"
#include "tests/order/crew.h"

namespace order {
namespace {

const harness::Driver& driver() { return harness::driver_without_per_thread(); }

Trace* reported = nullptr;

[[noreturn]] void End(const char* finding) {
  std::snprintf(reported->finding, sizeof reported->finding, "%s", finding);
  _exit(1);
}

struct Emulator {
#define X(name) decltype(&emu##name) name = reinterpret_cast<decltype(&emu##name)>(dlsym(driver().library, "emu" #name))
  X(Stepped);
  X(Last);
  X(LastIsAfter);
  X(HostAccess);
  X(StreamIsAfter);
  X(HostIsAfter);
  X(ContextIsStuck);
  X(StreamIsStuck);
  X(EventIsStuck);
  X(CaptureForbids);
#undef X
};

struct Skip {};
void Need(bool condition) {
  if (!condition) throw Skip{};
}

enum class Kind { kDevice, kOrdered, kGraph, kManaged, kHost };

struct Block {
  bool live = false;
  Kind kind = Kind::kDevice;
  CUdeviceptr address = 0;
  std::uint32_t bytes = 0;
  int context = 0;
  int generation = -1;  // the step that allocated it
  EmuPoint born{};      // of a stream-ordered one: usable after it
  struct Touch {
    EmuPoint point;
    int context;  // of the stream that it was put on
  };
  std::vector<Touch> touched;  // by every access so far
  int graph_stream = -1;       // of a graph's: the stream that captures
};

struct Node {  // of a captured graph
  int block;
  int generation;
  bool writes;
  int signer;
};

struct Stream {
  bool live = false;
  CUstream handle = nullptr;
  int context = 0;
  bool blocking = true;
  bool capturing = false;
  int capturer = 0;
  int capture_mode = 0;
  int capture = 0;  // tells captures apart
  std::vector<Node> nodes;
};

struct Event {
  bool live = false;
  CUevent handle = nullptr;
  int context = 0;
  int capture = 0;  // 0: it stands for no place in a graph
};

struct Graph {
  bool live = false;
  int context = 0;
  CUgraph graph = nullptr;
  CUgraphExec exec = nullptr;
  std::vector<Node> nodes;
};

struct ContextSlot {
  bool live = false;
  CUcontext handle = nullptr;
  CUdevice device = 0;
};

// What a kernel of the program does: reads one block's first bytes and writes another's.
struct Kernel {
  volatile std::uint64_t* from;
  std::uint64_t* observed;
  volatile std::uint64_t* to;
  std::uint64_t signature;
  static void Body(void* data) {
    const auto* k = static_cast<const Kernel*>(data);
    if (k->from != nullptr) *k->observed = *k->from;
    if (k->to != nullptr) *k->to = k->signature;
  }
};

constexpr int kSecondDevice = 2;  // the slot of its primary context

class Interpreter {
 public:
  Interpreter(const Program& program, const RunOptions& options, Trace& trace)
      : program_(program), options_(options), trace_(trace) {}

  void Run() {
    EmuStepped settings{};
    settings.seed = options_.seed;
    settings.deadlock = End;
    settings.guaranteed = native() ? 1 : 0;
    settings.memory = native() ? std::uint64_t{64} << 30 : 0;  // what natively depends on its luck is not guaranteed
    settings.free_returns = native() && options_.free_returns ? 1 : 0;
    emu_.Stepped(&settings);
    Start();
    for (step_ = 0; step_ < static_cast<int>(program_.size()) && !lost_; ++step_) {
      if (!native() && !options_.native->step[at(step_)].executed) continue;
      trace_.at = static_cast<std::int16_t>(step_);
      crew_.Run(now().thread, [this] { Perform(); });
      if (ends_ != 0) {
        crew_.End(ends_);
        modes_[at(ends_)] = CU_STREAM_CAPTURE_MODE_RELAXED;
        ends_ = 0;
      }
    }
    trace_.at = static_cast<std::int16_t>(step_);
    Finish();
    trace_.finished = true;
  }

 private:
  static std::size_t at(int index) { return static_cast<std::size_t>(index); }
  bool native() const { return options_.native == nullptr; }
  const Step& now() const { return program_[at(step_)]; }
  StepTrace& log() { return trace_.step[at(step_)]; }

  void Start() {
    driver().Init(0);
    Retain(0);
    driver().CtxSetCurrent(contexts_[0].handle);
    CUmodule module = nullptr;
    driver().ModuleLoadData(&module, "");
    driver().ModuleGetFunction(&call_, module, "k_call");
    driver().ModuleGetFunction(&spin_, module, "k_spin");
  }

  // Whatever is open comes to its end.
  void Finish() {
    for (std::uint32_t& flag : flags_) flag = 1;
    for (int slot = kFirstCreatedStream; slot < kStreams; ++slot) {
      Stream& stream = streams_[at(slot)];
      if (!stream.live || !stream.capturing) continue;
      CUgraph graph = nullptr;
      crew_.Run(stream.capturer, [&] { driver().StreamEndCapture(stream.handle, &graph); });
    }
    for (const ContextSlot& context : contexts_) {
      if (!context.live) continue;
      driver().CtxSetCurrent(context.handle);
      const CUresult result = driver().CtxSynchronize();
      if (result != CUDA_SUCCESS) End("the last cuCtxSynchronize fails");
    }
  }

  void Perform() {
    try {
      const CUresult result = Execute();
      log().executed = true;
      log().result = static_cast<int>(result);
    } catch (const Skip&) {
      log() = {};
      // For want of a block that found no memory. What the step orders natively is missing from here on (a free in a
      // stream orders nothing): what follows could be the program's own fault.
      lost_ = !native() && now().what != Do::kFreeAsync;
    }
  }

  // ---- what a step names ---------------------------------------------------------------------------------------

  // The primary context of a device.
  void Retain(int slot) {
    ContextSlot& context = contexts_[at(slot)];
    context.device = slot / 2;
    context.live = driver().DevicePrimaryCtxRetain(&context.handle, context.device) == CUDA_SUCCESS;
  }

  ContextSlot& Enter(int slot) {
    ContextSlot& context = contexts_[at(slot)];
    if (slot == kSecondDevice && context.handle == nullptr) Retain(slot);
    Need(context.live);
    driver().CtxSetCurrent(context.handle);
    return context;
  }

  // The stream of the step, its context current.
  Stream& StreamNow() {
    const Step& s = now();
    if (s.stream >= kFirstCreatedStream) {
      Stream& stream = streams_[at(s.stream)];
      Need(stream.live);
      Enter(stream.context);
      if (stream.capturing && native())
        Need(stream.capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED || stream.capturer == s.thread);
      return stream;
    }
    Enter(s.context);
    Stream& stream = common_;
    stream.live = true;
    stream.context = s.context;
    if (s.stream == 0) {
      stream.handle = s.mode == 0 ? nullptr : CU_STREAM_LEGACY;
      LegacyIsFree(s.context);
    } else {
      stream.handle = CU_STREAM_PER_THREAD;
    }
    return stream;
  }

  // While a blocking stream captures, the legacy one is not touched (contract §4).
  void LegacyIsFree(int context) {
    Need(std::none_of(streams_.begin(), streams_.end(), [&](const Stream& stream) {
      return stream.live && stream.capturing && stream.blocking && stream.context == context;
    }));
  }

  bool AnyCapture(int context = -1) const {
    return std::any_of(streams_.begin(), streams_.end(), [&](const Stream& stream) {
      return stream.live && stream.capturing && (context < 0 || stream.context == context);
    });
  }

  // For calls that a capture may forbid.
  void Unsafe() {
    if (native()) Need(emu_.CaptureForbids() == 0);
  }

  Block& BlockNow(int slot) {
    Block& block = blocks_[at(slot)];
    Need(block.live);
    return block;
  }

  // ---- memory that is touched ----------------------------------------------------------------------------------

  // Cushion sees the thread's own stream when a kernel is launched on it, or memory allocated or freed; not a copy or a
  // fill that names it by its handle (README.md).
  void OwnStreamIsSeen() { Need(now().stream != 1 || own_stream_seen_); }

  // Whether work put on the stream now may touch the block.
  void MayTouch(const Stream& stream, const Block& block, bool copies = false) {
    // Kernels use their own context's memory; copies reach every context's on the device.
    Need(copies ? contexts_[at(block.context)].live &&
                      contexts_[at(block.context)].device == contexts_[at(stream.context)].device
                : block.context == stream.context);
    Need(block.kind != Kind::kGraph || (stream.capturing && &stream == &streams_[at(block.graph_stream)]));
    if (native() && block.kind == Kind::kOrdered && !stream.capturing)
      Need(emu_.StreamIsAfter(stream.handle, &block.born, 0) != 0);
  }

  void Note(Block& block, int context, bool writes, int signer) {
    StepTrace& step = log();
    if (step.accesses < StepTrace::kMostAccesses) {
      step.access[step.accesses++] = {static_cast<std::int16_t>(block.generation), writes,
                                      static_cast<std::int16_t>(signer)};
    }
    block.touched.push_back({points_[at(step_)], context});
  }

  // After the call that put the step's work on its stream, or announced the host's access.
  void Touched() {
    emu_.Last(&points_[at(step_)]);
    for (int earlier = 0; earlier < step_; ++earlier) {
      if (points_[at(earlier)].count != 0 && emu_.LastIsAfter(&points_[at(earlier)]) != 0) log().after.set(at(earlier));
    }
  }

  CUresult Touch(Stream& stream, CUresult result, Block* read, Block* written, int signer) {
    if (result != CUDA_SUCCESS) return result;
    if (stream.capturing) {
      const auto node = [&](Block* block, bool writes) {
        if (block == nullptr || block->kind == Kind::kGraph) return;
        stream.nodes.push_back(
            {static_cast<int>(block - blocks_.data()), block->generation, writes, writes ? signer : -1});
      };
      node(read, false);
      node(written, true);
      return result;
    }
    Touched();
    if (read != nullptr) Note(*read, stream.context, false, -1);
    if (written != nullptr) Note(*written, stream.context, true, signer);
    return result;
  }

  static std::uint64_t* WordsOf(const Block& block) { return reinterpret_cast<std::uint64_t*>(block.address); }

  CUresult Launch(Stream& stream, Block* read, Block* written) {
    if (read != nullptr) MayTouch(stream, *read);
    if (written != nullptr) MayTouch(stream, *written);
    kernels_.push_back({read != nullptr ? WordsOf(*read) : nullptr, &log().observed,
                        written != nullptr ? WordsOf(*written) : nullptr, SignatureOf(step_)});
    void (*function)(void*) = Kernel::Body;
    void* data = &kernels_.back();
    void* arguments[] = {&function, &data};
    const CUresult result = driver().LaunchKernel(call_, 1, 1, 1, 1, 1, 1, 0, stream.handle, arguments, nullptr);
    own_stream_seen_ = own_stream_seen_ || now().stream == 1;
    return Touch(stream, result, read, written, step_);
  }

  // ---- allocation and free -------------------------------------------------------------------------------------

  Block& EmptyBlock() {
    Block& block = blocks_[at(now().block)];
    Need(!block.live && now().bytes >= sizeof(std::uint64_t));
    return block;
  }

  CUresult Allocated(Block& block, Kind kind, CUdeviceptr address, CUresult result) {
    if (result != CUDA_SUCCESS) {
      if (result == CUDA_ERROR_OUT_OF_MEMORY && trace_.short_at < 0) trace_.short_at = static_cast<std::int16_t>(step_);
      return result;
    }
    block = {};
    block.live = true;
    block.kind = kind;
    block.address = address;
    block.bytes = now().bytes;
    block.context = now().context;
    block.generation = step_;
    if (kind != Kind::kGraph) log().address = address;
    if (kind != Kind::kGraph) log().bytes = now().bytes;
    return result;
  }

  CUresult AllocatedOn(Stream& stream, Block& block, CUdeviceptr address, CUresult result) {
    result = Allocated(block, stream.capturing ? Kind::kGraph : Kind::kOrdered, address, result);
    block.context = stream.context;
    block.graph_stream = now().stream;
    if (native() && result == CUDA_SUCCESS && !stream.capturing) emu_.Last(&block.born);  // the pool puts a marker
    return result;
  }

  CUresult AllocateHost(Block& block) {
    Enter(now().context);
    Unsafe();
    void* host = nullptr;
    const CUresult result = driver().MemHostAlloc(&host, now().bytes, CU_MEMHOSTALLOC_DEVICEMAP);
    return Allocated(block, Kind::kHost, reinterpret_cast<CUdeviceptr>(host), result);
  }

  CUmemoryPool PoolOf(CUdevice device) {
    CUmemoryPool& pool = pools_[at(device)];
    if (pool != nullptr) return pool;
    Unsafe();
    CUmemPoolProps properties{};
    properties.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, {device}};
    Need(driver().MemPoolCreate(&pool, &properties) == CUDA_SUCCESS);
    return pool;
  }

  void Freed(Block& block) {
    block.live = false;
    if (block.kind != Kind::kGraph) trace_.step[at(block.generation)].freed = static_cast<std::int16_t>(step_);
  }

  // Its free waits for the block's own context only.
  void OthersAreDone(const Block& block) {
    Need(!native() || std::all_of(block.touched.begin(), block.touched.end(), [&](const Block::Touch& touch) {
      return touch.context == block.context || emu_.HostIsAfter(&touch.point) != 0;
    }));
  }

  CUresult Free(Block& block) {
    Need(block.kind != Kind::kGraph && contexts_[at(block.context)].live);
    OthersAreDone(block);
    if (now().context == kNoContext) {
      driver().CtxSetCurrent(nullptr);
    } else {
      Enter(now().context);
    }
    Unsafe();
    if (native() && block.kind != Kind::kOrdered) Need(emu_.ContextIsStuck(contexts_[at(block.context)].handle) == 0);
    const CUresult result = block.kind == Kind::kHost ? driver().MemFreeHost(reinterpret_cast<void*>(block.address))
                                                      : driver().MemFree(block.address);
    if (result == CUDA_SUCCESS) Freed(block);
    return result;
  }

  CUresult FreeAsync(Stream& stream, Block& block) {
    Need(contexts_[at(block.context)].device == contexts_[at(stream.context)].device);
    if (stream.capturing) {
      Need(block.kind == Kind::kGraph && block.graph_stream == now().stream);
    } else {
      Need(block.kind == Kind::kDevice || block.kind == Kind::kOrdered);
      if (native()) {
        // By the legacy stream's rule a free on it comes after the blocking streams' work. That a free on one of those
        // comes after the legacy stream's is not relied on (README.md).
        const int itself = now().stream == 0 ? 0 : 1;
        const auto is_before = [&](const EmuPoint& point) {
          return emu_.StreamIsAfter(stream.handle, &point, itself) != 0;
        };
        Need(std::all_of(block.touched.begin(), block.touched.end(),
                         [&](const Block::Touch& touch) { return is_before(touch.point); }));
        Need(block.kind != Kind::kOrdered || is_before(block.born));
      }
    }
    const CUresult result = driver().MemFreeAsync(block.address, stream.handle);
    if (result == CUDA_SUCCESS) Freed(block);
    return result;
  }

  CUresult Blocking(Block& block, bool writes) {
    Need(block.kind != Kind::kGraph);
    Enter(block.context);
    LegacyIsFree(block.context);
    Unsafe();
    common_.context = block.context;
    common_.handle = nullptr;
    MayTouch(common_, block);
    if (native()) Need(emu_.StreamIsStuck(nullptr) == 0);
    const std::uint64_t signature = SignatureOf(step_);
    const CUresult result = writes ? driver().MemcpyHtoD(block.address, &signature, sizeof signature)
                                   : driver().MemcpyDtoH(&log().observed, block.address, sizeof log().observed);
    return Touch(common_, result, writes ? nullptr : &block, writes ? &block : nullptr, step_);
  }

  CUresult HostTouch(Block& block, bool writes) {
    Need(block.kind == Kind::kHost || block.kind == Kind::kManaged);
    emu_.HostAccess();
    common_.context = block.context;
    common_.capturing = false;
    writes ? static_cast<void>(*WordsOf(block) = SignatureOf(step_))
           : static_cast<void>(log().observed = *WordsOf(block));
    return Touch(common_, CUDA_SUCCESS, writes ? nullptr : &block, writes ? &block : nullptr, step_);
  }

  // ---- the rest ------------------------------------------------------------------------------------------------

  Event& EventNow() {
    Event& event = events_[at(now().event)];
    Need(event.live);
    Enter(event.context);
    return event;
  }

  CUresult Record(Stream& stream) {
    Event& event = events_[at(now().event)];
    if (!event.live) {
      event = {};
      Need(driver().EventCreate(&event.handle, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS);
      event.live = true;
      event.context = stream.context;
    }
    Need(event.context == stream.context);
    const CUresult result = driver().EventRecord(event.handle, stream.handle);
    event.capture = stream.capturing ? stream.capture : 0;
    return result;
  }

  CUresult Wait(Stream& stream) {
    Event& event = events_[at(now().event)];
    Need(event.live && contexts_[at(event.context)].live);
    Need(event.capture == (stream.capturing ? stream.capture : 0));
    return driver().StreamWaitEvent(stream.handle, event.handle, 0);
  }

  CUresult Poll(const Event& event) {
    Need(event.capture == 0);
    Unsafe();
    if (native()) {
      Need(emu_.EventIsStuck(event.handle) == 0);
      return driver().EventSynchronize(event.handle);
    }
    for (int tries = 0; tries < 10'000; ++tries) {
      const CUresult result = driver().EventQuery(event.handle);
      if (result != CUDA_ERROR_NOT_READY) return result;
    }
    End("an event that the program polls never completes");
  }

  CUresult EndContext(int slot, CUresult (*end)(CUcontext, CUdevice)) {
    ContextSlot& context = Enter(slot);
    Need(!AnyCapture());
    if (native()) Need(emu_.ContextIsStuck(context.handle) == 0);
    for (const Block& block : blocks_) {
      if (block.live && block.context == slot) OthersAreDone(block);
    }
    const CUresult result = end(context.handle, context.device);
    context.live = false;
    const auto forget = [&](auto& slots) {
      for (auto& object : slots) object.live = object.live && object.context != slot;
    };
    for (Block& block : blocks_) {
      if (block.live && block.context == slot && block.kind != Kind::kGraph) Freed(block);
    }
    forget(streams_);
    forget(events_);
    forget(graphs_);
    forget(blocks_);
    return result;
  }

  CUresult BeginCapture(Stream& stream) {
    Need(now().stream >= kFirstCreatedStream && !stream.capturing);
    const auto mode = static_cast<CUstreamCaptureMode>(now().mode);
    const CUresult result = driver().StreamBeginCapture(stream.handle, mode);
    if (result != CUDA_SUCCESS) return result;
    stream.capturing = true;
    stream.capturer = now().thread;
    stream.capture_mode = now().mode;
    stream.capture = step_ + 1;
    stream.nodes.clear();
    return result;
  }

  CUresult EndCapture(Stream& stream) {
    Graph& graph = graphs_[at(now().graph)];
    Need(stream.capturing && !graph.live && stream.capturer == now().thread);
    CUgraph made = nullptr;
    const CUresult result = driver().StreamEndCapture(stream.handle, &made);
    stream.capturing = false;
    for (Block& block : blocks_) {
      if (block.kind == Kind::kGraph && block.graph_stream == now().stream) block.live = false;
    }
    if (result == CUDA_SUCCESS) graph = {true, stream.context, made, nullptr, stream.nodes};
    return result;
  }

  CUresult GraphLaunch(Stream& stream) {
    Graph& graph = graphs_[at(now().graph)];
    Need(graph.live && graph.context == stream.context && !stream.capturing);
    for (const Node& node : graph.nodes) {
      const Block& block = blocks_[at(node.block)];
      Need(block.live && block.generation == node.generation);
      MayTouch(stream, block);
    }
    if (graph.exec == nullptr) {
      Unsafe();
      const CUresult result = driver().GraphInstantiateWithFlags(&graph.exec, graph.graph, 0);
      if (result != CUDA_SUCCESS) return result;
    }
    const CUresult result = driver().GraphLaunch(graph.exec, stream.handle);
    if (result != CUDA_SUCCESS) return result;
    Touched();
    for (const Node& node : graph.nodes) Note(blocks_[at(node.block)], stream.context, node.writes, node.signer);
    return result;
  }

  CUresult Fork() {
    const CUdeviceptr address = BlockNow(now().block).address;
    const pid_t child = fork();
    if (child == 0) {
      CUdeviceptr fresh = 0;
      _exit(driver().MemFree(address) == CUDA_ERROR_NOT_INITIALIZED &&
                    driver().MemAlloc(&fresh, 512) == CUDA_ERROR_NOT_INITIALIZED
                ? 0
                : 1);
    }
    int status = 0;
    return waitpid(child, &status, 0) == child && status == 0 ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
  }

  CUresult Execute() {
    const Step& s = now();
    const auto& d = driver();
    CUdeviceptr address = 0;
    switch (s.what) {
      case Do::kAlloc: {
        Block& block = EmptyBlock();
        Enter(s.context);
        Unsafe();
        const CUresult result = d.MemAlloc(&address, s.bytes);
        return Allocated(block, Kind::kDevice, address, result);
      }
      case Do::kAllocAsync:
      case Do::kAllocFromPool: {
        Block& block = EmptyBlock();
        Stream& stream = StreamNow();
        if (!stream.capturing) Unsafe();
        if (s.what == Do::kAllocAsync) {
          const CUresult result = d.MemAllocAsync(&address, s.bytes, stream.handle);
          return AllocatedOn(stream, block, address, result);
        }
        Need(!stream.capturing);
        const CUmemoryPool pool = PoolOf(contexts_[at(stream.context)].device);
        const CUresult result = d.MemAllocFromPoolAsync(&address, s.bytes, pool, stream.handle);
        return AllocatedOn(stream, block, address, result);
      }
      case Do::kAllocManaged: {
        Block& block = EmptyBlock();
        Enter(s.context);
        Unsafe();
        const CUresult result = d.MemAllocManaged(&address, s.bytes, CU_MEM_ATTACH_GLOBAL);
        return Allocated(block, Kind::kManaged, address, result);
      }
      case Do::kAllocHost:
        return AllocateHost(EmptyBlock());
      case Do::kFree:
        return Free(BlockNow(s.block));
      case Do::kFreeAsync: {
        Block& block = BlockNow(s.block);
        return FreeAsync(StreamNow(), block);
      }
      case Do::kLaunch: {
        Block* read = s.from >= 0 && s.from != s.block ? &BlockNow(s.from) : nullptr;
        Block& written = BlockNow(s.block);
        return Launch(StreamNow(), read, &written);
      }
      case Do::kRead: {
        Block& block = BlockNow(s.block);
        return Launch(StreamNow(), &block, nullptr);
      }
      case Do::kFill: {
        Block& block = BlockNow(s.block);
        Stream& stream = StreamNow();
        OwnStreamIsSeen();
        MayTouch(stream, block);
        const auto value = static_cast<unsigned char>(SignatureOf(step_) & 0xff);
        const CUresult result =
            d.MemsetD8Async(block.address, value, std::min<std::size_t>(block.bytes, 4096), stream.handle);
        return Touch(stream, result, nullptr, &block, step_);
      }
      case Do::kCopy: {
        Need(s.from >= 0 && s.from != s.block);
        Block& from = BlockNow(s.from);
        Block& to = BlockNow(s.block);
        Stream& stream = StreamNow();
        OwnStreamIsSeen();
        MayTouch(stream, from, true);
        MayTouch(stream, to, true);
        const CUresult result = d.MemcpyDtoDAsync(to.address, from.address, sizeof(std::uint64_t), stream.handle);
        return Touch(stream, result, &from, &to, -1);
      }
      case Do::kUpload:
        return Blocking(BlockNow(s.block), true);
      case Do::kDownload:
        return Blocking(BlockNow(s.block), false);
      case Do::kHostWrite:
        return HostTouch(BlockNow(s.block), true);
      case Do::kHostRead:
        return HostTouch(BlockNow(s.block), false);
      case Do::kStreamCreate: {
        Need(s.stream >= kFirstCreatedStream && !streams_[at(s.stream)].live);
        Enter(s.context);
        Stream& stream = streams_[at(s.stream)];
        stream = {};
        const CUresult result = d.StreamCreate(&stream.handle, s.mode == 1 ? CU_STREAM_NON_BLOCKING : 0);
        stream.live = result == CUDA_SUCCESS;
        stream.context = s.context;
        stream.blocking = s.mode == 0;
        return result;
      }
      case Do::kStreamDestroy: {
        Stream& stream = StreamNow();
        Need(s.stream >= kFirstCreatedStream && !stream.capturing);
        const CUresult result = d.StreamDestroy(stream.handle);
        stream.live = false;
        return result;
      }
      case Do::kStreamSync: {
        Stream& stream = StreamNow();
        Need(!stream.capturing);
        Unsafe();
        if (native()) Need(emu_.StreamIsStuck(stream.handle) == 0);
        return d.StreamSynchronize(stream.handle);
      }
      case Do::kStreamQuery: {
        Stream& stream = StreamNow();
        Need(!stream.capturing);
        Unsafe();
        return d.StreamQuery(stream.handle);
      }
      case Do::kRecord:
        return Record(StreamNow());
      case Do::kWait:
        return Wait(StreamNow());
      case Do::kEventSync: {
        Event& event = EventNow();
        Need(event.capture == 0);
        Unsafe();
        if (native()) Need(emu_.EventIsStuck(event.handle) == 0);
        return d.EventSynchronize(event.handle);
      }
      case Do::kEventQuery: {
        Event& event = EventNow();
        Need(event.capture == 0);
        Unsafe();
        return d.EventQuery(event.handle);
      }
      case Do::kEventPoll:
        return Poll(EventNow());
      case Do::kEventDestroy: {
        Event& event = EventNow();
        event.live = false;
        return d.EventDestroy(event.handle);
      }
      case Do::kCtxSync: {
        const ContextSlot& context = Enter(s.context);
        Need(!AnyCapture(s.context));
        Unsafe();
        if (native()) Need(emu_.ContextIsStuck(context.handle) == 0);
        return d.CtxSynchronize();
      }
      case Do::kCtxCreate: {
        ContextSlot& context = contexts_[1];
        Need(!context.live);
        const CUresult result = d.CtxCreate(&context.handle, 0, 0);
        context.live = result == CUDA_SUCCESS;
        return result;
      }
      case Do::kCtxDestroy:
        return EndContext(1, [](CUcontext context, CUdevice) { return driver().CtxDestroy(context); });
      case Do::kReset: {
        Need(s.context != 1 && s.context != kNoContext);
        const CUresult result =
            EndContext(s.context, [](CUcontext, CUdevice device) { return driver().DevicePrimaryCtxReset(device); });
        ContextSlot& context = contexts_[at(s.context)];
        context.live = d.DevicePrimaryCtxRetain(&context.handle, context.device) == CUDA_SUCCESS;
        return result;
      }
      case Do::kBeginCapture:
        return BeginCapture(StreamNow());
      case Do::kEndCapture:
        return EndCapture(StreamNow());
      case Do::kGraphLaunch:
        return GraphLaunch(StreamNow());
      case Do::kGraphDestroy: {
        Graph& graph = graphs_[at(s.graph)];
        Need(graph.live);
        Enter(graph.context);
        graph.live = false;
        if (graph.exec != nullptr) d.GraphExecDestroy(graph.exec);
        return d.GraphDestroy(graph.graph);
      }
      case Do::kSpin: {
        Stream& stream = StreamNow();
        Need(!stream.capturing && flags_[at(s.flag)] == 0);
        volatile std::uint32_t* flag = &flags_[at(s.flag)];
        void* arguments[] = {&flag};
        return d.LaunchKernel(spin_, 1, 1, 1, 1, 1, 1, 0, stream.handle, arguments, nullptr);
      }
      case Do::kSetFlag:
        Need(flags_[at(s.flag)] == 0);
        flags_[at(s.flag)] = 1;
        return CUDA_SUCCESS;
      case Do::kRelax: {
        CUstreamCaptureMode& mode = modes_[at(s.thread)];
        return d.ThreadExchangeStreamCaptureMode(&mode);
      }
      case Do::kNewThread:
        Need(s.thread != 0);
        Need(std::none_of(streams_.begin(), streams_.end(),
                          [&](const Stream& stream) { return stream.capturing && stream.capturer == s.thread; }));
        ends_ = s.thread;
        return CUDA_SUCCESS;
      case Do::kMemInfo: {
        Enter(s.context);
        std::size_t free = 0;
        std::size_t total = 0;
        return d.MemGetInfo(&free, &total);
      }
      case Do::kFork:
        return Fork();
    }
    return CUDA_ERROR_UNKNOWN;
  }

  const Program& program_;
  const RunOptions& options_;
  Trace& trace_;
  const Emulator emu_;
  CUfunction call_ = nullptr, spin_ = nullptr;
  int step_ = 0;

  std::array<ContextSlot, kContexts> contexts_{};
  std::array<Stream, kStreams> streams_{};
  std::array<Event, kEvents> events_{};
  std::array<Block, kBlocks> blocks_{};
  std::array<Graph, kGraphs> graphs_{};
  std::array<std::uint32_t, kFlags> flags_{};
  std::array<CUmemoryPool, kContexts> pools_{};
  std::array<CUstreamCaptureMode, kThreads> modes_{CU_STREAM_CAPTURE_MODE_RELAXED, CU_STREAM_CAPTURE_MODE_RELAXED,
                                                   CU_STREAM_CAPTURE_MODE_RELAXED};
  std::array<EmuPoint, kMostSteps> points_{};  // of what steps touched memory at
  std::deque<Kernel> kernels_;
  bool own_stream_seen_ = false;
  bool lost_ = false;
  Stream common_;  // the legacy stream or the thread's own one, for a step
  int ends_ = 0;   // the thread that ends after the step
  Crew crew_;
};

}  // namespace

void Run(const Program& program, const RunOptions& options, Trace& trace) {
  reported = &trace;
  // Its threads stay to the end of the process.
  (new Interpreter(program, options, trace))->Run();
}

}  // namespace order
