// The launcher as a person meets it: what it prints, what it exits with, what the program then sees.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <fstream>

#include "core/options.h"
#include "tools/launch.h"

namespace cushion {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

const std::string kFixtures = FIXTURES "/";
const std::string kLauncher = LAUNCHER;
const std::string kLibrary = " --library " + kFixtures + "libfixture_preload.so ";

struct Outcome {
  int status;
  std::string text;  // stdout and stderr
};

Outcome shell(const std::string& command) {
  FILE* const pipe = popen(("{ " + command + "\n} 2>&1").c_str(), "r");
  std::string text;
  std::array<char, 4096> part{};
  for (std::size_t got = 0; (got = fread(part.data(), 1, part.size(), pipe)) > 0;) text.append(part.data(), got);
  const int status = pclose(pipe);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), text};
}

Outcome run(const std::string& arguments) { return shell(kLauncher + " run" + kLibrary + arguments); }

Outcome doctor(const std::string& program, const std::string& driver = "current") {
  return shell("LD_LIBRARY_PATH=" + kFixtures + driver + ' ' + kLauncher + " doctor" + kLibrary + program);
}

class Folder : public ::testing::Test {
 protected:
  Folder() { fs::create_directories(path_); }
  ~Folder() override { fs::remove_all(path_); }
  std::string write(const std::string& name, const std::string& text, mode_t mode = 0755) {
    const std::string file = path_ + '/' + name;
    std::ofstream(file) << text;
    chmod(file.c_str(), mode);
    return file;
  }
  const std::string path_ = ::testing::TempDir() + "launcher_test." + std::to_string(getpid());
};
using RunCommand = Folder;
using Doctor = Folder;

TEST(Launcher, TellsItsVersionAndItsOptions) {
  EXPECT_EQ(shell(kLauncher + " --version").text, "cushion " VERSION "\n");
  const Outcome help = shell(kLauncher + " run --help");
  const Outcome table = shell(kLauncher + " options");
  const Outcome markdown = shell(kLauncher + " options --markdown");
  EXPECT_EQ(help.status + table.status + markdown.status, 0);
  for (const OptionInfo& option : option_table()) {
    EXPECT_THAT(table.text, HasSubstr(std::string("\nCUSHION_") + option.name + ' '));
    EXPECT_THAT(table.text, HasSubstr(option.help));
    EXPECT_THAT(markdown.text, HasSubstr(std::string("\n| `CUSHION_") + option.name + "` | "));
  }
  EXPECT_THAT(help.text, AllOf(HasSubstr("--allocator pool|arena|binning|async|cuda"), HasSubstr("--log-level"),
                               HasSubstr("--oom-wait")));
}

TEST(Launcher, WrongUseExitsWith2) {
  for (const char* arguments :
       {"", "frob", "run", "run --", "run --track", "run --trak on -- true", "options x", "doctor"}) {
    EXPECT_EQ(shell(kLauncher + ' ' + arguments).status, 2) << arguments;
  }
  EXPECT_THAT(run("--trak on -- true").text, HasSubstr("did you mean CUSHION_TRACK?"));
}

TEST_F(RunCommand, FlagsBecomeVariablesAndTheExitStatusPassesOn) {
  const Outcome outcome = run("--log-level info --track=on -- sh -c 'echo $CUSHION_LOG_LEVEL $CUSHION_TRACK; exit 7'");
  EXPECT_EQ(outcome.text, "info on\n");
  EXPECT_EQ(outcome.status, 7);
  EXPECT_EQ(run("-- sh -c 'kill -TERM $$'").status, 128 + SIGTERM);
  EXPECT_EQ(run("sh -c 'exit 5'").status, 5);
  EXPECT_EQ(run("printf '%s %s' -- -x").text, "-- -x");
  EXPECT_EQ(run("-- printf '%s %s' -- -x").text, "-- -x");
}

