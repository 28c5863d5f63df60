// A program that leaks from places that it knows, each marked with `LEAK` in the line of the call:
//
//     leak              65537 bytes in planted_leak(), called through an inlined function; 65538 in a thread; and
//                       10 blocks of 4096 that are freed
//     leak --all        allocates 64 MiB blocks until there is no more memory, and frees them all
//     leak LIBRARY      3 bytes + 65536 in library_leak() of a library opened at run time, which stays open
#include <string_view>
#include <thread>
#include <vector>

#include "driver_api.h"

namespace {

DriverApi g_api;
CUcontext g_context = nullptr;

[[gnu::noinline]] CUdeviceptr planted_leak(std::size_t bytes) {
  CUdeviceptr block = 0;
  g_api.alloc(&block, bytes);  // LEAK planted_leak
  return block + 1;
}

[[gnu::always_inline]] inline CUdeviceptr through_inlined(std::size_t bytes) {
  return planted_leak(bytes) + 1;  // LEAK through_inlined
}

[[gnu::noinline]] int take_all() {
  std::vector<CUdeviceptr> blocks;
  CUdeviceptr block = 0;
  CUresult result = CUDA_SUCCESS;
  while ((result = g_api.alloc(&block, std::size_t{64} << 20)) == CUDA_SUCCESS) blocks.push_back(block);
  const CUresult again = g_api.alloc(&block, std::size_t{64} << 20);
  for (const CUdeviceptr one : blocks) g_api.free(one);
  std::printf("%d %d\n", result, again);
  return 0;
}

[[gnu::noinline]] CUdeviceptr thread_leak() {
  g_api.set_current(g_context);
  CUdeviceptr block = 0;
  g_api.alloc(&block, 65538);  // LEAK thread_leak
  return block + 1;
}

}  // namespace

int main(int argc, char** argv) {
  void* const driver = open_driver();
  g_api = by_elf_name([&](const char* name) { return dlsym(driver, name); });
  CUdevice device = 0;
  if (g_api.init(0) != CUDA_SUCCESS || g_api.device_get(&device, 0) != CUDA_SUCCESS ||
      g_api.primary_retain(&g_context, device) != CUDA_SUCCESS || g_api.set_current(g_context) != CUDA_SUCCESS)
    return 1;
  if (argc > 1 && std::string_view(argv[1]) == "--all") return take_all();
  if (argc > 1) {
    void* const library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return 2;
    auto* const leak = reinterpret_cast<CUdeviceptr (*)(decltype(&::cuMemAlloc))>(dlsym(library, "library_leak"));
    return leak != nullptr && leak(g_api.alloc) != 0 ? 0 : 3;
  }
  volatile CUdeviceptr kept = through_inlined(65537);
  std::thread([&] { kept = thread_leak(); }).join();
  for (int i = 0; i < 10; ++i) {
    CUdeviceptr block = 0;
    if (g_api.alloc(&block, 4096) != CUDA_SUCCESS || g_api.free(block) != CUDA_SUCCESS) return 4;
  }
  return 0;
}
