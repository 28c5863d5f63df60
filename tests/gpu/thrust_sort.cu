// A program that never calls the allocator itself: Thrust vectors and CUB temporaries, sorted, scanned, reduced.
#include <thrust/copy.h>
#include <thrust/device_vector.h>
#include <thrust/reduce.h>
#include <thrust/scan.h>
#include <thrust/sequence.h>
#include <thrust/sort.h>
#include <thrust/transform.h>

#include <cub/device/device_radix_sort.cuh>

#include "gpu_program.h"

namespace {

struct Scramble {
  __host__ __device__ std::uint32_t operator()(std::uint32_t x) const {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ (x >> 16);
  }
};

std::uint64_t checksum(const thrust::device_vector<std::uint32_t>& values) {
  std::vector<std::uint32_t> host(values.size());
  thrust::copy(values.begin(), values.end(), host.begin());
  std::uint64_t sum = 14695981039346656037u;
  for (std::uint32_t value : host) sum = (sum ^ value) * 1099511628211u;
  return sum;
}

}  // namespace

int main() {
  for (std::size_t size : {std::size_t{1000}, std::size_t{100000}, std::size_t{1000000}}) {
    for (int round = 0; round < 3; ++round) {
      thrust::device_vector<std::uint32_t> values(size);
      thrust::sequence(values.begin(), values.end(), static_cast<std::uint32_t>(round));
      thrust::transform(values.begin(), values.end(), values.begin(), Scramble{});
      thrust::device_vector<std::uint32_t> sorted(values), other(size);
      thrust::sort(sorted.begin(), sorted.end());

      const auto* in = thrust::raw_pointer_cast(values.data());
      auto* out = thrust::raw_pointer_cast(other.data());
      void* scratch = nullptr;
      std::size_t bytes = 0;
      const auto count = static_cast<int>(size);
      MUST(cub::DeviceRadixSort::SortKeys(scratch, bytes, in, out, count));
      MUST(cudaMalloc(&scratch, bytes));
      MUST(cub::DeviceRadixSort::SortKeys(scratch, bytes, in, out, count));
      MUST(cudaFree(scratch));

      thrust::device_vector<std::uint32_t> sums(size);
      thrust::inclusive_scan(values.begin(), values.end(), sums.begin());
      std::printf("%zu %d: sorted %016llx, both ways alike %d, scanned %016llx, sum %u\n", size, round,
                  static_cast<unsigned long long>(checksum(sorted)), sorted == other,
                  static_cast<unsigned long long>(checksum(sums)), thrust::reduce(values.begin(), values.end(), 0u));
    }
  }
  return 0;
}
