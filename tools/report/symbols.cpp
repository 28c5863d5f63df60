#include "tools/report/symbols.h"

#include <cxxabi.h>
#include <dwarf.h>
#include <elfutils/libdw.h>
#include <elfutils/libdwfl.h>
#include <fcntl.h>
#include <fmt/core.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <map>
#include <optional>
#include <string_view>

#include "tools/report/words.h"

namespace cushion {
namespace {

constexpr int kDeepest = 200;  // of scopes within each other

std::string text_of(const char* text) { return text == nullptr ? std::string() : text; }

// Without the compiler's word for a part or a special form of a function: " [clone .cold]".
std::string demangled(const char* name) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> text(abi::__cxa_demangle(name, nullptr, nullptr, &status), &free);
  const std::string_view whole = text ? text.get() : name;
  return std::string(whole.substr(0, whole.find(" [clone ")));
}

// As the linker knows it; g++ leaves that out of functions that only their own file can name.
std::string linkage_name_of(Dwarf_Die& function) {
  Dwarf_Attribute attribute;
  for (const unsigned kind : {DW_AT_linkage_name, DW_AT_MIPS_linkage_name}) {
    if (dwarf_attr_integrate(&function, kind, &attribute) == nullptr) continue;
    if (const char* const name = dwarf_formstring(&attribute)) return demangled(name);
  }
  return {};
}

// "name" within what its declaration is in: "space::Class::name".
std::string scoped_name_of(const Dwarf_Die& function) {
  Dwarf_Die declaration = function;
  for (const unsigned kind : {DW_AT_abstract_origin, DW_AT_specification}) {
    Dwarf_Attribute attribute;
    Dwarf_Die other;
    if (dwarf_attr(&declaration, kind, &attribute) != nullptr && dwarf_formref_die(&attribute, &other) != nullptr)
      declaration = other;
  }
  std::string name = text_of(dwarf_diename(&declaration));
  Dwarf_Die* scopes = nullptr;
  const int count = name.empty() ? 0 : dwarf_getscopes_die(&declaration, &scopes);
  const std::unique_ptr<Dwarf_Die, void (*)(void*)> owner(scopes, &free);
  for (int i = 1; i < count; ++i) {
    const int tag = dwarf_tag(&scopes[i]);
    std::string scope = text_of(dwarf_diename(&scopes[i]));
    if (scope.empty() && tag == DW_TAG_namespace) scope = "(anonymous namespace)";
    if (scope.empty() && (tag == DW_TAG_class_type || tag == DW_TAG_structure_type))
      scope = name.starts_with("operator()") ? "{lambda}" : "{unnamed type}";
    if (!scope.empty() && (tag == DW_TAG_namespace || tag == DW_TAG_class_type || tag == DW_TAG_structure_type ||
                           tag == DW_TAG_union_type || tag == DW_TAG_subprogram))
      name.insert(0, scope + "::");
  }
  return name;
}

std::optional<std::uint64_t> number_of(Dwarf_Die& die, unsigned kind) {
  Dwarf_Attribute attribute;
  Dwarf_Word value = 0;
  if (dwarf_attr(&die, kind, &attribute) == nullptr || dwarf_formudata(&attribute, &value) != 0) return std::nullopt;
  return value;
}

struct Range {  // low <= address < high
  Dwarf_Addr low;
  Dwarf_Addr high;
  std::size_t of;  // place in a list
};

void add_ranges(std::vector<Range>& ranges, Dwarf_Die& die, std::size_t of) {
  Dwarf_Addr base = 0, low = 0, high = 0;
  for (std::ptrdiff_t at = 0; (at = dwarf_ranges(&die, at, &base, &low, &high)) > 0;) {
    if (low < high) ranges.push_back({low, high, of});
  }
}

const Range* find(const std::vector<Range>& sorted, Dwarf_Addr address) {
  const auto above = std::ranges::upper_bound(sorted, address, {}, &Range::low);
  if (above == sorted.begin()) return nullptr;
  const Range& range = *std::prev(above);
  return address < range.high ? &range : nullptr;
}

// A compilation unit: one source file with what it includes.
class Unit {
 public:
  explicit Unit(const Dwarf_Die& die) : lines_(die), scopes_(die) {}

  Dwarf_Die& die() { return lines_; }

  // `symbol` is what the symbol table says, demangled; empty: nothing.
  std::vector<Place> at(Dwarf_Addr address, const std::string& symbol) {
    if (!listed_) list();
    std::vector<Place> places(1);
    if (Dwarf_Line* const line = dwarf_getsrc_die(&lines_, address)) {
      int number = 0;
      places[0].file = path_of(dwarf_linesrc(line, nullptr, nullptr));
      if (dwarf_lineno(line, &number) == 0 && number > 0) places[0].line = static_cast<std::uint64_t>(number);
    }
    const Range* const range = find(ranges_, address);
    if (range == nullptr) return places;
    std::vector<Dwarf_Die> functions = inlined_at(functions_[range->of], address);
    for (std::size_t i = functions.size(); i-- > 0;) {
      places.back().function = name_of(functions[i], i == 0 ? symbol : std::string());
      if (i > 0) places.push_back(call_of(functions[i]));
    }
    return places;
  }

