// Route: linked with -lcuda, every call through the PLT; the dynamic linker binds the exported symbols.
#include "driver_api.h"

int main() {
  DriverApi api;
#define X(field, function, name, elf, elf_per_thread) api.field = &::function;
  DRIVER_API(X)
#undef X
  return exercise(api);
}
