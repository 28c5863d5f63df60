// Resolve: how a program's lookup of a driver function ends at a hook (contract §1).
//
// A lookup is answered by the real driver first; only a pointer that is one of its hooked functions is replaced, by
// the hook of exactly that function. Nothing here allocates. The dlsym path takes no lock of ours and touches only
// constant-initialised state; binding takes one lock, once.
#include <dlfcn.h>
#include <errno.h>

#include <array>
#include <cstring>
#include <mutex>
#include <string_view>

#include "core/libraries.h"
#include "core/options.h"
#include "core/runtime.h"
#include "shim/hooks.h"

namespace cushion {

constinit std::atomic<void*> g_real[kHooks]{};
constinit std::mutex g_bind_mutex;  // held to fill the tables; g_bound's release shows them. Nothing is called under it

namespace {

struct HookInfo {
  const char* elf;
  const char* base;
  int since;
  cuuint64_t flags;
};
constexpr cuuint64_t flags_of(std::string_view suffix) noexcept {
  return suffix == "_ptsz" ? CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM : CU_GET_PROC_ADDRESS_LEGACY_STREAM;
}
constexpr HookInfo kInfo[] = {
#define CUSHION_HOOK(elf, base, since, suffix) {#elf, #base, since, flags_of(#suffix)},
#define CUSHION_LIBC_HOOK(name)
#define CUSHION_RUNTIME_HOOK(name, parameters)
#include "shim/hooks.def"
#undef CUSHION_HOOK
#undef CUSHION_LIBC_HOOK
#undef CUSHION_RUNTIME_HOOK
};

void* hook_address(std::size_t index) noexcept {
  switch (static_cast<HookId>(index)) {
#define CUSHION_HOOK(elf, base, since, suffix) \
  case HookId::id_##elf:                       \
    return reinterpret_cast<void*>(&hook_##elf);
#define CUSHION_LIBC_HOOK(name)
#define CUSHION_RUNTIME_HOOK(name, parameters)
#include "shim/hooks.def"
#undef CUSHION_HOOK
#undef CUSHION_LIBC_HOOK
#undef CUSHION_RUNTIME_HOOK
    case HookId::count:
      break;
  }
  return nullptr;
}

// From a name to its hook, hashed when compiling.
constexpr std::uint32_t hash(std::string_view text) noexcept {
  std::uint32_t h = 2166136261u;
  for (const char c : text) h = (h ^ static_cast<unsigned char>(c)) * 16777619u;
  return h;
}
constexpr std::size_t kSlots = 512;
static_assert(kSlots > 2 * kHooks);
constexpr auto kByName = [] {
  std::array<std::uint16_t, kSlots> slots{};  // index + 1
  for (std::size_t i = 0; i < kHooks; ++i) {
    std::size_t slot = hash(kInfo[i].elf) % kSlots;
    while (slots[slot] != 0) slot = (slot + 1) % kSlots;
    slots[slot] = static_cast<std::uint16_t>(i + 1);
  }
  return slots;
}();
int hook_named(const char* name) noexcept {
  if (name == nullptr || name[0] != 'c' || name[1] != 'u') return -1;
  for (std::size_t slot = hash(name) % kSlots; kByName[slot] != 0; slot = (slot + 1) % kSlots) {
    if (std::strcmp(kInfo[kByName[slot] - 1].elf, name) == 0) return kByName[slot] - 1;
  }
  return -1;
}

using Dlsym = void* (*)(void*, const char*);

// The C library's dlsym, or that of an interposer loaded after us. Two threads may both find it: they find the same.
Dlsym real_dlsym() noexcept {
  static constinit std::atomic<Dlsym> found{nullptr};
  Dlsym real = found.load(std::memory_order_relaxed);
  if (real != nullptr) return real;
  for (const char* version : {"GLIBC_2.34", "GLIBC_2.17", "GLIBC_2.2.5"}) {
    real = reinterpret_cast<Dlsym>(dlvsym(RTLD_NEXT, "dlsym", version));
    if (real != nullptr) break;
  }
  found.store(real, std::memory_order_relaxed);
  return real;
}

// CUSHION_DISABLE and CUSHION_PROGRAMS, asked once: 0 not yet, 1 active, 2 inert.
bool is_inert() noexcept {
  static constinit std::atomic<int> known{0};
  int answer = known.load(std::memory_order_relaxed);
  if (answer == 0) {
    answer = inert(program_invocation_short_name) ? 2 : 1;
    known.store(answer, std::memory_order_relaxed);
  }
  return answer == 2;
}

bool is_in_driver(const void* function) noexcept {
  Dl_info info{};
  if (dladdr(function, &info) == 0 || info.dli_fname == nullptr) return false;
  const char* slash = std::strrchr(info.dli_fname, '/');
  const char* file = slash != nullptr ? slash + 1 : info.dli_fname;
  return std::strncmp(file, "libcuda.so", 10) == 0 || std::strncmp(file, "libcuda-", 8) == 0;
}

void* hooked_dlsym(void* handle, const char* name) noexcept {
  void* found = real_dlsym()(handle, name);
  if (found == nullptr || !is_in_driver(found)) return found;  // a library's own private cu… symbol
  if (std::string_view(name).ends_with("_ptsz")) {
    runtime().shared().streams.lose();
    runtime().shared().blocking_streams.store(true, std::memory_order_relaxed);
  }
  return hook_address(static_cast<std::size_t>(hook_named(name)));
}

// From a driver function's address to its hook. Filled by bind_driver() before `g_bound` is released.
struct Slot {
  void* function;
  std::uint16_t hook;
};
constexpr std::size_t kAddressSlots = 1024;
constinit Slot g_by_address[kAddressSlots]{};

std::size_t address_slot(const void* function) noexcept {
  return (reinterpret_cast<std::uintptr_t>(function) >> 4) * 0x9E3779B97F4A7C15ull >> 54;
}
void map_address(void* function, std::size_t hook) noexcept {
  std::size_t slot = address_slot(function);
  while (g_by_address[slot].function != nullptr) {
    if (g_by_address[slot].function == function) return;
    slot = (slot + 1) % kAddressSlots;
  }
  g_by_address[slot] = {function, static_cast<std::uint16_t>(hook)};
}

constinit std::atomic<bool> g_bound{false};

// The driver's library and what is looked up in it. Every thread that needs it before it is bound looks everything up
// for itself, with no lock of ours held: a lookup takes the loader's lock, whose holder may be waiting in a hook.
void* find_in_driver(const char* name) noexcept {
  void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return nullptr;
  void* found = real_dlsym()(library, name);
  dlclose(library);
  return found;
}

}  // namespace

bool bind_driver() noexcept {
  if (g_bound.load(std::memory_order_acquire)) return true;
  if (!is_loaded("libcuda.so")) return false;
  DriverTable table;
  if (!table.bind(find_in_driver)) return false;
  // Identity, from both of the driver's own answers; on the drivers seen so far the two are the same pointer.
  using Lookup = CUresult (*)(const char*, void**, int, cuuint64_t, CUdriverProcAddressQueryResult*);
  const auto lookup = reinterpret_cast<Lookup>(find_in_driver("cuGetProcAddress_v2"));
  std::array<void*, kHooks> exported{};
  std::array<void*, kHooks> answered{};
  for (std::size_t i = 0; i < kHooks; ++i) {
    if (table.version < kInfo[i].since) continue;
    exported[i] = find_in_driver(kInfo[i].elf);
    CUdriverProcAddressQueryResult status{};
    if (exported[i] != nullptr && lookup != nullptr && table.version >= 12000 &&
        lookup(kInfo[i].base, &answered[i], kInfo[i].since, kInfo[i].flags, &status) != CUDA_SUCCESS) {
      answered[i] = nullptr;
    }
  }
  std::lock_guard lock(g_bind_mutex);
  if (g_bound.load(std::memory_order_relaxed)) return true;
  static_cast<DriverTable&>(runtime().shared().driver) = table;
  for (std::size_t i = 0; i < kHooks; ++i) {
    g_real[i].store(exported[i], std::memory_order_release);
    if (exported[i] != nullptr) map_address(exported[i], i);
    if (answered[i] != nullptr) map_address(answered[i], i);
  }
  g_bound.store(true, std::memory_order_release);
  return true;
}

void* unbound(HookId id) noexcept { return find_in_driver(kInfo[static_cast<std::size_t>(id)].elf); }

void* replacement_of(void* driver_function) noexcept {
  if (is_inert() || !bind_driver()) return driver_function;
  for (std::size_t slot = address_slot(driver_function); g_by_address[slot].function != nullptr;
       slot = (slot + 1) % kAddressSlots) {
    if (g_by_address[slot].function == driver_function) return hook_address(g_by_address[slot].hook);
  }
  return driver_function;
}

}  // namespace cushion

// Called by dlsym.S: the address that dlsym should jump to.
extern "C" void* cushion_dlsym_target(void* handle, const char* name) noexcept {
  using namespace cushion;
  const bool ours = handle != RTLD_NEXT && handle != RTLD_DEFAULT && hook_named(name) >= 0 && !is_inert();
  return ours ? reinterpret_cast<void*>(&hooked_dlsym) : reinterpret_cast<void*>(real_dlsym());
}
