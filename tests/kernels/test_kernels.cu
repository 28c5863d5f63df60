// The kernels that tests launch, on a GPU and on the emulated driver alike.
//
//   k_hold(ns)                              occupies its stream for ns
//   k_fill(p, n, value, ns)                 waits ns, then writes the byte value to p[0..n)
//   k_fill_hold_check(p, n, value, ns, bad) writes value to p[0..n), waits ns, adds the number of changed bytes to *bad
//   k_check(p, n, value, bad)               adds the number of bytes of p[0..n) other than value to *bad
//   k_copy(d, s, n, ns)                     waits ns, then copies s[0..n) to d
//   k_wait_flag(flag, timeout_ns)           spins until *flag is not 0, or until the timeout, so that a failing test
//                                           ends
//   k_print(times)                          prints its name so often
//
// Each is launched with one block (harness/launch.h does), so that a wait holds the whole launch. On the emulator they
// run on the host (emulator/kernel.cpp), and a range outside live memory breaks the context as it does on the GPU.
// Built to PTX and embedded as kTestKernels (test_kernels.h, generated); without nvcc the image is empty, which only
// the emulator loads.
#include <cstdint>
#include <cstdio>

namespace {

__device__ std::uint64_t Now() {
  std::uint64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}

__device__ void Wait(std::uint64_t ns) {
  const std::uint64_t end = Now() + ns;
  while (Now() < end) __nanosleep(1000);
}

__device__ void Fill(std::uint8_t* p, std::uint64_t n, std::uint32_t value) {
  for (std::uint64_t i = threadIdx.x; i < n; i += blockDim.x) p[i] = static_cast<std::uint8_t>(value);
}

__device__ void Check(const volatile std::uint8_t* p, std::uint64_t n, std::uint32_t value, std::uint32_t* bad) {
  std::uint32_t count = 0;
  for (std::uint64_t i = threadIdx.x; i < n; i += blockDim.x) count += p[i] != static_cast<std::uint8_t>(value);
  if (count > 0) atomicAdd(bad, count);
}

}  // namespace

extern "C" {

__global__ void k_hold(std::uint64_t ns) { Wait(ns); }

__global__ void k_fill(std::uint8_t* p, std::uint64_t n, std::uint32_t value, std::uint64_t ns) {
  Wait(ns);
  __syncthreads();
  Fill(p, n, value);
}

__global__ void k_fill_hold_check(std::uint8_t* p, std::uint64_t n, std::uint32_t value, std::uint64_t ns,
                                  std::uint32_t* bad) {
  Fill(p, n, value);
  __threadfence();
  __syncthreads();
  Wait(ns);
  __syncthreads();
  Check(p, n, value, bad);
}

__global__ void k_check(std::uint8_t* p, std::uint64_t n, std::uint32_t value, std::uint32_t* bad) {
  Check(p, n, value, bad);
}

__global__ void k_copy(std::uint8_t* d, const std::uint8_t* s, std::uint64_t n, std::uint64_t ns) {
  Wait(ns);
  __syncthreads();
  for (std::uint64_t i = threadIdx.x; i < n; i += blockDim.x) d[i] = s[i];
}

__global__ void k_wait_flag(volatile std::uint32_t* flag, std::uint64_t timeout_ns) {
  const std::uint64_t end = Now() + timeout_ns;
  while (*flag == 0 && Now() < end) __nanosleep(1000);
}

__global__ void k_print(std::uint32_t times) {
  for (std::uint32_t i = 0; i < times; ++i) printf("k_print\n");
}

}  // extern "C"
