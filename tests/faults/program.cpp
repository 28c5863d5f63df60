// The program whose driver fails: it allocates and frees by every call, on streams, in graphs, under pressure and out
// of memory, in two contexts and after a reset, and says of each step what came of it, one line a step:
//
//   NUMBER WHAT: VALUE        a driver's code, or what the program saw; "skipped" where an earlier step failed
//   NUMBER WHAT again: VALUE  the same call once more, after it failed
//
// Every run has the same steps with the same numbers, so that sweep.py can compare a run whose driver fails with one
// whose driver does not. The last line, "left BYTES BLOCKS BYTES BLOCKS", is what it leaves allocated, and what it
// may leave besides.
//
// `program` runs once. `program --serve` runs for each line "SECONDS FILE NAME=VALUE..." on its standard input: in a
// forked child with that environment, whose output goes to FILE; its wait status, or "timeout", is the answer. The
// server itself makes no driver call: what a child finds is a fresh process, without the price of starting one.
#include <cuda.h>
#include <dlfcn.h>
#include <poll.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "test_kernels.h"

namespace {

// Of these two, newer headers have other signatures.
using CreateContext = CUresult(CUcontext*, unsigned, CUdevice);
using Synchronize = CUresult();
// X(field, type, ELF name); found as old programs do it, so that drivers of every age will serve.
#define FUNCTIONS(X)                                                                                 \
  X(init, decltype(cuInit), "cuInit")                                                                \
  X(retain, decltype(cuDevicePrimaryCtxRetain), "cuDevicePrimaryCtxRetain")                          \
  X(reset, decltype(cuDevicePrimaryCtxReset), "cuDevicePrimaryCtxReset_v2")                          \
  X(create_context, CreateContext, "cuCtxCreate_v2")                                                 \
  X(destroy_context, decltype(cuCtxDestroy), "cuCtxDestroy_v2")                                      \
  X(set_current, decltype(cuCtxSetCurrent), "cuCtxSetCurrent")                                       \
  X(get_current, decltype(cuCtxGetCurrent), "cuCtxGetCurrent")                                       \
  X(synchronize, Synchronize, "cuCtxSynchronize")                                                    \
  X(exchange_mode, decltype(cuThreadExchangeStreamCaptureMode), "cuThreadExchangeStreamCaptureMode") \
  X(alloc, decltype(cuMemAlloc), "cuMemAlloc_v2")                                                    \
  X(alloc_pitch, decltype(cuMemAllocPitch), "cuMemAllocPitch_v2")                                    \
  X(alloc_managed, decltype(cuMemAllocManaged), "cuMemAllocManaged")                                 \
  X(free, decltype(cuMemFree), "cuMemFree_v2")                                                       \
  X(alloc_async, decltype(cuMemAllocAsync), "cuMemAllocAsync")                                       \
  X(free_async, decltype(cuMemFreeAsync), "cuMemFreeAsync")                                          \
  X(alloc_async_ptsz, decltype(cuMemAllocAsync), "cuMemAllocAsync_ptsz")                             \
  X(free_async_ptsz, decltype(cuMemFreeAsync), "cuMemFreeAsync_ptsz")                                \
  X(default_pool, decltype(cuDeviceGetDefaultMemPool), "cuDeviceGetDefaultMemPool")                  \
  X(alloc_from_pool, decltype(cuMemAllocFromPoolAsync), "cuMemAllocFromPoolAsync")                   \
  X(host_alloc, decltype(cuMemHostAlloc), "cuMemHostAlloc")                                          \
  X(get_info, decltype(cuMemGetInfo), "cuMemGetInfo_v2")                                             \
  X(memset, decltype(cuMemsetD8), "cuMemsetD8_v2")                                                   \
  X(memset_async, decltype(cuMemsetD8Async), "cuMemsetD8Async")                                      \
  X(to_host, decltype(cuMemcpyDtoH), "cuMemcpyDtoH_v2")                                              \
  X(create_stream, decltype(cuStreamCreate), "cuStreamCreate")                                       \
  X(destroy_stream, decltype(cuStreamDestroy), "cuStreamDestroy_v2")                                 \
  X(finish, decltype(cuStreamSynchronize), "cuStreamSynchronize")                                    \
  X(finish_ptsz, decltype(cuStreamSynchronize), "cuStreamSynchronize_ptsz")                          \
  X(wait, decltype(cuStreamWaitEvent), "cuStreamWaitEvent")                                          \
  X(create_event, decltype(cuEventCreate), "cuEventCreate")                                          \
  X(destroy_event, decltype(cuEventDestroy), "cuEventDestroy_v2")                                    \
  X(record, decltype(cuEventRecord), "cuEventRecord")                                                \
  X(begin_capture, decltype(cuStreamBeginCapture), "cuStreamBeginCapture_v2")                        \
  X(end_capture, decltype(cuStreamEndCapture), "cuStreamEndCapture")                                 \
  X(instantiate, decltype(cuGraphInstantiateWithFlags), "cuGraphInstantiateWithFlags")               \
  X(launch_graph, decltype(cuGraphLaunch), "cuGraphLaunch")                                          \
  X(destroy_graph, decltype(cuGraphDestroy), "cuGraphDestroy")                                       \
  X(destroy_exec, decltype(cuGraphExecDestroy), "cuGraphExecDestroy")                                \
  X(load_module, decltype(cuModuleLoadData), "cuModuleLoadData")                                     \
  X(get_function, decltype(cuModuleGetFunction), "cuModuleGetFunction")                              \
  X(launch, decltype(cuLaunchKernel), "cuLaunchKernel")

struct Api {
#define X(field, type, elf) type* field = nullptr;
  FUNCTIONS(X)
#undef X
} api;

void find_functions() {
  void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (driver == nullptr) std::exit(70);
#define X(field, type, elf)                                              \
  api.field = reinterpret_cast<decltype(api.field)>(dlsym(driver, elf)); \
  if (api.field == nullptr) std::exit(71);
  FUNCTIONS(X)
#undef X
}

constexpr std::size_t kKiB = 1024;
constexpr std::size_t kMiB = 1024 * kKiB;
constexpr std::size_t kUsed = 64 * kKiB;  // of a block, at most so much is written: the rest costs time only
constexpr std::uint64_t kHold = 20'000;   // ns

// ---- what a run says ---------------------------------------------------------------------------------------------

int step = 0;
std::size_t left_bytes = 0, left_blocks = 0;  // what could not be freed
// Of these, what may have gone with its context: natively, memory of a device's pool does not.
std::size_t perhaps_bytes = 0, perhaps_blocks = 0;
bool sticky = false;  // some call said that the context is broken

void say(const char* what, const char* value) { std::printf("%d %s: %s\n", ++step, what, value); }
void skip(const char* what) { say(what, "skipped"); }
bool did(const char* what, CUresult result) {
  std::printf("%d %s: %d\n", ++step, what, result);
  sticky = sticky || result == CUDA_ERROR_ILLEGAL_ADDRESS;
  return result == CUDA_SUCCESS;
}
// A call that the rest depends on, or that gives something back: tried again if it fails.
template <class Call>
bool must(const char* what, Call call) {
  if (did(what, call())) return true;
  const CUresult result = call();
  std::printf("%d %s again: %d\n", step, what, result);
  return result == CUDA_SUCCESS;
}
template <class Call>
bool must_if(bool can, const char* what, Call call) {
  if (can) return must(what, call);
  skip(what);
  return false;
}

// ---- blocks ------------------------------------------------------------------------------------------------------

struct Block {
  CUdeviceptr address = 0;
  std::size_t bytes = 0;
  unsigned char value = 0;
  std::size_t used() const { return std::min(bytes, kUsed); }
};

CUfunction fill_hold_check = nullptr;
CUdeviceptr bad = 0;  // counted up by kernels whose bytes somebody else wrote
unsigned char next_value = 0;

Block fresh(const char* what, std::size_t bytes, CUresult result, CUdeviceptr address) {
  Block block{0, bytes, ++next_value};
  if (did(what, result)) block.address = address;
  return block;
}
void keeps_bytes(const Block& block) {
  std::vector<unsigned char> seen(block.used());
  const CUresult result = block.address != 0 ? api.to_host(seen.data(), block.address, seen.size()) : CUDA_SUCCESS;
  const bool same = std::all_of(seen.begin(), seen.end(), [&](unsigned char byte) { return byte == block.value; });
  if (block.address == 0) return skip("bytes");
  if (result != CUDA_SUCCESS) {
    did("bytes", result);
  } else {
    say("bytes", same ? "kept" : "WRONG");
  }
}

// cuMemAlloc, and bytes written by the host's own fill.
Block get(const char* what, std::size_t bytes) {
  CUdeviceptr address = 0;
  const CUresult result = api.alloc(&address, bytes);
  Block block = fresh(what, bytes, result, address);
  must_if(block.address != 0, "fill", [&] { return api.memset(block.address, block.value, block.used()); });
  return block;
}
void freed(const Block& block, bool success) {
  if (block.address == 0 || success) return;
  left_bytes += block.bytes;
  ++left_blocks;
}
void put(const Block& block) {
  freed(block, must_if(block.address != 0, "free", [&] { return api.free(block.address); }));
}
void check_and_put(const Block& block) {
  keeps_bytes(block);
  put(block);
}

// cuMemAllocAsync, and a kernel that fills the block, holds it and looks whether it is still its own.
void use_on(CUstream stream, const Block& block) {
  if (block.address == 0 || fill_hold_check == nullptr || bad == 0) return skip("use");
  std::uint64_t address = block.address, bytes = block.used(), hold = kHold, counter = bad;
  std::uint32_t value = block.value;
  void* arguments[] = {&address, &bytes, &value, &hold, &counter};
  did("use", api.launch(fill_hold_check, 1, 1, 1, 256, 1, 1, 0, stream, arguments, nullptr));
}
Block get_on(CUstream stream, const char* what, std::size_t bytes) {
  if (stream == nullptr) {
    skip(what), skip("use");
    return {};
  }
  CUdeviceptr address = 0;
  const CUresult result = api.alloc_async(&address, bytes, stream);
  const Block block = fresh(what, bytes, result, address);
  use_on(stream, block);
  return block;
}
void put_on(CUstream stream, const Block& block) {
  const auto free = [&] { return stream != nullptr ? api.free_async(block.address, stream) : api.free(block.address); };
  freed(block, must_if(block.address != 0, "free async", free));
}
void finish(CUstream stream) {
  must_if(stream != nullptr, "finish", [&] { return api.finish(stream); });
}

CUstream make_stream(unsigned flags) {
  CUstream stream = nullptr;
  return must("create stream", [&] { return api.create_stream(&stream, flags); }) ? stream : nullptr;
}
void end_stream(CUstream stream) {
  must_if(stream != nullptr, "destroy stream", [&] { return api.destroy_stream(stream); });
}

// What the program relies on without asking: its own capture mode, and its own current context.
void is_as_it_was(CUcontext context) {
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
  bool known = must("exchange mode", [&] { return api.exchange_mode(&mode); });
  if (known) {
    say("mode", mode == CU_STREAM_CAPTURE_MODE_GLOBAL ? "global" : "CHANGED");
  } else {
    skip("mode");
  }
  must_if(known, "mode back", [&] { return api.exchange_mode(&mode); });
  CUcontext now = nullptr;
  known = must("get current", [&] { return api.get_current(&now); });
  if (known) {
    say("context", now == context ? "same" : "CHANGED");
  } else {
    skip("context");
  }
}

// ---- the steps ---------------------------------------------------------------------------------------------------

void host_ordered() {
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{1000}, 64 * kKiB, kMiB, 3 * kMiB + 1}) {
    const Block block = get("alloc", bytes);
    keeps_bytes(block);
    if (block.address == 0) {
      skip("free interior"), skip("free"), skip("free twice");
      continue;
    }
    did("free interior", api.free(block.address + 512));
    const bool success = must("free", [&] { return api.free(block.address); });
    success ? void(did("free twice", api.free(block.address))) : skip("free twice");
    freed(block, success);
  }
  CUdeviceptr address = 0;
  std::size_t pitch = 0;
  did("alloc nothing", api.alloc(&address, 0));
  did("alloc 1<<50", api.alloc(&address, std::size_t{1} << 50));
  did("free null", api.free(0));
  const CUresult pitched = api.alloc_pitch(&address, &pitch, 1000, 4, 4);
  Block block = fresh("alloc pitch", 4 * kKiB, pitched, address);
  put(block);
  const CUresult managed = api.alloc_managed(&address, kMiB, CU_MEM_ATTACH_GLOBAL);
  block = fresh("alloc managed", kMiB, managed, address);
  put(block);
  std::size_t idle = 0, total = 0;
  if (did("info", api.get_info(&idle, &total))) {
    say("free", idle > 0 && idle <= total ? "within total" : "NONSENSE");
  } else {
    skip("free");
  }
}

