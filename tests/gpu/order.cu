// Order: what a program may rely on because cudaFree waits, and that no block is handed out while the device
// still works on it. A block handed out too early shows as bytes that somebody else changed.
#include <unistd.h>

#include <atomic>
#include <chrono>

#include "gpu_program.h"

namespace {

constexpr std::size_t kSize = 4 << 20;
constexpr unsigned long long kHold = 20 * kMillisecond;

// Two streams that nothing orders but a cudaFree of a third block in between.
void two_streams() {
  Counter bad;
  cudaStream_t writer = new_stream(), reader = new_stream();
  unsigned char *shared = nullptr, *other = nullptr;
  MUST(cudaMalloc(&shared, kSize));
  for (int round = 1; round <= 5; ++round) {
    const auto value = static_cast<unsigned char>(round);
    MUST(cudaMalloc(&other, 1000 * round));
    fill<<<8, 256, 0, writer>>>(shared, kSize, value, kHold);
    SHOW(cudaFree(other));
    check<<<8, 256, 0, reader>>>(shared, kSize, value, bad.device());
    MUST(cudaStreamSynchronize(reader));
  }
  std::printf("bad bytes: %u\n", bad.read());
  MUST(cudaFree(shared));
}

// Pinned memory that a copy fills is complete after cudaFree.
void pinned() {
  unsigned char *device = nullptr, *host = nullptr, *other = nullptr;
  MUST(cudaMalloc(&device, kSize));
  MUST(cudaMallocHost(&host, kSize));
  std::memset(host, 0, kSize);
  MUST(cudaMalloc(&other, 100));
  cudaStream_t stream = new_stream();
  fill<<<8, 256, 0, stream>>>(device, kSize, 5, kHold);
  MUST(cudaMemcpyAsync(host, device, kSize, cudaMemcpyDeviceToHost, stream));
  SHOW(cudaFree(other));
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < kSize; ++i) wrong += host[i] != 5;
  std::printf("wrong: %zu\n", wrong);
  MUST(cudaFreeHost(host));
  MUST(cudaFree(device));
}

__global__ void speak(int number) {
  device_wait(kHold);
  printf("from the device: %d\n", number);
}

// Device printf followed by nothing but a cudaFree: the text is out when the process ends at once.
void device_printf() {
  void* block = nullptr;
  MUST(cudaMalloc(&block, 100));
  std::printf("from the host\n");
  std::fflush(stdout);
  speak<<<1, 1>>>(42);
  SHOW(cudaFree(block));
  std::fflush(stdout);
  _exit(5);
}

// An event's time may be read right after a cudaFree, because the event has happened by then.
void elapsed() {
  void* block = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
  cudaStream_t stream = new_stream();
  MUST(cudaMalloc(&block, 100));
  MUST(cudaEventCreate(&begin));
  MUST(cudaEventCreate(&end));
  MUST(cudaEventRecord(begin, stream));
  hold<<<1, 1, 0, stream>>>(kHold);
  MUST(cudaEventRecord(end, stream));
  SHOW(cudaFree(block));
  SHOW(cudaEventQuery(end));
  SHOW(cudaStreamQuery(stream));
  float milliseconds = 0;
  SHOW(cudaEventElapsedTime(&milliseconds, begin, end));
  std::printf("20 ms or more: %d\n", milliseconds >= 19.5f);
}

__global__ void fault() {
  device_wait(kHold);
  *reinterpret_cast<volatile int*>(16) = 1;
}

// cudaFree returns the error of the work that it waited for, and after that everything does.
void async_error() {
  void *block = nullptr, *other = nullptr;
  MUST(cudaMalloc(&block, 100));
  MUST(cudaMalloc(&other, 100));
  fault<<<1, 1>>>();
  SHOW(cudaFree(block));
  SHOW(cudaMalloc(&block, 100));
  SHOW(cudaFree(other));
  SHOW(cudaMallocAsync(&block, 100, nullptr));
  std::size_t available = 0, total = 0;
  SHOW(cudaMemGetInfo(&available, &total));
  SHOW(cudaDeviceSynchronize());
  SHOW(cudaGetLastError());
}

// The host opens the gate that the device waits at. Between the launch and that, the program allocates: whatever
// the allocator does then must not wait for the device.
struct Gate {
  unsigned *host = nullptr, *device = nullptr;
  unsigned* seen = nullptr;

  Gate() {
    MUST(cudaHostAlloc(&host, 2 * sizeof *host, cudaHostAllocMapped));
    MUST(cudaHostGetDevicePointer(&device, host, 0));
    host[0] = host[1] = 0;
  }
  void close(cudaStream_t stream) {
    host[0] = host[1] = 0;
    wait_flag<<<1, 1, 0, stream>>>(device, device + 1, 10000 * kMillisecond);
    MUST(cudaGetLastError());
  }
  void open() { *static_cast<volatile unsigned*>(host) = 1; }
  bool passed() const { return host[1] == 1; }
};

