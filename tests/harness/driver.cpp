#include "tests/harness/driver.h"

#include <dlfcn.h>

#include <ostream>
#include <string_view>

namespace harness {
namespace {

template <class F>
void Look(const Driver& driver, F& function, const char* name, int version, cuuint64_t flags) {
  void* address = nullptr;
  CUdriverProcAddressQueryResult status;
  if (driver.GetProcAddress(name, &address, version, flags, &status) == CUDA_SUCCESS) {
    function = reinterpret_cast<F>(address);
  }
}

Driver Load(bool per_thread) {
  Driver driver;
  driver.library = dlopen("libcuda.so.1", RTLD_NOW);
  if (driver.library == nullptr) return driver;
  driver.GetProcAddress = reinterpret_cast<PFN_cuGetProcAddress_v12000>(dlsym(driver.library, "cuGetProcAddress_v2"));
  if (driver.GetProcAddress == nullptr) return driver;
#define X(name, version) Look(driver, driver.name, "cu" #name, version, CU_GET_PROC_ADDRESS_LEGACY_STREAM);
#define T(name, version) \
  X(name, version)       \
  if (per_thread) Look(driver, driver.name##_ptsz, "cu" #name, version, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM);
#include "tests/harness/driver_functions.def"
#undef X
#undef T
  return driver;
}

std::string Reason() {
  if (driver().library == nullptr) return "no CUDA driver: libcuda.so.1 does not load";
  if (driver().GetProcAddress == nullptr) return "the CUDA driver is older than 12.0";
  if (driver().Init(0) != CUDA_SUCCESS) return "the CUDA driver does not start: no GPU";
  int count = 0;
  if (driver().DeviceGetCount(&count) != CUDA_SUCCESS || count == 0) return "no CUDA device";
  return {};
}

}  // namespace

const Driver& driver() {
  static const Driver loaded = Load(true);
  return loaded;
}

const Driver& driver_without_per_thread() {
  static const Driver loaded = Load(false);
  return loaded;
}

const std::string& Driver::Missing() {
  static const std::string reason = Reason();
  return reason;
}

bool Driver::Emulated() {
  char name[64] = "";
  return Missing().empty() && driver().DeviceGetName(name, sizeof name, 0) == CUDA_SUCCESS &&
         std::string_view(name) == "Emulated device";
}

}  // namespace harness

void PrintTo(CUresult result, std::ostream* out) {
  const char* name = nullptr;
  const auto ask = harness::driver().GetErrorName;
  if (ask == nullptr || ask(result, &name) != CUDA_SUCCESS || name == nullptr) name = "CUresult";
  *out << name << " (" << static_cast<int>(result) << ")";
}
