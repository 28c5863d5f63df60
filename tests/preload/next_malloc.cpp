// A library that wraps malloc and finds the wrapped one with dlsym(RTLD_NEXT, "malloc") inside the wrapper.
// It is loaded behind a preload, so RTLD_NEXT must be resolved relative to *this* library: relative to the
// preload it finds this very function, and recurses. Built at every optimisation level, with the lookup
// noexcept or not. A dlsym that allocates recurses here too.
#include <dlfcn.h>

#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstdlib>

namespace {

std::atomic<int> wrapped{0};
thread_local int depth __attribute__((tls_model("initial-exec"))) = 0;

void* next_malloc() LOOKUP_NOEXCEPT {
  void* found = dlsym(RTLD_NEXT, "malloc");
  return found;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void* malloc(std::size_t size) {
  if (++depth > 1) std::abort();  // inside our own lookup
  auto next = reinterpret_cast<void* (*)(std::size_t)>(next_malloc());
  --depth;
  wrapped.fetch_add(1, std::memory_order_relaxed);
  return next(size);
}

extern "C" __attribute__((visibility("default"))) int wrapped_mallocs() { return wrapped.load(); }
