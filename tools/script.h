// What a script's first bytes say of the program that runs it. Any bytes are safe to read.
#pragma once

#include <string>
#include <string_view>

namespace cushion {

// The interpreter that a `#!` line names, `env` looked through; empty if the text is no script's.
std::string interpreter_of(std::string_view head);

}  // namespace cushion
