// Random programs. What is live is followed roughly, so that most steps find what they name; what order would be needed
// is not: the native run skips the steps that would be a program's own fault.
//
// Sizes come from a few per program, so that freed blocks are wanted again soon; a stream-ordered block is mostly used
// on its own stream. Each program leaves out some kinds of steps and prefers others: what needs two rare things
// together happens in those that have much of both.
#include <algorithm>
#include <array>
#include <random>

#include "tests/order/program.h"

namespace order {
namespace {

struct Weighted {
  Do what;
  unsigned weight;
};

constexpr Weighted kWeights[] = {
    {Do::kAlloc, 18},        {Do::kAllocAsync, 18},  {Do::kAllocFromPool, 1}, {Do::kAllocManaged, 2},
    {Do::kAllocHost, 2},     {Do::kFree, 16},        {Do::kFreeAsync, 16},    {Do::kLaunch, 36},
    {Do::kRead, 10},         {Do::kFill, 4},         {Do::kCopy, 4},          {Do::kUpload, 2},
    {Do::kDownload, 2},      {Do::kHostWrite, 4},    {Do::kHostRead, 6},      {Do::kStreamCreate, 5},
    {Do::kStreamDestroy, 3}, {Do::kStreamSync, 3},   {Do::kStreamQuery, 3},   {Do::kRecord, 9},
    {Do::kWait, 9},          {Do::kEventSync, 2},    {Do::kEventQuery, 3},    {Do::kEventPoll, 2},
    {Do::kEventDestroy, 1},  {Do::kCtxSync, 2},      {Do::kCtxCreate, 2},     {Do::kCtxDestroy, 1},
    {Do::kReset, 1},         {Do::kBeginCapture, 3}, {Do::kEndCapture, 4},    {Do::kGraphLaunch, 3},
    {Do::kGraphDestroy, 1},  {Do::kSpin, 2},         {Do::kSetFlag, 3},       {Do::kRelax, 1},
    {Do::kNewThread, 1},     {Do::kMemInfo, 1},      {Do::kFork, 1},
};

constexpr std::uint32_t kSizes[] = {512, 512, 3000, 65536, 1 << 20, (1 << 20) + 1, 2 << 20, 3 << 20, 5 << 20};

class Generator {
 public:
  explicit Generator(std::uint64_t seed) : random_(seed * 0x9E3779B97F4A7C15ULL + 1) {
    for (std::uint32_t& size : palette_) size = kSizes[Below(std::size(kSizes))];
    if (Below(2) == 0) palette_[1] = palette_[0];
    threads_ = 1 + static_cast<int>(Below(kThreads));
    contexts_ = Below(4) == 0 ? kContexts : 1;
    for (std::size_t i = 0; i < std::size(kWeights); ++i) {
      constexpr unsigned kFactors[] = {0, 1, 1, 1, 2, 6};
      weights_[i] = kWeights[i].weight * kFactors[Below(std::size(kFactors))];
      if (kWeights[i].what == Do::kAlloc || kWeights[i].what == Do::kLaunch) weights_[i] += 4;
      if (contexts_ == 1 && (kWeights[i].what == Do::kCtxCreate || kWeights[i].what == Do::kCtxDestroy))
        weights_[i] = 0;
      total_ += weights_[i];
    }
    streams_[0] = Below(2) == 0;
    streams_[1] = Below(2) == 0;
    non_blocking_ = Below(2) == 0;
    most_blocks_ = 1 + Below(kBlocks);
    simple_ = Below(4) == 0;
  }

  Program Make() {
    Program program;
    const std::size_t length = 20 + Below(kMostSteps - 20);
    if (simple_) MakeSimple(program, length / 2);
    if (contexts_ > 1 && Below(4) != 0) Push(program, {.what = Do::kCtxCreate});
    for (int stream = 0; stream <= static_cast<int>(Below(3)); ++stream)
      Push(program, {.what = Do::kStreamCreate,
                     .context = Any(contexts_),
                     .stream = kFirstCreatedStream + stream,
                     .mode = non_blocking_ ? 1 : Any(2)});
    while (program.size() < length) {
      if (Below(4) == 0) thread_ = static_cast<int>(Below(static_cast<std::size_t>(threads_)));
      Push(program, Random());
    }
    return program;
  }

 private:
  std::size_t Below(std::size_t most) { return std::uniform_int_distribution<std::size_t>(0, most - 1)(random_); }
  int Any(int count) { return static_cast<int>(Below(static_cast<std::size_t>(count))); }

  // One thread and the legacy stream, nothing that the host could watch: all of a program in one order.
  void MakeSimple(Program& program, std::size_t length) {
    while (program.size() < length) {
      Step step = Random();
      switch (step.what) {
        case Do::kAlloc:
        case Do::kAllocAsync:
        case Do::kFree:
        case Do::kFreeAsync:
        case Do::kLaunch:
        case Do::kRead:
        case Do::kFill:
        case Do::kCopy:
        case Do::kUpload:
        case Do::kDownload:
        case Do::kStreamSync:
        case Do::kStreamQuery:
        case Do::kRecord:
        case Do::kEventSync:
        case Do::kEventQuery:
        case Do::kEventDestroy:
        case Do::kCtxSync:
        case Do::kReset:
        case Do::kMemInfo:
          step.thread = step.context = step.stream = 0;
          Push(program, step);
          break;
        default:
          if (Below(200) == 0) return;
      }
    }
  }

