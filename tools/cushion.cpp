// cushion: the launcher. `run` starts a program under Cushion, `ctl` asks one that runs, `top` shows all of them,
// `options` prints the table, `doctor` says whether preloading takes effect, `report` shows what it wrote. Exit status:
// with `run` the program's own; else 0, or 1 if what was asked for was not done; 2 for a usage error, a bad option or a
// file that is no report; 126 and 127 as a shell's for a program that cannot be executed or found.
#include <fmt/core.h>
#include <stdlib.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "core/options.h"
#include "tools/control.h"
#include "tools/doctor.h"
#include "tools/launch.h"
#include "tools/report/command.h"
#include "tools/top.h"

extern char** environ;

namespace cushion {
namespace {

constexpr int kUsage = 2;

// "LOG_LEVEL" as "--log-level".
std::string flag_of(const OptionInfo& option) {
  std::string flag = "--";
  for (const char c : std::string_view(option.name)) {
    flag += c == '_' ? '-' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return flag;
}

std::string variable_of(const OptionInfo& option) { return std::string("CUSHION_") + option.name; }

// A flag sets its variable, so that flags and environment are then one thing, checked in one place.
void add_option_flags(CLI::App& command) {
  for (const OptionInfo& option : option_table()) {
    const bool words = std::string_view(option.range).find('|') != std::string_view::npos;
    command
        .add_option_function<std::string>(
            flag_of(option),
            [variable = variable_of(option)](const std::string& value) { setenv(variable.c_str(), value.c_str(), 1); },
            fmt::format("{}{} (default: {})", option.help, words ? "" : fmt::format("; {}", option.range),
                        *option.fallback == '\0' ? "empty" : option.fallback))
        ->type_name(words ? option.range : "VALUE")
        ->group("Cushion's options, each also a CUSHION_ variable");
  }
}

// `--trak=on` as an option's name: "TRAK".
std::string name_of(std::string_view flag) {
  std::string name(flag.substr(0, flag.find('=')));
  name.erase(0, name.find_first_not_of('-'));
  std::ranges::transform(name, name.begin(),
                         [](unsigned char c) { return c == '-' ? '_' : static_cast<char>(std::toupper(c)); });
  return name;
}

int run(const std::string& library, std::vector<std::string> command) {
  if (command.empty() || command.front().starts_with('-')) {
    const std::string problem = command.empty() ? std::string("no program is named")
                                                : command.front() + ": " + check_option(name_of(command.front()), "");
    fmt::print(stderr, "cushion: {}\nusage: cushion run [OPTIONS] -- PROGRAM [ARGUMENTS]\n", problem);
    return kUsage;
  }
  const OptionsResult result = read_options(environ);
  for (const std::string& error : result.errors) fmt::print(stderr, "cushion: {}\n", error);
  if (!result.errors.empty()) return kUsage;
  const LibrarySearch search = find_library(library);
  const std::string problem = preload_problem(search.path);
  if (search.path.empty() || !problem.empty()) {
    fmt::print(stderr, "cushion: {}\n", problem.empty() ? "found no libcushion.so; places searched:" : problem);
    if (problem.empty()) {
      for (const std::string& place : search.searched) fmt::print(stderr, "  {}\n", place);
    }
    return kUsage;
  }
  std::vector<char*> arguments;
  arguments.reserve(command.size() + 1);
  for (std::string& argument : command) arguments.push_back(argument.data());
  arguments.push_back(nullptr);
  return become(search.path, arguments.data());
}

void print_table() {
  std::size_t name = 0;
  std::size_t fallback = 0;
  std::size_t range = 0;
  for (const OptionInfo& option : option_table()) {
    name = std::max(name, variable_of(option).size());
    fallback = std::max(fallback, std::string_view(option.fallback).size());
    range = std::max(range, std::string_view(option.range).size());
  }
  const auto row = [&](std::string_view a, std::string_view b, std::string_view c, std::string_view d) {
    fmt::print("{:<{}}  {:<{}}  {:<{}}  {}\n", a, name, b, std::max<std::size_t>(fallback, 7), c, range, d);
  };
  row("variable", "default", "values", "what it does");
  for (const OptionInfo& option : option_table()) row(variable_of(option), option.fallback, option.range, option.help);
}

void print_markdown() {
  const auto cell = [](std::string_view text) {  // a bar ends a cell, even within code
    std::string out;
    for (const char c : text) out.append(c == '|' ? "\\" : "").append(1, c);
    return out;
  };
  fmt::print("| variable | default | values | what it does |\n| --- | --- | --- | --- |\n");
  for (const OptionInfo& option : option_table()) {
    const std::string fallback = *option.fallback == '\0' ? "(empty)" : fmt::format("`{}`", option.fallback);
    fmt::print("| `{}` | {} | {} | {} |\n", variable_of(option), fallback, cell(option.range), cell(option.help));
  }
}

CLI::App* add_report_command(CLI::App& app, ReportRequest& request) {
  CLI::App* const command = app.add_subcommand("report", "Show reports, the JSON of CUSHION_REPORT");
  command->add_option("FILE", request.files, "Reports; several are shown as the ranks of one job")->required();
  CLI::Option* const top = command->add_option("--top", request.top, "Rows of each list (default: 20, of a page 1000)")
                               ->check(CLI::Range(1, 1'000'000'000))
                               ->type_name("N");
  CLI::Option* const diff = command->add_flag("--diff", request.difference, "What grew and what is new from A to B");
  CLI::Option* const html =
      command->add_option("--html", request.html, "Write a page for a browser")->type_name("OUT")->excludes(diff);
  CLI::Option* const format = command->add_option("--format", request.format, "Write another tool's format")
                                  ->check(CLI::IsMember(report_formats()))
                                  ->excludes(diff)
                                  ->excludes(html)
                                  ->excludes(top);
  command->add_option("-o", request.output, "Where --format writes to (default: stdout)")
      ->type_name("OUT")
      ->needs(format);
  CLI::Option* const symbolize =
      command->add_option("--symbolize", request.symbolized, "Write the report again, with the functions that it lacks")
          ->type_name("OUT")
          ->excludes(diff)
          ->excludes(html)
          ->excludes(format)
          ->excludes(top);
  command->add_option("--debug-dir", request.debug_dirs, "Look for separate debug files in this folder too")
      ->type_name("DIR")
      ->expected(1)
      ->take_all();
  command->add_flag("--no-symbols", request.raw, "Show places in modules as they are")->excludes(symbolize);
  command->final_callback([&request] {
    if (!request.symbolized.empty() && request.files.size() != 1)
      throw CLI::ValidationError("--symbolize", "takes one FILE");
    if (request.difference && request.files.size() != 2) throw CLI::ValidationError("--diff", "takes two FILEs");
  });
  return command;
}

int main_of(int argc, char** argv) {
  CLI::App app("Serves the GPU memory of an unmodified CUDA program from an in-process pool.", "cushion");
  app.set_version_flag("--version", "cushion " CUSHION_VERSION);
  app.require_subcommand(1);

  std::string library;
  CLI::App* const run_command =
      app.add_subcommand("run", "Run a program under Cushion: cushion run [OPTIONS] -- PROGRAM [ARGUMENTS]");
  run_command->prefix_command();
  run_command->add_option("--library", library, "The libcushion.so to preload, if not this launcher's own")
      ->type_name("FILE");
  add_option_flags(*run_command);

  bool markdown = false;
  CLI::App* const options_command = app.add_subcommand("options", "Print the table of options");
  options_command->add_flag("--markdown", markdown, "As a Markdown table");

  std::string program;
  CLI::App* const doctor_command = app.add_subcommand("doctor", "Say whether preloading takes effect in a program");
  doctor_command->add_option("program", program, "The program, by path or by name in PATH")
      ->required()
      ->type_name("PROGRAM");
  doctor_command->add_option("--library", library, "The libcushion.so to look at, if not this launcher's own")
      ->type_name("FILE");

  std::int64_t pid = 0;
  std::string argument;
  bool json = false;
  CLI::App* const ctl_command = app.add_subcommand("ctl", "Ask a process that runs under Cushion");
  ctl_command->add_option("pid", pid, "The process")
      ->required()
      ->type_name("PID")
      ->check(CLI::Range(1, std::numeric_limits<int>::max()));
  ctl_command->require_subcommand(1);
  CLI::App* const ctl_show_command = ctl_command->add_subcommand("show", "Its figures");
  ctl_show_command->add_flag("--json", json, "As a line of JSON");
  CLI::App* const ctl_track_command = ctl_command->add_subcommand("track", "Switch its tracking");
  ctl_track_command->add_option("level", argument, "As CUSHION_TRACK")->required()->type_name("LEVEL");
  CLI::App* const ctl_trim_command = ctl_command->add_subcommand("trim", "Have it give unused memory back");
  CLI::App* const ctl_mark_command = ctl_command->add_subcommand("mark", "Name this moment in its report");
  ctl_mark_command->add_option("name", argument, "The moment's name")->required()->type_name("NAME");
  CLI::App* const ctl_report_command = ctl_command->add_subcommand("report", "Have it write its report now");
  ctl_report_command
      ->add_option("path", argument, "JSON, or text if it ends in .txt (default: cushion-report-PID.json here)")
      ->type_name("PATH");

  TopSettings settings;
  CLI::App* const top_command = app.add_subcommand("top", "Show all processes that run under Cushion");
  top_command->add_option("--interval", settings.interval_s, "Seconds between two looks")
      ->check(CLI::Range(0.1, 3600.0));
  top_command->add_option("--sort", settings.sort, "By " + sort_keys() + " (default: live)")
      ->type_name("KEY")
      ->check([](const std::string& key) { return is_sort_key(key) ? std::string() : "use " + sort_keys(); });
  top_command->add_flag("--once", settings.once, "Look once (for half a second, so that rates are known), and end");
  top_command->add_flag("--json", settings.json, "The same, as a line of JSON for each process");

  ReportRequest request;
  const CLI::App* const report_command = add_report_command(app, request);

  // What follows the first `--` is the program's; without one, the program is the first word that is no flag.
  const std::vector<std::string> words(argv + 1, argv + argc);
  const bool runs = !words.empty() && words.front() == "run";
  const auto bar = runs ? std::ranges::find(words, "--") : words.end();
  try {
    app.parse(std::vector<std::string>(std::reverse_iterator(bar), words.rend()));  // CLI11 reads from the back
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kUsage;
  }
  if (*run_command) {
    std::vector<std::string> command = run_command->remaining();
    if (bar != words.end()) command.insert(command.end(), command.empty() ? bar + 1 : bar, words.end());
    return run(library, std::move(command));
  }
  if (*ctl_track_command) return ctl_track(pid, argument);
  if (*ctl_trim_command) return ctl_trim(pid);
  if (*ctl_mark_command) return ctl_mark(pid, argument);
  if (*ctl_report_command) return ctl_report(pid, argument);
  if (*ctl_show_command) return ctl_show(pid, json);
  if (*top_command) return top(settings);
  if (*report_command) return show_reports(request);
  if (*doctor_command) return diagnose(program, library);
  if (markdown) {
    print_markdown();
  } else {
    print_table();
  }
  return 0;
}

}  // namespace
}  // namespace cushion

int main(int argc, char** argv) {
  try {
    const int status = cushion::main_of(argc, argv);
    if (status != 0 || (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) || errno == EPIPE) return status;
    std::fprintf(stderr, "cushion: stdout: %s\n", std::strerror(errno));
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cushion: %s\n", error.what());
    return 1;
  }
}