 private:
  void list() {
    listed_ = true;
    // Of split debug information only the lines are here, and the rest in a file of its own.
    Dwarf_Die split{};
    if (dwarf_cu_info(lines_.cu, nullptr, nullptr, nullptr, &split, nullptr, nullptr, nullptr) == 0 &&
        split.addr != nullptr)
      scopes_ = split;
    list_in(scopes_, 0);
    std::ranges::stable_sort(ranges_, {}, &Range::low);
  }

  void list_in(Dwarf_Die& scope, int depth) {
    Dwarf_Die die;
    if (depth == kDeepest || dwarf_child(&scope, &die) != 0) return;
    do {
      switch (dwarf_tag(&die)) {
        case DW_TAG_subprogram:
          add_ranges(ranges_, die, functions_.size());
          functions_.push_back(die);
          [[fallthrough]];
        case DW_TAG_namespace:
        case DW_TAG_module:
        case DW_TAG_class_type:
        case DW_TAG_structure_type:
        case DW_TAG_union_type:
        case DW_TAG_lexical_block:
          list_in(die, depth + 1);
          break;
        default:
          break;
      }
    } while (dwarf_siblingof(&die, &die) == 0);
  }

  // The function, and what is inlined into it at the address, outermost first.
  static std::vector<Dwarf_Die> inlined_at(const Dwarf_Die& function, Dwarf_Addr address) {
    std::vector<Dwarf_Die> functions{function};
    Dwarf_Die scope = function;
    Dwarf_Die die;
    for (int depth = 0; depth < kDeepest && dwarf_child(&scope, &die) == 0; ++depth) {
      const auto is_scope = [&] {
        const int tag = dwarf_tag(&die);
        return tag == DW_TAG_inlined_subroutine || tag == DW_TAG_lexical_block || tag == DW_TAG_try_block ||
               tag == DW_TAG_catch_block;
      };
      bool found = false;
      do {
        found = is_scope() && dwarf_haspc(&die, address) > 0;
      } while (!found && dwarf_siblingof(&die, &die) == 0);
      if (!found) break;
      if (dwarf_tag(&die) == DW_TAG_inlined_subroutine) functions.push_back(die);
      scope = die;
    }
    return functions;
  }

  const std::string& name_of(Dwarf_Die& function, const std::string& symbol) {
    const auto [at, is_new] = names_.try_emplace(function.addr);
    if (!is_new) return at->second;
    at->second = linkage_name_of(function);
    if (at->second.empty() && symbol.find('(') != std::string::npos) at->second = symbol;  // a name of C has no more
    if (at->second.empty()) at->second = scoped_name_of(function);
    return at->second;
  }

  // Where an inlined function is called.
  Place call_of(Dwarf_Die& inlined) {
    Place place;
    Dwarf_Files* files = nullptr;
    std::size_t count = 0;
    const auto file = number_of(inlined, DW_AT_call_file);
    if (file && dwarf_getsrcfiles(&scopes_, &files, &count) == 0 && *file < count)
      place.file = path_of(dwarf_filesrc(files, *file, nullptr, nullptr));
    place.line = number_of(inlined, DW_AT_call_line).value_or(0);
    return place;
  }

  std::string path_of(const char* file) {
    if (file == nullptr || std::string_view(file) == "???") return {};  // libdw's word for no name
    std::filesystem::path path(file);
    Dwarf_Attribute folder;
    if (path.is_relative() && dwarf_attr(&lines_, DW_AT_comp_dir, &folder) != nullptr)
      path = text_of(dwarf_formstring(&folder)) / path;
    return path.lexically_normal().string();
  }

  Dwarf_Die lines_;
  Dwarf_Die scopes_;
  bool listed_ = false;
  std::vector<Dwarf_Die> functions_;
  std::vector<Range> ranges_;           // of functions_, sorted
  std::map<void*, std::string> names_;  // of functions and of where they are inlined
};

std::string hex(const unsigned char* bytes, std::size_t size) {
  std::string text;
  for (std::size_t i = 0; i < size; ++i) text += fmt::format("{:02x}", bytes[i]);
  return text;
}

}  // namespace

class ModuleSymbols::File {
 public:
  enum class State { gone, unreadable, another, good };

  explicit File(const std::vector<std::string>& debug_dirs) {
    for (const std::string& dir : debug_dirs) path_ += std::filesystem::absolute(dir).string() + ':';
    path_ += ":.debug:/usr/lib/debug";
    path_text_ = path_.data();
    callbacks_.find_elf = [](Dwfl_Module*, void**, const char*, Dwarf_Addr, char**, Elf**) { return -1; };
    callbacks_.find_debuginfo = &dwfl_standard_find_debuginfo;
    callbacks_.section_address = &dwfl_offline_section_address;
    callbacks_.debuginfo_path = &path_text_;
  }

