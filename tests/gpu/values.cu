// Values: what the allocation calls return through the CUDA runtime, and what its last-error state is then.
#include "gpu_program.h"

namespace {

constexpr std::size_t kMiB = 1 << 20;

void errors() {
  void* block = reinterpret_cast<void*>(42);
  SHOW(cudaMalloc(&block, 0));
  std::printf("null for 0 bytes: %d\n", block == nullptr);
  SHOW(cudaMalloc(nullptr, 100));
  SHOW(cudaGetLastError());
  SHOW(cudaMalloc(&block, std::size_t{1} << 50));
  SHOW(cudaPeekAtLastError());
  SHOW(cudaGetLastError());
  SHOW(cudaGetLastError());
  SHOW(cudaMallocAsync(&block, std::size_t{1} << 50, nullptr));
  SHOW(cudaGetLastError());
  SHOW(cudaFree(nullptr));
  SHOW(cudaFreeAsync(nullptr, nullptr));
  SHOW(cudaGetLastError());

  char* bytes = nullptr;
  SHOW(cudaMalloc(&bytes, 1000));
  SHOW(cudaFree(bytes + 512));
  SHOW(cudaFree(bytes + 1));
  SHOW(cudaGetLastError());
  SHOW(cudaMemset(bytes, 1, 1000));
  SHOW(cudaFree(bytes));
  SHOW(cudaFree(bytes));
  SHOW(cudaGetLastError());

  int on_stack = 0;
  SHOW(cudaFree(&on_stack));
  void* on_heap = std::malloc(1000);
  SHOW(cudaFree(on_heap));
  std::free(on_heap);
  SHOW(cudaFree(reinterpret_cast<void*>(16)));
  SHOW(cudaGetLastError());
}

// A double free of the block at a segment's head must not give the segment away under its live neighbours.
void double_free() {
  constexpr int kBlocks = 64;
  Counter bad;
  std::vector<unsigned char*> blocks(kBlocks);
  for (int i = 0; i < kBlocks; ++i) {
    MUST(cudaMalloc(&blocks[i], 64 << 10));
    fill<<<1, 256>>>(blocks[i], 64 << 10, static_cast<unsigned char>(i + 1), 0);
  }
  int first = 0, second = 0;
  for (int i = 0; i < kBlocks; i += 2) {
    first += cudaFree(blocks[i]) == cudaSuccess;
    second += cudaFree(blocks[i]) == cudaErrorInvalidValue;
  }
  std::printf("freed %d, refused again %d\n", first, second);
  cudaGetLastError();
  for (int i = 1; i < kBlocks; i += 2)
    check<<<1, 256>>>(blocks[i], 64 << 10, static_cast<unsigned char>(i + 1), bad.device());
  std::printf("bad bytes: %u\n", bad.read());
  for (int i = 1; i < kBlocks; i += 2) MUST(cudaFree(blocks[i]));
}

void alignment() {
  for (std::size_t size : {std::size_t{1}, std::size_t{511}, std::size_t{513}, std::size_t{70000}, kMiB, kMiB + 1,
                           2 * kMiB + 1, 33 * kMiB + 5, 300 * kMiB}) {
    void *block = nullptr, *async = nullptr;
    MUST(cudaMalloc(&block, size));
    MUST(cudaMallocAsync(&async, size, nullptr));
    MUST(cudaStreamSynchronize(nullptr));
    const auto address = reinterpret_cast<std::uintptr_t>(block), other = reinterpret_cast<std::uintptr_t>(async);
    std::printf("%zu: by 512 %d, async %d", size, address % 512 == 0, other % 512 == 0);
    if (size > kMiB) std::printf(", by 64 KiB %d", address % (64 << 10) == 0);
    std::printf("\n");
    MUST(cudaMemset(block, 1, size));
    MUST(cudaFree(block));
    MUST(cudaFreeAsync(async, nullptr));
  }
}

void kinds() {
  void* block = nullptr;
  std::size_t pitch = 0;
  SHOW(cudaMallocPitch(&block, &pitch, 1000, 100));
  std::printf("pitch %zu\n", pitch);
  SHOW(cudaMemset2D(block, pitch, 1, 1000, 100));
  SHOW(cudaFree(block));

  cudaPitchedPtr volume{};
  SHOW(cudaMalloc3D(&volume, make_cudaExtent(100, 20, 30)));
  std::printf("pitch %zu, %zu by %zu\n", volume.pitch, volume.xsize, volume.ysize);
  SHOW(cudaMemset3D(volume, 1, make_cudaExtent(100, 20, 30)));
  SHOW(cudaFree(volume.ptr));

  cudaArray_t array = nullptr;
  const cudaChannelFormatDesc format = cudaCreateChannelDesc<float>();
  SHOW(cudaMallocArray(&array, &format, 128, 128));
  SHOW(cudaFreeArray(array));

  int* managed = nullptr;
  SHOW(cudaMallocManaged(&managed, 1000 * sizeof(int)));
  managed[5] = 55;
  fill<<<1, 256>>>(reinterpret_cast<unsigned char*>(managed), 4, 1, 0);
  SHOW(cudaDeviceSynchronize());
  std::printf("managed: %d %x\n", managed[5], static_cast<unsigned>(managed[0]));
  SHOW(cudaFree(managed));

  void* pinned = nullptr;
  SHOW(cudaMallocHost(&pinned, 5000));
  SHOW(cudaFree(pinned));
  SHOW(cudaGetLastError());
  SHOW(cudaFreeHost(pinned));
  SHOW(cudaHostAlloc(&pinned, 5000, cudaHostAllocMapped));
  SHOW(cudaHostGetDevicePointer(&block, pinned, 0));
  SHOW(cudaFreeHost(pinned));
  SHOW(cudaMalloc(&block, 5000));
  SHOW(cudaFreeHost(block));
  SHOW(cudaGetLastError());
  SHOW(cudaFree(block));

  cudaMemPoolProps properties{};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location = {cudaMemLocationTypeDevice, 0};
  cudaMemPool_t pool = nullptr, standard = nullptr;
  SHOW(cudaMemPoolCreate(&pool, &properties));
  SHOW(cudaMallocFromPoolAsync(&block, 5000, pool, nullptr));
  SHOW(cudaMemsetAsync(block, 1, 5000, nullptr));
  SHOW(cudaFreeAsync(block, nullptr));
  SHOW(cudaMallocFromPoolAsync(&block, 5000, pool, nullptr));
  SHOW(cudaDeviceSynchronize());  // cudaFree of a pool's block does not wait: the fill above could meet unmapped memory
  SHOW(cudaFree(block));
  SHOW(cudaDeviceSynchronize());
  SHOW(cudaMemPoolDestroy(pool));
  SHOW(cudaDeviceGetDefaultMemPool(&standard, 0));
  SHOW(cudaMallocFromPoolAsync(&block, 5000, standard, nullptr));
  SHOW(cudaFreeAsync(block, nullptr));

  // Freed by the other API than it was allocated by.
  SHOW(cudaMalloc(&block, 5000));
  SHOW(cudaFreeAsync(block, nullptr));
  SHOW(cudaMallocAsync(&block, 5000, nullptr));
  SHOW(cudaFree(block));
  SHOW(cudaDeviceSynchronize());
}

void attributes() {
  void* block = nullptr;
  for (bool async : {false, true}) {
    MUST(async ? cudaMallocAsync(&block, 3000, nullptr) : cudaMalloc(&block, 3000));
    cudaPointerAttributes found{};
    SHOW(cudaPointerGetAttributes(&found, static_cast<char*>(block) + 100));
    std::printf("type %d, device %d, device pointer kept %d, host pointer %d\n", found.type, found.device,
                found.devicePointer == static_cast<char*>(block) + 100, found.hostPointer != nullptr);
    MUST(cudaFree(block));
  }
  // The driver exports no mapped memory.
  MUST(cudaMalloc(&block, 3000));
  cudaIpcMemHandle_t handle;
  std::printf("DIFF-OK cudaIpcGetMemHandle: %d\n", cudaIpcGetMemHandle(&handle, block));
  cudaGetLastError();
  MUST(cudaFree(block));
}

void reset() {
  void *before = nullptr, *after = nullptr, *async = nullptr;
  SHOW(cudaMalloc(&before, 5000));
  SHOW(cudaMalloc(&before, 5 * kMiB));
  SHOW(cudaMallocAsync(&async, 5000, nullptr));
  SHOW(cudaDeviceReset());
  for (int round = 0; round < 2; ++round) {
    SHOW(cudaMalloc(&after, 5 * kMiB));
    SHOW(cudaMemset(after, 1, 5 * kMiB));
    SHOW(cudaMallocAsync(&async, 7000, nullptr));
    SHOW(cudaMemsetAsync(async, 1, 7000, nullptr));
    in_threads(1, [&](int) { MUST(cudaFree(after)); });
    SHOW(cudaFreeAsync(async, nullptr));
    SHOW(cudaDeviceReset());
  }
  SHOW(cudaFree(nullptr));
  SHOW(cudaMalloc(&after, 100));
  SHOW(cudaFree(after));
}

// Allocation inside a host function is not permitted natively. Cushion may serve what needs no driver call, and
// must neither deadlock nor answer anything else.
void host_function() {
  struct Seen {
    cudaError_t alloc = cudaErrorUnknown, alloc_large = cudaErrorUnknown;
    void *block = nullptr, *large = nullptr;
  } seen;
  void* warm = nullptr;
  MUST(cudaMalloc(&warm, 5000));
  MUST(cudaFree(warm));
  cudaStream_t stream = new_stream();
  hold<<<1, 1, 0, stream>>>(20 * kMillisecond);
  MUST(cudaLaunchHostFunc(
      stream,
      [](void* data) {
        auto* into = static_cast<Seen*>(data);
        into->alloc = cudaMalloc(&into->block, 5000);
        into->alloc_large = cudaMalloc(&into->large, std::size_t{3} << 30);
      },
      &seen));
  SHOW(cudaStreamSynchronize(stream));
  std::printf("DIFF-OK in a host function: %d %d\n", seen.alloc, seen.alloc_large);
  for (cudaError_t code : {seen.alloc, seen.alloc_large})
    std::printf("refused or served: %d\n", code == cudaErrorNotPermitted || code == cudaSuccess);
  if (seen.alloc == cudaSuccess) MUST(cudaFree(seen.block));
  if (seen.alloc_large == cudaSuccess) MUST(cudaFree(seen.large));
  MUST(cudaStreamDestroy(stream));
}

// Programs size themselves by cudaMemGetInfo. Runs alone on its device: others' memory would show.
void memory_info() {
  std::size_t before = 0, total = 0, during = 0, after = 0;
  void* block = nullptr;
  MUST(cudaFree(nullptr));
  SHOW(cudaMemGetInfo(&before, &total));
  SHOW(cudaMalloc(&block, 1024 * kMiB));
  SHOW(cudaMemGetInfo(&during, &total));
  SHOW(cudaFree(block));
  SHOW(cudaMemGetInfo(&after, &total));
  std::printf("1 GiB less: %d, back again: %d\n", before - during >= 1024 * kMiB, after + 64 * kMiB >= before);
  std::size_t most = after / 10 * 9;
  SHOW(cudaMalloc(&block, most));
  SHOW(cudaFree(block));

  // Fill the device, free everything, and the largest request is served again.
  std::vector<void*> blocks;
  while (cudaMalloc(&block, 1024 * kMiB) == cudaSuccess) blocks.push_back(block);
  SHOW(cudaGetLastError());
  std::printf("at least 80 %% of it: %d\n", blocks.size() * 1024 * kMiB >= total / 10 * 8);
  for (void* each : blocks) MUST(cudaFree(each));
  SHOW(cudaMalloc(&block, most));
  SHOW(cudaFree(block));
  // The memory that the pool keeps is there for every other kind too.
  SHOW(cudaMallocManaged(&block, most));
  SHOW(cudaMemset(block, 1, 64 * kMiB));
  SHOW(cudaFree(block));
  cudaMemPool_t pool = nullptr;
  cudaMemPoolProps properties{};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location = {cudaMemLocationTypeDevice, 0};
  MUST(cudaMemPoolCreate(&pool, &properties));
  SHOW(cudaMallocFromPoolAsync(&block, most, pool, nullptr));
  SHOW(cudaFreeAsync(block, nullptr));
  SHOW(cudaDeviceSynchronize());
  MUST(cudaMemPoolDestroy(pool));
}

// Many live blocks of many sizes: no two overlap, every one keeps its bytes.
void many() {
  struct Block {
    unsigned char* bytes;
    std::size_t size;
    unsigned char value;
  };
  Counter bad;
  std::vector<Block> live;
  std::uint64_t random = 12345;
  const auto next = [&] { return (random = random * 6364136223846793005u + 1442695040888963407u) >> 33; };
  int overlapping = 0;
  for (int i = 0; i < 1500; ++i) {
    if (live.size() > 200 || (!live.empty() && next() % 3 == 0)) {
      const std::size_t at = next() % live.size();
      check<<<4, 256>>>(live[at].bytes, live[at].size, live[at].value, bad.device());
      MUST(cudaFree(live[at].bytes));
      live[at] = live.back();
      live.pop_back();
      continue;
    }
    Block block{nullptr, std::size_t{1} << (next() % 22), static_cast<unsigned char>(i)};
    block.size += next() % block.size;
    MUST(cudaMalloc(&block.bytes, block.size));
    for (const Block& other : live)
      overlapping += block.bytes < other.bytes + other.size && other.bytes < block.bytes + block.size;
    fill<<<4, 256>>>(block.bytes, block.size, block.value, 0);
    live.push_back(block);
  }
  for (const Block& block : live) {
    check<<<4, 256>>>(block.bytes, block.size, block.value, bad.device());
    MUST(cudaFree(block.bytes));
  }
  std::printf("overlapping: %d, bad bytes: %u\n", overlapping, bad.read());
}

constexpr Scenario kScenarios[] = {{"errors", errors}, {"double_free", double_free},     {"alignment", alignment},
                                   {"kinds", kinds},   {"attributes", attributes},       {"reset", reset},
                                   {"many", many},     {"host_function", host_function}, {"memory_info", memory_info}};

}  // namespace

int main(int argc, char** argv) { return run_scenario(kScenarios, argc, argv); }