TEST_F(RunCommand, BadOptionsStopItBeforeTheProgram) {
  const Outcome flag = run("--allocator pol -- echo started");
  EXPECT_EQ(flag.status, 2);
  EXPECT_EQ(flag.text, "cushion: CUSHION_ALLOCATOR=pol is not valid: use pool, arena, binning, async or cuda\n");
  const Outcome both = shell("CUSHION_FREE=x " + kLauncher + " run" + kLibrary + "--max-size 101% -- echo started");
  EXPECT_EQ(both.status, 2);
  EXPECT_THAT(both.text,
              AllOf(HasSubstr("CUSHION_FREE=x"), HasSubstr("CUSHION_MAX_SIZE=101%"), Not(HasSubstr("started"))));
  EXPECT_EQ(shell("CUSHION_FREE=x " + kLauncher + " run" + kLibrary + "--free sync -- true").status, 0);
}

TEST_F(RunCommand, ProgramsThatCannotStartExitAsInAShell) {
  EXPECT_EQ(run("-- nonesuch").status, 127);
  EXPECT_EQ(run("-- ./nonesuch").status, 127);
  EXPECT_EQ(run("-- " + write("data", "no program", 0644)).status, 126);
  EXPECT_EQ(run("-- " + path_).status, 126);
}

TEST_F(RunCommand, PreloadsAndKeepsWhatIsPreloadedAlready) {
  const std::string library = kFixtures + "libfixture_preload.so";
  EXPECT_EQ(run("-- printenv LD_PRELOAD").text, library + "\n");
  const std::string other = kFixtures + "libcudart.so.13";
  EXPECT_EQ(shell("LD_PRELOAD=" + other + ' ' + kLauncher + " run" + kLibrary + "-- printenv LD_PRELOAD").text,
            library + ':' + other + "\n");
  EXPECT_THAT(run("-- cat /proc/self/maps").text, HasSubstr(library));
}

TEST_F(RunCommand, LibraryIsFoundBesideItOrInItsInstallation) {
  fs::create_directories(path_ + "/bin");
  fs::copy_file(kLauncher, path_ + "/bin/cushion");
  const std::string start = path_ + "/bin/cushion run -- printenv LD_PRELOAD";
  const Outcome missing = shell(start);
  EXPECT_EQ(missing.status, 2);
  EXPECT_THAT(missing.text, AllOf(HasSubstr(path_ + "/bin/libcushion.so\n"), HasSubstr(path_ + "/lib/libcushion.so\n"),
                                  HasSubstr(path_ + "/lib64/libcushion.so\n")));
  for (const char* place : {"/lib64/", "/lib/", "/bin/"}) {  // the later, the sooner it is found
    fs::create_directories(path_ + place);
    fs::copy_file(kFixtures + "libfixture_preload.so", path_ + place + "libcushion.so");
    EXPECT_EQ(shell(start).text, path_ + place + "libcushion.so\n");
  }
}

TEST_F(RunCommand, ALibraryTheLoaderWouldSplitIsRefused) {
  fs::create_directories(path_ + "/a b");
  fs::copy_file(kFixtures + "libfixture_preload.so", path_ + "/a b/libcushion.so");
  const Outcome outcome = shell(kLauncher + " run --library '" + path_ + "/a b/libcushion.so' -- true");
  EXPECT_EQ(outcome.status, 2);
  EXPECT_THAT(outcome.text, HasSubstr("space or colon"));
}

TEST(Preload, ValuePutsOursFirstOnce) {
  EXPECT_EQ(preload_value("/l.so", ""), "/l.so");
  EXPECT_EQ(preload_value("/l.so", "/a.so /b.so"), "/l.so:/a.so:/b.so");
  EXPECT_EQ(preload_value("/l.so", ":/a.so::/l.so:"), "/l.so:/a.so");
}

TEST_F(Doctor, ProgramsThatItReaches) {
  for (const auto& [program, says] :
       {std::pair{"plain", "not linked directly"}, std::pair{"shared_runtime", "libcudart.so.13"},
        std::pair{"static_runtime", "linked in statically"}, std::pair{"driver", "libcuda.so.1"}}) {
    const Outcome outcome = doctor(kFixtures + program);
    EXPECT_EQ(outcome.status, 0) << outcome.text;
    EXPECT_THAT(outcome.text, AllOf(HasSubstr(says), HasSubstr("CUDA 13.0, with cuCtxRecordEvent"),
                                    HasSubstr("Cushion will take effect"), Not(HasSubstr("FAIL"))));
  }
}

