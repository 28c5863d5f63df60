// A program with a private library that exports driver-like names: a lookup in *that* library must give that
// library's own function, whatever it is called; the real driver beside it works as ever.
#include <cstring>

#include "driver_api.h"

int main(int, char** argv) {
  void* mine = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  require(mine, "the private library");
  for (const char* name : {"cuMemAlloc_v2", "cuGetProcAddress_v2", "private_alloc"}) {
    Dl_info where{};
    void* found = dlsym(mine, name);
    require(found, name);
    const char* file = dladdr(found, &where) != 0 ? std::strrchr(where.dli_fname, '/') : nullptr;
    std::printf("%s is of %s\n", name, file != nullptr ? file + 1 : "nowhere");
  }
  unsigned long long block = 0;
  using Alloc = int (*)(unsigned long long*, std::size_t);
  std::printf("own: %d\n", reinterpret_cast<Alloc>(dlsym(mine, "cuMemAlloc_v2"))(&block, 5));
  std::printf("own through itself: %d, block %llx\n", reinterpret_cast<Alloc>(dlsym(mine, "private_alloc"))(&block, 6),
              block);

  void* driver = open_driver();
  return exercise(by_elf_name([&](const char* name) { return dlsym(driver, name); }));
}
