// A part of a test in a process of its own.
//
// CUDA does not survive fork, so the test program runs itself again with the current test as its only one; there,
// reaching the same RunChild, the body runs and the process exits with the body's result. What stands before RunChild
// in the test runs in both processes. Use it for settings read at start, for faults that end a process, for fork tests
// and for exit reports.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

namespace harness {

struct ChildResult {
  int status = -1;     // the exit status, or minus the signal that ended it
  std::string output;  // stdout and stderr together, googletest's own lines among them
};

using Environment = std::map<std::string, std::string>;

// `name` tells the children of one test apart.
ChildResult RunChild(const std::string& name, const std::function<int()>& body, const Environment& environment = {});

// Any other program.
ChildResult RunProgram(const std::vector<std::string>& command, const Environment& environment = {});

}  // namespace harness
