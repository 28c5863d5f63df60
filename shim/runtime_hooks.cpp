// Runtime hooks: a fast path for programs that use a shared libcudart, past the runtime's own bookkeeping.
//
// Invariant: only a call that succeeds, and that the runtime would have sent to the context that is current now or that
// the call itself names, is answered here; its outcome leaves no trace in the runtime, natively neither. Everything
// else goes through the real runtime and is caught at driver level: errors (so that cudaGetLastError is right), a
// thread's first call, the first after cudaSetDevice, a context that the runtime was not seen to use, an open capture,
// and all calls once the process is exiting (so that they answer "unloading" when the runtime does).
#include <dlfcn.h>
#include <driver_types.h>
#include <link.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "core/libraries.h"
#include "shim/hooks.h"
#include "shim/process.h"

namespace cushion {

namespace {

// The context that this thread's last successful call through the real runtime ran in.
struct Seen {
  CUcontext context;
  std::uint64_t epoch;  // Shared::handle_epoch then: a reset makes the runtime start anew
};
constinit thread_local Seen t_seen{};

constinit std::atomic<bool> g_exiting{false};
constinit std::atomic<bool> g_exit_watched{false};

CUcontext current_context() noexcept {
  CUcontext now = nullptr;
  InsideDriver inside;
  return runtime().shared().driver.cuCtxGetCurrent(&now) == CUDA_SUCCESS ? now : nullptr;
}

// A call that names its context, by a stream of the program's or by a block, does not depend on the current one.
Runtime* fast_path() noexcept {
  Runtime* rt = serving();
  if (rt == nullptr || t_seen.context == nullptr || g_exiting.load(std::memory_order_relaxed)) return nullptr;
  const Shared& shared = rt->shared();
  // What is asked for is done by the driver's hook, which serves the call then.
  const bool good = !shared.gate.may_be_open() && !shared.wants_attention() &&
                    t_seen.epoch == shared.handle_epoch.load(std::memory_order_acquire);
  return good ? rt : nullptr;
}
Runtime* fast_path_in_current() noexcept {
  Runtime* rt = fast_path();
  return rt != nullptr && current_context() == t_seen.context ? rt : nullptr;
}
Runtime* fast_path(CUstream stream) noexcept {
  return is_legacy(stream) || is_per_thread(stream) ? fast_path_in_current() : fast_path();
}

// After a call that the real runtime answered. Our exit handler is registered after the runtime's own, which it
// registered when it was first used, and so runs before it.
cudaError_t answered(cudaError_t result) noexcept {
  if (result != cudaSuccess || serving() == nullptr) return result;
  t_seen = {current_context(), runtime().shared().handle_epoch.load(std::memory_order_acquire)};
  if (!g_exit_watched.exchange(true)) std::atexit([] { g_exiting.store(true, std::memory_order_relaxed); });
  return result;
}

// The runtime's own function, as the library that calls us would have found it: in the scope of that library, else in
// whatever libcudart is loaded. A few microseconds.
void* find_real(const char* name, const void* caller, const void* ours) noexcept {
  const auto look = [&](const char* path) -> void* {
    void* handle = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
    if (handle == nullptr) return nullptr;
    void* found = dlsym(handle, name);
    dlclose(handle);
    return found != ours ? found : nullptr;
  };
  Dl_info info{};
  link_map* map = nullptr;
  if (dladdr1(caller, &info, reinterpret_cast<void**>(&map), RTLD_DL_LINKMAP) != 0 && map->l_name[0] != '\0') {
    if (void* found = look(map->l_name)) return found;
  }
  if (void* next = dlsym(RTLD_NEXT, name)) return next;
  constexpr std::size_t kLongest = 4096;
  char path[kLongest] = "";
  for_each_library([&](const dl_phdr_info& library) {
    if (std::strncmp(file_name(library), "libcudart", 9) != 0 || std::strlen(library.dlpi_name) >= kLongest)
      return false;
    std::strcpy(path, library.dlpi_name);
    return true;
  });
  return path[0] != '\0' ? look(path) : nullptr;
}

// find_real's last answers in this thread, one for each hook (about 0.1 µs).
struct Found {
  const void* caller;
  void* real;
  std::uint64_t unloads;
};
void* cached_real(Found& last, const char* name, const void* caller, const void* ours) noexcept {
  const std::uint64_t now = unloads();
  if (last.caller != caller || last.unloads != now) last = {caller, find_real(name, caller, ours), now};
  return last.real;
}

template <class... Args>
cudaError_t call_real(Found& last, const char* name, const void* caller, const void* ours, Args... args) noexcept {
  void* real = cached_real(last, name, caller, ours);
  if (real == nullptr) return cudaErrorInitializationError;
  return answered(reinterpret_cast<cudaError_t (*)(Args...)>(real)(args...));
}

bool malloc_async(void** out, std::size_t bytes, CUstream stream) noexcept {
  Runtime* rt = fast_path(stream);
  CUdeviceptr address = 0;
  if (rt == nullptr || out == nullptr) return false;
  if (!rt->malloc_async(&address, bytes, stream)) return false;
  *out = reinterpret_cast<void*>(address);
  return true;
}

bool free_async(void* pointer, CUstream stream) noexcept {
  Runtime* rt = pointer != nullptr ? fast_path(stream) : nullptr;
  return rt != nullptr && rt->free_async(reinterpret_cast<CUdeviceptr>(pointer), stream) == CUDA_SUCCESS;
}

}  // namespace
}  // namespace cushion