  State open(const std::string& path, const std::string& build_id) {
    // A report may name anything: a pipe, or a device, is not to be waited for.
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    struct stat status {};
    if (fd < 0) return State::gone;
    if (fstat(fd, &status) != 0 || !S_ISREG(status.st_mode)) {
      ::close(fd);
      return State::gone;
    }
    dwfl_.reset(dwfl_begin(&callbacks_));
    // Based at 0, addresses are those of the file.
    module_ = dwfl_ ? dwfl_report_elf(dwfl_.get(), path.c_str(), path.c_str(), fd, 0, true) : nullptr;
    if (module_ == nullptr) {
      ::close(fd);
      return State::unreadable;
    }
    dwfl_report_end(dwfl_.get(), nullptr, nullptr);
    if (dwfl_module_getelf(module_, &bias_) == nullptr) return State::unreadable;
    const unsigned char* id = nullptr;
    GElf_Addr id_address = 0;
    const int size = dwfl_module_build_id(module_, &id, &id_address);
    if (!build_id.empty() && (size <= 0 || hex(id, static_cast<std::size_t>(size)) != build_id)) return State::another;
    list();
    return State::good;
  }

  std::vector<Place> at(Dwarf_Addr address) {
    Dwarf_Addr low = 0, high = 0;
    dwfl_module_info(module_, nullptr, &low, &high, nullptr, nullptr, nullptr, nullptr);
    if (address + bias_ < low || address + bias_ >= high) return {};
    GElf_Off offset = 0;
    GElf_Sym symbol{};
    const char* const name =
        dwfl_module_addrinfo(module_, address + bias_, &offset, &symbol, nullptr, nullptr, nullptr);
    const std::string function = name == nullptr ? std::string() : demangled(name);
    std::vector<Place> places;
    if (const Range* const range = find(ranges_, address + bias_ - dwarf_bias_))
      places = units_[range->of].at(address + bias_ - dwarf_bias_, function);
    if (places.empty()) places.resize(1);
    if (places.back().function.empty()) places.back().function = function;
    if (places.back().function.empty()) places.clear();  // a line of no function
    return places;
  }

 private:
  void list() {
    if (dwfl_module_getdwarf(module_, &dwarf_bias_) == nullptr) return;
    Dwarf_Addr bias = 0;
    for (Dwarf_Die* die = nullptr; (die = dwfl_module_nextcu(module_, die, &bias)) != nullptr;) {
      add_ranges(ranges_, *die, units_.size());
      units_.emplace_back(*die);
    }
    std::ranges::stable_sort(ranges_, {}, &Range::low);
  }

  std::string path_;
  char* path_text_ = nullptr;
  Dwfl_Callbacks callbacks_{};
  struct End {
    void operator()(Dwfl* dwfl) const { dwfl_end(dwfl); }
  };
  std::unique_ptr<Dwfl, End> dwfl_;
  Dwfl_Module* module_ = nullptr;
  Dwarf_Addr bias_ = 0;        // what libdwfl adds to addresses of the file
  Dwarf_Addr dwarf_bias_ = 0;  // and to those of the debug information
  std::vector<Unit> units_;
  std::vector<Range> ranges_;  // of units_, sorted
};

ModuleSymbols::ModuleSymbols(const Module& module, const std::vector<std::string>& debug_dirs) {
  unsetenv("DEBUGINFOD_URLS");  // libdwfl would ask the servers that it names
  std::string build_id = module.build_id;
  std::ranges::transform(build_id, build_id.begin(), [](unsigned char c) { return std::tolower(c); });
  std::vector<std::string> files{module.path};
  // Where the module itself is gone, its separate debug file will do.
  if (build_id.size() > 2 && std::ranges::all_of(build_id, [](unsigned char c) { return std::isxdigit(c) != 0; })) {
    std::vector<std::string> dirs = debug_dirs;
    dirs.emplace_back("/usr/lib/debug");
    for (const std::string& dir : dirs)
      files.push_back(fmt::format("{}/.build-id/{}/{}.debug", dir, build_id.substr(0, 2), build_id.substr(2)));
  }
  for (const std::string& path : files) {
    if (!path.starts_with('/') && path == module.path) continue;  // [vdso] and its like
    auto file = std::make_unique<File>(debug_dirs);
    const File::State state = file->open(path, build_id);
    if (state == File::State::good) {
      file_ = std::move(file);
      problem_.clear();
      return;
    }
    if (!problem_.empty()) continue;
    if (state == File::State::another) {
      problem_ = fmt::format("{}: its build id is not the report's: no symbols are taken from it", plain(path));
    } else if (state == File::State::unreadable) {
      problem_ = fmt::format("{}: no program or library that can be read: no symbols are taken from it", plain(path));
    }
  }
}

ModuleSymbols::~ModuleSymbols() = default;

std::vector<Place> ModuleSymbols::at(std::uint64_t address) {
  return file_ ? file_->at(address) : std::vector<Place>();
}

}  // namespace cushion
