#include "core/python.h"

#include <dlfcn.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "core/libraries.h"
#include "core/slab.h"

namespace cushion {

// Where CPython keeps what is needed, in bytes from an object's start; 64-bit builds with a GIL.
struct Python::Layout {
  static constexpr int kNone = -1;
  int version;  // 300 + minor
  // PyThreadState: the innermost frame, or what points to it.
  int state_frame;
  int inner_frame;  // in what state_frame points to; none: it is the frame
  // The frame.
  int frame_code;
  int frame_previous;
  int frame_at;     // the instruction that runs: its address, or (3.10) its number
  int frame_owner;  // a byte; 3: a frame of the interpreter's own
  // PyCodeObject.
  int code_first_line;
  int code_filename;
  int code_name;  // the qualified one, from 3.11 on
  int code_lines;
  int code_start;  // of the instructions; none: frame_at is a number
  // Characters of a str that is ASCII, and of one that is not.
  int ascii;
  int wide;
};

namespace {

constexpr int kNone = Python::Layout::kNone;
constexpr Python::Layout kLayouts[] = {
    {310, 24, kNone, 32, 24, 96, kNone, 40, 104, 112, 120, kNone, 48, 72},
    {311, 56, 8, 32, 48, 56, 69, 72, 112, 128, 136, 184, 48, 72},
    {312, 56, 0, 0, 8, 56, 70, 68, 112, 128, 136, 192, 40, 56},
    {313, 72, kNone, 0, 8, 56, 70, 68, 112, 128, 136, 200, 40, 56},
    {314, 72, kNone, 0, 8, 56, 74, 68, 112, 128, 136, 208, 40, 56},
};

// Every object: its type is its second word; a variable-sized one (and a str) has its length in the third.
constexpr std::uint64_t kType = 8;
constexpr std::uint64_t kLength = 16;
constexpr std::uint64_t kTextState = 32;
constexpr std::uint64_t kBytesData = 32;

// Reads memory that is known to be there.
struct Direct {
  static constexpr bool kProving = false;
  bool copy(void* to, std::uint64_t from, std::size_t bytes) const noexcept {
    if (from < 4096) return false;
    std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
    return true;
  }
};
// Reads memory that may not be there.
struct Checked {
  static constexpr bool kProving = true;
  bool copy(void* to, std::uint64_t from, std::size_t bytes) const noexcept {
    const iovec into{to, bytes};
    const iovec out_of{reinterpret_cast<void*>(from), bytes};
    return process_vm_readv(getpid(), &into, 1, &out_of, 1, 0) == static_cast<ssize_t>(bytes);
  }
};

template <class T, class Memory>
bool get(Memory memory, std::uint64_t object, std::int64_t offset, T& to) noexcept {
  return memory.copy(&to, object + static_cast<std::uint64_t>(offset), sizeof to);
}

constexpr std::size_t kLongest = 512;
using Text = std::array<char, kLongest>;  // ends with 0

void append(Text& text, std::size_t& size, std::uint32_t c) noexcept {
  const auto put = [&](std::uint32_t byte) { text[size++] = static_cast<char>(byte); };
  if (size + 5 > kLongest) return;
  if (c < 0x80) {
    put(c);
  } else if (c < 0x800) {
    put(0xc0 | c >> 6);
    put(0x80 | (c & 0x3f));
  } else if (c < 0x10000) {
    put(0xe0 | c >> 12);
    put(0x80 | (c >> 6 & 0x3f));
    put(0x80 | (c & 0x3f));
  } else {
    put(0xf0 | c >> 18);
    put(0x80 | (c >> 12 & 0x3f));
    put(0x80 | (c >> 6 & 0x3f));
    put(0x80 | (c & 0x3f));
  }
}

// A str as UTF-8, cut where it is longer than any name should be.
template <class Memory>
bool read_text(const Python::Layout& layout, Memory memory, std::uint64_t object, std::uint64_t type,
               Text& text) noexcept {
  std::uint64_t found = 0;
  std::uint64_t length = 0;
  std::uint32_t state = 0;
  if (!get(memory, object, kType, found) || found != type || !get(memory, object, kLength, length) ||
      !get(memory, object, kTextState, state))
    return false;
  const std::uint32_t kind = state >> 2 & 7;
  const bool compact = (state >> 5 & 1) != 0;
  const bool ascii = (state >> 6 & 1) != 0;
  if (!compact || (kind != 1 && kind != 2 && kind != 4)) return false;
  std::size_t size = 0;
  const std::uint64_t data = object + static_cast<std::uint64_t>(ascii ? layout.ascii : layout.wide);
  for (std::uint64_t i = 0; i < length && size + 5 <= kLongest; ++i) {
    std::uint32_t c = 0;
    if (!memory.copy(&c, data + i * kind, kind)) return false;
    append(text, size, c);
  }
  text[size] = '\0';
  return true;
}

// Whether an ASCII str is this text. Of others, and of what cannot be read, it is not known: true.
bool may_be(const Python::Layout& layout, std::uint64_t object, const char* text) noexcept {
  const Direct memory;
  std::uint64_t length = 0;
  std::uint32_t state = 0;
  if (!get(memory, object, kLength, length) || !get(memory, object, kTextState, state)) return true;
  if ((state >> 6 & 1) == 0 || length + 5 > kLongest) return true;
  return std::memcmp(reinterpret_cast<const void*>(object + static_cast<std::uint64_t>(layout.ascii)), text, length) ==
             0 &&
         text[length] == '\0';
}

// A bytes object, read forward.
template <class Memory>
class Bytes {
 public:
  Bytes(Memory memory, std::uint64_t object, std::uint64_t type) noexcept : memory_(memory), at_(object + kBytesData) {
    std::uint64_t found = 0;
    std::uint64_t length = 0;
    if (get(memory, object, kType, found) && found == type && get(memory, object, kLength, length)) end_ = at_ + length;
  }
  bool more() const noexcept { return at_ < end_; }
  std::uint8_t take() noexcept {
    std::uint8_t byte = 0;
    if (more()) memory_.copy(&byte, at_, 1);
    ++at_;
    return byte;
  }
  std::uint32_t number() noexcept {  // six bits a byte, the lowest first
    std::uint32_t value = 0;
    for (unsigned shift = 0; more(); shift += 6) {
      const std::uint8_t byte = take();
      if (shift < 32) value |= static_cast<std::uint32_t>(byte & 63) << shift;
      if ((byte & 64) == 0) break;
    }
    return value;
  }
  std::int32_t signed_number() noexcept {
    const std::uint32_t value = number();
    const auto size = static_cast<std::int32_t>(value >> 1);
    return (value & 1) != 0 ? -size : size;
  }

