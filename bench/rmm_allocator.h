// Allocator over RMM's memory resources: --allocator=rmm_pool, rmm_arena, rmm_binning, rmm_cuda_async, or
// rmm_pool_track (the pool under tracking_resource_adaptor). Stream-ordered only, so --api, if given, is async.
//
// Their settings are those of RMM's own benchmarks, and are in the output's context as "allocator_settings": the pool
// starts with half of the free memory and has no maximum; the arena has all but 64 MiB; binning has bins of 256 KiB to
// 4 MiB over that pool; cuda_async is as made by default. Where nothing may be reserved the pool starts empty and
// grows. A resource is made for each use and destroyed after it.
#pragma once

#include <optional>
#include <rmm/aligned.hpp>
#include <rmm/cuda_device.hpp>
#include <rmm/error.hpp>
#include <rmm/mr/arena_memory_resource.hpp>
#include <rmm/mr/binning_memory_resource.hpp>
#include <rmm/mr/cuda_async_memory_resource.hpp>
#include <rmm/mr/cuda_memory_resource.hpp>
#include <rmm/mr/pool_memory_resource.hpp>
#include <rmm/mr/statistics_resource_adaptor.hpp>
#include <rmm/mr/tracking_resource_adaptor.hpp>
#include <rmm/resource_ref.hpp>
#include <string>

#include "cuda_api.h"

namespace bench {

// A resource's allocate and deallocate on one stream.
struct RmmApi {
  mutable rmm::device_async_resource_ref resource;  // a reference, whose calls are not const
  cudaStream_t stream;

  bool allocate(void*& block, std::size_t bytes) const {
    try {
      block = resource.allocate(stream, bytes, rmm::CUDA_ALLOCATION_ALIGNMENT);
      return true;
    } catch (const rmm::bad_alloc&) {
      return false;
    }
  }
  bool free(void* block, std::size_t bytes) const {
    resource.deallocate(stream, block, bytes, rmm::CUDA_ALLOCATION_ALIGNMENT);
    return true;
  }
};

class Allocator {
 public:
  Allocator(int& argc, char** argv, bool reserve = true)
      : name_{take_flag(argc, argv, "allocator", "rmm_pool")}, reserve_{reserve} {
    const std::string pool = reserve ? "pool: half of the free memory at first" : "pool: empty at first";
    std::string settings;
    if (name_ == "rmm_pool") {
      settings = pool;
    } else if (name_ == "rmm_pool_track") {
      settings = pool + ", under tracking_resource_adaptor";
    } else if (name_ == "rmm_binning") {
      settings = "bins of 256 KiB to 4 MiB over " + pool;
    } else if (name_ == "rmm_arena") {
      settings = "arena: all free memory but 64 MiB";
    } else if (name_ == "rmm_cuda_async") {
      settings = "defaults";
    }
    if (const std::string api = take_flag(argc, argv, "api", "async"); settings.empty() || api != "async") {
      std::fprintf(stderr, "--allocator=%s --api=%s: RMM has no such\n", name_.c_str(), api.c_str());
      std::exit(2);
    }
    benchmark::AddCustomContext("allocator_settings", settings);
  }

  const std::string& name() const { return name_; }

  void start_anew() const {}  // every use does

  template <typename Work>
  void use(Work work) const {
    if (name_ == "rmm_cuda_async") {
      rmm::mr::cuda_async_memory_resource resource;
      return work(Resource{resource, [pool = resource.pool_handle()] {
                             std::uint64_t bytes = 0;
                             check(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReservedMemHigh, &bytes),
                                   "cudaMemPoolGetAttribute");
                             return bytes;
                           }});
    }
    // The resources take whole pieces from the driver, so that counting these costs their allocations nothing.
    rmm::mr::statistics_resource_adaptor upstream{rmm::mr::cuda_memory_resource{}};
    const auto held = [&] { return static_cast<std::size_t>(upstream.get_bytes_counter().peak); };
    if (name_ == "rmm_arena") {
      rmm::mr::arena_memory_resource arena{upstream, rmm::available_device_memory().first - 64 * MiB};
      return work(Resource{arena, held});
    }
    rmm::mr::pool_memory_resource pool{upstream, reserve_ ? rmm::percent_of_free_device_memory(50) : 0};
    if (name_ == "rmm_binning") {
      rmm::mr::binning_memory_resource binning{pool, 18, 22};
      return work(Resource{binning, held});
    }
    if (name_ == "rmm_pool_track") {
      rmm::mr::tracking_resource_adaptor tracking{pool};
      return work(Resource{tracking, held});
    }
    work(Resource{pool, held});
  }

 private:
  template <typename Held>
  class Resource {
   public:
    Resource(rmm::device_async_resource_ref resource, Held held) : resource_{resource}, held_{held} {}

    RmmApi on(cudaStream_t stream) const { return {resource_, stream}; }
    std::optional<std::size_t> held() const { return held_(); }

   private:
    rmm::device_async_resource_ref resource_;
    Held held_;
  };

  std::string name_;
  bool reserve_;
};

}  // namespace bench
