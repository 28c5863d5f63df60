// Torture: threads that allocate, use and free by every call, on streams of every kind, as fast as they can, and check
// on the device that no byte of a block changes while it is theirs. The program is correct by the rules of CUDA alone:
// natively it finds nothing. It relies on cudaFree's wait for nothing but the reuse of the block itself, so it runs
// under CUSHION_FREE=deferred too. A wrong byte ends it with code 1 and the history of that byte; threads that do not
// end, with code 4 and what each did last.
#include <getopt.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <utility>

#include "torture_history.h"

namespace {

struct Settings {
  double seconds = 10;
  unsigned threads = 8;
  unsigned streams = 6;  // of its own, for each thread
  std::uint64_t seed = 1;
  unsigned graphs = 3;       // of a hundred operations
  std::size_t live = 4096;   // MiB, all threads together
  std::size_t largest = 64;  // MiB, of a block
  bool spoil = false;        // change one byte behind the program's back: shows that it is found
};

struct Block {
  unsigned char* bytes = nullptr;
  std::size_t size = 0;
  std::uint64_t serial = 0;     // who it is, for the history
  std::uint64_t signature = 0;  // what it holds: its own serial, or that of the block it was copied from
  std::size_t stream = 0;       // index of the stream that its work and bytes are ordered in
  bool async = false;           // from cudaMallocAsync
};

// A block on its way to another thread, which must wait for the event before it touches it.
struct Parcel {
  Block block;
  cudaEvent_t event = nullptr;
};
class Mailbox {
 public:
  bool put(const Parcel& parcel) {
    std::lock_guard lock(mutex_);
    if (parcels_.size() >= kMost) return false;
    parcels_.push_back(parcel);
    return true;
  }
  bool take(std::uint64_t random, Parcel& parcel) {
    std::lock_guard lock(mutex_);
    if (parcels_.empty()) return false;
    std::swap(parcels_[random % parcels_.size()], parcels_.back());
    parcel = parcels_.back();
    parcels_.pop_back();
    return true;
  }

 private:
  static constexpr std::size_t kMost = 32;
  std::mutex mutex_;
  std::vector<Parcel> parcels_;
};

struct Tally {
  std::atomic<std::uint64_t> allocations{0}, out_of_memory{0}, launches{0}, graphs{0}, streams{0}, handed_over{0};
  std::atomic<std::uint64_t> to_verify{0};  // bytes that kernels were launched to check
};

struct World {
  Settings settings;
  History history;
  Mailbox mailbox;
  Tally tally;
  Findings* findings = nullptr;         // as the host sees them
  Findings* device_findings = nullptr;  // as the device does
  std::vector<std::size_t> usual;       // sizes that come again and again, in all threads
  std::atomic<bool> stop{false}, spoilt{false};
  std::atomic<unsigned> over{0};

  explicit World(const Settings& s) : settings(s), history(s.threads + 1) {}
};

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15 + 1) {}
  std::uint64_t next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return state_ >> 29;
  }
  std::uint64_t below(std::uint64_t n) { return next() % n; }
  bool one_in(std::uint64_t n) { return below(n) == 0; }
  // A power law: every doubling of the size is as likely as the next.
  std::size_t size(std::size_t largest) {
    unsigned bits = 0;
    while (std::size_t{1} << (bits + 1) <= largest) ++bits;
    const std::size_t power = std::size_t{1} << below(bits + 1);
    return std::min(power + below(power), largest);
  }
  // Mostly next to nothing, at times long enough that whole lives of other blocks go by.
  unsigned long long hold() {
    if (one_in(2)) return 0;
    return one_in(12) ? below(2 * kMillisecond) : below(60 * 1000);
  }

 private:
  std::uint64_t state_;
};

// Streams: the legacy one, this thread's own default one, and some that come and go, odd ones non-blocking. (A capture
// on a blocking stream breaks when anybody touches the legacy stream, so only non-blocking ones capture.)
constexpr std::size_t kPerThread = 1, kOwn = 2;

