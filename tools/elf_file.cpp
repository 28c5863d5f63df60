#include "tools/elf_file.h"

#include <fcntl.h>
#include <gelf.h>
#include <libelf.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string_view>

namespace cushion {
namespace {

struct Descriptor {
  int fd;
  explicit Descriptor(int descriptor) : fd(descriptor) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (fd >= 0) close(fd);
  }
};

struct ElfEnd {
  void operator()(Elf* elf) const { elf_end(elf); }
};
using ElfHandle = std::unique_ptr<Elf, ElfEnd>;

// Text of libcudart's error table, present in every release since CUDA 3.
constexpr std::string_view kRuntimeText = "CUDA driver version is insufficient for CUDA runtime version";

std::string_view bytes_of(const Elf_Data* data) {
  if (data == nullptr || data->d_buf == nullptr) return {};
  return {static_cast<const char*>(data->d_buf), data->d_size};
}

std::string_view chunk(Elf* elf, std::uint64_t offset, std::uint64_t size) {
  if (offset > INT64_MAX || size == 0) return {};
  return bytes_of(elf_getdata_rawchunk(elf, static_cast<std::int64_t>(offset), size, ELF_T_BYTE));
}

// The zero-terminated string at `offset` of a string table; empty if it lies outside or does not end.
std::string string_at(std::string_view table, std::uint64_t offset) {
  if (offset >= table.size()) return {};
  const std::string_view tail = table.substr(offset);
  const std::size_t end = tail.find('\0');
  return end == std::string_view::npos ? std::string() : std::string(tail.substr(0, end));
}

std::vector<GElf_Phdr> program_headers(Elf* elf) {
  std::vector<GElf_Phdr> headers;
  std::size_t count = 0;
  if (elf_getphdrnum(elf, &count) != 0) return headers;
  for (std::size_t i = 0; i < count && i <= INT_MAX; ++i) {
    GElf_Phdr header;
    if (gelf_getphdr(elf, static_cast<int>(i), &header) == nullptr) break;
    headers.push_back(header);
  }
  return headers;
}

std::optional<std::uint64_t> file_offset(const std::vector<GElf_Phdr>& headers, std::uint64_t address) {
  for (const GElf_Phdr& header : headers) {
    if (header.p_type == PT_LOAD && address >= header.p_vaddr && address - header.p_vaddr < header.p_filesz) {
      return header.p_offset + (address - header.p_vaddr);
    }
  }
  return std::nullopt;
}

// Reads the dynamic section by its segment, as the loader does: section headers may be stripped.
void read_dynamic(Elf* elf, const std::vector<GElf_Phdr>& headers, const GElf_Phdr& dynamic, ElfFile& file) {
  if (dynamic.p_offset > INT64_MAX || dynamic.p_filesz == 0) return;
  Elf_Data* const data =
      elf_getdata_rawchunk(elf, static_cast<std::int64_t>(dynamic.p_offset), dynamic.p_filesz, ELF_T_DYN);
  if (data == nullptr) return;
  std::vector<std::uint64_t> names;
  std::uint64_t table_address = 0;
  std::uint64_t table_size = 0;
  GElf_Dyn entry;
  for (int i = 0; gelf_getdyn(data, i, &entry) != nullptr && entry.d_tag != DT_NULL; ++i) {
    switch (entry.d_tag) {
      case DT_NEEDED:
        names.push_back(entry.d_un.d_val);
        break;
      case DT_STRTAB:
        table_address = entry.d_un.d_ptr;
        break;
      case DT_STRSZ:
        table_size = entry.d_un.d_val;
        break;
      case DT_FLAGS_1:
        file.shared_library = file.shared_library && (entry.d_un.d_val & DF_1_PIE) == 0;
        break;
      default:
        break;
    }
  }
  const std::optional<std::uint64_t> offset = file_offset(headers, table_address);
  const std::string_view table = offset ? chunk(elf, *offset, table_size) : std::string_view();
  for (const std::uint64_t name : names) {
    if (std::string text = string_at(table, name); !text.empty()) file.needed.push_back(std::move(text));
  }
}

bool has_static_runtime(Elf* elf) {
  std::size_t names = 0;
  if (elf_getshdrstrndx(elf, &names) != 0) return false;
  for (Elf_Scn* section = elf_nextscn(elf, nullptr); section != nullptr; section = elf_nextscn(elf, section)) {
    GElf_Shdr header;
    if (gelf_getshdr(section, &header) == nullptr || header.sh_type != SHT_PROGBITS) continue;
    const char* const name = elf_strptr(elf, names, header.sh_name);
    if (name == nullptr || std::strcmp(name, ".rodata") != 0) continue;
    if (bytes_of(elf_rawdata(section, nullptr)).find(kRuntimeText) != std::string_view::npos) return true;
  }
  return false;
}

}  // namespace

ElfFile read_elf(const std::string& path) {
  ElfFile file;
  const auto unreadable = [](std::string why) {
    ElfFile nothing;
    nothing.problem = std::move(why);
    return nothing;
  };
  if (elf_version(EV_CURRENT) == EV_NONE) return unreadable("libelf is older than its headers");
  const Descriptor input(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (input.fd < 0) return unreadable(std::strerror(errno));
  const ElfHandle elf(elf_begin(input.fd, ELF_C_READ, nullptr));
  GElf_Ehdr header;
  if (!elf || elf_kind(elf.get()) != ELF_K_ELF) return unreadable("not an ELF file");
  if (gelf_getehdr(elf.get(), &header) == nullptr) return unreadable("a corrupt ELF file (no valid header)");
  if (header.e_type != ET_EXEC && header.e_type != ET_DYN) return unreadable("an ELF file, but not a program");
  const std::vector<GElf_Phdr> headers = program_headers(elf.get());
  if (std::ranges::none_of(headers, [](const GElf_Phdr& h) { return h.p_type == PT_LOAD; })) {
    return unreadable("a corrupt ELF file (nothing to load)");
  }
  file.machine = header.e_machine;
  file.word_bits = header.e_ident[EI_CLASS] == ELFCLASS64 ? 64 : 32;
  file.shared_library = header.e_type == ET_DYN;
  for (const GElf_Phdr& segment : headers) {
    if (segment.p_type == PT_INTERP) {
      file.interpreter =
          string_at(chunk(elf.get(), segment.p_offset, std::min<std::uint64_t>(segment.p_filesz, PATH_MAX)), 0);
      if (file.interpreter.empty()) return unreadable("a corrupt ELF file (its loader has no name)");
    } else if (segment.p_type == PT_DYNAMIC) {
      read_dynamic(elf.get(), headers, segment, file);
    }
  }
  file.shared_library = file.shared_library && file.interpreter.empty();
  file.static_cuda_runtime = has_static_runtime(elf.get());
  return file;
}

}  // namespace cushion
