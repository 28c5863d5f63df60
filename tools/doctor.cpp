#include "tools/doctor.h"

#include <cuda.h>
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <fmt/core.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string_view>

#include "core/options.h"
#include "tools/elf_file.h"
#include "tools/launch.h"
#include "tools/script.h"

extern char** environ;

namespace cushion {
namespace {

class Findings {
 public:
  void ok(std::string_view subject, const std::string& text) { line("ok", subject, text); }
  void note(std::string_view subject, const std::string& text) { line("note", subject, text); }
  void fail(std::string_view subject, const std::string& text) {
    line("FAIL", subject, text);
    failed_ = true;
  }
  bool failed() const { return failed_; }

 private:
  static void line(const char* state, std::string_view subject, const std::string& text) {
    fmt::print("{:<5} {:<11} {}\n", state, subject, text);
  }
  bool failed_ = false;
};

std::string machine_name(unsigned machine, int bits) {
  switch (machine) {
    case EM_X86_64:
      return bits == 64 ? "x86-64" : "x32";
    case EM_AARCH64:
      return "aarch64";
    case EM_386:
      return "32-bit x86";
    case EM_ARM:
      return "32-bit Arm";
    case EM_PPC64:
      return "ppc64";
    case EM_RISCV:
      return "RISC-V";
    default:
      return fmt::format("ELF machine {}", machine);
  }
}

// The interpreter a script's first line names; empty if the file is no script.
std::string script_interpreter(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::array<char, 256> head{};  // as much as the kernel looks at
  file.read(head.data(), head.size());
  return interpreter_of({head.data(), static_cast<std::size_t>(file.gcount())});
}

// The ELF file that is in the end executed for `program`: scripts lead on to their interpreters.
std::string resolve_program(const std::string& program, Findings& findings) {
  constexpr int kDeepest = 5;  // the kernel's own bound
  std::string name = program;
  for (int depth = 0; depth < kDeepest; ++depth) {
    const std::string path = find_program(name);
    std::error_code error;
    if (path.empty()) {
      findings.fail("program", fmt::format("{} is not in PATH: give its path", name));
    } else if (!std::filesystem::exists(path, error)) {
      findings.fail("program", fmt::format("{}: no such file: give the path of the program", path));
    } else if (!std::filesystem::is_regular_file(path, error)) {
      findings.fail("program", fmt::format("{} is not a file: give the path of the program", path));
    } else if (access(path.c_str(), X_OK) != 0) {
      findings.fail("program", fmt::format("{} cannot be executed by this user: chmod +x it", path));
    } else if (const std::string interpreter = script_interpreter(path); !interpreter.empty()) {
      findings.note("script", fmt::format("{} is run by {}: looking at that", path, interpreter));
      name = interpreter;
      continue;
    } else {
      return path;
    }
    return {};
  }
  findings.fail("program", fmt::format("{}: its interpreters lead on without end: name the real one", program));
  return {};
}

bool check_format(const std::string& path, const ElfFile& elf, Findings& findings) {
  const ElfFile self = read_elf("/proc/self/exe");
  if (!elf.problem.empty()) {
    findings.fail("program", fmt::format("{} is {}: name the program that runs it", path, elf.problem));
  } else if (elf.machine != self.machine || elf.word_bits != self.word_bits) {
    findings.fail("program",
                  fmt::format("{} is a {} program and Cushion was built for {}: use a build for that", path,
                              machine_name(elf.machine, elf.word_bits), machine_name(self.machine, self.word_bits)));
  } else if (elf.shared_library) {
    findings.fail("program", fmt::format("{} is a shared library: name the program that loads it", path));
  } else if (elf.interpreter.empty()) {
    findings.fail("program",
                  fmt::format("{} is a static executable, in which nothing is preloaded: link it dynamically", path));
  } else if (elf.interpreter.find("ld-musl") != std::string::npos) {
    findings.fail("program",
                  fmt::format("{} runs on musl and Cushion needs the GNU C library: use a glibc build", path));
  } else if (access(elf.interpreter.c_str(), X_OK) != 0) {
    findings.fail("program", fmt::format("{} wants the loader {}, which is not here: install its C library", path,
                                         elf.interpreter));
  } else {
    findings.ok("program", fmt::format("{}, dynamically linked", path));
    return true;
  }
  return false;
}

// Whether the kernel starts the program in secure-execution mode, in which the loader ignores such an LD_PRELOAD.
void check_privileges(const std::string& path, Findings& findings) {
  struct stat status {};
  struct statvfs volume {};
  if (stat(path.c_str(), &status) != 0 || statvfs(path.c_str(), &volume) != 0) {
    findings.fail("privileges", fmt::format("{}: {}", path, std::strerror(errno)));
    return;
  }
  const bool honoured = (volume.f_flag & ST_NOSUID) == 0;
  const bool user = (status.st_mode & S_ISUID) != 0 && status.st_uid != getuid();
  const bool group = (status.st_mode & S_ISGID) != 0 && (status.st_mode & S_IXGRP) != 0 && status.st_gid != getgid();
  const bool capable = getuid() != 0 && getxattr(path.c_str(), "security.capability", nullptr, 0) > 0;
  if (honoured && (user || group || capable)) {
    findings.fail("privileges", fmt::format("{}, so the loader ignores LD_PRELOAD: use a copy without it ({})",
                                            user    ? "set-user-ID"
                                            : group ? "set-group-ID"
                                                    : "has file capabilities",
                                            "cp makes one"));
  } else {
    findings.ok("privileges", "none that make the loader ignore LD_PRELOAD");
  }
}

void check_cuda(const ElfFile& elf, Findings& findings) {
  bool any = false;
  for (const std::string& name : elf.needed) {
    if (!name.starts_with("libcudart.so") && !name.starts_with("libcuda.so")) continue;
    findings.ok("CUDA", fmt::format("linked with {} ({})", name,
                                    name.starts_with("libcudart") ? "the shared CUDA runtime" : "the CUDA driver"));
    any = true;
  }
  if (elf.static_cuda_runtime && !elf.needs("libcudart.so")) {
    findings.ok("CUDA", "the CUDA runtime is linked in statically (nvcc's default)");
    any = true;
  }
  if (!any) {
    findings.note("CUDA", "not linked directly: what the program loads later (as Python packages do) is served");
  }
}

struct Driver {
  bool loaded = false;
  bool has_context_fence = false;  // cuCtxRecordEvent, since 12.5
  int version = 0;
  std::array<char, 256> error{};
};

Driver look_at_driver() {
  Driver driver;
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const why = dlerror();
    std::strncpy(driver.error.data(), why != nullptr ? why : "unknown error", driver.error.size() - 1);
    return driver;
  }
  driver.loaded = true;
  driver.has_context_fence = dlsym(library, "cuCtxRecordEvent") != nullptr;
  const auto version = reinterpret_cast<decltype(&cuDriverGetVersion)>(dlsym(library, "cuDriverGetVersion"));
  if (version == nullptr || version(&driver.version) != CUDA_SUCCESS) driver.version = 0;
  return driver;
}

// look_at_driver() in a child; a child that dies or hangs leaves an error instead.
Driver look_at_driver_in_child() {
  constexpr unsigned kPatience = 30;  // seconds; a driver that is being set up can take several
  Driver driver;
  const auto failed = [&driver](const std::string& why) {
    driver = Driver{};
    why.copy(driver.error.data(), driver.error.size() - 1);
    return driver;
  };
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) return failed(std::strerror(errno));
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    alarm(kPatience);
    const Driver seen = look_at_driver();
    const bool told = write(ends[1], &seen, sizeof seen) == static_cast<ssize_t>(sizeof seen);
    _exit(told ? 0 : 1);
  }
  close(ends[1]);
  const ssize_t got = child < 0 ? -1 : read(ends[0], &driver, sizeof driver);  // under PIPE_BUF: whole or not at all
  close(ends[0]);
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child) return failed("cannot start a process to look");
  if (got == static_cast<ssize_t>(sizeof driver)) return driver;
  return failed(WIFSIGNALED(status) ? fmt::format("loading it ended by signal {}", WTERMSIG(status))
                                    : "loading it failed");
}