 private:
  Memory memory_;
  std::uint64_t at_;
  std::uint64_t end_ = 0;
};

// The line of an instruction, by its number (an instruction is two bytes), from 3.11 on.
template <class Memory>
std::uint32_t line_of(Bytes<Memory> table, std::uint32_t first, std::uint64_t wanted) noexcept {
  std::int64_t line = first;
  for (std::uint64_t at = 0; table.more();) {
    const std::uint8_t head = table.take();
    const std::uint64_t length = (head & 7u) + 1;
    const unsigned form = head >> 3 & 15;
    bool has_line = true;
    if (form == 15) {
      has_line = false;
    } else if (form == 14) {
      line += table.signed_number();
      table.number();
      table.number();
      table.number();
    } else if (form == 13) {
      line += table.signed_number();
    } else if (form >= 10) {
      line += form - 10;
      table.take();
      table.take();
    } else {
      table.take();
    }
    at += length;
    if (at > wanted) return has_line && line > 0 ? static_cast<std::uint32_t>(line) : 0;
  }
  return 0;
}

// The same in 3.10: pairs of bytes passed and lines passed.
template <class Memory>
std::uint32_t old_line_of(Bytes<Memory> table, std::uint32_t first, std::uint64_t wanted) noexcept {
  std::int64_t line = first;
  for (std::uint64_t at = 0; table.more();) {
    at += table.take();
    const auto passed = static_cast<std::int8_t>(table.take());
    if (passed != -128) line += passed;
    if (at > 2 * wanted) return passed != -128 && line > 0 ? static_cast<std::uint32_t>(line) : 0;
  }
  return 0;
}

template <class To>
bool find_symbol(const char* name, To& to) noexcept {
  void* const found = dlsym(RTLD_DEFAULT, name);
  std::memcpy(&to, &found, sizeof to);
  return found != nullptr;
}

}  // namespace

bool Python::find_interpreter() noexcept {
  // Often at first, then ever more seldom: looking takes microseconds.
  const std::uint32_t asked = asked_.fetch_add(1, std::memory_order_relaxed);
  if ((asked & (asked - 1)) != 0 || refused_.load(std::memory_order_relaxed)) return false;
  const char* (*version)() = nullptr;
  decltype(own_state_) own_state = nullptr;
  std::uint64_t types[3]{};
  if (!find_symbol("Py_GetVersion", version) || !find_symbol("PyGILState_GetThisThreadState", own_state) ||
      !find_symbol("PyCode_Type", types[0]) || !find_symbol("PyUnicode_Type", types[1]) ||
      !find_symbol("PyBytes_Type", types[2]))
    return false;
  const char* const text = version();  // "3.11.2 (main, ..."
  const int minor = std::strncmp(text, "3.", 2) == 0 ? std::atoi(text + 2) : 0;
  const auto* const layout =
      std::find_if(std::begin(kLayouts), std::end(kLayouts), [&](const Layout& l) { return l.version == 300 + minor; });
  const bool without_gil = std::strstr(text, "free-threading") != nullptr;
  if (layout == std::end(kLayouts) || without_gil) {
    refused_.store(true, std::memory_order_relaxed);
    return false;
  }
  AddressRange library{};
  for_each_library([&](const dl_phdr_info& loaded) {
    library = addresses_of(loaded);
    return library.holds(reinterpret_cast<std::uint64_t>(version));
  });
  std::lock_guard lock(lock_);
  if (layout_.load(std::memory_order_relaxed) != nullptr) return true;
  own_state_ = own_state;
  code_type_ = types[0];
  text_type_ = types[1];
  bytes_type_ = types[2];
  low_.store(library.low, std::memory_order_relaxed);
  high_.store(library.high, std::memory_order_relaxed);
  layout_.store(layout, std::memory_order_release);
  return true;
}

std::uint32_t Python::frames(Frame* out, std::uint32_t most) noexcept {
  const Layout& layout = *layout_.load(std::memory_order_relaxed);
  bool good = true;
  if (proven_.load(std::memory_order_relaxed)) [[likely]]
    return walk(layout, Direct(), out, most, good);
  if (refused_.load(std::memory_order_relaxed)) return 0;
  const std::uint32_t n = walk(layout, Checked(), out, most, good);
  if (!good) refused_.store(true, std::memory_order_relaxed);
  if (good && n != 0) proven_.store(true, std::memory_order_relaxed);
  return good ? n : 0;
}

template <class Memory>
std::uint32_t Python::walk(const Layout& layout, Memory memory, Frame* out, std::uint32_t most, bool& good) noexcept {
  const std::uint64_t state = own_state_();
  if (state == 0) return 0;
  std::uint64_t frame = 0;
  good = get(memory, state, layout.state_frame, frame);
  if (good && frame != 0 && layout.inner_frame != kNone) good = get(memory, frame, layout.inner_frame, frame);
  std::uint32_t n = 0;
  while (good && frame != 0 && n < most) {
    std::uint8_t owner = 0;
    std::uint64_t object = 0;
    std::uint64_t previous = 0;
    std::uint64_t at = 0;
    good = get(memory, frame, layout.frame_previous, previous) &&
           (layout.frame_owner == kNone || get(memory, frame, layout.frame_owner, owner)) &&
           get(memory, frame, layout.frame_code, object);
    object &= ~std::uint64_t{7};  // 3.14 keeps marks there
    if (good && owner < 3) {
      const std::int64_t place = intern(layout, memory, object, good);
      std::uint32_t first = 0;
      std::uint64_t lines = 0;
      good =
          good && get(memory, object, layout.code_first_line, first) && get(memory, object, layout.code_lines, lines);
      if (layout.code_start == kNone) {
        std::int32_t number = 0;
        good = good && get(memory, frame, layout.frame_at, number);
        at = number < 0 ? 0 : static_cast<std::uint64_t>(number);
      } else {
        good = good && get(memory, frame, layout.frame_at, at);
        at = (at - object - static_cast<std::uint64_t>(layout.code_start)) / 2;
      }
      if (!good) break;
      const Bytes<Memory> table(memory, lines, bytes_type_);
      if (place >= 0) {
        out[n++] = {static_cast<std::uint32_t>(place),
                    layout.code_start == kNone ? old_line_of(table, first, at) : line_of(table, first, at)};
      }
    }
    frame = previous;
  }
  return n;
}

template <class Memory>
std::int64_t Python::intern(const Layout& layout, Memory memory, std::uint64_t object, bool& good) noexcept {
  Code code;
  code.object = object;
  if constexpr (Memory::kProving) {
    std::uint64_t type = 0;
    good = get(memory, object, kType, type) && type == code_type_;
    if (!good) return -1;
  }
  good = get(memory, object, layout.code_name, code.name) && get(memory, object, layout.code_filename, code.filename) &&
         get(memory, object, layout.code_first_line, code.first_line);
  if (!good) return -1;
  const std::uint64_t hash = object ^ code.name << 20 ^ std::uint64_t{code.first_line} << 48;
  const auto known = [&] {
    return index_.find(hash, [&](std::uint32_t i) {
      const Code& c = codes_[i];
      return c.object == object && c.name == code.name && c.filename == code.filename &&
             c.first_line == code.first_line && may_be(layout, code.name, c.function) &&
             may_be(layout, code.filename, c.file);
    });
  };
  // In a proof nothing is known yet, and nothing may be read but through the kernel.
  if (!Memory::kProving) {
    if (const std::int64_t place = known(); place >= 0) [[likely]]
      return place;
  }
  Text function;
  Text file;
  good = read_text(layout, memory, code.name, text_type_, function) &&
         read_text(layout, memory, code.filename, text_type_, file);
  if (!good) return -1;
  std::lock_guard lock(lock_);
  if (const std::int64_t place = known(); place >= 0) return place;  // another thread was first
  Code* const fresh = index_.reserve() ? codes_.prepare() : nullptr;
  if (fresh == nullptr) return -1;
  code.function = keep(function.data());
  code.file = keep(file.data());
  *fresh = code;
  codes_.publish();
  index_.add(hash, codes_.size() - 1);
  return static_cast<std::int64_t>(codes_.size() - 1);
}

const char* Python::keep(const char* text) noexcept {
  constexpr std::size_t kPiece = std::size_t{1} << 18;
  const std::size_t bytes = std::strlen(text) + 1;
  if (bytes > text_left_) {
    text_ = static_cast<char*>(map_pages(kPiece));
    text_left_ = text_ != nullptr ? kPiece : 0;
    if (text_ == nullptr) return "";
  }
  char* const kept = text_;
  std::memcpy(kept, text, bytes);
  text_ += bytes;
  text_left_ -= bytes;
  return kept;
}

}  // namespace cushion
