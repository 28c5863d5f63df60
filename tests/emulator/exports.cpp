// The exported functions: what is common to every call, and how a function is found.
//
// From functions.def come the ELF symbols, their call counters and fault points, and the table behind both ABIs of
// cuGetProcAddress. The library is linked with -Bsymbolic, so that the table holds the very addresses dlsym gives
// (measured on the real driver) even where a preloaded library exports the same names.
//
// Cost of a call before its body: two relaxed counters and a few tests.
#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <exception>
#include <new>
#include <string_view>
#include <tuple>

#include "driver.h"
#include "settings.h"

namespace emu {

// The bodies, with the signatures of cuda.h.
#define PLAIN(arity, elf, name, since, where, body) decltype(::elf) body;
#define PTSZ(arity, elf, name, since, where, body) decltype(::elf) body;
#define PTDS(arity, elf, name, since, where, body) decltype(::elf) body;
#define ALIAS(elf, name, since)
#include "functions.def"
#undef PLAIN
#undef PTSZ
#undef PTDS
#undef ALIAS

namespace {

enum class Where { kAnywhere, kReady };
using enum Where;

enum class Function : std::size_t {
#define PLAIN(arity, elf, name, since, where, body) elf,
#define PTSZ(arity, elf, name, since, where, body) elf, elf##_ptsz,
#define PTDS(arity, elf, name, since, where, body) elf, elf##_ptds,
#define ALIAS(elf, name, since)
#include "functions.def"
#undef PLAIN
#undef PTSZ
#undef PTDS
#undef ALIAS
  kCount
};

struct Description {
  const char* elf;
  const char* name;
  int since;
  Where where;
  CUstream default_stream;
};

// _ptsz and _ptds variants came with CUDA 7.
constexpr int SincePerThread(int since) { return std::max(since, 7000); }

const std::array<Description, static_cast<std::size_t>(Function::kCount)>& descriptions() {
  static const std::array<Description, static_cast<std::size_t>(Function::kCount)> table{{
#define PLAIN(arity, elf, name, since, where, body) {#elf, #name, since, where, CU_STREAM_LEGACY},
#define PTSZ(arity, elf, name, since, where, body) \
  {#elf, #name, since, where, CU_STREAM_LEGACY},   \
      {#elf "_ptsz", #name, SincePerThread(since), where, CU_STREAM_PER_THREAD},
#define PTDS(arity, elf, name, since, where, body) \
  {#elf, #name, since, where, CU_STREAM_LEGACY},   \
      {#elf "_ptds", #name, SincePerThread(since), where, CU_STREAM_PER_THREAD},
#define ALIAS(elf, name, since)
#include "functions.def"
#undef PLAIN
#undef PTSZ
#undef PTDS
#undef ALIAS
  }};
  return table;
}

constinit std::array<std::atomic<unsigned long>, static_cast<std::size_t>(Function::kCount)> calls{};
constinit std::atomic<bool> initialised{false};
constinit std::atomic<bool> forked{false};  // a child of a process that had called cuInit

bool IsElf(std::string_view name) {
  return std::any_of(descriptions().begin(), descriptions().end(), [&](const auto& f) { return name == f.elf; });
}

// The code this call was planned to fail with, if it was (EMU_FAIL).
CUresult Planned(const Description& function, unsigned long call) {
  for (const PlannedFailure& failure : settings().failures) {
    const bool due = failure.and_later ? call >= failure.call : call == failure.call;
    if (due && (failure.function == function.elf || (failure.function == function.name && !IsElf(failure.function)))) {
      return failure.code;
    }
  }
  return CUDA_SUCCESS;
}

template <class Body>
CUresult Call(Function id, Body body) noexcept {
  const Description& function = descriptions()[static_cast<std::size_t>(id)];
  const unsigned long call = calls[static_cast<std::size_t>(id)].fetch_add(1, std::memory_order_relaxed) + 1;
  if (function.since > settings().driver_version) return CUDA_ERROR_NOT_FOUND;
  if (function.where == kReady) {
    if (forked || !initialised) return CUDA_ERROR_NOT_INITIALIZED;
    if (InHostFunction()) return CUDA_ERROR_NOT_PERMITTED;  // §2
  }
  try {
    const CUresult planned = Planned(function, call);
    if (IsSticky(planned)) {
      Lock lock(global_mutex());
      CurrentContext()->broken = planned;
    }
    if (planned != CUDA_SUCCESS) return planned;
    SetDefaultStream(function.default_stream);
    return body();
  } catch (const Failure& failure) {
    return failure.code;
  } catch (const std::bad_alloc&) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  } catch (const std::exception&) {  // no thread for a stream
    return CUDA_ERROR_UNKNOWN;
  }
}

template <class Signature>
struct Parameters;
template <class... P>
struct Parameters<CUresult(P...)> {
  template <std::size_t n>
  using Type = std::tuple_element_t<n, std::tuple<P...>>;
};
template <class Signature, std::size_t n>
using Parameter = typename Parameters<Signature>::template Type<n>;

}  // namespace
}  // namespace emu

#define P(f, n) emu::Parameter<decltype(::f), n> a##n
#define PARAMETERS_0(f)
#define PARAMETERS_1(f) P(f, 0)
#define PARAMETERS_2(f) PARAMETERS_1(f), P(f, 1)
#define PARAMETERS_3(f) PARAMETERS_2(f), P(f, 2)
#define PARAMETERS_4(f) PARAMETERS_3(f), P(f, 3)
#define PARAMETERS_5(f) PARAMETERS_4(f), P(f, 4)
#define PARAMETERS_6(f) PARAMETERS_5(f), P(f, 5)
#define PARAMETERS_7(f) PARAMETERS_6(f), P(f, 6)
#define PARAMETERS_11(f) PARAMETERS_7(f), P(f, 7), P(f, 8), P(f, 9), P(f, 10)
#define ARGUMENTS_0
#define ARGUMENTS_1 a0
#define ARGUMENTS_2 ARGUMENTS_1, a1
#define ARGUMENTS_3 ARGUMENTS_2, a2
#define ARGUMENTS_4 ARGUMENTS_3, a3
#define ARGUMENTS_5 ARGUMENTS_4, a4
#define ARGUMENTS_6 ARGUMENTS_5, a5
#define ARGUMENTS_7 ARGUMENTS_6, a6
#define ARGUMENTS_11 ARGUMENTS_7, a7, a8, a9, a10

#define EXPORT(arity, elf, body)                                                        \
  CUresult elf(PARAMETERS_##arity(elf)) {                                               \
    return emu::Call(emu::Function::elf, [&] { return emu::body(ARGUMENTS_##arity); }); \
  }
#define PLAIN(arity, elf, name, since, where, body) EXPORT(arity, elf, body)
#define PTSZ(arity, elf, name, since, where, body) EXPORT(arity, elf, body) EXPORT(arity, elf##_ptsz, body)
#define PTDS(arity, elf, name, since, where, body) EXPORT(arity, elf, body) EXPORT(arity, elf##_ptds, body)
#define ALIAS(elf, name, since)
extern "C" {
#include "functions.def"
}
#undef PLAIN
#undef PTSZ
#undef PTDS
#undef ALIAS

namespace emu {
namespace {

struct Entry {
  std::string_view name;
  int since;
  bool per_thread;
  void* address;
};

// Function pointers become data pointers here, as they do in dlsym.
template <class F>
void* Address(F* function) {
  return reinterpret_cast<void*>(function);
}

const auto& entries() {
  static const std::array table{
#define PLAIN(arity, elf, name, since, where, body) Entry{#name, since, false, Address(::elf)},
#define PTSZ(arity, elf, name, since, where, body) \
  Entry{#name, since, false, Address(::elf)}, Entry{#name, SincePerThread(since), true, Address(::elf##_ptsz)},
#define PTDS(arity, elf, name, since, where, body) \
  Entry{#name, since, false, Address(::elf)}, Entry{#name, SincePerThread(since), true, Address(::elf##_ptds)},
#define ALIAS(elf, name, since) Entry{#name, since, false, Address(::elf)},
#include "functions.def"
#undef PLAIN
#undef PTSZ
#undef PTDS
#undef ALIAS
  };
  return table;
}

// The newest ABI of a function that both the asked version and the driver know; the per-thread one where asked for.
void* Look(std::string_view name, int version, cuuint64_t flags, CUdriverProcAddressQueryResult* status) {
  const bool per_thread = (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0;
  const Entry* best = nullptr;
  bool known = false;
  for (const Entry& entry : entries()) {
    if (entry.name != name || entry.since > settings().driver_version) continue;
    known = true;
    if (entry.since > version || (entry.per_thread && !per_thread)) continue;
    if (best == nullptr || std::tie(entry.per_thread, entry.since) > std::tie(best->per_thread, best->since)) {
      best = &entry;
    }
  }
  *status = best != nullptr ? CU_GET_PROC_ADDRESS_SUCCESS
            : known         ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                            : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return best != nullptr ? best->address : nullptr;
}

// At the end of a process that used the driver: how often each function was called (EMU_COUNT).
[[gnu::destructor]] void WriteCounts() {
  if (!initialised || forked || settings().count_file.empty()) return;
  std::FILE* const file = std::fopen(settings().count_file.c_str(), "w");
  if (file == nullptr) return;
  for (std::size_t i = 0; i < calls.size(); ++i) {
    if (calls[i] > 0) std::fprintf(file, "%s %lu\n", descriptions()[i].elf, calls[i].load());
  }
  std::fclose(file);
}

// What it still had of the driver then (EMU_LEFT). Of memory that the program freed and work still uses, nothing.
[[gnu::destructor]] void WriteLeft() {
  if (!initialised || forked || settings().left_file.empty()) return;
  std::FILE* const file = std::fopen(settings().left_file.c_str(), "w");
  if (file == nullptr) return;
  static constexpr const char* kKinds[] = {"device", "pool", "graph", "managed", "host", "registered", "mapped"};
  std::array<std::pair<std::size_t, std::size_t>, std::size(kKinds)> left{};
  Lock lock(global_mutex());
  for (const BlockPtr& block : driver().blocks.Select([](const Block& b) { return !b.freed; })) {
    auto& [objects, bytes] = left[static_cast<std::size_t>(block->kind)];
    ++objects;
    bytes += block->size;
  }
  for (std::size_t i = 0; i < left.size(); ++i) {
    std::fprintf(file, "%s %zu %zu\n", kKinds[i], left[i].first, left[i].second);
  }
  std::size_t physical = 0;
  for (const auto& [handle, memory] : driver().virtual_memory.handles) physical += memory->size;
  std::fprintf(file, "handles %zu %zu\n", driver().virtual_memory.handles.size(), physical);
  std::fprintf(file, "streams %zu 0\nevents %zu 0\n", driver().streams.size(), driver().events.size());
  std::fclose(file);
}

}  // namespace

CUresult Init(unsigned flags) {
  if (forked) return CUDA_ERROR_NOT_INITIALIZED;  // the driver does not survive fork (§5)
  Require(flags == 0);
  static const int registered = pthread_atfork(nullptr, nullptr, [] { forked = true; });
  Require(registered == 0, CUDA_ERROR_UNKNOWN);
  Lock lock(global_mutex());
  Require(!driver().devices.empty(), CUDA_ERROR_NO_DEVICE);
  initialised = true;
  return CUDA_SUCCESS;
}

CUresult DriverGetVersion(int* version) {
  Require(version != nullptr);
  *version = settings().driver_version;
  return CUDA_SUCCESS;
}

CUresult GetProcAddressWithStatus(const char* name, void** out, int version, cuuint64_t flags,
                                  CUdriverProcAddressQueryResult* status) {
  Require(name != nullptr && out != nullptr && version <= settings().driver_version);
  CUdriverProcAddressQueryResult result;
  *out = Look(name, version, flags, &result);
  if (status != nullptr) *status = result;
  return *out != nullptr ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult GetProcAddress(const char* name, void** out, int version, cuuint64_t flags) {
  return GetProcAddressWithStatus(name, out, version, flags, nullptr);
}

}  // namespace emu