void stream_ordered(CUstream first, CUstream second) {
  for (int round = 0; round < 3; ++round) {
    const Block a = get_on(first, "alloc async", 300 * kKiB);
    put_on(first, a);
    const Block b = get_on(first, "alloc async, same stream", 300 * kKiB);
    const Block c = get_on(second, "alloc async, other stream", 300 * kKiB);
    put_on(first, b);
    put_on(second, c);
  }
  // An order that the program makes: the second stream may have the first one's block at once.
  const Block a = get_on(first, "alloc async", 300 * kKiB);
  put_on(first, a);
  CUevent event = nullptr;
  const bool made = must("create event", [&] { return api.create_event(&event, CU_EVENT_DISABLE_TIMING); });
  const bool recorded = must_if(made && first != nullptr, "record", [&] { return api.record(event, first); });
  must_if(recorded && second != nullptr, "wait", [&] { return api.wait(second, event, 0); });
  const Block b = get_on(second, "alloc async, ordered", 300 * kKiB);
  must_if(made, "destroy event", [&] { return api.destroy_event(event); });
  // Freed by the other kind of call, and on another stream.
  const Block c = get_on(first, "alloc async", kMiB);
  finish(first);
  put(c);
  const Block d = get("alloc", kMiB);
  put_on(second, d);
  put_on(second, b);
  const Block e = get("alloc", 300 * kKiB);
  check_and_put(e);
  finish(first);
  finish(second);
}

