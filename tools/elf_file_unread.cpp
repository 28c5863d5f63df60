// Stands in for elf_file.cpp in a build without libelf.
#include "tools/elf_file.h"

namespace cushion {

ElfFile read_elf(const std::string&) {
  ElfFile file;
  file.problem = "this cushion was built without libelf and cannot read programs";
  return file;
}

}  // namespace cushion
