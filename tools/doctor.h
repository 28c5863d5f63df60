// doctor: will preloading Cushion take effect in this program, and if not, what is to be done?
//
// Each check is one line: what was looked at, what was found, what to do. Nothing of the program is run; the
// CUDA driver is loaded in a child process, so that whatever it does there cannot harm the diagnosis.
#pragma once

#include <string>

namespace cushion {

// Prints the lines and the verdict to stdout; 0 if Cushion takes effect, else 1.
int diagnose(const std::string& program, const std::string& library);

}  // namespace cushion