class Worker {
 public:
  Worker(World& world, unsigned thread)
      : world_(world),
        thread_(thread),
        ring_(world.history.ring(thread)),
        random_(world.settings.seed * 1000 + thread),
        budget_((world.settings.live << 20) / world.settings.threads) {
    streams_ = {cudaStreamLegacy, cudaStreamPerThread};
    for (std::size_t i = 0; i < world.settings.streams; ++i) streams_.push_back(create(streams_.size()));
    for (cudaEvent_t& event : events_) MUST(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    for (cudaEvent_t& event : paces_) MUST(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  }

  void run() {
    while (!world_.stop.load(std::memory_order_relaxed)) step();
    drain();
  }

 private:
  // Runs `call` and writes down that it did.
  template <class Call>
  cudaError_t attempt(const char* name, const Block& block, cudaStream_t stream, Call call) {
    Operation& operation = ring_.next();
    operation = {name, block.bytes, block.size, block.serial, stream, host_ns(), 0, thread_};
    const cudaError_t result = call();
    operation.at = block.bytes;
    operation.end = host_ns();
    return result;
  }
  template <class Call>
  void perform(const char* name, const Block& block, cudaStream_t stream, Call call) {
    must(attempt(name, block, stream, call), name, __FILE__, __LINE__);
  }

  void step() {
    pace();
    const std::uint64_t kind = random_.below(100);
    if (kind < world_.settings.graphs) return graph();
    if (kind < 38) return grow();
    if (kind < 60) return live_.empty() ? grow() : let_go(pick());
    if (kind < 70) return touch();
    if (kind < 74) return copy();
    if (kind < 80) return take();
    if (kind < 82) return replace_stream();
    if (kind < 86) return wait();
    Block block;  // an allocation, a kernel and a free in one go: freed while the kernel runs
    if (allocate(block)) let_go(block);
  }

  // ---- streams ----------------------------------------------------------------------------------------------------

  cudaStream_t create(std::size_t at) {
    cudaStream_t stream = nullptr;
    MUST(cudaStreamCreateWithFlags(&stream, at % 2 == 1 ? cudaStreamNonBlocking : cudaStreamDefault));
    ++world_.tally.streams;
    return stream;
  }
  std::size_t any_stream() { return random_.below(streams_.size()); }
  std::size_t non_blocking_stream() {
    const std::size_t many = (streams_.size() - kOwn) / 2;
    return kOwn + 1 + 2 * random_.below(many);
  }
  cudaEvent_t next_event() { return events_[event_++ % kEvents]; }
  // What `to` does from now on comes after all that `from` was given.
  void order(std::size_t from, std::size_t to) {
    if (from == to) return;
    const cudaEvent_t event = next_event();
    MUST(cudaEventRecord(event, streams_[from]));
    MUST(cudaStreamWaitEvent(streams_[to], event, 0));
  }
  void move(Block& block, std::size_t to) {
    order(block.stream, to);
    block.stream = to;
  }
  // Destroys a stream, busy or not, with blocks that were allocated in it alive, and makes another in its place.
  void replace_stream() {
    const std::size_t old = kOwn + random_.below(streams_.size() - kOwn);
    const std::size_t heir = old == kOwn ? kOwn + 1 : kOwn;
    order(old, heir);
    for (Block& block : live_) {
      if (block.stream == old) block.stream = heir;
    }
    const Block none;
    perform("cudaStreamDestroy", none, streams_[old], [&] { return cudaStreamDestroy(streams_[old]); });
    streams_[old] = create(old);
  }
  void wait() { MUST(cudaStreamSynchronize(streams_[any_stream()])); }
  // Keeps the device's queues short: a cudaFree that waits for all of them should not wait for long.
  void pace() {
    if (++steps_ % 8 != 0) return;
    const cudaEvent_t event = paces_[steps_ / 8 % kPaces];
    MUST(cudaEventSynchronize(event));
    MUST(cudaEventRecord(event, streams_[any_stream()]));
  }

  // ---- blocks -----------------------------------------------------------------------------------------------------

  void launch(const char* name, Block& block, std::uint64_t expected, std::uint64_t next, std::size_t stream,
              unsigned long long before, unsigned long long after, unsigned times = 1) {
    const unsigned grid = static_cast<unsigned>(std::min<std::size_t>(64, block.size / (64 << 10) + 1));
    perform(name, block, streams_[stream], [&] {
      work<<<grid, 256, 0, streams_[stream]>>>(block.bytes, block.size, expected, next, before, after,
                                               world_.device_findings);
      return cudaGetLastError();
    });
    if (next != 0) block.signature = next;
    count_launch(block, (expected != 0 ? 1 : 0) + (next != 0 ? 1 : 0), times);
  }
  void count_launch(const Block& block, unsigned checks, unsigned times) {
    world_.tally.launches += times;
    world_.tally.to_verify += block.size * checks * times;
  }

  bool allocate(Block& block, std::size_t largest = 0) {
    if (largest == 0) largest = world_.settings.largest << 20;
    block.size = random_.one_in(2) ? random_.size(largest) : world_.usual[random_.below(world_.usual.size())];
    block.size = std::min(block.size, largest);
    block.serial = serial_of(thread_, ++serials_);
    block.stream = any_stream();
    block.async = random_.below(10) < 6;
    const cudaStream_t stream = streams_[block.stream];
    void* bytes = nullptr;
    const auto call = [&] {
      const cudaError_t result =
          block.async ? cudaMallocAsync(&bytes, block.size, stream) : cudaMalloc(&bytes, block.size);
      block.bytes = static_cast<unsigned char*>(bytes);
      return result;
    };
    const cudaError_t result =
        attempt(block.async ? "cudaMallocAsync" : "cudaMalloc", block, block.async ? stream : nullptr, call);
    if (result == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      ++world_.tally.out_of_memory;
      for (const cudaStream_t each : streams_) MUST(cudaStreamSynchronize(each));
      for (std::size_t i = live_.size() / 2; i > 0; --i) let_go(pick());
      return false;
    }
    MUST(result);
    ++world_.tally.allocations;
    launch("sign", block, 0, block.serial, block.stream, random_.hold(), random_.hold());
    return true;
  }
  void grow() {
    constexpr std::size_t kMost = 96;
    if (live_.size() >= kMost || (used_ > budget_ && !live_.empty())) return let_go(pick());
    Block block;
    if (!allocate(block)) return;
    used_ += block.size;
    live_.push_back(block);
  }
  Block pick() {
    const std::size_t at = random_.below(live_.size());
    const Block block = live_[at];
    live_[at] = live_.back();
    live_.pop_back();
    used_ -= block.size;
    return block;
  }

  // Checks a live block where it is or in another stream, and signs it again.
  void touch() {
    if (live_.empty()) return;
    Block& block = live_[random_.below(live_.size())];
    if (random_.one_in(2)) move(block, any_stream());
    if (world_.settings.spoil && serials_ > 100 && block.size >= 8 && !world_.spoilt.exchange(true)) {
      perform("spoil (no part of the program)", block, streams_[block.stream],
              [&] { return cudaMemsetAsync(block.bytes, 0, 8, streams_[block.stream]); });
    }
    launch("check and sign", block, block.signature, block.serial, block.stream, random_.hold(), random_.hold());
  }
  // A copy by the device's copy engine: its target then holds the source's signature.
  void copy() {
    if (live_.empty()) return;
    Block& from = live_[random_.below(live_.size())];
    Block block;
    if (!allocate(block, from.size)) return;
    if (block.size == from.size) {
      move(block, from.stream);
      perform("copied", from, streams_[from.stream], [&] {
        return cudaMemcpyAsync(block.bytes, from.bytes, from.size, cudaMemcpyDeviceToDevice, streams_[from.stream]);
      });
      block.signature = from.signature;
    }
    let_go(block);
  }

  // Ends a block's life here: used once more or only checked, then freed by one of the calls while that work may still
  // run, or given to another thread.
  void let_go(Block block) {
    const std::uint64_t next = random_.one_in(2) ? block.serial : 0;
    launch(next != 0 ? "last use" : "last check", block, block.signature, next, block.stream, random_.hold(),
           random_.hold());
    if (random_.one_in(4) && give(block)) return;
    if (random_.one_in(5)) move(block, any_stream());
    release(block);
  }
  void release(const Block& block) {
    const cudaStream_t stream = streams_[block.stream];
    if (random_.below(10) < (block.async ? 9u : 7u)) {
      perform("cudaFreeAsync", block, stream, [&] { return cudaFreeAsync(block.bytes, stream); });
      return;
    }
    // cudaFree waits for the work on a cudaMalloc block only: for others the program must have waited itself.
    if (block.async) perform("cudaStreamSynchronize", block, stream, [&] { return cudaStreamSynchronize(stream); });
    perform("cudaFree", block, nullptr, [&] { return cudaFree(block.bytes); });
  }
  bool give(const Block& block) {
    Parcel parcel{block, nullptr};
    MUST(cudaEventCreateWithFlags(&parcel.event, cudaEventDisableTiming));
    perform("given away", block, streams_[block.stream],
            [&] { return cudaEventRecord(parcel.event, streams_[block.stream]); });
    if (world_.mailbox.put(parcel)) return true;
    MUST(cudaEventDestroy(parcel.event));
    return false;
  }
  void take() {
    Parcel parcel;
    if (!world_.mailbox.take(random_.next(), parcel)) return;
    Block block = parcel.block;
    block.stream = any_stream();
    perform("taken over", block, streams_[block.stream],
            [&] { return cudaStreamWaitEvent(streams_[block.stream], parcel.event, 0); });
    MUST(cudaEventDestroy(parcel.event));
    ++world_.tally.handed_over;
    if (random_.one_in(2)) {
      launch("check and sign", block, block.signature, block.serial, block.stream, random_.hold(), random_.hold());
      used_ += block.size;
      live_.push_back(block);
    } else {
      launch("check", block, block.signature, 0, block.stream, random_.hold(), 0);
      release(block);
    }
  }

  // ---- graphs -----------------------------------------------------------------------------------------------------

  // Captures work on two blocks, in two streams, and on a block that the graph allocates itself; launches that a few
  // times, and lets the blocks go while it may still run.
  void graph() {
    constexpr std::size_t kLargest = 4 << 20;
    Block first, second;
    if (!allocate(first, kLargest)) return;
    if (!allocate(second, kLargest)) return let_go(first);
    const std::size_t main = non_blocking_stream(), side = non_blocking_stream();
    move(first, main);
    move(second, main);
    const unsigned times = 1 + static_cast<unsigned>(random_.below(4));
    const bool relaxed = random_.one_in(2);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    MUST(cudaStreamBeginCapture(streams_[main],
                                relaxed ? cudaStreamCaptureModeRelaxed : cudaStreamCaptureModeThreadLocal));
    launch("captured", first, first.signature, first.signature, main, random_.hold(), random_.hold(), times);
    if (side != main) order(main, side);
    launch("captured", second, second.signature, second.signature, side, random_.hold(), random_.hold(), times);
    Block inner;
    if (random_.one_in(3)) {
      inner.size = random_.size(kLargest);
      inner.serial = serial_of(thread_, ++serials_);
      void* bytes = nullptr;
      perform("graph's own", inner, streams_[main],
              [&] { return cudaMallocAsync(&bytes, inner.size, streams_[main]); });
      inner.bytes = static_cast<unsigned char*>(bytes);
      launch("captured", inner, 0, inner.serial, main, random_.hold(), random_.hold(), times);
      perform("graph's own free", inner, streams_[main], [&] { return cudaFreeAsync(inner.bytes, streams_[main]); });
    }
    if (relaxed) {  // the capturing thread itself may allocate and free
      Block beside;
      beside.size = random_.size(kLargest);
      beside.serial = serial_of(thread_, ++serials_);
      void* bytes = nullptr;
      perform("cudaMalloc", beside, nullptr, [&] { return cudaMalloc(&bytes, beside.size); });
      beside.bytes = static_cast<unsigned char*>(bytes);
      launch("sign", beside, 0, beside.serial, kOwn, random_.hold(), random_.hold());
      perform("cudaFree", beside, nullptr, [&] { return cudaFree(beside.bytes); });
    }
    if (side != main) order(side, main);
    MUST(cudaStreamEndCapture(streams_[main], &graph));
    MUST(cudaGraphInstantiate(&executable, graph, 0));
    MUST(cudaGraphDestroy(graph));
    const std::size_t launched = any_stream();
    move(first, launched);
    move(second, launched);
    for (unsigned i = 0; i < times; ++i) {
      perform("cudaGraphLaunch", first, streams_[launched],
              [&] { return cudaGraphLaunch(executable, streams_[launched]); });
      perform("cudaGraphLaunch", second, streams_[launched], [&] { return cudaSuccess; });
    }
    ++world_.tally.graphs;
    retire(executable, launched);
    let_go(first);
    let_go(second);
  }

  // An executable graph must be over before it is destroyed.
  void retire(cudaGraphExec_t executable, std::size_t stream) {
    Retired& slot = retired_[retirement_++ % kRetired];
    slot.destroy();
    slot.executable = executable;
    if (slot.over == nullptr) MUST(cudaEventCreateWithFlags(&slot.over, cudaEventDisableTiming));
    MUST(cudaEventRecord(slot.over, streams_[stream]));
  }

  void drain() {
    while (!live_.empty()) let_go(pick());
    Parcel parcel;
    while (world_.mailbox.take(0, parcel)) {
      MUST(cudaEventSynchronize(parcel.event));
      MUST(cudaEventDestroy(parcel.event));
      parcel.block.stream = kPerThread;
      launch("check", parcel.block, parcel.block.signature, 0, kPerThread, 0, 0);
      release(parcel.block);
    }
    for (Retired& slot : retired_) slot.destroy();
    for (std::size_t i = 0; i < streams_.size(); ++i) {
      MUST(cudaStreamSynchronize(streams_[i]));
      if (i >= kOwn) MUST(cudaStreamDestroy(streams_[i]));
    }
    ++world_.over;
  }

  struct Retired {
    cudaGraphExec_t executable = nullptr;
    cudaEvent_t over = nullptr;
    void destroy() {
      if (executable == nullptr) return;
      MUST(cudaEventSynchronize(over));
      MUST(cudaGraphExecDestroy(executable));
      executable = nullptr;
    }
  };
  static constexpr std::size_t kEvents = 64, kPaces = 3, kRetired = 8;

  World& world_;
  const unsigned thread_;
  Ring& ring_;
  Random random_;
  const std::size_t budget_;
  std::size_t used_ = 0;
  std::uint32_t serials_ = 0;
  std::vector<cudaStream_t> streams_;
  cudaEvent_t events_[kEvents] = {};
  std::size_t event_ = 0;
  cudaEvent_t paces_[kPaces] = {};
  std::uint64_t steps_ = 0;
  std::vector<Block> live_;
  Retired retired_[kRetired];
  std::size_t retirement_ = 0;
};

__global__ void read_clock(unsigned long long* now) { *now = device_now(); }

// Everything that is loaded lazily is loaded here: a first launch waits for the device, which a capture forbids.
void warm_up(World& world) {
  Findings* findings = nullptr;
  MUST(cudaHostAlloc(&findings, sizeof *findings, cudaHostAllocMapped));
  std::memset(findings, 0, sizeof *findings);
  world.findings = findings;
  MUST(cudaHostGetDevicePointer(&world.device_findings, findings, 0));
  work<<<1, 1>>>(nullptr, 0, 0, 0, 0, 0, world.device_findings);
  MUST(cudaGetLastError());
  void *one = nullptr, *other = nullptr;
  MUST(cudaMallocAsync(&one, 1 << 20, nullptr));
  MUST(cudaMalloc(&other, 1 << 20));
  MUST(cudaMemsetAsync(one, 1, 1 << 20, nullptr));
  MUST(cudaMemcpyAsync(other, one, 1 << 20, cudaMemcpyDeviceToDevice, nullptr));
  MUST(cudaFreeAsync(one, nullptr));
  unsigned long long* now = nullptr;
  MUST(cudaHostAlloc(&now, sizeof *now, cudaHostAllocMapped));
  for (int i = 0; i < 2; ++i) {  // the first one pays for the loading
    const std::uint64_t before = host_ns();
    read_clock<<<1, 1>>>(now);
    MUST(cudaStreamSynchronize(nullptr));
    world.history.set_device_offset(static_cast<std::int64_t>(*now - (before + host_ns()) / 2));
  }
  MUST(cudaFreeHost(now));
  MUST(cudaFree(other));
}

// The threads, until the time is over or a byte is wrong.
double run_threads(World& world) {
  const auto begin = std::chrono::steady_clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(); };
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < world.settings.threads; ++i) {
    threads.emplace_back([&world, i] { Worker(world, i).run(); });
  }
  const volatile unsigned long long& wrong = world.findings->wrong;
  while (elapsed() < world.settings.seconds && wrong == 0) usleep(20 * 1000);
  world.stop = true;
  constexpr double kPatience = 60;
  for (const double stopped = elapsed(); world.over < world.settings.threads; usleep(10 * 1000)) {
    if (elapsed() - stopped < kPatience) continue;
    std::printf("STUCK: %u of %u threads ended within %.0f s; what each did last:\n", world.over.load(),
                world.settings.threads, kPatience);
    world.history.print_last();
    std::fflush(stdout);
    std::_Exit(4);
  }
  for (std::thread& thread : threads) thread.join();
  return elapsed();
}

