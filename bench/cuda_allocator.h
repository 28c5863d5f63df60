// Allocator over the CUDA runtime: --api=malloc (the default) or --api=async.
//
// Which allocator serves the calls is whatever is preloaded, and with it what is reserved; --allocator=NAME only says
// so in the benchmarks' names.
#pragma once

#include <optional>
#include <string>

#include "cuda_api.h"

namespace bench {

class Allocator {
 public:
  Allocator(int& argc, char** argv, bool /*reserve*/ = true)
      : name_{take_flag(argc, argv, "allocator", "native")}, api_{take_flag(argc, argv, "api", "malloc")} {
    if (api_ == "malloc" || api_ == "async") return;
    std::fprintf(stderr, "--api=%s: must be malloc or async\n", api_.c_str());
    std::exit(2);
  }

  const std::string& name() const { return name_; }

  // A pair after the reset lets a preload reserve what it reserves.
  void start_anew() const {
    check(cudaDeviceReset(), "cudaDeviceReset");
    void* block = nullptr;
    check(cudaMalloc(&block, 1), "cudaMalloc");
    check(cudaFree(block), "cudaFree");
  }

  template <typename Work>
  void use(Work work) const {
    if (api_ == "async") {
      work(StreamOrdered{});
    } else {
      work(HostOrdered{});
    }
  }

 private:
  struct HostOrdered {
    MallocApi on(cudaStream_t) const { return {}; }
    std::optional<std::size_t> held() const { return {}; }
  };
  struct StreamOrdered {
    AsyncApi on(cudaStream_t stream) const { return {stream}; }

    // Of the driver's own pool.
    std::optional<std::size_t> held() const {
      cudaMemPool_t pool = nullptr;
      std::uint64_t bytes = 0;
      check(cudaDeviceGetDefaultMemPool(&pool, 0), "cudaDeviceGetDefaultMemPool");
      check(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReservedMemHigh, &bytes), "cudaMemPoolGetAttribute");
      return bytes;
    }
  };

  std::string name_;
  std::string api_;
};

}  // namespace bench
