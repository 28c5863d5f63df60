// What the GPU programs share: printing what a call returned, and kernels that hold memory for a while.
//
// A program's output must be the same with and without Cushion, so nothing printed holds an address or a
// time. A line that begins with DIFF-OK states a difference that is allowed; the line must be there in both.
// Work that ought to take a time is timed on the device (globaltimer), so that a busy host does not shorten it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

constexpr unsigned long long kMillisecond = 1000 * 1000;

// Prints the call as written and its code.
#define SHOW(call) std::printf("%s: %d\n", #call, static_cast<int>(call))

// For calls that are not what a program is about: a failure ends it, with a code that is no program's result.
#define MUST(call) must(call, #call, __FILE__, __LINE__)
inline void must(cudaError_t result, const char* call, const char* file, int line) {
  if (result == cudaSuccess) return;
  std::printf("%s:%d: %s: %s (%d)\n", std::strrchr(file, '/') ? std::strrchr(file, '/') + 1 : file, line, call,
              cudaGetErrorName(result), static_cast<int>(result));
  std::fflush(stdout);
  std::_Exit(70);
}

__device__ inline unsigned long long device_now() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__device__ inline void device_wait(unsigned long long ns) {
  if (ns == 0) return;
  const unsigned long long end = device_now() + ns;
  while (device_now() < end) __nanosleep(1000);
}

static __global__ void hold(unsigned long long ns) { device_wait(ns); }

// Waits, then writes.
static __global__ void fill(unsigned char* block, std::size_t size, unsigned char value, unsigned long long ns) {
  device_wait(ns);
  for (std::size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < size; i += gridDim.x * blockDim.x) block[i] = value;
}

// Counts bytes that are not `value`.
static __global__ void check(const unsigned char* block, std::size_t size, unsigned char value, unsigned* bad) {
  const volatile unsigned char* bytes = block;
  for (std::size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < size; i += gridDim.x * blockDim.x)
    if (bytes[i] != value) atomicAdd(bad, 1);
}

// Writes, waits, and counts bytes that somebody else changed meanwhile.
static __global__ void fill_hold_check(unsigned char* block, std::size_t size, unsigned char value,
                                       unsigned long long ns, unsigned* bad) {
  volatile unsigned char* bytes = block;
  const std::size_t first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  for (std::size_t i = first; i < size; i += step) bytes[i] = value;
  __threadfence();
  device_wait(ns);
  for (std::size_t i = first; i < size; i += step)
    if (bytes[i] != value) atomicAdd(bad, 1);
}

// Spins until the host sets the flag, or until the time is over (`seen` stays 0: a failed test, not a hang).
static __global__ void wait_flag(const volatile unsigned* flag, unsigned* seen, unsigned long long timeout_ns) {
  const unsigned long long end = device_now() + timeout_ns;
  while (*flag == 0 && device_now() < end) __nanosleep(1000);
  *seen = *flag;
}

// A counter that kernels add to, and the host reads; in managed memory, so that it is none of the pool's.
class Counter {
 public:
  Counter() {
    MUST(cudaMallocManaged(&value_, sizeof *value_));
    *value_ = 0;
  }
  ~Counter() { MUST(cudaFree(value_)); }
  Counter(const Counter&) = delete;
  Counter& operator=(const Counter&) = delete;
  unsigned* device() const { return value_; }
  unsigned read() const {
    MUST(cudaDeviceSynchronize());
    return *value_;
  }

 private:
  unsigned* value_ = nullptr;
};

inline cudaStream_t new_stream() {
  cudaStream_t stream = nullptr;
  MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return stream;
}

// Runs body(0) … body(count - 1), each in a thread of its own.
template <class Body>
void in_threads(int count, Body body) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back(body, i);
  for (std::thread& thread : threads) thread.join();
}

// A program is a list of scenarios, one a run, named by its first argument.
struct Scenario {
  const char* name;
  void (*run)();
};

template <std::size_t N>
int run_scenario(const Scenario (&scenarios)[N], int argc, char** argv) {
  for (const Scenario& scenario : scenarios) {
    if (argc != 2 || std::strcmp(argv[1], scenario.name) != 0) continue;
    scenario.run();
    std::printf("done\n");
    return 0;
  }
  std::fprintf(stderr, "usage: %s SCENARIO, one of:", argv[0]);
  for (const Scenario& scenario : scenarios) std::fprintf(stderr, " %s", scenario.name);
  std::fprintf(stderr, "\n");
  return 64;
}
