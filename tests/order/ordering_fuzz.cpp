// ordering_fuzz: random programs over the emulated driver, natively and under Cushion, until one differs.
//
// The process that is called only deals out work: for each setup it starts itself again as a worker, with that setup's
// environment and the preload, and the worker runs every program in processes of its own (check.h). A worker that finds
// something makes the program as short as it can and prints it.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "tests/harness/child.h"
#include "tests/harness/driver.h"
#include "tests/order/check.h"
#include "tests/order/mutations.h"
#include "tests/order/setups.h"

namespace {

using order::Counts;
using Clock = std::chrono::steady_clock;

struct Arguments {
  std::uint64_t seeds = 100;
  double minutes = 0;
  std::string settings = "all";
  std::uint64_t first = 1;
  bool one = false;
  std::string mutation;
  unsigned jobs = std::max(1U, std::thread::hardware_concurrency());
  bool keep = false;
  bool worker = false;
  bool free_returns = false;
};

double SecondsSince(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Seeds from the first one until one finds something, they are used up, or the time is over.
int Work(const Arguments& arguments) {
  const auto start = Clock::now();
  Counts counts;
  harness::driver_without_per_thread();  // found once, for all the processes that come
  for (std::uint64_t seed = arguments.first; seed < arguments.first + arguments.seeds; ++seed) {
    if (arguments.minutes > 0 && SecondsSince(start) > 60 * arguments.minutes) break;
    const order::Program program = order::Generate(seed);
    std::string finding = order::Check(program, seed, arguments.free_returns, counts);
    if (finding.empty()) continue;
    if (!arguments.keep) {
      const order::Program shortest = order::Shrink(program, seed, arguments.free_returns);
      if (const std::string again = order::Check(shortest, seed, arguments.free_returns, counts); !again.empty())
        finding = again;
      fmt::print("seed {}: {}\n{}\n", seed, finding, order::Print(shortest));
    } else {
      fmt::print("seed {}: {}\n{}\n", seed, finding, order::Print(program));
    }
    return 1;
  }
  const nlohmann::json figures{
      {"programs", counts.programs}, {"steps", counts.steps}, {"conflicts", counts.conflicts}, {"reads", counts.reads}};
  fmt::print("{}\n", figures.dump());
  return 0;
}

// One worker for each setup, as many at a time as there are jobs. 1 if any finds something, and then no more begin.
int Deal(const Arguments& arguments) {
  const auto start = Clock::now();
  const std::filesystem::path tests = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  const auto preload =
      arguments.mutation.empty() ? tests.parent_path() / "libcushion.so" : tests / "libcushion_mutant.so";
  if (!std::filesystem::exists(preload)) {
    fmt::print(stderr, "{} is not built\n", preload.string());
    return 2;
  }
  const std::vector<order::Setup> setups = order::SetupsOf(arguments.settings);
  Counts total;
  std::mutex mutex;  // protects total and the output
  std::atomic<std::size_t> next{0};
  std::atomic<bool> found{false};
  const double share =
      arguments.minutes * arguments.jobs / static_cast<double>(std::max(setups.size(), std::size_t{arguments.jobs}));
  const auto deal = [&] {
    for (std::size_t i = next++; i < setups.size() && !found; i = next++) {
      const order::Setup& setup = setups[i];
      harness::Environment environment = setup.environment;
      environment["LD_PRELOAD"] = preload.string();
      environment["LD_LIBRARY_PATH"] = (tests.parent_path() / "emulator").string();
      environment["EMU_DEVICES"] = "2";
      environment["ORDER_MUTATION"] = arguments.mutation;
      std::vector<std::string> command{"/proc/self/exe", "--worker",
                                       "--seed",         std::to_string(arguments.first),
                                       "--seeds",        std::to_string(arguments.one ? 1 : arguments.seeds),
                                       "--minutes",      std::to_string(share)};
      if (setup.free_returns()) command.emplace_back("--free-returns");
      if (arguments.keep) command.emplace_back("--keep");
      const harness::ChildResult result = harness::RunProgram(command, environment);
      const std::lock_guard lock(mutex);
      if (result.status != 0) {
        found = true;
        std::string options;
        for (const auto& [name, value] : setup.environment) options += name + "=" + value + " ";
        fmt::print("FOUND under {} ({}): {}", setup.name, options, result.output);
        continue;
      }
      const auto figures = nlohmann::json::parse(result.output);
      total.programs += figures["programs"].get<std::uint64_t>();
      total.steps += figures["steps"].get<std::uint64_t>();
      total.conflicts += figures["conflicts"].get<std::uint64_t>();
      total.reads += figures["reads"].get<std::uint64_t>();
    }
  };
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < arguments.jobs; ++i) threads.emplace_back(deal);
  for (std::thread& thread : threads) thread.join();
  if (found) return 1;
  fmt::print("{} programs under {} settings, {} steps, {} conflicts and {} reads checked in {:.0f} s: nothing found\n",
             total.programs, setups.size(), total.steps, total.conflicts, total.reads, SecondsSince(start));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  bool list = false;
  bool list_settings = false;
  CLI::App app("Random programs whose order of work must be the native one under Cushion.");
  app.add_option("--seeds", arguments.seeds, "how many programs under each setting")->capture_default_str();
  app.add_option("--minutes", arguments.minutes, "end after so many minutes in all; 0: no limit")
      ->capture_default_str();
  app.add_option("--settings", arguments.settings,
                 "all, names of settings, or \"CUSHION_FREE=auto EMU_MEMORY=64M ...\"");
  app.add_option("--seed", arguments.first, "the first program; without --seeds the only one");
  app.add_option("--mutation", arguments.mutation, "run a build of Cushion with this fault in it");
  app.add_option("--jobs", arguments.jobs, "settings at a time")->capture_default_str()->check(CLI::PositiveNumber);
  app.add_flag("--keep", arguments.keep, "print a failing program as it is, do not make it shorter");
  app.add_flag("--list-mutations", list, "print the faults that there are");
  app.add_flag("--list-settings", list_settings, "print the settings that there are");
  app.add_flag("--worker", arguments.worker)->group("");
  app.add_flag("--free-returns", arguments.free_returns)->group("");
  CLI11_PARSE(app, argc, argv);
  arguments.one = app.count("--seed") > 0 && app.count("--seeds") == 0;
  try {
    if (list) {
      for (const order::Mutation& mutation : order::Mutations())
        fmt::print("{:24} {}\n", mutation.name, mutation.sentence);
      return 0;
    }
    if (list_settings) {
      for (const order::Setup& setup : order::AllSetups()) {
        fmt::print("{:28}", setup.name);
        for (const auto& [name, value] : setup.environment) fmt::print(" {}={}", name, value);
        fmt::print("\n");
      }
      return 0;
    }
    if (!arguments.mutation.empty() && !order::IsMutation(arguments.mutation))
      throw std::invalid_argument("no mutation is called " + arguments.mutation);
    return arguments.worker ? Work(arguments) : Deal(arguments);
  } catch (const std::exception& error) {
    fmt::print(stderr, "ordering_fuzz: {}\n", error.what());
    return 2;
  }
}