int report(const World& world, double seconds) {
  const Findings& found = *world.findings;
  std::uint64_t told = 0;
  for (unsigned i = 0; i < std::min(found.count, Findings::kMost); ++i) {
    if (std::exchange(told, found.first[i].serial) != found.first[i].serial) world.history.print(found.first[i]);
  }
  const Tally& tally = world.tally;
  const std::uint64_t to_verify = tally.to_verify;
  std::printf(
      "torture: seconds %.1f, threads %u, seed %llu, operations %llu, allocations %llu, launches %llu, "
      "graphs %llu, streams %llu, handed over %llu, out of memory %llu, bytes verified %llu, wrong bytes %llu\n",
      seconds, world.settings.threads, static_cast<unsigned long long>(world.settings.seed),
      static_cast<unsigned long long>(world.history.operations()), static_cast<unsigned long long>(tally.allocations),
      static_cast<unsigned long long>(tally.launches), static_cast<unsigned long long>(tally.graphs),
      static_cast<unsigned long long>(tally.streams), static_cast<unsigned long long>(tally.handed_over),
      static_cast<unsigned long long>(tally.out_of_memory), found.verified, found.wrong);
  if (found.verified != to_verify) {
    std::printf("but %llu bytes were to be verified\n", static_cast<unsigned long long>(to_verify));
    return 1;
  }
  return found.wrong == 0 ? 0 : 1;
}

