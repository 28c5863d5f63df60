// Hooks: the typed objects made from hooks.def. real_NAME calls the driver's own function; hook_NAME is Cushion's,
// exported under the driver's name.
#pragma once

#include <cudaTypedefs.h>
#include <driver_types.h>

#include <atomic>
#include <cstdint>
#include <mutex>

#include "core/driver.h"

namespace cushion {

enum class HookId : std::uint16_t {
#define CUSHION_HOOK(elf, base, since, suffix) id_##elf,
#define CUSHION_LIBC_HOOK(name)
#define CUSHION_RUNTIME_HOOK(name, parameters)
#include "shim/hooks.def"
#undef CUSHION_HOOK
#undef CUSHION_LIBC_HOOK
#undef CUSHION_RUNTIME_HOOK
  count
};
inline constexpr std::size_t kHooks = static_cast<std::size_t>(HookId::count);

// The driver's functions, by HookId. Written once, by bind_driver().
extern constinit std::atomic<void*> g_real[kHooks];

// Finds the loaded driver and fills g_real, core's driver table and the map of cuGetProcAddress's answers. False while
// no driver is loaded, or it does not say its version. Takes a lock the first time; afterwards one acquire load.
bool bind_driver() noexcept;

// A function of a loaded driver that would not bind, for the program's own call; null if none is loaded.
void* unbound(HookId id) noexcept;

extern constinit std::mutex g_bind_mutex;  // held while binding; a fork waits for it

// The hook that stands for a function of the real driver, or the function itself if it is not hooked.
void* replacement_of(void* driver_function) noexcept;

template <class Fn>
class Real;
template <class... Args>
class Real<CUresult (*)(Args...)> {
 public:
  explicit constexpr Real(HookId id) noexcept : id_(id) {}
  CUresult operator()(Args... args) const noexcept {
    // Acquire: who sees a function sees the driver table too.
    void* function = g_real[static_cast<std::size_t>(id_)].load(std::memory_order_acquire);
    if (function == nullptr) {
      const bool bound = bind_driver();
      function = bound ? g_real[static_cast<std::size_t>(id_)].load(std::memory_order_relaxed) : unbound(id_);
      if (function == nullptr) return bound ? CUDA_ERROR_NOT_FOUND : CUDA_ERROR_NOT_INITIALIZED;
    }
    InsideDriver inside;
    return reinterpret_cast<CUresult (*)(Args...)>(function)(args...);
  }

 private:
  HookId id_;
};

template <class Fn>
struct NoexceptOf;
template <class R, class... Args>
struct NoexceptOf<R (*)(Args...)> {
  using type = R(Args...) noexcept;
};

}  // namespace cushion

#define CUSHION_LIBC_HOOK(name)
#define CUSHION_RUNTIME_HOOK(name, parameters) \
  extern "C" __attribute__((visibility("default"))) cudaError_t hook_##name parameters noexcept __asm__(#name);
#define CUSHION_HOOK(elf, base, since, suffix)                                       \
  extern "C" __attribute__((visibility("default")))                                  \
  cushion::NoexceptOf<PFN_##base##_v##since##suffix>::type hook_##elf __asm__(#elf); \
  namespace cushion {                                                                \
  inline constexpr Real<PFN_##base##_v##since##suffix> real_##elf{HookId::id_##elf}; \
  }
#include "shim/hooks.def"
#undef CUSHION_HOOK
#undef CUSHION_LIBC_HOOK
#undef CUSHION_RUNTIME_HOOK
