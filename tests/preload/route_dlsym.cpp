// Route: dlopen the driver, dlsym each function by its ELF name (CuPy, numba, older Triton).
#include "driver_api.h"

int main() {
  void* driver = open_driver();
  return exercise(by_elf_name([&](const char* name) { return dlsym(driver, name); }));
}
