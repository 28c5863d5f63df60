#include "core/python.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cstring>
#include <mutex>

#include "core/slab.h"

namespace cushion {

// CPython's, all stable since 3.10: objects and frames are only passed on.
struct Python::Functions {
  int (*Py_IsInitialized)();
  void* (*PyGILState_GetThisThreadState)();
  void* (*current_thread_state)();  // PyThreadState_GetUnchecked, before 3.13 with an underscore
  void* (*PyEval_GetFrame)();       // borrowed
  void* (*PyFrame_GetBack)(void*);  // a new reference, as the next
  void* (*PyFrame_GetCode)(void*);
  int (*PyFrame_GetLineNumber)(void*);
  void (*Py_DecRef)(void*);
  int (*PyGC_Disable)();
  int (*PyGC_Enable)();
  void (*PyErr_Fetch)(void**, void**, void**);
  void (*PyErr_Restore)(void*, void*, void*);
  void* (*PyObject_GetAttrString)(void*, const char*);
  const char* (*PyUnicode_AsUTF8)(void*);
};

namespace {

template <class Function>
bool find(Function& to, std::initializer_list<const char*> names) noexcept {
  for (const char* name : names) {
    if (void* found = dlsym(RTLD_DEFAULT, name)) {
      std::memcpy(&to, &found, sizeof found);
      return true;
    }
  }
  return false;
}

struct Library {
  std::uint64_t address;
  std::uint64_t low = 0;
  std::uint64_t high = 0;
};

}  // namespace

bool Python::find_interpreter() noexcept {
  static constinit Functions f{};
  static constinit std::atomic<bool> filling{false};
  // Often at first, then ever more seldom: looking takes microseconds.
  const std::uint32_t asked = asked_.fetch_add(1, std::memory_order_relaxed);
  if ((asked & (asked + 1)) != 0 || filling.exchange(true, std::memory_order_acquire)) return false;
  const bool all = find(f.PyGC_Disable, {"PyGC_Disable"}) && find(f.PyGC_Enable, {"PyGC_Enable"}) &&
                   find(f.Py_IsInitialized, {"Py_IsInitialized"}) &&
                   find(f.PyGILState_GetThisThreadState, {"PyGILState_GetThisThreadState"}) &&
                   find(f.current_thread_state, {"PyThreadState_GetUnchecked", "_PyThreadState_UncheckedGet"}) &&
                   find(f.PyEval_GetFrame, {"PyEval_GetFrame"}) && find(f.PyFrame_GetBack, {"PyFrame_GetBack"}) &&
                   find(f.PyFrame_GetCode, {"PyFrame_GetCode"}) &&
                   find(f.PyFrame_GetLineNumber, {"PyFrame_GetLineNumber"}) && find(f.Py_DecRef, {"Py_DecRef"}) &&
                   find(f.PyErr_Fetch, {"PyErr_Fetch"}) && find(f.PyErr_Restore, {"PyErr_Restore"}) &&
                   find(f.PyObject_GetAttrString, {"PyObject_GetAttrString"}) &&
                   find(f.PyUnicode_AsUTF8, {"PyUnicode_AsUTF8"});
  if (!all) {
    filling.store(false, std::memory_order_release);
    return false;
  }
  Library library{reinterpret_cast<std::uint64_t>(f.PyEval_GetFrame)};
  dl_iterate_phdr(
      [](dl_phdr_info* loaded, std::size_t, void* argument) {
        auto& of = *static_cast<Library*>(argument);
        std::uint64_t low = ~std::uint64_t{0};
        std::uint64_t high = 0;
        for (int i = 0; i < loaded->dlpi_phnum; ++i) {
          const ElfW(Phdr)& part = loaded->dlpi_phdr[i];
          if (part.p_type != PT_LOAD) continue;
          low = std::min<std::uint64_t>(low, loaded->dlpi_addr + part.p_vaddr);
          high = std::max<std::uint64_t>(high, loaded->dlpi_addr + part.p_vaddr + part.p_memsz);
        }
        if (of.address < low || of.address >= high) return 0;
        of.low = low;
        of.high = high;
        return 1;
      },
      &library);
  low_.store(library.low, std::memory_order_relaxed);
  high_.store(library.high, std::memory_order_relaxed);
  functions_.store(&f, std::memory_order_release);
  return true;
}

bool Python::holds_lock() noexcept {
  const Functions* f = functions_.load(std::memory_order_acquire);
  if (f == nullptr) {
    if (!find_interpreter()) return false;
    f = functions_.load(std::memory_order_acquire);
  }
  if (f->Py_IsInitialized() == 0) return false;
  // Until 3.11 the current thread state is whoever holds the lock, so it must be this thread's own.
  void* const own = f->PyGILState_GetThisThreadState();
  return own != nullptr && f->current_thread_state() == own;
}

std::uint32_t Python::frames(Frame* out, std::uint32_t most) noexcept {
  const Functions& f = *functions_.load(std::memory_order_relaxed);
  void* frame = f.PyEval_GetFrame();
  if (frame == nullptr || most == 0) return 0;
  const bool collects = f.PyGC_Disable() != 0;
  void* exception[3]{};
  f.PyErr_Fetch(&exception[0], &exception[1], &exception[2]);
  std::uint32_t n = 0;
  for (bool borrowed = true; frame != nullptr && n < most; borrowed = false) {
    void* const code = f.PyFrame_GetCode(frame);
    const std::int64_t place = code != nullptr ? intern(code) : -1;
    const int line = f.PyFrame_GetLineNumber(frame);
    if (place >= 0) out[n++] = {static_cast<std::uint32_t>(place), line > 0 ? static_cast<std::uint32_t>(line) : 0};
    void* const back = f.PyFrame_GetBack(frame);
    if (!borrowed) f.Py_DecRef(frame);
    frame = back;
  }
  if (frame != nullptr) f.Py_DecRef(frame);
  f.PyErr_Restore(exception[0], exception[1], exception[2]);
  if (collects) f.PyGC_Enable();
  return n;
}

std::int64_t Python::known(const void* object) const noexcept {
  return index_.find(reinterpret_cast<std::uintptr_t>(object),
                     [&](std::uint32_t place) { return codes_[place].object == object; });
}

const char* Python::keep(const char* text, std::size_t bytes) noexcept {
  constexpr std::size_t kPiece = std::size_t{1} << 18;
  if (bytes + 1 > text_left_) {
    text_ = static_cast<char*>(map_pages(kPiece));
    text_left_ = text_ != nullptr ? kPiece : 0;
    if (text_ == nullptr) return "";
  }
  char* const kept = text_;
  std::memcpy(kept, text, bytes);
  kept[bytes] = '\0';
  text_ += bytes + 1;
  text_left_ -= bytes + 1;
  return kept;
}

std::int64_t Python::intern(void* object) noexcept {
  const Functions& f = *functions_.load(std::memory_order_relaxed);
  if (const std::int64_t place = known(object); place >= 0 || codes_.size() == kMost) {
    f.Py_DecRef(object);
    return place;
  }
  constexpr std::size_t kLongest = 512;
  struct Text {
    char bytes[kLongest];
    std::size_t size = 0;
  };
  // Copied before the lock: reading an attribute is a call into Python, though no code of the program's runs.
  const auto read = [&](Text& to, std::initializer_list<const char*> names) {
    for (const char* name : names) {
      void* const value = f.PyObject_GetAttrString(object, name);
      const char* const utf8 = value != nullptr ? f.PyUnicode_AsUTF8(value) : nullptr;
      if (utf8 != nullptr) {
        to.size = strnlen(utf8, kLongest);
        std::memcpy(to.bytes, utf8, to.size);
      }
      if (value != nullptr) f.Py_DecRef(value);
      void* none[3]{};
      f.PyErr_Fetch(&none[0], &none[1], &none[2]);  // clears it
      for (void* part : none) {
        if (part != nullptr) f.Py_DecRef(part);
      }
      if (utf8 != nullptr) return;
    }
  };
  Text function;
  Text file;
  read(function, {"co_qualname", "co_name"});
  read(file, {"co_filename"});
  std::lock_guard lock(lock_);
  if (const std::int64_t place = known(object); place >= 0) return place;  // another thread was first
  Code* const code = index_.reserve() ? codes_.prepare() : nullptr;
  if (code == nullptr) return -1;
  *code = {object, keep(function.bytes, function.size), keep(file.bytes, file.size)};
  codes_.publish();
  index_.add(reinterpret_cast<std::uintptr_t>(object), codes_.size() - 1);
  return static_cast<std::int64_t>(codes_.size() - 1);
}

}  // namespace cushion
