// A library with functions of its own that happen to be named like the driver's (an emulation layer, a
// test double). Linked -Bsymbolic, as such libraries are: it calls its own.
#include <cstddef>

extern "C" __attribute__((visibility("default"))) int cuMemAlloc_v2(unsigned long long* block, std::size_t size) {
  *block = 0x1000 + size;
  return 1234;
}

extern "C" __attribute__((visibility("default"))) void* cuGetProcAddress_v2() { return nullptr; }

extern "C" __attribute__((visibility("default"))) int private_alloc(unsigned long long* block, std::size_t size) {
  return cuMemAlloc_v2(block, size);
}
