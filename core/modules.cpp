#include "core/modules.h"

#include <elf.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "core/libraries.h"

namespace cushion {
namespace {

void read_build_id(Module& module, std::uint64_t at, std::uint64_t bytes) noexcept {
  const auto* note = reinterpret_cast<const unsigned char*>(at);
  const unsigned char* const end = note + bytes;
  while (note + sizeof(ElfW(Nhdr)) <= end) {
    ElfW(Nhdr) head;
    std::memcpy(&head, note, sizeof head);
    const auto padded = [](std::uint64_t size) { return (size + 3) & ~std::uint64_t{3}; };
    const unsigned char* const name = note + sizeof head;
    const std::uint64_t rest = static_cast<std::uint64_t>(end - name);
    if (padded(head.n_namesz) > rest || padded(head.n_descsz) > rest - padded(head.n_namesz)) return;
    const unsigned char* const content = name + padded(head.n_namesz);
    if (head.n_type == NT_GNU_BUILD_ID && head.n_namesz == 4 && std::memcmp(name, "GNU", 4) == 0) {
      module.build_id_size = static_cast<std::uint8_t>(std::min<std::size_t>(head.n_descsz, module.build_id.size()));
      std::memcpy(module.build_id.data(), content, module.build_id_size);
      return;
    }
    note = content + padded(head.n_descsz);
  }
}

// Whether the library holds the address; then the module is it.
bool look(const dl_phdr_info& library, std::uint64_t address, Module& m) noexcept {
  const AddressRange range = addresses_of(library);
  if (!range.holds(address)) return false;
  const std::uint64_t bias = library.dlpi_addr;
  m.low = range.low;
  m.high = range.high;
  m.bias = bias;
  for (int i = 0; i < library.dlpi_phnum; ++i) {
    if (library.dlpi_phdr[i].p_type == PT_GNU_EH_FRAME) m.unwind = bias + library.dlpi_phdr[i].p_vaddr;
  }
  for (int i = 0; i < library.dlpi_phnum; ++i) {
    const ElfW(Phdr)& part = library.dlpi_phdr[i];
    const std::uint64_t begin = bias + part.p_vaddr;
    if (part.p_type == PT_NOTE && m.build_id_size == 0) read_build_id(m, begin, part.p_memsz);
    if (part.p_type == PT_LOAD && m.unwind >= begin && m.unwind < begin + part.p_filesz) {
      m.unwind_low = begin;
      m.unwind_high = begin + part.p_filesz;
    }
  }
  if (m.unwind_high == 0) m.unwind = 0;
  const char* name = library.dlpi_name;
  if (name == nullptr || *name == '\0') {  // the program itself
    const ssize_t n = readlink("/proc/self/exe", m.path, sizeof m.path - 1);
    m.path[n > 0 ? n : 0] = '\0';
    m.program = true;
  } else {
    char whole[PATH_MAX];  // a preloaded library may be named from the working folder
    const std::string_view path = *name != '/' && realpath(name, whole) != nullptr ? whole : name;
    m.path[path.copy(m.path, sizeof m.path - 1)] = '\0';
  }
  return true;
}

}  // namespace

int Modules::known(std::uint64_t address) const noexcept {
  for (std::size_t i = modules_.size(); i-- > 0;) {
    const Module& m = modules_[i];
    if (address >= m.low && address < m.high && !m.gone.load(std::memory_order_relaxed)) return static_cast<int>(i);
  }
  return -1;
}

int Modules::find(std::uint64_t address) noexcept {
  if (const int at = known(address); at >= 0) return at;
  std::lock_guard lock(mutex_);
  if (const int at = known(address); at >= 0) return at;  // another thread was first
  Module* fresh = modules_.prepare();
  if (fresh == nullptr) return -1;
  bool found = false;
  for_each_library([&](const dl_phdr_info& library) { return found = look(library, address, *fresh); });
  if (!found) return -1;
  for (std::size_t i = 0; i < modules_.size(); ++i) {  // it never went, or came back to where it was
    Module& m = modules_[i];
    if (m.low != fresh->low || m.build_id != fresh->build_id || std::strcmp(m.path, fresh->path) != 0) continue;
    m.gone.store(false, std::memory_order_relaxed);
    return static_cast<int>(i);
  }
  modules_.publish();
  return static_cast<int>(modules_.size() - 1);
}

bool Modules::refresh() noexcept {
  const std::uint64_t unloads = cushion::unloads();
  if (unloads_.exchange(unloads, std::memory_order_relaxed) == unloads) return false;
  // Which went is not said: all are looked up anew.
  std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < modules_.size(); ++i) modules_[i].gone.store(true, std::memory_order_relaxed);
  return true;
}

}  // namespace cushion
