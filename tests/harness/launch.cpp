#include "tests/harness/launch.h"

#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "test_kernels.h"

namespace harness {
namespace {

struct Key {
  unsigned long long context_id;
  std::string kernel;
  auto operator<=>(const Key&) const = default;
};

std::mutex mutex;
std::map<unsigned long long, CUmodule> modules;  // by context id: a handle may come again after a reset
std::map<Key, CUfunction> functions;

CUresult Function(const char* kernel, CUfunction* function) {
  unsigned long long id = 0;
  CUresult result = driver().CtxGetId(nullptr, &id);
  if (result != CUDA_SUCCESS) return result;
  const std::lock_guard lock(mutex);
  if (!modules.contains(id)) {
    CUmodule module = nullptr;
    result = driver().ModuleLoadData(&module, kTestKernels);
    if (result != CUDA_SUCCESS) return result;
    modules[id] = module;
  }
  CUfunction& known = functions[{id, kernel}];
  if (known == nullptr) {
    result = driver().ModuleGetFunction(&known, modules[id], kernel);
    if (result != CUDA_SUCCESS) return result;
  }
  *function = known;
  return CUDA_SUCCESS;
}

template <class... Arguments>
CUresult Launch(const char* kernel, unsigned threads, CUstream stream, Arguments... arguments) {
  CUfunction function = nullptr;
  const CUresult result = Function(kernel, &function);
  if (result != CUDA_SUCCESS) return result;
  void* pointers[] = {&arguments...};
  return driver().LaunchKernel(function, 1, 1, 1, threads, 1, 1, 0, stream, pointers, nullptr);
}

}  // namespace

CUresult LoadKernels() {
  for (const char* kernel : {"k_hold", "k_fill", "k_fill_hold_check", "k_check", "k_copy", "k_wait_flag", "k_print"}) {
    CUfunction function = nullptr;
    const CUresult result = Function(kernel, &function);
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

CUresult LaunchHold(CUstream stream, std::uint64_t ns) { return Launch("k_hold", 1, stream, ns); }

CUresult LaunchFill(CUstream stream, CUdeviceptr p, std::uint64_t n, std::uint32_t value, std::uint64_t ns) {
  return Launch("k_fill", 256, stream, p, n, value, ns);
}

CUresult LaunchFillHoldCheck(CUstream stream, CUdeviceptr p, std::uint64_t n, std::uint32_t value, std::uint64_t ns,
                             CUdeviceptr bad) {
  return Launch("k_fill_hold_check", 256, stream, p, n, value, ns, bad);
}

CUresult LaunchCheck(CUstream stream, CUdeviceptr p, std::uint64_t n, std::uint32_t value, CUdeviceptr bad) {
  return Launch("k_check", 256, stream, p, n, value, bad);
}

CUresult LaunchCopy(CUstream stream, CUdeviceptr to, CUdeviceptr from, std::uint64_t n, std::uint64_t ns) {
  return Launch("k_copy", 256, stream, to, from, n, ns);
}

CUresult LaunchWaitFlag(CUstream stream, CUdeviceptr flag, std::uint64_t timeout_ns) {
  return Launch("k_wait_flag", 1, stream, flag, timeout_ns);
}

CUresult LaunchPrint(CUstream stream, std::uint32_t times) { return Launch("k_print", 1, stream, times); }

}  // namespace harness
