// doctor's reader of programs: any file, however corrupt or truncated, is read without harm, and is either told to be
// unreadable or described. Input: the file.
#include <sys/mman.h>
#include <unistd.h>

#include <string>

#include "tests/fuzz/require.h"
#include "tools/elf_file.h"

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  static const int file = memfd_create("elf", MFD_CLOEXEC);
  static const std::string path = "/proc/self/fd/" + std::to_string(file);
  require(file >= 0 && ftruncate(file, 0) == 0 && pwrite(file, data, size, 0) == static_cast<ssize_t>(size));
  const cushion::ElfFile elf = cushion::read_elf(path);
  if (!elf.problem.empty()) {
    require(elf.needed.empty() && !elf.static_cuda_runtime);
    return 0;
  }
  require(elf.word_bits == 32 || elf.word_bits == 64);
  std::size_t bytes = elf.interpreter.size();
  for (const std::string& name : elf.needed) {
    require(!name.empty());
    bytes = std::max(bytes, name.size());
  }
  require(bytes <= size);
  return 0;
}
