#include "tests/order/check.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <new>
#include <optional>
#include <utility>

#include "tests/order/interpret.h"

namespace order {
namespace {

constexpr unsigned kPatience = 120;  // seconds that a run may take, on a busy machine too
constexpr int kNotReady = 600;
constexpr int kOutOfMemory = 2;

Trace& Shared(int which) {
  static Trace* const traces =
      static_cast<Trace*>(mmap(nullptr, 2 * sizeof(Trace), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  return *new (traces + which) Trace{};
}

// How a run that did not finish ended.
std::string Unfinished(const Program& program, const Trace& trace, int status) {
  std::string what = trace.finding;
  if (what.empty() && WIFSIGNALED(status)) {
    what = WTERMSIG(status) == SIGALRM ? "the run hangs" : fmt::format("the run dies of signal {}", WTERMSIG(status));
  }
  if (what.empty()) what = fmt::format("the run ends with {}", WEXITSTATUS(status));
  const auto at = static_cast<std::size_t>(trace.at);
  if (trace.at >= 0 && at < program.size()) return fmt::format("step {}: {}: {}", at, NameOf(program[at].what), what);
  return fmt::format("at the {}: {}", trace.at < 0 ? "start" : "end", what);
}

std::string RunChild(const Program& program, const RunOptions& options, Trace& trace) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(kPatience);
    if (options.native == nullptr) setenv("CUSHION_DISABLE", "1", 1);
    Run(program, options, trace);
    _exit(0);
  }
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child) return "no process";
  return trace.finished && status == 0 ? std::string{} : Unfinished(program, trace, status);
}

class Judge {
 public:
  Judge(const Program& program, const Trace& native, const Trace& actual, Counts& counts)
      : program_(program), native_(native), actual_(actual), counts_(counts) {}

  std::string Finding() {
    for (int step = 0; step < size(); ++step) {
      if (!actual(step).executed) continue;
      ++counts_.steps;
      std::string finding = Answer(step);
      if (finding.empty() && actual(step).address != 0) finding = HandedOut(step);
      if (finding.empty()) finding = Order(step);
      if (finding.empty()) finding = Data(step);
      if (!finding.empty()) return finding;
    }
    return {};
  }

 private:
  int size() const { return static_cast<int>(program_.size()); }
  const StepTrace& native(int step) const { return native_.step[static_cast<std::size_t>(step)]; }
  const StepTrace& actual(int step) const { return actual_.step[static_cast<std::size_t>(step)]; }
  // Whether everything before the step went as natively.
  bool Full(int step) const { return actual_.short_at < 0 || step < actual_.short_at; }

  std::string Answer(int step) const {
    const int expected = native(step).result;
    const int got = actual(step).result;
    const Do what = program_[static_cast<std::size_t>(step)].what;
    const bool query = what == Do::kEventQuery || what == Do::kStreamQuery;
    if (got == expected || !Full(step)) return {};
    if ((query && expected == kNotReady) || (got == kOutOfMemory && step == actual_.short_at)) return {};
    return fmt::format("step {} answers {}, natively {}", step, got, expected);
  }

  bool Overlap(int a, int b) const {
    const StepTrace& x = actual(a);
    const StepTrace& y = actual(b);
    return x.address < y.address + y.bytes && y.address < x.address + x.bytes;
  }

  std::string HandedOut(int step) const {
    for (int earlier = 0; earlier < step; ++earlier) {
      const StepTrace& other = actual(earlier);
      if (other.address == 0 || !Overlap(earlier, step) || (other.freed >= 0 && other.freed < step)) continue;
      return fmt::format("step {} hands out bytes that the block of step {} has\n{}{}", step, earlier, History(earlier),
                         History(step));
    }
    return {};
  }

  std::string Order(int step) {
    const StepTrace& here = actual(step);
    for (int earlier = 0; earlier < step; ++earlier) {
      const StepTrace& there = actual(earlier);
      for (int i = 0; i < here.accesses; ++i) {
        for (int j = 0; j < there.accesses; ++j) {
          const Access& a = there.access[static_cast<std::size_t>(j)];
          const Access& b = here.access[static_cast<std::size_t>(i)];
          if (!a.writes && !b.writes) continue;
          const bool same = a.generation == b.generation;
          if (same ? !native(step).after[static_cast<std::size_t>(earlier)] || !Full(step)
                   : !Overlap(a.generation, b.generation)) {
            continue;
          }
          ++counts_.conflicts;
          if (here.after[static_cast<std::size_t>(earlier)]) continue;
          return fmt::format("step {} is not ordered after step {}, {}\n{}{}", step, earlier,
                             same ? "and natively it is" : "which touches the same bytes in an earlier block",
                             History(a.generation), same ? "" : History(b.generation));
        }
      }
    }
    return {};
  }