TEST_F(Doctor, ProgramsThatItDoesNotReach) {
  const auto fails = [](const std::string& program, const std::string& says) {
    const Outcome outcome = doctor(program);
    EXPECT_EQ(outcome.status, 1) << outcome.text;
    EXPECT_THAT(outcome.text,
                AllOf(ContainsRegex("FAIL +program"), HasSubstr(says), HasSubstr("will not take effect")));
  };
  fails(kFixtures + "static", "static executable");
  fails(kFixtures + "libcudart.so.13", "shared library");
  fails("nonesuch", "not in PATH");
  fails("./nonesuch", "no such file");
  fails(path_, "not a file");
  fails(write("data", "x", 0644), "cannot be executed");
  fails(write("text", "no ELF"), "not an ELF file");
  fails(write("corrupt", std::string("\x7f"
                                     "ELF\x02\x01\x01",
                                     7)),
        "corrupt");
  fails(write("loop", "#!" + path_ + "/loop\n"), "without end");

  std::ifstream plain(kFixtures + "plain", std::ios::binary);
  std::string bytes{std::istreambuf_iterator<char>(plain), {}};
  bytes[18] = '\x16';  // e_machine: s390
  bytes[19] = '\0';
  fails(write("foreign", bytes), "Cushion was built for");
}

TEST_F(Doctor, ScriptsAreFollowedToTheirInterpreter) {
  const std::string direct = write("direct", "#! " + kFixtures + "plain -x\n");
  const std::string env = write("env", "#!/usr/bin/env -S A=1 " + kFixtures + "static\n");
  EXPECT_THAT(
      doctor(write("twice", "#!" + direct + "\n")).text,
      AllOf(HasSubstr("is run by " + direct), HasSubstr("is run by " + kFixtures + "plain"), HasSubstr("take effect")));
  EXPECT_EQ(doctor(direct).status, 0);
  EXPECT_EQ(doctor(env).status, 1);
}

TEST_F(Doctor, PrivilegedProgramsIgnoreAPreload) {
  const std::string program = path_ + "/privileged";
  fs::copy_file(kFixtures + "plain", program);
  constexpr uid_t kNobody = 65534;
  if (chown(program.c_str(), kNobody, kNobody) != 0) GTEST_SKIP() << "only root can give a file to another user";
  chmod(program.c_str(), 0755);
  EXPECT_EQ(doctor(program).status, 0);
  for (const auto& [mode, says] : {std::pair<mode_t, const char*>{04755, "set-user-ID"}, {02755, "set-group-ID"}}) {
    chmod(program.c_str(), mode);
    const Outcome outcome = doctor(program);
    EXPECT_EQ(outcome.status, 1) << outcome.text;
    EXPECT_THAT(outcome.text, HasSubstr(says));
  }
}

TEST_F(Doctor, DriversAreLookedAt) {
  const Outcome old = doctor(kFixtures + "plain", "old");
  EXPECT_EQ(old.status, 0);
  EXPECT_THAT(old.text, HasSubstr("CUDA 12.2, without cuCtxRecordEvent"));
  write("libcuda.so.1", "no library");
  const Outcome broken =
      shell("LD_LIBRARY_PATH=" + path_ + ' ' + kLauncher + " doctor" + kLibrary + kFixtures + "plain");
  EXPECT_EQ(broken.status, 1);
  EXPECT_THAT(broken.text, ContainsRegex("FAIL +driver .*cannot be loaded"));
}

TEST_F(Doctor, OptionsThatLeaveTheProgramOutAreNamed) {
  const std::string rest =
      "LD_LIBRARY_PATH=" + kFixtures + "current " + kLauncher + " doctor" + kLibrary + kFixtures + "plain";
  EXPECT_EQ(shell("CUSHION_DISABLE=1 " + rest).status, 1);
  EXPECT_EQ(shell("CUSHION_PROGRAMS=other " + rest).status, 1);
  EXPECT_EQ(shell("CUSHION_PROGRAMS=plain " + rest).status, 0);
  EXPECT_THAT(shell("CUSHION_FREE=x " + rest).text, HasSubstr("use sync, deferred or auto"));
}

}  // namespace
}  // namespace cushion
