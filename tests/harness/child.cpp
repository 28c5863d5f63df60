#include "tests/harness/child.h"

#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace harness {
namespace {

constexpr char kVariable[] = "HARNESS_CHILD";

}  // namespace

ChildResult RunProgram(const std::vector<std::string>& command, const Environment& environment) {
  // Spawned: after a fork beside the driver's threads a sanitizer's runtime may find its own locks held.
  std::vector<char*> arguments;
  for (const std::string& argument : command) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  std::vector<std::string> settings;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    if (!environment.contains(text.substr(0, text.find('=')))) settings.push_back(text);
  }
  for (const auto& [name, value] : environment) settings.push_back(name + "=" + value);
  std::vector<char*> variables;
  for (std::string& setting : settings) variables.push_back(setting.data());
  variables.push_back(nullptr);

  int ends[2];
  if (pipe(ends) != 0) return {};
  std::fflush(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDERR_FILENO);
  for (const int end : ends) posix_spawn_file_actions_addclose(&actions, end);
  pid_t child = 0;
  const int failed = posix_spawnp(&child, arguments[0], &actions, nullptr, arguments.data(), variables.data());
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  ChildResult result;
  char buffer[4096];
  for (ssize_t count; (count = read(ends[0], buffer, sizeof buffer)) > 0;) {
    result.output.append(buffer, static_cast<std::size_t>(count));
  }
  close(ends[0]);
  int status = 0;
  if (failed == 0 && waitpid(child, &status, 0) == child) {
    result.status = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }
  return result;
}

ChildResult RunChild(const std::string& name, const std::function<int()>& body, const Environment& environment) {
  const char* const role = std::getenv(kVariable);
  if (role != nullptr) {
    if (role != name) return {};
    const int status = body();
    std::exit(testing::Test::HasFailure() && status == 0 ? 1 : status);
  }
  const testing::TestInfo& test = *testing::UnitTest::GetInstance()->current_test_info();
  Environment settings = environment;
  settings[kVariable] = name;
  return RunProgram({"/proc/self/exe", std::string("--gtest_filter=") + test.test_suite_name() + "." + test.name(),
                     "--gtest_color=no", "--gtest_output="},
                    settings);
}

}  // namespace harness
