#include "tests/harness/child.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace harness {
namespace {

constexpr char kVariable[] = "HARNESS_CHILD";

}  // namespace

ChildResult RunProgram(const std::vector<std::string>& command, const Environment& environment) {
  // Everything the child needs is made before fork: after it only exec is safe.
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
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDOUT_FILENO);
    dup2(ends[1], STDERR_FILENO);
    close(ends[0]);
    close(ends[1]);
    execvpe(arguments[0], arguments.data(), variables.data());
    _exit(127);
  }
  close(ends[1]);
  ChildResult result;
  char buffer[4096];
  for (ssize_t count; (count = read(ends[0], buffer, sizeof buffer)) > 0;) {
    result.output.append(buffer, static_cast<std::size_t>(count));
  }
  close(ends[0]);
  int status = 0;
  if (child > 0 && waitpid(child, &status, 0) == child) {
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
