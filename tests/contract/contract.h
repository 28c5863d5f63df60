// The contract, as tests: what an unmodified program may rely on, one test per rule, named after it.
//
// Every test states what native CUDA does and passes in four settings: over the emulated driver or a real
// one, with or without libcushion.so preloaded. Where Cushion differs on purpose, or promises more, the test
// asks under_cushion(); where only its own pool does, pooled(). Waiting is told by whether a stream is still busy,
// never by an upper bound on time.
//
// A rule that needs a process of its own (an environment, a dying context, an end of the process) is a
// SCENARIO: a function that the same executable runs in a fresh process, started by run_scenario(). Its
// expectations count as in a test: the process exits with 1 if any failed.
#pragma once

#include <gtest/gtest.h>
#include <sys/types.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/harness/gpu.h"
#include "tests/harness/launch.h"

namespace contract {

using namespace std::chrono_literals;
using harness::driver;
using harness::Driver;
using harness::Event;
using harness::SharedWord;
using harness::Stream;

inline constexpr std::size_t KiB = 1024;
inline constexpr std::size_t MiB = 1024 * KiB;

bool under_cushion();  // libcushion.so is mapped into this process
bool deferred();       // … and runs with CUSHION_FREE=deferred
bool pooled();         // … and serves from memory of its own (every CUSHION_ALLOCATOR but async and cuda)
bool packs();          // … and rounds requests up to the alignment only (pool and arena)

// --- Memory ----------------------------------------------------------------------------------------------

CUdeviceptr allocate(std::size_t size);                         // cuMemAlloc that must succeed
CUdeviceptr allocate_async(std::size_t size, CUstream stream);  // cuMemAllocAsync that must succeed
void write_ends(CUdeviceptr p, std::size_t size);               // its first and its last 64 KiB
std::size_t free_memory();                                      // cuMemGetInfo's free bytes

// --- Streams and work --------------------------------------------------------------------------------------
// A SharedWord is made before any work is in flight: pinning memory may wait.

bool busy(CUstream stream);  // work is still queued or running there
void finish(CUstream stream);

// Makes everything submitted to `after` later wait for everything submitted to `before` so far.
void order(CUstream before, CUstream after);

// Kernels (tests/kernels): each occupies its stream for `time` before it does what it is named for.
void hold(CUstream stream, std::chrono::milliseconds time);
void fill(CUstream stream, CUdeviceptr p, std::size_t size, std::uint8_t byte, std::chrono::milliseconds time = 0ms);
void copy(CUstream stream, CUdeviceptr to, CUdeviceptr from, std::size_t size, std::chrono::milliseconds time = 0ms);
void check(CUstream stream, CUdeviceptr p, std::size_t size, std::uint8_t byte, const SharedWord& bad);
// Writes first, then waits, then counts the bytes that somebody else changed meanwhile.
void fill_hold_check(CUstream stream, CUdeviceptr p, std::size_t size, std::uint8_t byte,
                     std::chrono::milliseconds time, const SharedWord& bad);
// Spins until the flag is set, or half a minute, so that a failing test ends.
void wait_flag(CUstream stream, const SharedWord& flag);

// The primary context of device 0 is current; the test leaves it idle and healthy. One that breaks it fails and is the
// last to run: breaking it on purpose is for scenarios.
class Contract : public testing::Test {
 protected:
  void SetUp() override;
  void TearDown() override;
};

// --- Processes ---------------------------------------------------------------------------------------------

struct Scenario {
  Scenario(const char* name, bool with_context, void (*body)());
};
#define CONTRACT_SCENARIO(name, with_context)                                              \
  static void scenario_##name();                                                           \
  static const contract::Scenario registered_##name{#name, with_context, scenario_##name}; \
  static void scenario_##name()
#define SCENARIO(name) CONTRACT_SCENARIO(name, true)
#define SCENARIO_WITHOUT_CONTEXT(name) CONTRACT_SCENARIO(name, false)  // nothing of CUDA has run yet
void use_primary_context();                                            // … until this call
bool expectations_failed();                                            // so far, in this scenario

// By the C library: an algorithm's loop over megabytes takes seconds where nothing is optimised, under a sanitizer.
inline bool all_are(const std::vector<std::uint8_t>& bytes, std::uint8_t value) {
  return bytes == std::vector<std::uint8_t>(bytes.size(), value);
}

struct Outcome {
  pid_t pid = 0;
  int status = 0;  // as waitpid gives it
  bool timed_out = false;
  std::string out, err;

  bool exited(int code) const;
  bool killed(int signal) const;
};
std::ostream& operator<<(std::ostream& stream, const Outcome& outcome);

// Runs the scenario in a fresh process whose environment is this one's with NAME=value strings set; a string without
// `=` removes all variables whose names begin so.
Outcome run_scenario(const std::string& name, const std::vector<std::string>& environment = {},
                     std::chrono::seconds timeout = 60s);
int scenario_main(const std::string& name);

// A scenario whose expectations must all hold.
#define EXPECT_SCENARIO(...)                                                \
  do {                                                                      \
    const contract::Outcome outcome_ = contract::run_scenario(__VA_ARGS__); \
    EXPECT_TRUE(outcome_.exited(0)) << outcome_;                            \
  } while (false)

// A directory that goes with its object.
class Scratch {
 public:
  Scratch();
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  std::string path(const std::string& name) const { return (directory_ / name).string(); }
  std::vector<std::string> files() const;                // their names, sorted
  nlohmann::json report(const std::string& name) const;  // parsed; a failure and null if it is not valid JSON

 private:
  std::filesystem::path directory_;
};

}  // namespace contract