void per_thread() {
  CUdeviceptr address = 0;
  const CUresult result = api.alloc_async_ptsz(&address, 20'000, nullptr);
  const Block block = fresh("alloc per thread", 20'000, result, address);
  const auto free = [&] { return api.free_async_ptsz(block.address, nullptr); };
  freed(block, must_if(block.address != 0, "free per thread", free));
  must("finish per thread", [] { return api.finish_ptsz(nullptr); });
}

// More is alive than the pool may hold, and what is freed is still in use.
void under_pressure(CUstream first, CUstream second) {
  constexpr std::size_t kBlocks = 10;
  std::vector<Block> blocks;
  for (std::size_t i = 0; i < kBlocks; ++i) blocks.push_back(get_on(first, "alloc, pressed", 4 * kMiB));
  for (std::size_t i = 0; i < kBlocks / 2; ++i) put_on(first, blocks[i]);
  for (std::size_t i = 0; i < kBlocks / 2; ++i) blocks[i] = get_on(second, "alloc, pressed", 4 * kMiB);
  for (std::size_t i = 0; i < kBlocks; ++i) put_on(i < kBlocks / 2 ? second : first, blocks[i]);
  const Block host = get("alloc, pressed", 3 * kMiB);
  check_and_put(host);
  finish(first);
  finish(second);
}

void out_of_memory(CUstream stream) {
  std::vector<CUdeviceptr> blocks;
  CUresult result = CUDA_SUCCESS;
  for (int failures = 0; failures < 2 && blocks.size() < 1000;) {  // full is what refuses twice
    CUdeviceptr address = 0;
    result = api.alloc(&address, 7 * kMiB);
    failures = result == CUDA_SUCCESS ? 0 : failures + 1;
    if (result == CUDA_SUCCESS) blocks.push_back(address);
  }
  did("alloc all", result);
  CUdeviceptr large = 0;
  if (stream != nullptr) {
    result = api.alloc_async(&large, 32 * kMiB, stream);
    if (result == CUDA_SUCCESS) blocks.push_back(large);
    did("alloc async, full", result);
  } else {
    skip("alloc async, full");
  }
  CUresult failed = CUDA_SUCCESS;
  for (const CUdeviceptr address : blocks) {
    result = api.free(address);
    if (result == CUDA_SUCCESS) continue;
    failed = result;
    result = api.free(address);
    if (result != CUDA_SUCCESS) std::printf("%d free again: %d\n", step, result);
    freed({address, address == large ? 32 * kMiB : 7 * kMiB}, result == CUDA_SUCCESS);
  }
  did("free all", failed);
  check_and_put(get("alloc after", 7 * kMiB));
  // What Cushion keeps must not fail others.
  CUmemoryPool pool = nullptr;
  const bool known = must("default pool", [&] { return api.default_pool(&pool, 0); });
  if (!known || stream == nullptr) {
    skip("from pool"), skip("free async"), skip("finish");
    return;
  }
  CUdeviceptr address = 0;
  result = api.alloc_from_pool(&address, 100 * kMiB, pool, stream);
  const Block block = fresh("from pool", 100 * kMiB, result, address);
  put_on(stream, block);
  finish(stream);
}

void capture(CUstream stream, CUcontext context) {
  const Block outside = get("alloc", 50 * kKiB);
  must("synchronize", [] { return api.synchronize(); });
  const auto begin = [&] { return api.begin_capture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL); };
  const bool begun = must_if(stream != nullptr && outside.address != 0, "begin capture", begin);
  const char* const others[] = {"set current", "alloc", "fill", "free"};
  if (begun) {
    CUdeviceptr node = 0;
    const bool added = did("alloc node", api.alloc_async(&node, 10'000, stream));
    must_if(added, "fill node", [&] { return api.memset_async(node, 1, 10'000, stream); });
    must("fill outside", [&] { return api.memset_async(outside.address, outside.value, outside.bytes, stream); });
    must_if(added, "free node", [&] { return api.free_async(node, stream); });
    std::thread([&] {
      const bool current = must(others[0], [&] { return api.set_current(context); });
      CUdeviceptr address = 0;
      const bool got = current && did(others[1], api.alloc(&address, 30'000));
      if (!current) skip(others[1]);
      freed({address, 30'000}, !got || must_if(got, others[3], [&] { return api.free(address); }));
      if (!got) skip(others[3]);
    }).join();
  } else {
    for (const char* what : {"alloc node", "fill node", "fill outside", "free node", others[0], others[1], others[3]})
      skip(what);
  }
  CUgraph graph = nullptr;
  CUgraphExec exec = nullptr;
  const bool ended = begun && did("end capture", api.end_capture(stream, &graph));
  if (!begun) skip("end capture");
  const bool made = must_if(ended, "instantiate", [&] { return api.instantiate(&exec, graph, 0); });
  for (int i = 0; i < 2; ++i) must_if(made, "launch graph", [&] { return api.launch_graph(exec, stream); });
  finish(stream);
  keeps_bytes(outside);
  must_if(made, "destroy exec", [&] { return api.destroy_exec(exec); });
  must_if(ended, "destroy graph", [&] { return api.destroy_graph(graph); });
  put(outside);
}

void second_context(CUcontext primary) {
  CUcontext other = nullptr;
  const bool made = must("create context", [&] { return api.create_context(&other, 0, 0); });
  const CUstream stream = made ? make_stream(CU_STREAM_NON_BLOCKING) : (skip("create stream"), nullptr);
  const Block a = get("alloc", 200 * kKiB);
  const Block live = get("alloc", 200 * kKiB);
  const bool back = must("set current", [&] { return api.set_current(primary); });
  // Its stream and its blocks, from the first context.
  Block b;
  if (stream != nullptr && back) {
    CUdeviceptr address = 0;
    const CUresult result = api.alloc_async(&address, 200 * kKiB, stream);
    b = fresh("alloc async", 200 * kKiB, result, address);
  } else {
    skip("alloc async");
  }
  const auto free = [&] { return api.free_async(b.address, stream); };
  const bool free_b = must_if(b.address != 0, "free async", free);
  finish(stream);
  must_if(a.address != 0, "free", [&] { return api.free(a.address); });
  const bool ended = must_if(made, "destroy context", [&] { return api.destroy_context(other); });
  freed(live, ended);
  if (b.address != 0 && !free_b) perhaps_bytes += b.bytes, ++perhaps_blocks;
  is_as_it_was(primary);
  check_and_put(get("alloc", 200 * kKiB));
}

// The primary context anew, whatever state it was in.
CUcontext after_reset() {
  CUcontext context = nullptr;
  if (must("reset", [] { return api.reset(0); })) left_bytes = left_blocks = 0;
  const bool retained = must("retain", [&] { return api.retain(&context, 0); });
  must_if(retained, "set current", [&] { return api.set_current(context); });
  check_and_put(get("alloc after reset", 100 * kKiB));
  return context;
}

int run() {
  CUcontext context = nullptr;
  must("init", [] { return api.init(0); });
  must("retain", [&] { return api.retain(&context, 0); });
  must("set current", [&] { return api.set_current(context); });
  get("alloc before reset", 100 * kKiB);
  context = after_reset();

  CUmodule module = nullptr;
  const bool loaded = must("load module", [&] { return api.load_module(&module, kTestKernels); });
  must_if(loaded, "get function", [&] { return api.get_function(&fill_hold_check, module, "k_fill_hold_check"); });
  void* word = nullptr;
  if (must("host alloc", [&] { return api.host_alloc(&word, sizeof(std::uint32_t), CU_MEMHOSTALLOC_DEVICEMAP); })) {
    *static_cast<std::uint32_t*>(word) = 0;
    bad = reinterpret_cast<CUdeviceptr>(word);
  }
  const CUstream first = make_stream(CU_STREAM_NON_BLOCKING);
  const CUstream second = make_stream(CU_STREAM_DEFAULT);

  host_ordered();
  stream_ordered(first, second);
  per_thread();
  under_pressure(first, second);
  out_of_memory(first);
  capture(first, context);
  second_context(context);
  stream_ordered(first, second);
  end_stream(second);
  end_stream(first);
  must("synchronize", [] { return api.synchronize(); });
  if (word != nullptr) {
    say("bytes in use", *static_cast<std::uint32_t*>(word) == 0 ? "untouched" : "WRONG");
  } else {
    skip("bytes in use");
  }
  is_as_it_was(context);

  if (sticky) {  // beyond the steps of a healthy run
    std::printf("%d broken: 0\n", ++step);
    bad = 0;
    after_reset();
  }
  for (int i = 0; i < 3; ++i) {
    CUdeviceptr address = 0;
    if (api.alloc(&address, 1000) != CUDA_SUCCESS && api.alloc(&address, 1000) != CUDA_SUCCESS) continue;
    left_bytes += 1000;
    ++left_blocks;
  }
  std::printf("left %zu %zu %zu %zu\n", left_bytes, left_blocks, perhaps_bytes, perhaps_blocks);
  return 0;
}

// ---- the server --------------------------------------------------------------------------------------------------

int serve() {
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream fields(line);
    double seconds = 0;
    std::string file;
    fields >> seconds >> file;
    const pid_t child = fork();
    if (child == 0) {
      for (std::string variable; fields >> variable;) {
        const std::size_t equals = variable.find('=');
        setenv(variable.substr(0, equals).c_str(), variable.substr(equals + 1).c_str(), 1);
      }
      if (std::freopen(file.c_str(), "w", stdout) == nullptr || dup2(fileno(stdout), STDERR_FILENO) < 0) _exit(72);
      std::exit(run());
    }
    // The child's end, waited for by its descriptor: no signal of ours is the program's.
    pollfd end{static_cast<int>(syscall(SYS_pidfd_open, child, 0)), POLLIN, 0};
    const bool late = poll(&end, 1, static_cast<int>(seconds * 1000)) == 0;
    if (late) kill(child, SIGKILL);
    close(end.fd);
    int status = 0;
    waitpid(child, &status, 0);
    std::cout << (late ? "timeout" : std::to_string(status)) << std::endl;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  find_functions();
  std::setvbuf(stdout, nullptr, _IOLBF, 4096);  // a run that dies has said what came before
  return argc > 1 && std::string(argv[1]) == "--serve" ? serve() : run();
}