using namespace cushion;

#define CUSHION_REAL(name, ...)                                                                      \
  [&, caller = __builtin_return_address(0)] {                                                        \
    static constinit thread_local Found last{};                                                      \
    return call_real(last, #name, caller, reinterpret_cast<const void*>(&hook_##name), __VA_ARGS__); \
  }()

cudaError_t hook_cudaMalloc(void** out, std::size_t bytes) noexcept {
  if (Runtime* rt = out != nullptr ? fast_path_in_current() : nullptr) {
    CUdeviceptr address = 0;
    if (rt->malloc(&address, bytes, Api::malloc)) {
      *out = reinterpret_cast<void*>(address);
      return cudaSuccess;
    }
  }
  return CUSHION_REAL(cudaMalloc, out, bytes);
}

cudaError_t hook_cudaFree(void* pointer) noexcept {
  if (Runtime* rt = pointer != nullptr ? fast_path() : nullptr) {
    if (rt->free(reinterpret_cast<CUdeviceptr>(pointer)) == CUDA_SUCCESS) return cudaSuccess;
  }
  return CUSHION_REAL(cudaFree, pointer);
}

cudaError_t hook_cudaMallocAsync(void** out, std::size_t bytes, cudaStream_t stream) noexcept {
  if (malloc_async(out, bytes, stream)) return cudaSuccess;
  return CUSHION_REAL(cudaMallocAsync, out, bytes, stream);
}
cudaError_t hook_cudaMallocAsync_ptsz(void** out, std::size_t bytes, cudaStream_t stream) noexcept {
  if (malloc_async(out, bytes, per_thread(stream))) return cudaSuccess;
  return CUSHION_REAL(cudaMallocAsync_ptsz, out, bytes, stream);
}
cudaError_t hook_cudaFreeAsync(void* pointer, cudaStream_t stream) noexcept {
  return free_async(pointer, stream) ? cudaSuccess : CUSHION_REAL(cudaFreeAsync, pointer, stream);
}
cudaError_t hook_cudaFreeAsync_ptsz(void* pointer, cudaStream_t stream) noexcept {
  return free_async(pointer, per_thread(stream)) ? cudaSuccess : CUSHION_REAL(cudaFreeAsync_ptsz, pointer, stream);
}

// Older runtimes bind the device's context at the next call only: until then the current one says nothing.
cudaError_t hook_cudaSetDevice(int device) noexcept {
  const cudaError_t result = CUSHION_REAL(cudaSetDevice, device);
  t_seen = {};
  return result;
}
