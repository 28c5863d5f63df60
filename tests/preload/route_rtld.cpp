// Route: a -lcuda program that looks symbols up with RTLD_DEFAULT and RTLD_NEXT, hooked names and others.
// Both mean "in the order in which the objects were loaded", relative to the caller for RTLD_NEXT; the
// answers must work, be the same each time, and be NULL for what does not exist.
#include "driver_api.h"

int main() {
  void* keep = reinterpret_cast<void*>(&cuInit);  // -lcuda is really needed: the driver is in the global scope
  std::printf("malloc by next: %d, by default: %d\n", dlsym(RTLD_NEXT, "malloc") != nullptr,
              dlsym(RTLD_DEFAULT, "malloc") != nullptr);
  std::printf("cuInit by next: %d, by default: %d\n", dlsym(RTLD_NEXT, "cuInit") != nullptr,
              keep == dlsym(RTLD_DEFAULT, "cuInit"));
  std::printf("cuMemAlloc_v2 by default is the linked one: %d\n",
              dlsym(RTLD_DEFAULT, "cuMemAlloc_v2") == reinterpret_cast<void*>(&cuMemAlloc));
  std::printf("unknown by next: %d", dlsym(RTLD_NEXT, "cuNoSuchFunction") != nullptr);
  std::printf(", said so: %d\n", dlerror() != nullptr);
  std::printf("by next\n");
  exercise(by_elf_name([](const char* name) { return dlsym(RTLD_NEXT, name); }));
  std::printf("by default\n");
  return exercise(by_elf_name([](const char* name) { return dlsym(RTLD_DEFAULT, name); }));
}
