// An ordinary CUDA program, as nvcc builds it by default: the runtime is linked in statically.
//
// Every iteration is one step of a heat simulation written the way much code is: each stage allocates the
// temporaries that it needs, launches its kernels and frees them. The checksum goes to stdout, the time, which
// differs from run to run, to stderr.
//
//   gpu_demo [STEPS]
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

constexpr int kSide = 512;
constexpr int kCells = kSide * kSide;
constexpr int kThreads = 256;
constexpr int kBlocks = kCells / kThreads;

#define CHECK(call) check(call, #call)
void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "gpu_demo: %s: %s\n", call, cudaGetErrorString(error));
  std::exit(1);
}

// Integer arithmetic throughout: the result is the same on every GPU.
__global__ void ignite(std::uint32_t* cells) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  cells[i] = (static_cast<std::uint32_t>(i) * 2654435761u) >> 8;
}

__global__ void flow(const std::uint32_t* cells, std::int32_t* change) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  const int x = i % kSide;
  const int y = i / kSide;
  const auto at = [&](int column, int row) {
    return static_cast<std::int32_t>(cells[(row + kSide) % kSide * kSide + (column + kSide) % kSide]);
  };
  change[i] = (at(x - 1, y) + at(x + 1, y) + at(x, y - 1) + at(x, y + 1) - 4 * at(x, y)) / 8;
}

__global__ void apply(std::uint32_t* cells, const std::int32_t* change) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  cells[i] += static_cast<std::uint32_t>(change[i]);
}

__global__ void sum_blocks(const std::uint32_t* cells, unsigned long long* sums) {
  __shared__ unsigned long long partial[kThreads];
  partial[threadIdx.x] = static_cast<unsigned long long>(cells[blockIdx.x * kThreads + threadIdx.x]) * (blockIdx.x + 1);
  for (int width = kThreads / 2; width > 0; width /= 2) {
    __syncthreads();
    if (threadIdx.x < width) partial[threadIdx.x] += partial[threadIdx.x + width];
  }
  if (threadIdx.x == 0) sums[blockIdx.x] = partial[0];
}

template <typename T>
T* temporary(int count) {
  T* pointer = nullptr;
  CHECK(cudaMalloc(&pointer, count * sizeof(T)));
  return pointer;
}

void step(std::uint32_t* cells) {
  auto* const change = temporary<std::int32_t>(kCells);
  flow<<<kBlocks, kThreads>>>(cells, change);
  apply<<<kBlocks, kThreads>>>(cells, change);
  CHECK(cudaFree(change));
}

std::uint64_t energy(const std::uint32_t* cells) {
  auto* const sums = temporary<unsigned long long>(kBlocks);
  auto* const copy = temporary<std::uint32_t>(kCells);
  CHECK(cudaMemcpyAsync(copy, cells, kCells * sizeof *cells, cudaMemcpyDeviceToDevice));
  sum_blocks<<<kBlocks, kThreads>>>(copy, sums);
  std::vector<unsigned long long> host(kBlocks);
  CHECK(cudaMemcpy(host.data(), sums, kBlocks * sizeof *sums, cudaMemcpyDeviceToHost));
  CHECK(cudaFree(copy));
  CHECK(cudaFree(sums));
  std::uint64_t total = 0;
  for (const unsigned long long sum : host) total = total * 31 + sum;
  return total;
}

}  // namespace

int main(int argc, char** argv) {
  const int steps = argc > 1 ? std::atoi(argv[1]) : 3000;
  auto* const cells = temporary<std::uint32_t>(kCells);
  ignite<<<kBlocks, kThreads>>>(cells);
  CHECK(cudaDeviceSynchronize());

  std::uint64_t checksum = 0;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < steps; ++i) {
    step(cells);
    checksum = checksum * 31 + energy(cells);
  }
  const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;

  CHECK(cudaGetLastError());
  CHECK(cudaFree(cells));
  std::printf("%d steps over %d cells, checksum %016llx\n", steps, kCells, static_cast<unsigned long long>(checksum));
  std::fprintf(stderr, "%.1f ms\n", time.count());
  return 0;
}