  // A slot that is live, or that is not; any where there is none.
  template <std::size_t n>
  int Slot(const std::array<bool, n>& live, bool wanted, std::size_t first = 0) {
    std::array<int, n> fitting{};
    int count = 0;
    for (std::size_t i = first; i < n; ++i) {
      if (live[i] == wanted) fitting[static_cast<std::size_t>(count++)] = static_cast<int>(i);
    }
    return count > 0 ? fitting[Below(static_cast<std::size_t>(count))] : static_cast<int>(first + Below(n - first));
  }

  Do Kind() {
    std::size_t at = Below(total_);
    std::size_t i = 0;
    while (at >= weights_[i]) at -= weights_[i++];
    return kWeights[i].what;
  }

  Step Random() {
    Step step{.what = Kind()};
    step.thread = thread_;
    step.context = Any(contexts_);
    step.stream = Slot(streams_, true);
    step.event = Slot(events_, true);
    step.block = Slot(blocks_, true);
    step.graph = Any(kGraphs);
    step.flag = Any(kFlags);
    step.mode = Any(2);
    switch (step.what) {
      case Do::kAlloc:
      case Do::kAllocAsync:
      case Do::kAllocFromPool:
      case Do::kAllocManaged:
      case Do::kAllocHost:
        step.block = Slot(blocks_, false) % static_cast<int>(most_blocks_);
        step.bytes = palette_[Below(palette_.size())];
        if (Below(5) != 0) step.context = stream_context_[static_cast<std::size_t>(step.stream)];
        break;
      case Do::kFree:
        if (Below(8) == 0) step.context = kNoContext;
        break;
      case Do::kFreeAsync:
      case Do::kRead:
        if (Below(3) != 0) step.stream = home_[static_cast<std::size_t>(step.block)];
        break;
      case Do::kLaunch:
        if (Below(2) == 0) step.stream = home_[static_cast<std::size_t>(step.block)];
        if (Below(4) == 0) step.from = Slot(blocks_, true);
        break;
      case Do::kCopy:
        step.from = Slot(blocks_, true);
        break;
      case Do::kStreamCreate:
        step.stream = Slot(streams_, false, kFirstCreatedStream);
        if (non_blocking_) step.mode = 1;
        break;
      case Do::kStreamDestroy:
        step.stream = Slot(streams_, true, kFirstCreatedStream);
        break;
      case Do::kRecord:
        step.event = Any(kEvents);
        break;
      case Do::kBeginCapture:
        step.stream = Slot(streams_, true, kFirstCreatedStream);
        step.mode = Any(3);
        capturing_ = step.stream;
        capturer_ = thread_;
        break;
      case Do::kEndCapture:
        step.stream = capturing_;
        step.thread = capturer_;
        break;
      default:
        break;
    }
    return step;
  }

  void Push(Program& program, const Step& step) {
    const auto at = [](auto& slots, int slot) -> auto& { return slots[static_cast<std::size_t>(slot)]; };
    switch (step.what) {
      case Do::kAlloc:
      case Do::kAllocAsync:
      case Do::kAllocFromPool:
      case Do::kAllocManaged:
      case Do::kAllocHost:
        at(blocks_, step.block) = true;
        at(home_, step.block) = step.stream;
        break;
      case Do::kFree:
      case Do::kFreeAsync:
        at(blocks_, step.block) = false;
        break;
      case Do::kStreamCreate:
        at(streams_, step.stream) = true;
        at(stream_context_, step.stream) = step.context;
        break;
      case Do::kStreamDestroy:
        at(streams_, step.stream) = false;
        break;
      case Do::kRecord:
        at(events_, step.event) = true;
        break;
      case Do::kEventDestroy:
        at(events_, step.event) = false;
        break;
      default:
        break;
    }
    program.push_back(Plain(step));
  }

  std::mt19937_64 random_;
  std::array<std::uint32_t, 2> palette_{};
  int threads_ = 1, contexts_ = 1;
  std::array<unsigned, std::size(kWeights)> weights_{};
  unsigned total_ = 0;
  bool non_blocking_ = false, simple_ = false;
  std::size_t most_blocks_ = kBlocks;
  int thread_ = 0, capturing_ = kFirstCreatedStream, capturer_ = 0;
  std::array<bool, kStreams> streams_{};
  std::array<int, kStreams> stream_context_{};
  std::array<bool, kEvents> events_{};
  std::array<bool, kBlocks> blocks_{};
  std::array<int, kBlocks> home_{};  // the stream that a block was allocated with
};

}  // namespace

Program Generate(std::uint64_t seed) { return Generator(seed).Make(); }

}  // namespace order
