// Stream capture: allocations inside a captured stream belong to the graph, and a capture survives whatever is
// allocated and freed beside it.
#include <atomic>
#include <chrono>

#include "gpu_program.h"

namespace {

constexpr std::size_t kSize = 1 << 20;

void warm_up() {
  for (std::size_t size : {std::size_t{1000}, kSize, 8 * kSize}) {
    void *block = nullptr, *async = nullptr;
    MUST(cudaMalloc(&block, size));
    MUST(cudaMallocAsync(&async, size, nullptr));
    MUST(cudaFree(block));
    MUST(cudaFreeAsync(async, nullptr));
  }
  MUST(cudaDeviceSynchronize());
}

// Launches the graph several times and prints how many bytes of `out` are wrong.
void launch(cudaGraph_t graph, cudaStream_t stream, const unsigned char* out, unsigned char value) {
  Counter bad;
  cudaGraphExec_t executable = nullptr;
  SHOW(cudaGraphInstantiate(&executable, graph, 0));
  for (int i = 0; i < 5; ++i) MUST(cudaGraphLaunch(executable, stream));
  check<<<8, 256, 0, stream>>>(out, kSize, value, bad.device());
  SHOW(cudaStreamSynchronize(stream));
  std::printf("bad bytes: %u\n", bad.read());
  MUST(cudaGraphExecDestroy(executable));
}

// cudaMallocAsync and cudaFreeAsync in a captured stream are nodes of the graph.
void nodes() {
  warm_up();
  cudaStream_t stream = new_stream();
  unsigned char *out = nullptr, *inner = nullptr;
  MUST(cudaMalloc(&out, kSize));
  cudaGraph_t graph = nullptr;
  SHOW(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  SHOW(cudaMallocAsync(&inner, kSize, stream));
  fill<<<8, 256, 0, stream>>>(inner, kSize, 9, kMillisecond);
  SHOW(cudaMemcpyAsync(out, inner, kSize, cudaMemcpyDeviceToDevice, stream));
  SHOW(cudaFreeAsync(inner, stream));
  SHOW(cudaStreamEndCapture(stream, &graph));
  std::size_t count = 0;
  SHOW(cudaGraphGetNodes(graph, nullptr, &count));
  std::printf("nodes: %zu\n", count);
  launch(graph, stream, out, 9);
  MUST(cudaGraphDestroy(graph));
  MUST(cudaFree(out));
}

// A block that the graph allocates and the program frees after the launch.
void graph_owned() {
  warm_up();
  cudaStream_t stream = new_stream();
  for (bool async : {false, true}) {
    Counter bad;
    unsigned char* owned = nullptr;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    SHOW(cudaMallocAsync(&owned, kSize, stream));
    fill<<<8, 256, 0, stream>>>(owned, kSize, 3, 0);
    SHOW(cudaStreamEndCapture(stream, &graph));
    SHOW(cudaGraphInstantiate(&executable, graph, 0));
    for (int i = 0; i < 3; ++i) {
      MUST(cudaGraphLaunch(executable, stream));
      check<<<8, 256, 0, stream>>>(owned, kSize, 3, bad.device());
      if (!async) MUST(cudaStreamSynchronize(stream));
      SHOW(async ? cudaFreeAsync(owned, stream) : cudaFree(owned));
    }
    std::printf("bad bytes: %u\n", bad.read());
    MUST(cudaGraphExecDestroy(executable));
    MUST(cudaGraphDestroy(graph));
  }
}

// A block from outside is not a captured stream's to free: 1, and the capture goes on.
void outside() {
  warm_up();
  cudaStream_t stream = new_stream();
  unsigned char *out = nullptr, *async = nullptr, *sync = nullptr;
  MUST(cudaMalloc(&out, kSize));
  MUST(cudaMalloc(&sync, kSize));
  MUST(cudaMallocAsync(&async, kSize, stream));
  MUST(cudaStreamSynchronize(stream));
  cudaGraph_t graph = nullptr;
  SHOW(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
  fill<<<8, 256, 0, stream>>>(out, kSize, 8, 0);
  SHOW(cudaFreeAsync(sync, stream));
  SHOW(cudaFreeAsync(async, stream));
  SHOW(cudaGetLastError());
  SHOW(cudaStreamEndCapture(stream, &graph));
  launch(graph, stream, out, 8);
  SHOW(cudaFree(sync));
  SHOW(cudaFreeAsync(async, stream));
  MUST(cudaGraphDestroy(graph));
  MUST(cudaFree(out));
}

// In relaxed mode the capturing thread itself may allocate and free.
void relaxed() {
  warm_up();
  cudaStream_t stream = new_stream(), other = new_stream();
  unsigned char* out = nullptr;
  MUST(cudaMalloc(&out, kSize));
  cudaGraph_t graph = nullptr;
  SHOW(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
  fill<<<8, 256, 0, stream>>>(out, kSize, 6, 0);
  for (std::size_t size : {std::size_t{1000}, kSize, 64 * kSize}) {
    void *sync = nullptr, *async = nullptr;
    SHOW(cudaMalloc(&sync, size));
    SHOW(cudaMallocAsync(&async, size, other));
    hold<<<1, 1, 0, other>>>(5 * kMillisecond);
    SHOW(cudaFreeAsync(async, other));
    SHOW(cudaFree(sync));
  }
  SHOW(cudaStreamEndCapture(stream, &graph));
  launch(graph, stream, out, 6);
  MUST(cudaGraphDestroy(graph));
  MUST(cudaFree(out));
}

// Captures in one thread while others allocate, use and free without pause. Beside a thread-local capture that is
// allowed natively; so every capture succeeds and every graph computes what it should.
void beside(cudaStreamCaptureMode mode) {
  warm_up();
  std::atomic<bool> stop{false};
  std::atomic<int> failed{0};
  Counter changed;
  std::vector<std::thread> busy;
  for (int thread = 0; thread < 3; ++thread) {
    busy.emplace_back([&, thread] {
      cudaStream_t stream = new_stream();
      for (int i = 0; !stop; ++i) {
        const std::size_t size = (std::size_t{1000} << (i % 12));
        unsigned char *sync = nullptr, *async = nullptr;
        failed += cudaMalloc(&sync, size) != cudaSuccess;
        failed += cudaMallocAsync(&async, size, stream) != cudaSuccess;
        fill_hold_check<<<2, 128, 0, stream>>>(sync, size, static_cast<unsigned char>(2 * i + 64 * thread), 100 * 1000,
                                               changed.device());
        fill_hold_check<<<2, 128, 0, stream>>>(async, size, static_cast<unsigned char>(2 * i + 64 * thread + 1),
                                               100 * 1000, changed.device());
        failed += cudaFree(sync) != cudaSuccess;
        failed += cudaFreeAsync(async, stream) != cudaSuccess;
        // Where cudaFree does not wait, launches would fill the device's queue and hold up the capturing thread.
        if (i % 16 == 15) failed += cudaStreamSynchronize(stream) != cudaSuccess;
      }
      failed += cudaStreamSynchronize(stream) != cudaSuccess;
    });
  }
  cudaStream_t stream = new_stream();
  unsigned char* out = nullptr;
  MUST(cudaMalloc(&out, kSize));
  int captured = 0, launched = 0;
  for (int i = 0; i < 30; ++i) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    MUST(cudaStreamBeginCapture(stream, mode));
    for (int node = 0; node < 10; ++node) {
      fill<<<8, 256, 0, stream>>>(out, kSize, static_cast<unsigned char>(i), 0);
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    captured += cudaStreamEndCapture(stream, &graph) == cudaSuccess;
    if (graph == nullptr) continue;
    MUST(cudaGraphInstantiate(&executable, graph, 0));
    MUST(cudaGraphLaunch(executable, stream));
    launched += cudaStreamSynchronize(stream) == cudaSuccess;
    MUST(cudaGraphExecDestroy(executable));
    MUST(cudaGraphDestroy(graph));
  }
  stop = true;
  for (std::thread& thread : busy) thread.join();
  std::printf("captured: %d, launched: %d, failed beside: %d, bad bytes: %u\n", captured, launched, failed.load(),
              changed.read());
}

void beside_thread_local() { beside(cudaStreamCaptureModeThreadLocal); }
void beside_relaxed() { beside(cudaStreamCaptureModeRelaxed); }

// Where the driver refuses with 900 and breaks the capture, Cushion may serve and the capture survive; but the
// codes belong together: a capture that was not refused anything must end well.
void refused() {
  warm_up();
  cudaStream_t stream = new_stream();
  for (cudaStreamCaptureMode mode : {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal}) {
    void* block = nullptr;
    cudaGraph_t graph = nullptr;
    MUST(cudaStreamBeginCapture(stream, mode));
    hold<<<1, 1, 0, stream>>>(0);
    const cudaError_t alloc = cudaMalloc(&block, 1000);
    const cudaError_t free = alloc == cudaSuccess ? cudaFree(block) : alloc;
    const cudaError_t end = cudaStreamEndCapture(stream, &graph);
    std::printf("DIFF-OK alloc %d, free %d, end of capture %d\n", alloc, free, end);
    std::printf("consistent: %d\n", (free == cudaSuccess) == (end == cudaSuccess));
    cudaGetLastError();
    if (graph != nullptr) MUST(cudaGraphDestroy(graph));
    SHOW(cudaMalloc(&block, 1000));
    SHOW(cudaFree(block));
  }
}

constexpr Scenario kScenarios[] = {{"nodes", nodes},
                                   {"graph_owned", graph_owned},
                                   {"outside", outside},
                                   {"relaxed", relaxed},
                                   {"beside_thread_local", beside_thread_local},
                                   {"beside_relaxed", beside_relaxed},
                                   {"refused", refused}};

}  // namespace

int main(int argc, char** argv) { return run_scenario(kScenarios, argc, argv); }
