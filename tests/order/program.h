// Program: a list of steps for a few host threads, which take turns in the order of the list.
//
// Steps name what they use by slots: any subset of a program's steps is a program again (a step whose slots do not fit
// is skipped), so that a failing one can be made shorter. Contexts: 0 is the primary one of device 0, 1 one that the
// program creates there, 2 the primary one of device 1. Streams: 0 is the legacy stream and 1 the thread's own one, of
// the step's context; the others are created.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace order {

enum class Do : std::uint8_t {
#define STEP(name, fields, sentence) name,
#include "tests/order/steps.def"
#undef STEP
};

const char* NameOf(Do what);

struct Step {
  Do what = Do::kAlloc;
  int thread = 0;
  int context = 0;
  int stream = 0;
  int event = 0;
  int block = 0;
  int from = -1;  // another block, which is read; -1: none
  int graph = 0;
  int flag = 0;
  int mode = 0;  // of a stream: 1 non-blocking; of a capture: CUstreamCaptureMode; else of stream 0: 1 is handle 1
  std::uint32_t bytes = 0;
};

constexpr int kThreads = 3;
constexpr int kContexts = 3;
constexpr int kNoContext = 3;
constexpr int kStreams = 7;
constexpr int kFirstCreatedStream = 2;
constexpr int kEvents = 5;
constexpr int kBlocks = 12;
constexpr int kGraphs = 3;
constexpr int kFlags = 3;
constexpr std::size_t kMostSteps = 160;

using Program = std::vector<Step>;

// Fields that mean nothing to what a step does are put back to their defaults.
Step Plain(Step step);

std::string Print(const Step& step);

// As C++, for regressions.h.
std::string Print(const Program& program);

// A random program; the same seed gives the same one.
Program Generate(std::uint64_t seed);

}  // namespace order