void gate_sync() {
  Gate gate;
  cudaStream_t stream = new_stream();
  int passed = 0;
  for (std::size_t size = 1000; size <= (std::size_t{1} << 30); size *= 8) {
    void *first = nullptr, *second = nullptr;
    MUST(cudaMalloc(&first, size));
    MUST(cudaFree(first));
    gate.close(stream);
    MUST(cudaMalloc(&first, size));
    MUST(cudaMalloc(&second, 2 * size));
    gate.open();
    MUST(cudaStreamSynchronize(stream));
    passed += gate.passed();
    MUST(cudaFree(first));
    MUST(cudaFree(second));
  }
  std::printf("passed: %d\n", passed);
}

// A kernel that is loaded lazily, at its first launch, waits for the device: not behind a closed gate.
void warm_up_memset(cudaStream_t stream) {
  void* block = nullptr;
  for (std::size_t size : {std::size_t{1000}, std::size_t{1} << 20}) {
    MUST(cudaMallocAsync(&block, size, stream));
    MUST(cudaMemsetAsync(block, 1, size, stream));
    MUST(cudaFreeAsync(block, stream));
  }
  MUST(cudaStreamSynchronize(stream));
}

void gate_async() {
  Gate gate;
  cudaStream_t stream = new_stream(), other = new_stream();
  int passed = 0;
  warm_up_memset(other);
  for (std::size_t size = 1000; size <= (std::size_t{1} << 28); size *= 8) {
    // Freed before the gate in the stream that stops at it; wanted by another stream and by the host.
    void *block = nullptr, *again = nullptr, *host_ordered = nullptr;
    MUST(cudaMallocAsync(&block, size, stream));
    MUST(cudaFreeAsync(block, stream));
    gate.close(stream);
    MUST(cudaMallocAsync(&again, size, other));
    MUST(cudaMemsetAsync(again, 1, size, other));
    MUST(cudaStreamSynchronize(other));
    MUST(cudaMalloc(&host_ordered, size));
    MUST(cudaFreeAsync(again, other));
    MUST(cudaStreamSynchronize(other));
    gate.open();
    MUST(cudaStreamSynchronize(stream));
    passed += gate.passed();
    MUST(cudaFree(host_ordered));

    // Freed behind the gate: not clean before it opens, and nobody may wait for that.
    MUST(cudaMallocAsync(&block, size, stream));
    gate.close(stream);
    MUST(cudaFreeAsync(block, stream));
    MUST(cudaMallocAsync(&again, size, other));
    MUST(cudaMemsetAsync(again, 1, size, other));
    MUST(cudaStreamSynchronize(other));
    MUST(cudaMalloc(&host_ordered, size));
    gate.open();
    MUST(cudaStreamSynchronize(stream));
    passed += gate.passed();
    MUST(cudaFree(again));
    MUST(cudaFree(host_ordered));
  }
  std::printf("passed: %d\n", passed);
}

// Threads that allocate, start a kernel that holds the block for 20 ms and checks its bytes, and free it at once.
void hold_sync() {
  Counter bad;
  in_threads(4, [&](int thread) {
    cudaStream_t stream = new_stream();
    for (int i = 0; i < 8; ++i) {
      unsigned char* block = nullptr;
      MUST(cudaMalloc(&block, kSize));
      fill_hold_check<<<4, 256, 0, stream>>>(block, kSize, static_cast<unsigned char>(thread * 16 + i + 1), kHold,
                                             bad.device());
      MUST(cudaFree(block));
    }
    MUST(cudaStreamSynchronize(stream));
    MUST(cudaStreamDestroy(stream));
  });
  std::printf("bad bytes: %u\n", bad.read());
}

void hold_async() {
  Counter bad;
  in_threads(4, [&](int thread) {
    cudaStream_t stream = new_stream();
    for (int i = 0; i < 12; ++i) {
      unsigned char* block = nullptr;
      MUST(cudaMallocAsync(&block, kSize, stream));
      fill_hold_check<<<4, 256, 0, stream>>>(block, kSize, static_cast<unsigned char>(thread * 16 + i + 1), kHold,
                                             bad.device());
      MUST(cudaFreeAsync(block, stream));
    }
    MUST(cudaStreamDestroy(stream));  // still busy
  });
  std::printf("bad bytes: %u\n", bad.read());
}