void check_driver(Findings& findings) {
  const Driver driver = look_at_driver_in_child();
  if (!driver.loaded) {
    findings.fail("driver", fmt::format("libcuda.so.1 cannot be loaded: install NVIDIA's driver, or point "
                                        "LD_LIBRARY_PATH at it ({})",
                                        driver.error.data()));
  } else if (driver.version == 0) {
    findings.fail("driver", "libcuda.so.1 does not tell its version: install NVIDIA's driver");
  } else {
    const std::string version = fmt::format("CUDA {}.{}", driver.version / 1000, driver.version % 1000 / 10);
    if (driver.has_context_fence) {
      findings.ok("driver", fmt::format("{}, with cuCtxRecordEvent", version));
    } else {
      findings.note("driver", fmt::format("{}, without cuCtxRecordEvent: Cushion works, but frees cost more; update "
                                          "to 12.5 or later",
                                          version));
    }
  }
}

void check_library(const std::string& given, Findings& findings) {
  const LibrarySearch search = find_library(given);
  if (search.path.empty()) {
    std::string places;
    for (const std::string& place : search.searched) places += (places.empty() ? "" : ", ") + place;
    findings.fail("library",
                  fmt::format("no libcushion.so (looked at {}): build it, or name it with --library", places));
  } else if (const std::string problem = preload_problem(search.path); !problem.empty()) {
    findings.fail("library", problem);
  } else if (const ElfFile elf = read_elf(search.path); !elf.problem.empty()) {
    findings.fail("library", fmt::format("{} is {}: build it again", search.path, elf.problem));
  } else {
    findings.ok("library", search.path);
  }
}

void check_options(const std::string& path, Findings& findings) {
  const std::string name = std::filesystem::path(path).filename();
  const OptionsResult result = read_options(environ);
  for (const std::string& warning : result.warnings) findings.note("options", warning);
  for (const std::string& error : result.errors) findings.fail("options", error);
  if (inert(name.c_str())) {
    findings.fail("options", fmt::format("CUSHION_DISABLE or CUSHION_PROGRAMS leave out {}: unset them", name));
  } else if (result.errors.empty()) {
    findings.ok("options", "valid, and this program is not left out");
  }
}

}  // namespace

int diagnose(const std::string& program, const std::string& library) {
  Findings findings;
  const std::string path = resolve_program(program, findings);
  if (!path.empty()) {
    const ElfFile elf = read_elf(path);
    if (check_format(path, elf, findings)) {
      check_privileges(path, findings);
      check_cuda(elf, findings);
      check_options(path, findings);
    }
  }
  check_driver(findings);
  check_library(library, findings);
  fmt::print("{}\n", findings.failed() ? "Cushion will not take effect."
                                       : fmt::format("Cushion will take effect: cushion run -- {}", program));
  return findings.failed() ? 1 : 0;
}

}  // namespace cushion