  // What a read must have seen, if only one write can be the last before it.
  std::optional<std::uint64_t> Expected(int step, int generation) const {
    int last = -1;
    int signer = -1;
    for (int other = 0; other < size(); ++other) {
      const StepTrace& trace = native(other);
      for (int i = 0; i < trace.accesses; ++i) {
        const Access& access = trace.access[static_cast<std::size_t>(i)];
        if (!access.writes || access.generation != generation) continue;
        if (other == step) return std::nullopt;
        if (native(other).after[static_cast<std::size_t>(step)]) continue;
        if (!native(step).after[static_cast<std::size_t>(other)]) return std::nullopt;
        if (last >= 0 && other != last && !trace.after[static_cast<std::size_t>(last)]) return std::nullopt;
        last = other;
        signer = access.signer;
      }
    }
    if (signer < 0) return std::nullopt;
    return SignatureOf(signer);
  }

  std::string Data(int step) {
    const StepTrace& here = actual(step);
    if (!Full(step) || here.accesses == 0 || here.access[0].writes) return {};
    const Do what = program_[static_cast<std::size_t>(step)].what;
    if (what == Do::kGraphLaunch || what == Do::kCopy) return {};
    const int generation = here.access[0].generation;
    const auto expected = Expected(step, generation);
    if (!expected) return {};
    ++counts_.reads;
    if (native(step).observed != *expected)
      return fmt::format("step {} reads {:#x} natively, and should read {:#x}: the checker is wrong", step,
                         native(step).observed, *expected);
    if (here.observed == *expected) return {};
    return fmt::format("step {} reads {:#x}, natively {:#x}\n{}", step, here.observed, *expected, History(generation));
  }

  // What happened to the block that a step allocated.
  std::string History(int generation) const {
    const StepTrace& birth = actual(generation);
    std::string text = fmt::format("  block of step {}, {} bytes at {:#x}:\n", generation, birth.bytes, birth.address);
    for (int step = 0; step < size(); ++step) {
      const StepTrace& trace = actual(step);
      const char* doing = step == generation ? "allocated" : step == birth.freed ? "freed" : nullptr;
      for (int i = 0; i < trace.accesses && doing == nullptr; ++i) {
        const Access& access = trace.access[static_cast<std::size_t>(i)];
        if (access.generation == generation) doing = access.writes ? "written" : "read";
      }
      if (doing != nullptr)
        text += fmt::format("    {:9} by step {:2} {}\n", doing, step, Print(program_[static_cast<std::size_t>(step)]));
    }
    return text;
  }

  const Program& program_;
  const Trace& native_;
  const Trace& actual_;
  Counts& counts_;
};

}  // namespace

std::string Check(const Program& program, std::uint64_t seed, bool free_returns, Counts& counts) {
  Trace& native = Shared(0);
  Trace& actual = Shared(1);
  std::string finding = RunChild(program, {seed, nullptr, free_returns}, native);
  if (!finding.empty()) return "natively: " + finding;
  finding = RunChild(program, {seed, &native, free_returns}, actual);
  ++counts.programs;
  return finding.empty() ? Judge(program, native, actual, counts).Finding() : finding;
}

Program Shrink(Program program, std::uint64_t seed, bool free_returns) {
  Counts ignored;
  const auto run = [&](const Program& candidate) { return Check(candidate, seed, free_returns, ignored); };
  const bool natively = run(program).starts_with("natively");
  const auto fails = [&](const Program& candidate) {
    const std::string finding = run(candidate);
    return !finding.empty() && finding.starts_with("natively") == natively;
  };
  for (std::size_t piece = program.size() / 2; piece > 0;) {
    bool shorter = false;
    for (std::size_t from = 0; from < program.size();) {
      Program candidate(program.begin(), program.begin() + static_cast<std::ptrdiff_t>(from));
      const std::size_t to = std::min(from + piece, program.size());
      candidate.insert(candidate.end(), program.begin() + static_cast<std::ptrdiff_t>(to), program.end());
      if (fails(candidate)) {
        program = std::move(candidate);
        shorter = true;
      } else {
        from = to;
      }
    }
    if (!shorter || piece > 1) piece /= 2;
  }
  // Simpler: fewer threads, contexts and sizes, no second block.
  for (Step& step : program) {
    const auto simplify = [&](auto Step::*field, auto value) {
      if (step.*field == value) return;
      const auto before = std::exchange(step.*field, value);
      if (!fails(program)) step.*field = before;
    };
    const Step usual;
    simplify(&Step::from, usual.from);
    simplify(&Step::thread, usual.thread);
    simplify(&Step::context, usual.context);
    simplify(&Step::mode, usual.mode);
    simplify(&Step::event, usual.event);
    simplify(&Step::graph, usual.graph);
    simplify(&Step::flag, usual.flag);
    simplify(&Step::block, usual.block);
    simplify(&Step::stream, usual.stream);
  }
  return program;
}

}  // namespace order