[[noreturn]] void usage(const char* program) {
  std::fprintf(stderr,
               "usage: %s [--seconds S] [--threads N] [--streams N] [--seed N] [--graphs PERCENT] [--live MIB]\n"
               "          [--largest MIB] [--spoil]\n",
               program);
  std::exit(64);
}

Settings parse(int argc, char** argv) {
  Settings settings;
  const option options[] = {{"seconds", 1, nullptr, 's'}, {"threads", 1, nullptr, 't'}, {"streams", 1, nullptr, 'n'},
                            {"seed", 1, nullptr, 'r'},    {"graphs", 1, nullptr, 'g'},  {"live", 1, nullptr, 'l'},
                            {"largest", 1, nullptr, 'm'}, {"spoil", 0, nullptr, 'x'},   {nullptr, 0, nullptr, 0}};
  const auto number = [&](unsigned long long least, unsigned long long most) {
    char* end = nullptr;
    const unsigned long long value = std::strtoull(optarg, &end, 10);
    if (end == optarg || *end != '\0' || value < least || value > most) usage(argv[0]);
    return value;
  };
  for (int c = 0; (c = getopt_long(argc, argv, "", options, nullptr)) != -1;) {
    switch (c) {
      case 's':
        settings.seconds = static_cast<double>(number(1, 1000000));
        break;
      case 't':
        settings.threads = static_cast<unsigned>(number(1, 255));
        break;
      case 'n':
        settings.streams = static_cast<unsigned>(number(2, 1000));
        break;
      case 'r':
        settings.seed = number(0, ~0ull);
        break;
      case 'g':
        settings.graphs = static_cast<unsigned>(number(0, 30));
        break;
      case 'l':
        settings.live = number(1, 1 << 20);
        break;
      case 'm':
        settings.largest = number(1, 64);
        break;
      case 'x':
        settings.spoil = true;
        break;
      default:
        usage(argv[0]);
    }
  }
  if (optind != argc) usage(argv[0]);
  return settings;
}

}  // namespace

int main(int argc, char** argv) {
  World world(parse(argc, argv));
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  int devices = 0;
  if (const cudaError_t none = cudaGetDeviceCount(&devices); none != cudaSuccess || devices == 0) {
    std::printf("SKIP: no GPU (cudaGetDeviceCount: %s)\n", cudaGetErrorName(none));
    return 77;
  }
  warm_up(world);
  Random sizes(world.settings.seed);
  for (int i = 0; i < 48; ++i) world.usual.push_back(sizes.size(world.settings.largest << 20));
  const double seconds = run_threads(world);
  MUST(cudaDeviceSynchronize());
  return report(world, seconds);
}
