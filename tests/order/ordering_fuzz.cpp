// ordering_fuzz: random programs over the emulated driver, natively and under Cushion, until one differs.
//
// The process that is called only deals out work: for each setting it starts itself again as a worker, with that
// setting's environment and the preload, and the worker runs every program in processes of its own (check.h). A worker
// that finds something makes the program as short as it can and prints it. 1 says that something was found, 2 that the
// work could not be done.
#include <fmt/format.h>

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
#include "tests/order/regressions.h"
#include "tests/order/setups.h"

namespace {

using order::Counts;
using Clock = std::chrono::steady_clock;

struct Arguments {
  std::uint64_t seeds = 100;
  double minutes = 0;
  std::string settings;
  std::uint64_t first = 1;
  std::string mutation;
  unsigned jobs = std::max(1U, std::thread::hardware_concurrency());
  bool keep = false;
  bool regressions = false;
  bool free_returns = false;  // a worker's, as its setting is
  bool no_spins = false;      // likewise
};

double SecondsSince(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// ---- the worker --------------------------------------------------------------------------------------------------

int Report(const std::string& what, const std::string& finding, const order::Program& program) {
  fmt::print("{}: {}\n{}\n", what, finding, order::Print(program));
  return 1;
}

// Seeds from the first one until one finds something, they are used up, or the time is over.
int WorkOnRandom(const Arguments& arguments, Counts& counts) {
  const auto start = Clock::now();
  for (std::uint64_t seed = arguments.first; seed < arguments.first + arguments.seeds; ++seed) {
    if (arguments.minutes > 0 && SecondsSince(start) > 60 * arguments.minutes) break;
    order::Program program = order::Generate(seed);
    if (arguments.no_spins) std::erase_if(program, [](const order::Step& s) { return s.what == order::Do::kSpin; });
    std::string finding = order::Check(program, seed, arguments.free_returns, counts);
    if (finding.empty()) continue;
    if (!arguments.keep) {
      program = order::Shrink(program, seed, arguments.free_returns);
      const std::string again = order::Check(program, seed, arguments.free_returns, counts);
      if (!again.empty()) finding = again;
    }
    return Report(fmt::format("seed {}", seed), finding, program);
  }
  return 0;
}

// Each in several ways in which its work may progress.
int WorkOnRegressions(const Arguments& arguments, Counts& counts) {
  constexpr std::uint64_t kWays = 8;
  const auto spins = [](const order::Step& s) { return s.what == order::Do::kSpin; };
  for (const order::Regression& regression : order::Regressions()) {
    const order::Program& program = regression.program;
    if (arguments.no_spins && std::any_of(program.begin(), program.end(), spins)) continue;
    for (std::uint64_t seed = 1; seed <= kWays; ++seed) {
      const std::string finding = order::Check(program, seed, arguments.free_returns, counts);
      if (!finding.empty()) return Report(std::string(regression.what), finding, program);
    }
  }
  return 0;
}

int Work(const Arguments& arguments) {
  Counts counts;
  harness::driver_without_per_thread();  // found once, for all the processes that come
  const bool from_the_first = arguments.regressions || arguments.first == 1;
  int status = from_the_first ? WorkOnRegressions(arguments, counts) : 0;
  if (status == 0 && !arguments.regressions) status = WorkOnRandom(arguments, counts);
  if (status == 0) {
    const nlohmann::json figures{counts.programs, counts.steps, counts.conflicts, counts.reads};
    fmt::print("{}\n", figures.dump());
  }
  return status;
}

// ---- dealing out -------------------------------------------------------------------------------------------------

struct Dealt {
  std::string finding;  // empty: nothing was found
  Counts counts;
};

harness::ChildResult RunWorker(const Arguments& arguments, const order::Setup& setup, double minutes) {
  const std::filesystem::path tests = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  const auto preload =
      arguments.mutation.empty() ? tests.parent_path() / "libcushion.so" : tests / "libcushion_mutant.so";
  if (!std::filesystem::exists(preload)) throw std::runtime_error(preload.string() + " is not built");
  harness::Environment environment = setup.environment;
  environment["LD_PRELOAD"] = preload.string();
  environment["LD_LIBRARY_PATH"] = (tests.parent_path() / "emulator").string();
  environment["EMU_DEVICES"] = "2";
  environment["ORDER_MUTATION"] = arguments.mutation;
  environment["ASAN_OPTIONS"] = "verify_asan_link_order=0";
  std::vector<std::string> command{"/proc/self/exe", "--worker"};
  const auto option = [&](const char* name, const auto& value) {
    command.emplace_back(name);
    command.push_back(fmt::format("{}", value));
  };
  option("--seed", arguments.first);
  option("--seeds", arguments.seeds);
  option("--minutes", minutes);
  if (setup.free_returns()) command.emplace_back("--free-returns");
  if (setup.fills()) command.emplace_back("--no-spins");
  if (arguments.regressions) command.emplace_back("--regressions");
  if (arguments.keep) command.emplace_back("--keep");
  return harness::RunProgram(command, environment);
}

// The programs write where they may: what CUSHION_GUARD and CUSHION_QUARANTINE tell of them is a false alarm.
bool Alarmed(const std::string& output) {
  return output.find("cushion: overwritten") != std::string::npos ||
         output.find("cushion: written to after its free") != std::string::npos;
}

// One worker for each setting, as many at a time as there are jobs; once one has found something, no more begin.
Dealt Deal(const Arguments& arguments, const std::vector<order::Setup>& setups) {
  Dealt dealt;
  std::mutex mutex;  // protects dealt
  std::atomic<std::size_t> next{0};
  std::atomic<bool> over{false};
  const auto rounds = static_cast<double>((setups.size() + arguments.jobs - 1) / arguments.jobs);
  const auto deal = [&] {
    for (std::size_t i = next++; i < setups.size() && !over; i = next++) {
      const harness::ChildResult result = RunWorker(arguments, setups[i], arguments.minutes / rounds);
      const std::lock_guard lock(mutex);
      if (result.status == 0 && !Alarmed(result.output)) {
        const auto figures = nlohmann::json::parse(result.output.substr(result.output.find_last_of('[')));
        dealt.counts.programs += figures[0].get<std::uint64_t>();
        dealt.counts.steps += figures[1].get<std::uint64_t>();
        dealt.counts.conflicts += figures[2].get<std::uint64_t>();
        dealt.counts.reads += figures[3].get<std::uint64_t>();
        continue;
      }
      over = true;
      dealt.finding = fmt::format("under {}{}: {}", setups[i].name, order::Print(setups[i]), result.output);
    }
  };
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < arguments.jobs; ++i) threads.emplace_back(deal);
  for (std::thread& thread : threads) thread.join();
  return dealt;
}

int Fuzz(const Arguments& arguments) {
  const auto start = Clock::now();
  std::string settings = arguments.settings.empty() ? "all" : arguments.settings;
  if (!arguments.mutation.empty() && arguments.settings.empty())
    settings = order::MutationNamed(arguments.mutation).settings;
  const std::vector<order::Setup> setups = order::SetupsOf(settings);
  const Dealt dealt = Deal(arguments, setups);
  if (!dealt.finding.empty()) {
    fmt::print("FOUND {}", dealt.finding);
    return 1;
  }
  fmt::print("{} programs under {} settings, {} steps, {} conflicts and {} reads checked in {:.0f} s: nothing found\n",
             dealt.counts.programs, setups.size(), dealt.counts.steps, dealt.counts.conflicts, dealt.counts.reads,
             SecondsSince(start));
  return 0;
}

// Every mutation under the settings where it shows; 0 if each is found.
int FindMutations(Arguments arguments) {
  const auto start = Clock::now();
  arguments.keep = true;
  std::size_t found = 0;
  for (const order::Mutation& mutation : order::Mutations()) {
    arguments.mutation = mutation.name;
    const Dealt dealt = Deal(arguments, order::SetupsOf(std::string(mutation.settings)));
    found += dealt.finding.empty() ? 0 : 1;
    fmt::print("{:24} {}\n", mutation.name,
               dealt.finding.empty() ? "NOT FOUND" : dealt.finding.substr(0, dealt.finding.find('\n')));
  }
  fmt::print("{} of {} mutations found in {:.0f} s\n", found, order::Mutations().size(), SecondsSince(start));
  return found == order::Mutations().size() ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  bool worker = false;
  bool every_mutation = false;
  bool list_mutations = false;
  bool list_settings = false;
  CLI::App app("Random programs whose order of work must be the native one under Cushion.");
  app.add_option("--seeds", arguments.seeds, "how many programs under each setting")->capture_default_str();
  app.add_option("--minutes", arguments.minutes, "end after so many minutes in all; 0: no limit")
      ->capture_default_str();
  app.add_option("--settings", arguments.settings,
                 "all, names of settings, or some of your own: \"CUSHION_FREE=auto EMU_MEMORY=64M ...\"");
  app.add_option("--seed", arguments.first, "the first program; without --seeds the only one");
  app.add_option("--mutation", arguments.mutation, "run a build of Cushion that has this fault");
  app.add_option("--jobs", arguments.jobs, "settings at a time")->capture_default_str()->check(CLI::PositiveNumber);
  app.add_flag("--keep", arguments.keep, "print a failing program as it is, do not make it shorter");
  app.add_flag("--regressions", arguments.regressions, "run the programs of regressions.h instead of random ones");
  app.add_flag("--every-mutation", every_mutation, "run every fault; 0 if each is found");
  app.add_flag("--list-mutations", list_mutations, "print the faults that there are");
  app.add_flag("--list-settings", list_settings, "print the settings that there are");
  app.add_flag("--worker", worker)->group("");
  app.add_flag("--free-returns", arguments.free_returns)->group("");
  app.add_flag("--no-spins", arguments.no_spins)->group("");
  CLI11_PARSE(app, argc, argv);
  if (app.count("--seed") > 0 && app.count("--seeds") == 0) arguments.seeds = 1;
  try {
    if (list_mutations) {
      for (const order::Mutation& mutation : order::Mutations())
        fmt::print("{:24} {}\n", mutation.name, mutation.sentence);
      return 0;
    }
    if (list_settings) {
      for (const order::Setup& setup : order::AllSetups()) fmt::print("{:28}{}\n", setup.name, order::Print(setup));
      return 0;
    }
    if (worker) return Work(arguments);
    return every_mutation ? FindMutations(arguments) : Fuzz(arguments);
  } catch (const std::exception& error) {
    fmt::print(stderr, "ordering_fuzz: {}\n", error.what());
    return 2;
  }
}
