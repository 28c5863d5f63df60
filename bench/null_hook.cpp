// null_hook: a preload whose allocations cost nothing, the floor for every preloaded allocator.
//
// cuMemAlloc, cuMemFree and their stream-ordered forms return constants. A program reaches them as it reaches
// Cushion: through an interposed dlsym and a wrapped cuGetProcAddress. So a pair under null_hook costs what the
// CUDA runtime itself adds, and no preload can be cheaper. The blocks are not memory: no kernel may touch them.
//
// dlsym must stay a tail call, so that RTLD_NEXT and RTLD_DEFAULT keep meaning the caller's: the real function is
// called through a noexcept pointer as the last act, and the build always optimises this file.

#include <cuda.h>
#include <dlfcn.h>

#include <atomic>
#include <cstring>
#include <initializer_list>

#define NULL_HOOK_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using Dlsym = void* (*)(void*, const char*) noexcept;

Dlsym real_dlsym() noexcept {
  static constinit std::atomic<Dlsym> cached{nullptr};
  Dlsym real = cached.load(std::memory_order_relaxed);
  if (real != nullptr) return real;
  for (const char* version : {"GLIBC_2.34", "GLIBC_2.17", "GLIBC_2.2.5"}) {
    real = reinterpret_cast<Dlsym>(dlvsym(RTLD_NEXT, "dlsym", version));
    if (real != nullptr) break;
  }
  cached.store(real, std::memory_order_relaxed);
  return real;
}

// The loaded driver's own function of this name; only asked for once a program holds the driver.
void* driver_function(const char* name) noexcept {
  static void* const library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  return library == nullptr ? nullptr : real_dlsym()(library, name);
}

CUresult allocate(CUdeviceptr* block, std::size_t) {
  *block = 0x700000000000;
  return CUDA_SUCCESS;
}
CUresult free(CUdeviceptr) { return CUDA_SUCCESS; }
CUresult allocate_async(CUdeviceptr* block, std::size_t, CUstream) {
  *block = 0x700000000000;
  return CUDA_SUCCESS;
}
CUresult free_async(CUdeviceptr, CUstream) { return CUDA_SUCCESS; }

void* replacement(void* function) noexcept;

CUresult get_proc_address(const char* name, void** function, int version, cuuint64_t flags) {
  using Real = CUresult (*)(const char*, void**, int, cuuint64_t);
  const CUresult result = reinterpret_cast<Real>(driver_function("cuGetProcAddress"))(name, function, version, flags);
  if (result == CUDA_SUCCESS && function != nullptr) *function = replacement(*function);
  return result;
}

CUresult get_proc_address_v2(const char* name, void** function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult* status) {
  using Real = decltype(&get_proc_address_v2);
  const CUresult result =
      reinterpret_cast<Real>(driver_function("cuGetProcAddress_v2"))(name, function, version, flags, status);
  if (result == CUDA_SUCCESS && function != nullptr) *function = replacement(*function);
  return result;
}

struct Hook {
  const char* name;  // as the driver exports it
  void* function;
};
const Hook hooks[] = {
    {"cuMemAlloc_v2", reinterpret_cast<void*>(&allocate)},
    {"cuMemFree_v2", reinterpret_cast<void*>(&free)},
    {"cuMemAllocAsync", reinterpret_cast<void*>(&allocate_async)},
    {"cuMemAllocAsync_ptsz", reinterpret_cast<void*>(&allocate_async)},
    {"cuMemFreeAsync", reinterpret_cast<void*>(&free_async)},
    {"cuMemFreeAsync_ptsz", reinterpret_cast<void*>(&free_async)},
    {"cuGetProcAddress", reinterpret_cast<void*>(&get_proc_address)},
    {"cuGetProcAddress_v2", reinterpret_cast<void*>(&get_proc_address_v2)},
};

// The hook of a driver function, found by its address; any other function stays what it is.
void* replacement(void* function) noexcept {
  for (const Hook& hook : hooks) {
    if (function != nullptr && function == driver_function(hook.name)) return hook.function;
  }
  return function;
}

}  // namespace

NULL_HOOK_EXPORT void* dlsym(void* handle, const char* name) noexcept {
  if (handle != RTLD_NEXT && handle != RTLD_DEFAULT && std::strncmp(name, "cu", 2) == 0) {
    for (const Hook& hook : hooks) {
      if (std::strcmp(name, hook.name) == 0) return replacement(real_dlsym()(handle, name));
    }
  }
  return real_dlsym()(handle, name);
}
