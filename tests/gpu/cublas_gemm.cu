// A library that allocates for itself: cuBLAS handles and workspaces. The matrices hold small integers, so the
// products are exact and the checksum is the same for whatever kernel cuBLAS picks.
#include <cublas_v2.h>

#include "gpu_program.h"

namespace {

__global__ void small_integers(float* matrix, std::size_t size, unsigned seed) {
  for (std::size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < size; i += gridDim.x * blockDim.x)
    matrix[i] = static_cast<float>((static_cast<unsigned>(i) * 2654435761u + seed) >> 29);
}

void blas(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  std::printf("%s: %d\n", what, status);
  std::exit(71);
}

}  // namespace

int main() {
  for (int round = 0; round < 3; ++round) {
    cublasHandle_t handle = nullptr;
    blas(cublasCreate(&handle), "cublasCreate");
    cudaStream_t stream = new_stream();
    blas(cublasSetStream(handle, stream), "cublasSetStream");
    for (int n : {64, 257, 1024, 2048}) {
      const std::size_t size = static_cast<std::size_t>(n) * n;
      float *a = nullptr, *b = nullptr, *c = nullptr;
      MUST(cudaMalloc(&a, size * sizeof *a));
      MUST(cudaMallocAsync(&b, size * sizeof *b, stream));
      MUST(cudaMallocAsync(&c, size * sizeof *c, stream));
      small_integers<<<64, 256, 0, stream>>>(a, size, 1);
      small_integers<<<64, 256, 0, stream>>>(b, size, 2);
      const float one = 1, zero = 0;
      blas(cublasSgemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, n, n, n, &one, a, n, b, n, &zero, c, n), "cublasSgemm");
      std::vector<float> host(size);
      MUST(cudaMemcpyAsync(host.data(), c, size * sizeof *c, cudaMemcpyDeviceToHost, stream));
      MUST(cudaFreeAsync(b, stream));
      MUST(cudaFreeAsync(c, stream));
      MUST(cudaStreamSynchronize(stream));
      MUST(cudaFree(a));
      std::uint64_t sum = 14695981039346656037u;
      for (float value : host) sum = (sum ^ static_cast<std::uint64_t>(value)) * 1099511628211u;
      std::printf("%d: %016llx\n", n, static_cast<unsigned long long>(sum));
    }
    blas(cublasDestroy(handle), "cublasDestroy");
    MUST(cudaStreamDestroy(stream));
  }
  return 0;
}
