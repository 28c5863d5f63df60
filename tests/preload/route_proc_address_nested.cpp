// Route: cuGetProcAddress asked for cuGetProcAddress itself, at 11030 (four arguments) and at 12000 (five),
// as the runtime does; each answer must be wrapped with its own ABI, and asked again give the same address.
#include "driver_api.h"

namespace {

constexpr cuuint64_t kDefault = CU_GET_PROC_ADDRESS_DEFAULT;

DriverApi through(GetProcAddress4 get) {
  return by_name([&](const char* name) {
    void* found = nullptr;
    get(name, &found, 12000, kDefault);
    return found;
  });
}

DriverApi through(GetProcAddress5 get) {
  return by_name([&](const char* name) {
    void* found = nullptr;
    CUdriverProcAddressQueryResult status{};
    get(name, &found, 12000, kDefault, &status);
    return found;
  });
}

}  // namespace

int main() {
  void* driver = open_driver();
  auto first = reinterpret_cast<GetProcAddress5>(dlsym(driver, "cuGetProcAddress_v2"));
  require(first, "cuGetProcAddress_v2");

  void *four = nullptr, *five = nullptr, *again = nullptr;
  CUdriverProcAddressQueryResult status{};
  std::printf("at 11030: %d status %d\n", first("cuGetProcAddress", &four, 11030, kDefault, &status), status);
  std::printf("at 12000: %d status %d\n", first("cuGetProcAddress", &five, 12000, kDefault, &status), status);
  require(four, "cuGetProcAddress at 11030");
  require(five, "cuGetProcAddress at 12000");
  std::printf("same as dlsym: %d %d\n", four == dlsym(driver, "cuGetProcAddress"),
              five == dlsym(driver, "cuGetProcAddress_v2"));

  auto get4 = reinterpret_cast<GetProcAddress4>(four);
  auto get5 = reinterpret_cast<GetProcAddress5>(five);
  std::printf("4 args asked for 5: %d", get4("cuGetProcAddress", &again, 12000, kDefault));
  std::printf(", same %d\n", again == five);
  std::printf("5 args asked for 4: %d", get5("cuGetProcAddress", &again, 11030, kDefault, &status));
  std::printf(", same %d\n", again == four);
  // NULL for the query result is allowed, and an unknown name is not found: both must reach the driver.
  std::printf("no status wanted: %d", get5("cuMemAlloc", &again, 12000, kDefault, nullptr));
  std::printf(", same as dlsym %d\n", again == dlsym(driver, "cuMemAlloc_v2"));
  std::printf("unknown: %d", get5("cuNoSuchFunction", &again, 12000, kDefault, &status));
  std::printf(" status %d\n", status);

  exercise(through(get4));
  return exercise(through(get5));
}
