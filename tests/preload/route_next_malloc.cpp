// A driver program whose malloc is wrapped by a library that asks RTLD_NEXT at every call (next_malloc.cpp).
#include "driver_api.h"

extern "C" int wrapped_mallocs();

int main() {
  const int before = wrapped_mallocs();
  void* volatile memory = std::malloc(1000);
  std::printf("wrapped: %d\n", wrapped_mallocs() == before + 1);
  std::free(memory);
  void* driver = open_driver();
  return exercise(by_elf_name([&](const char* name) { return dlsym(driver, name); }));
}
