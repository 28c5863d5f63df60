// Options: what CUSHION_* variables say, parsed and checked once, at the first device allocation.
//
// Everything about an option stands in one line of options.def. Thread safety: read_options and the
// parsers are pure functions of their arguments; inert() reads only the environment. None of them throws.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/track.h"

namespace cushion {

enum class AllocatorKind : std::uint8_t { pool, arena, binning, async, cuda };
enum class Backing : std::uint8_t { driver, vmm, automatic };
enum class FreeMode : std::uint8_t { sync, deferred, automatic };
enum class InitMode : std::uint8_t { none, zero, junk };
enum class LogLevel : std::uint8_t { off, error, warn, info, debug, trace };
enum class DisableMode : std::uint8_t { automatic, never, always };
enum class CtlMode : std::uint8_t { off, on };
enum class AskMode : std::uint8_t { off, on };
enum class ShownMemory : std::uint8_t { limit, device };
enum class PythonMode : std::uint8_t { automatic, off };

// What INIT=zero and INIT=junk write; junk is NaN as a float or a double, and -1 as an integer.
constexpr unsigned char fill_byte(InitMode mode) noexcept { return mode == InitMode::zero ? 0 : 0xFF; }

using Text = std::string;

// An amount of device memory: bytes (`512MiB`, `8G`, `1000`), or a share of the device's total (`50%`).
// k/M/G/T and KiB/MiB/GiB/TiB are powers of 1024; KB/MB/GB/TB powers of 1000. Case is ignored.
struct Size {
  std::uint64_t bytes = 0;
  double percent = -1;  // ≥ 0: a share, and `bytes` is unused

  std::uint64_t of(std::uint64_t device_total) const noexcept {
    return percent < 0 ? bytes : static_cast<std::uint64_t>(static_cast<double>(device_total) * (percent / 100));
  }
};

// A length of time in nanoseconds: `250ms`, `1s`, `2min`.
struct Duration {
  std::uint64_t ns = 0;
};

struct Count {
  std::uint32_t value = 0;
};

struct Options {
#define CUSHION_OPTION(type, field, name, fallback, range, help) type field{};
#include "core/options.def"
#undef CUSHION_OPTION

  // Whether blocks are cut from memory of Cushion's own.
  bool suballocates() const noexcept { return allocator != AllocatorKind::async && allocator != AllocatorKind::cuda; }
  // Whether blocks are looked at when the program gives them back.
  bool watches() const noexcept {
    return guard.bytes != 0 || guard.percent > 0 || quarantine.bytes != 0 || quarantine.percent > 0;
  }
};

// One row of the table, for whoever prints it or makes flags of it.
struct OptionInfo {
  const char* name;      // without CUSHION_
  const char* fallback;  // the default, as a person would write it
  const char* range;     // the valid words or a phrase
  const char* help;
};
std::span<const OptionInfo> option_table() noexcept;

// A level of tracking as CUSHION_TRACK, `cushion ctl` and cushion_set_track take it; nothing if it is none.
std::optional<Tracking> parse_tracking(std::string_view text) noexcept;
// The values that it takes, for a person.
std::string_view tracking_values() noexcept;

// What is wrong with `value` for the option `name` (without CUSHION_): empty if it is valid, else one line
// without a newline that names the option, the value and the valid ones.
std::string check_option(std::string_view name, std::string_view value);

struct OptionsResult {
  Options options;
  std::vector<std::string> errors;    // bad values: the program must then run on native CUDA
  std::vector<std::string> warnings;  // unknown CUSHION_ names, each with the nearest valid one
};
// Reads every CUSHION_* of `environment` ("NAME=value" strings, null at the end). Never throws: a failing
// host allocation ends as an error line.
OptionsResult read_options(const char* const* environment) noexcept;

// The options in force as "NAME", "value" in table order, as a person would write them.
std::vector<std::pair<std::string, std::string>> describe(const Options& options);

// Whether CUSHION_DISABLE or CUSHION_PROGRAMS make Cushion inert in the program of this short name. Allocates
// nothing and takes no lock: it is asked inside dlsym. It is inert too where the environment may be another user's
// (setuid programs and the like, whom a library that is itself setuid can be preloaded into). A bad DISABLE value
// does not make it inert (it is an error, reported at the first allocation).
bool inert(const char* program) noexcept;

// Whether CUSHION_DISABLE says to serve under a tool that checks memory accesses, too. Reads the environment alone.
bool serves_under_checkers() noexcept;

// What a path pattern's letters stand for: %p, %h, ...; %% is a %, and an unknown sequence stays as it is.
using PathWords = std::vector<std::pair<char, std::string>>;
std::string expand_path(std::string_view pattern, const PathWords& words);

// The process's rank in its job, as its launcher says (torchrun, Open MPI, PMIx, MPICH and others with PMI, MVAPICH2,
// SLURM); empty: none says it.
std::string_view find_rank(const char* const* environment) noexcept;

// Whether the whole text matches: `*` stands for any text, `?` for one character.
bool matches_pattern(std::string_view pattern, std::string_view text) noexcept;

}  // namespace cushion
