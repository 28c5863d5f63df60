// print_stack: a call stack for a person who has nothing but this text: what the dynamic linker knows of names, unless
// this is a signal handler, which may not ask it. `cushion report` names functions, files and lines.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "core/stacks.h"
#include "core/utf8.h"

namespace cushion {

// `to` has raw(text) and print(format, arguments...).
template <class To>
void print_stack(To& to, const Stacks& stacks, std::uint32_t id, std::string_view indent, bool may_ask_linker) {
  const Stacks::Stack& stack = stacks[id];
  constexpr std::uint32_t kMost = 12;
  for (std::uint32_t i = 0; i < std::min(stack.depth, kMost); ++i) {
    const Stacks::Named call = stacks.named(stack.frames[i], may_ask_linker);
    to.raw(indent);
    if (*call.function != '\0') to.print("{} in ", Printable<160>(call.function).view());
    to.raw(Printable<200>(call.file).view());
    call.line != 0 ? to.print(":{}\n", call.line) : to.print("+{:#x}\n", call.offset);
  }
  if (stack.depth > kMost) to.print("{}and {} more calls\n", indent, stack.depth - kMost);
}

}  // namespace cushion
