// What an executable file says of itself, as far as it decides whether a preload reaches it.
//
// Invariant: any file is safe to read, however short, corrupt or hostile: every range comes from libelf, which
// checks it against the file's size. Cost: one open file, reads of the headers, the dynamic section and .rodata.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

namespace cushion {

struct ElfFile {
  std::string problem;  // why the file cannot be read as an ELF program; empty if it can, else the rest is unset
  unsigned machine = 0;
  int word_bits = 0;
  bool shared_library = false;       // position-independent, with neither an interpreter nor the PIE mark
  std::string interpreter;           // the dynamic loader; empty in a static executable
  std::vector<std::string> needed;   // DT_NEEDED, in order
  bool static_cuda_runtime = false;  // libcudart_static.a is linked in

  bool needs(const std::string& stem) const {  // whether a needed library's name begins with `stem`
    return std::ranges::any_of(needed, [&](const std::string& name) { return name.starts_with(stem); });
  }
};

ElfFile read_elf(const std::string& path);

}  // namespace cushion