// Freed in a stream's order while others allocate host-ordered: cudaMalloc may be used by any stream at once.
void hold_mixed() {
  Counter bad;
  in_threads(4, [&](int thread) {
    cudaStream_t stream = new_stream(), second = new_stream();
    for (int i = 0; i < 8; ++i) {
      const auto value = static_cast<unsigned char>(thread * 32 + 2 * i + 1);
      unsigned char *async = nullptr, *sync = nullptr;
      MUST(cudaMallocAsync(&async, kSize, stream));
      fill_hold_check<<<4, 256, 0, stream>>>(async, kSize, value, kHold, bad.device());
      MUST(cudaFreeAsync(async, stream));
      MUST(cudaMalloc(&sync, kSize));
      fill_hold_check<<<4, 256, 0, second>>>(sync, kSize, static_cast<unsigned char>(value + 1), kHold, bad.device());
      if (i % 2 == 0) {
        MUST(cudaFree(sync));
      } else {
        MUST(cudaFreeAsync(sync, second));
      }
    }
    MUST(cudaStreamSynchronize(stream));
    MUST(cudaStreamSynchronize(second));
  });
  std::printf("bad bytes: %u\n", bad.read());
}

// A block passes from stream to stream behind an event, as frameworks do, with blocks of every size in flight.
void handover() {
  Counter bad;
  cudaStream_t streams[4];
  for (cudaStream_t& stream : streams) stream = new_stream();
  cudaEvent_t event = nullptr;
  MUST(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  for (int i = 0; i < 40; ++i) {
    cudaStream_t from = streams[i % 4], to = streams[(i + 1) % 4];
    const auto value = static_cast<unsigned char>(i + 1);
    unsigned char *block = nullptr, *next = nullptr;
    MUST(cudaMallocAsync(&block, kSize, from));
    fill<<<8, 256, 0, from>>>(block, kSize, value, kMillisecond);
    MUST(cudaEventRecord(event, from));
    MUST(cudaStreamWaitEvent(to, event, 0));
    check<<<8, 256, 0, to>>>(block, kSize, value, bad.device());
    MUST(cudaFreeAsync(block, to));
    MUST(cudaMallocAsync(&next, kSize, from));  // `from` is not ordered behind `to`
    fill_hold_check<<<4, 256, 0, from>>>(next, kSize, static_cast<unsigned char>(~value), kMillisecond, bad.device());
    MUST(cudaFreeAsync(next, from));
  }
  std::printf("bad bytes: %u\n", bad.read());
}

// Eight threads with a stream each, about two seconds of random sizes and lifetimes, every block signed by its
// kernel and checked before it is freed.
void stress() {
  constexpr int kThreads = 8;
  Counter bad;
  std::atomic<int> errors{0}, few{0};
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  in_threads(kThreads, [&](int thread) {
    struct Block {
      unsigned char* bytes;
      std::size_t size;
      unsigned char value;
      bool async;
    };
    cudaStream_t stream = thread % 2 == 0 ? new_stream() : cudaStreamPerThread;
    std::vector<Block> live;
    std::uint64_t random = 1000 + thread;
    const auto next = [&] { return (random = random * 6364136223846793005u + 1442695040888963407u) >> 33; };
    int done = 0;
    const auto let_go = [&] {
      const std::size_t at = next() % live.size();
      const Block block = live[at];
      live[at] = live.back();
      live.pop_back();
      check<<<4, 128, 0, stream>>>(block.bytes, block.size, block.value, bad.device());
      const bool at_once = next() % 16 == 0;
      // cudaFree waits for the work on a cudaMalloc block only: for others the program must have waited itself.
      if (at_once && block.async) errors += cudaStreamSynchronize(stream) != cudaSuccess;
      errors += (at_once ? cudaFree(block.bytes) : cudaFreeAsync(block.bytes, stream)) != cudaSuccess;
    };
    while (std::chrono::steady_clock::now() < end) {
      ++done;
      if (live.size() > 20) let_go();
      Block block{nullptr, std::size_t{1} << (8 + next() % 14), static_cast<unsigned char>(next() % 251 + 1),
                  next() % 16 != 0};
      block.size += next() % block.size;
      errors += (block.async ? cudaMallocAsync(&block.bytes, block.size, stream)
                             : cudaMalloc(&block.bytes, block.size)) != cudaSuccess;
      fill<<<4, 128, 0, stream>>>(block.bytes, block.size, block.value, 0);
      live.push_back(block);
      if (next() % 64 == 0) errors += cudaStreamSynchronize(stream) != cudaSuccess;
      if (next() % 2 == 0) let_go();
    }
    while (!live.empty()) let_go();
    few += done < 100;
    errors += cudaStreamSynchronize(stream) != cudaSuccess;
  });
  std::printf("errors: %d, bad bytes: %u, threads that did next to nothing: %d\n", errors.load(), bad.read(),
              few.load());
}

constexpr Scenario kScenarios[] = {
    {"two_streams", two_streams}, {"pinned", pinned},           {"device_printf", device_printf},
    {"elapsed", elapsed},         {"async_error", async_error}, {"gate_sync", gate_sync},
    {"gate_async", gate_async},   {"hold_sync", hold_sync},     {"hold_async", hold_async},
    {"hold_mixed", hold_mixed},   {"handover", handover},       {"stress", stress}};

}  // namespace

int main(int argc, char** argv) { return run_scenario(kScenarios, argc, argv); }
