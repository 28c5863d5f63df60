// Another tool's preload, as profilers and limiters are written: it defines cuMemAlloc_v2 and cuMemFree_v2 and
// finds the next one with RTLD_NEXT. Compiled with INTERPOSE_DLSYM it interposes dlsym as well, finding the
// next one as those tools do, with dlvsym. It is loaded before and after Cushion: neither order may recurse.
//
// It asks at every call, on purpose: that is where a preload that forwards RTLD_NEXT wrongly never returns.
#include <cuda.h>
#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace {

std::atomic<int> calls{0};
thread_local int depth = 0;

struct Depth {
  Depth() {
    if (++depth > 1) {
      static const char text[] = "interposer: entered from within itself\n";
      std::fwrite(text, 1, sizeof text - 1, stderr);
      std::abort();
    }
    calls.fetch_add(1);
  }
  ~Depth() { --depth; }
};

// Its own evidence that it was called, where a test asks for it.
__attribute__((destructor)) void say() {
  if (std::getenv("INTERPOSER_SAYS") != nullptr) std::fprintf(stderr, "interposer: %d calls\n", calls.load());
}

}  // namespace

extern "C" __attribute__((visibility("default"))) CUresult cuMemAlloc_v2(CUdeviceptr* block, std::size_t size) {
  Depth guard;
  auto next = reinterpret_cast<decltype(&cuMemAlloc_v2)>(dlsym(RTLD_NEXT, "cuMemAlloc_v2"));
  return next != nullptr ? next(block, size) : CUDA_ERROR_NOT_FOUND;
}

extern "C" __attribute__((visibility("default"))) CUresult cuMemFree_v2(CUdeviceptr block) {
  Depth guard;
  auto next = reinterpret_cast<decltype(&cuMemFree_v2)>(dlsym(RTLD_NEXT, "cuMemFree_v2"));
  return next != nullptr ? next(block) : CUDA_ERROR_NOT_FOUND;
}

#ifdef INTERPOSE_DLSYM
extern "C" __attribute__((visibility("default"))) void* dlsym(void* handle, const char* name) noexcept {
  using Dlsym = void* (*)(void*, const char*);
  static const Dlsym next = [] {
    for (const char* version : {"GLIBC_2.34", "GLIBC_2.17", "GLIBC_2.2.5"})
      if (void* found = dlvsym(RTLD_NEXT, "dlsym", version)) return reinterpret_cast<Dlsym>(found);
    return Dlsym{nullptr};
  }();
  return next != nullptr ? next(handle, name) : nullptr;
}
#endif
