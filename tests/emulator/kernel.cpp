#include "kernel.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string_view>
#include <thread>
#include <tuple>
#include <utility>

#include "capture.h"
#include "driver.h"

namespace emu {
namespace {

struct Machine {  // what a running kernel sees
  const Context& context;

  void Touch(const volatile void* pointer, std::size_t bytes) const {
    Lock lock(global_mutex());
    const auto address = reinterpret_cast<std::uintptr_t>(pointer);
    Require(Accessible(context, address, bytes), CUDA_ERROR_ILLEGAL_ADDRESS);
  }
};

void Hold(std::uint64_t ns) { std::this_thread::sleep_for(std::chrono::nanoseconds(ns)); }

std::uint32_t CountOther(const std::uint8_t* p, std::uint64_t n, std::uint32_t value) {
  const auto expected = static_cast<std::uint8_t>(value);
  // Nearly always none: each is the one before it, which the C library finds fast in every build.
  if (n == 0 || (*p == expected && std::memcmp(p, p + 1, n - 1) == 0)) return 0;
  return static_cast<std::uint32_t>(std::count_if(p, p + n, [=](std::uint8_t byte) { return byte != expected; }));
}

void k_hold(const Machine&, std::uint64_t ns) { Hold(ns); }

void k_fill(const Machine& machine, std::uint8_t* p, std::uint64_t n, std::uint32_t value, std::uint64_t ns) {
  Hold(ns);
  machine.Touch(p, n);
  std::memset(p, static_cast<int>(value & 0xff), n);
}

void k_fill_hold_check(const Machine& machine, std::uint8_t* p, std::uint64_t n, std::uint32_t value, std::uint64_t ns,
                       std::uint32_t* bad) {
  machine.Touch(p, n);
  std::memset(p, static_cast<int>(value & 0xff), n);
  Hold(ns);
  machine.Touch(p, n);
  machine.Touch(bad, sizeof *bad);
  __atomic_fetch_add(bad, CountOther(p, n, value), __ATOMIC_RELAXED);
}

void k_check(const Machine& machine, std::uint8_t* p, std::uint64_t n, std::uint32_t value, std::uint32_t* bad) {
  machine.Touch(p, n);
  machine.Touch(bad, sizeof *bad);
  __atomic_fetch_add(bad, CountOther(p, n, value), __ATOMIC_RELAXED);
}

void k_copy(const Machine& machine, std::uint8_t* to, const std::uint8_t* from, std::uint64_t n, std::uint64_t ns) {
  Hold(ns);
  machine.Touch(to, n);
  machine.Touch(from, n);
  std::memmove(to, from, n);
}

void k_wait_flag(const Machine& machine, volatile std::uint32_t* flag, std::uint64_t timeout_ns) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(timeout_ns);
  machine.Touch(flag, sizeof *flag);
  while (__atomic_load_n(flag, __ATOMIC_ACQUIRE) == 0 && std::chrono::steady_clock::now() < end) {
    Hold(20'000);
  }
}

// The host's stdout: when a GPU shows it is not emulated.
void k_print(const Machine&, std::uint32_t times) {
  for (std::uint32_t i = 0; i < times; ++i) std::puts("k_print");
}

// Emulator only, for programs that check order (stepped_api.h): calls a function of the program's.
void k_call(const Machine&, void (*function)(void*), void* data) { function(data); }

// Spins until a word of the program's is not 0; stepped mode runs it when it is.
void k_spin(const Machine&, volatile std::uint32_t*) {}

// Whether a kernel that spins would end, with its arguments.
std::function<bool()> FlagIsSet(void** arguments) {
  const volatile std::uint32_t* flag;
  std::memcpy(&flag, arguments[0], sizeof flag);
  return [flag] { return __atomic_load_n(flag, __ATOMIC_ACQUIRE) != 0; };
}

template <auto Run, class... Arguments>
Work Bind(void (*)(const Machine&, Arguments...), const ContextPtr& context, void** arguments) {
  std::size_t next = 0;
  const auto read = [&]<class Argument>(Argument argument) {
    std::memcpy(&argument, arguments[next++], sizeof argument);
    return argument;
  };
  const std::tuple<Arguments...> values{read(Arguments{})...};  // braces: read in order
  return [context, values] { std::apply([&](Arguments... unpacked) { Run(Machine{*context}, unpacked...); }, values); };
}

template <auto Run>
Work Launch(const ContextPtr& context, void** arguments) {
  return Bind<Run>(Run, context, arguments);
}

struct Named {
  std::string_view name;
  Kernel kernel;
  std::function<bool()> (*ready)(void** arguments) = nullptr;  // task.h
  bool prints = false;
};

constexpr std::array kKernels{
    Named{"k_hold", Launch<k_hold>},
    Named{"k_fill", Launch<k_fill>},
    Named{"k_fill_hold_check", Launch<k_fill_hold_check>},
    Named{"k_check", Launch<k_check>},
    Named{"k_copy", Launch<k_copy>},
    Named{"k_wait_flag", Launch<k_wait_flag>, FlagIsSet},
    Named{"k_print", Launch<k_print>, nullptr, true},
    Named{"k_call", Launch<k_call>},
    Named{"k_spin", Launch<k_spin>, FlagIsSet},
};

const Named* KernelOf(CUfunction function) {
  const auto* const named = reinterpret_cast<const Named*>(function);
  Require(named >= kKernels.data() && named < kKernels.data() + kKernels.size(), CUDA_ERROR_INVALID_HANDLE);
  return named;
}

}  // namespace

CUresult ModuleLoadData(CUmodule* out, const void* image) {
  Lock lock(global_mutex());
  Require(out != nullptr && image != nullptr);
  auto module = std::make_shared<Module>();
  module->context = CurrentContext();
  RefuseDuringCapture();
  *out = driver().modules.Add(std::move(module));
  return CUDA_SUCCESS;
}

CUresult ModuleLoadDataEx(CUmodule* out, const void* image, unsigned, CUjit_option*, void**) {
  return ModuleLoadData(out, image);
}

CUresult ModuleUnload(CUmodule handle) {
  Lock lock(global_mutex());
  Require(driver().modules.Take(handle) != nullptr, CUDA_ERROR_INVALID_HANDLE);
  return CUDA_SUCCESS;
}

CUresult ModuleGetFunction(CUfunction* out, CUmodule handle, const char* name) {
  Lock lock(global_mutex());
  Require(out != nullptr && name != nullptr);
  Require(driver().modules.Find(handle) != nullptr, CUDA_ERROR_INVALID_HANDLE);
  const auto named = std::find_if(kKernels.begin(), kKernels.end(), [&](const Named& k) { return k.name == name; });
  Require(named != kKernels.end(), CUDA_ERROR_NOT_FOUND);
  *out = reinterpret_cast<CUfunction>(const_cast<Named*>(&*named));
  return CUDA_SUCCESS;
}

CUresult FuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction function) {
  Require(value != nullptr);
  KernelOf(function);
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult LaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                      unsigned block_y, unsigned block_z, unsigned, CUstream handle, void** arguments, void** extra) {
  Lock lock(global_mutex());
  const Named* const named = KernelOf(function);
  Require(grid_x > 0 && grid_y > 0 && grid_z > 0 && block_x > 0 && block_y > 0 && block_z > 0);
  Require(arguments != nullptr && extra == nullptr);  // arguments as one buffer are not emulated
  const StreamPtr stream = StreamOf(handle);
  stream->context->prints |= named->prints;
  Issue(*stream, named->kernel(stream->context, arguments),
        named->ready != nullptr ? named->ready(arguments) : std::function<bool()>{});
  return CUDA_SUCCESS;
}

}  // namespace emu
