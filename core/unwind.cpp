#include "core/unwind.h"

#include <pthread.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <optional>

// What is read here are frames of other functions: their redzones, and what they share with other threads.
#define CUSHION_RAW_STACK __attribute__((no_sanitize("address", "thread", "undefined")))

namespace cushion {
namespace {

// ---- the stack ---------------------------------------------------------------------------------------------------

constinit thread_local StackRange t_stack{};

[[gnu::noinline]] void ask_stack() noexcept {
  t_stack = {1, 1};  // asked
  pthread_attr_t attributes;
  if (pthread_getattr_np(pthread_self(), &attributes) != 0) return;
  void* low = nullptr;
  std::size_t bytes = 0;
  if (pthread_attr_getstack(&attributes, &low, &bytes) == 0)
    t_stack = {reinterpret_cast<std::uint64_t>(low), reinterpret_cast<std::uint64_t>(low) + bytes};
  pthread_attr_destroy(&attributes);
}

CUSHION_RAW_STACK bool read(const StackRange& stack, std::uint64_t at, std::uint64_t& value) noexcept {
  if (at < stack.low || at > stack.high - 8 || at % 8 != 0) return false;
  value = *reinterpret_cast<const std::uint64_t*>(at);
  return true;
}

// One step by the frame pointer: where it points, the caller's lies, and above it the return address.
bool step_by_frame_pointer(const StackRange& stack, Registers& r) noexcept {
  std::uint64_t fp = 0;
  std::uint64_t pc = 0;
  if (r.fp < r.sp || !read(stack, r.fp, fp) || !read(stack, r.fp + 8, pc)) return false;
  r = {pc, r.fp + 16, fp};
  return true;
}

#if defined(__x86_64__)

// ---- rules -------------------------------------------------------------------------------------------------------

// How to find a frame's caller: the canonical frame address (CFA: the stack pointer before the call), the return
// address 8 below it, and where the caller's rbp is.
enum class Cfa : std::uint8_t { none, end, from_sp, from_fp, at_fp };
enum class Saved : std::uint8_t { same, at_cfa, at_fp };
struct Rule {
  Cfa cfa = Cfa::none;  // none: unknown, the frame pointer may help; end: the outermost frame
  Saved fp = Saved::same;
  std::int32_t cfa_offset = 0;
  std::int32_t fp_offset = 0;

  static constexpr std::int32_t kMost = (1 << 27) - 1;  // of an offset
  bool fits() const noexcept {
    return cfa_offset >= -kMost && cfa_offset <= kMost && fp_offset >= -kMost && fp_offset <= kMost;
  }
  // In one word, never 0.
  std::uint64_t pack() const noexcept {
    const auto part = [](std::int32_t offset) { return static_cast<std::uint64_t>(offset) & ((1u << 28) - 1); };
    return std::uint64_t{1} << 63 | part(cfa_offset) << 28 | part(fp_offset) | static_cast<std::uint64_t>(cfa) << 56 |
           static_cast<std::uint64_t>(fp) << 60;
  }
  static Rule unpack(std::uint64_t word) noexcept {
    const auto part = [](std::uint64_t bits) {
      return static_cast<std::int32_t>(static_cast<std::uint32_t>(bits << 4)) >> 4;
    };
    return {static_cast<Cfa>(word >> 56 & 0xf), static_cast<Saved>(word >> 60 & 0x3), part(word >> 28), part(word)};
  }
};

// The rules that are known, by address. Two words an entry, written without a lock: the first is the address
// exclusive-or the second, so that an entry of which two threads wrote one half each is no entry.
struct Slot {
  std::atomic<std::uint64_t> check;
  std::atomic<std::uint64_t> rule;
};
constexpr std::size_t kSlots = std::size_t{1} << 14;
constinit std::array<Slot, kSlots> g_rules{};

Slot& slot_of(std::uint64_t pc) noexcept { return g_rules[(pc * 0x9E3779B97F4A7C15u) >> (64 - 14)]; }

// ---- .eh_frame ---------------------------------------------------------------------------------------------------

// Bytes of a mapped file, read forward. Past the end everything is 0 and `bad`.
class Cursor {
 public:
  Cursor(std::uint64_t at, std::uint64_t end) noexcept : at_(at), end_(end) {}
  std::uint64_t at() const noexcept { return at_; }
  bool more() const noexcept { return at_ < end_; }
  bool bad() const noexcept { return bad_; }
  void skip(std::uint64_t bytes) noexcept {
    if (bytes > end_ - at_) {
      bad_ = true;
      at_ = end_;
    } else {
      at_ += bytes;
    }
  }
  template <class T>
  T take() noexcept {
    T value{};
    const std::uint64_t from = at_;
    skip(sizeof value);
    if (!bad_) std::memcpy(&value, reinterpret_cast<const void*>(from), sizeof value);
    return value;
  }
  std::uint64_t uleb() noexcept {
    std::uint64_t value = 0;
    for (unsigned shift = 0;; shift += 7) {
      const auto byte = take<std::uint8_t>();
      if (shift < 64) value |= static_cast<std::uint64_t>(byte & 0x7f) << shift;
      if ((byte & 0x80) == 0 || bad_) return value;
    }
  }
  std::int64_t sleb() noexcept {
    std::uint64_t value = 0;
    for (unsigned shift = 0;;) {
      const auto byte = take<std::uint8_t>();
      if (shift < 64) value |= static_cast<std::uint64_t>(byte & 0x7f) << shift;
      shift += 7;
      if ((byte & 0x80) != 0 && !bad_) continue;
      if (shift < 64 && (byte & 0x40) != 0) value |= ~std::uint64_t{0} << shift;
      return static_cast<std::int64_t>(value);
    }
  }
  // A pointer in one of DWARF's encodings; `data`: what it may be relative to.
  std::uint64_t pointer(std::uint8_t encoding, std::uint64_t data) noexcept {
    const std::uint64_t here = at_;
    std::uint64_t value = 0;
    switch (encoding & 0x0f) {
      case 0x00:
      case 0x04:
      case 0x0c:
        value = take<std::uint64_t>();
        break;
      case 0x02:
        value = take<std::uint16_t>();
        break;
      case 0x03:
        value = take<std::uint32_t>();
        break;
      case 0x0a:
        value = static_cast<std::uint64_t>(std::int64_t{take<std::int16_t>()});
        break;
      case 0x0b:
        value = static_cast<std::uint64_t>(std::int64_t{take<std::int32_t>()});
        break;
      case 0x01:
        value = uleb();
        break;
      case 0x09:
        value = static_cast<std::uint64_t>(sleb());
        break;
      default:
        bad_ = true;
    }
    switch (encoding & 0x70) {
      case 0x00:
        break;
      case 0x10:
        value += here;
        break;
      case 0x30:
        value += data;
        break;
      default:
        bad_ = true;
    }
    if ((encoding & 0x80) != 0) bad_ = true;  // indirect: never for code
    return value;
  }

 private:
  std::uint64_t at_;
  std::uint64_t end_;
  bool bad_ = false;
};

// What a function's instructions say of one address. Registers by DWARF's numbers: 6 is rbp, 7 rsp, 16 the return
// address.
class Program {
 public:
  Program(std::uint64_t code_align, std::int64_t data_align) noexcept
      : code_align_(code_align), data_align_(data_align) {}

  // Runs up to the address `wanted`, beginning at `location`. False: what it meets cannot be followed.
  bool run(Cursor code, std::uint64_t location, std::uint64_t wanted) noexcept {
    while (code.more() && !code.bad()) {
      const auto op = code.take<std::uint8_t>();
      const std::uint8_t low = op & 0x3f;
      switch (op >> 6) {
        case 1:  // advance_loc
          location += low * code_align_;
          if (location > wanted) return true;
          continue;
        case 2:  // offset
          saved_at_cfa(low, static_cast<std::int64_t>(code.uleb()) * data_align_);
          continue;
        case 3:  // restore
          restore(low);
          continue;
        default:
          break;
      }
      switch (low) {
        case 0x00:
          break;  // nop
        case 0x01:
          return false;  // set_loc
        case 0x02:
          location += code.take<std::uint8_t>() * code_align_;
          break;
        case 0x03:
          location += code.take<std::uint16_t>() * code_align_;
          break;
        case 0x04:
          location += code.take<std::uint32_t>() * code_align_;
          break;
        case 0x05: {  // offset_extended
          const std::uint64_t reg = code.uleb();
          saved_at_cfa(reg, static_cast<std::int64_t>(code.uleb()) * data_align_);
          break;
        }
        case 0x06:
          restore(code.uleb());
          break;  // restore_extended
        case 0x07:
          undefined(code.uleb());
          break;  // undefined
        case 0x08:
          same(code.uleb());
          break;    // same_value
        case 0x09:  // register
          if (const std::uint64_t reg = code.uleb(); reg == 6 || reg == 16) lost(reg);
          code.uleb();
          break;
        case 0x0a:  // remember_state
          if (depth_ == kDepth) return false;
          kept_[depth_++] = now_;
          break;
        case 0x0b:  // restore_state
          if (depth_ == 0) return false;
          now_ = kept_[--depth_];
          break;
        case 0x0c: {  // def_cfa
          const std::uint64_t reg = code.uleb();
          cfa(reg, static_cast<std::int64_t>(code.uleb()));
          break;
        }
        case 0x0d:
          cfa(code.uleb(), now_.cfa_offset);
          break;  // def_cfa_register
        case 0x0e:
          now_.cfa_offset = static_cast<std::int64_t>(code.uleb());
          break;  // def_cfa_offset
        case 0x0f:
          cfa_expression(code);
          break;      // def_cfa_expression
        case 0x10: {  // expression
          const std::uint64_t reg = code.uleb();
          saved_by_expression(reg, code);
          break;
        }
        case 0x11: {  // offset_extended_sf
          const std::uint64_t reg = code.uleb();
          saved_at_cfa(reg, code.sleb() * data_align_);
          break;
        }
        case 0x12: {  // def_cfa_sf
          const std::uint64_t reg = code.uleb();
          cfa(reg, code.sleb() * data_align_);
          break;
        }
        case 0x13:
          now_.cfa_offset = code.sleb() * data_align_;
          break;    // def_cfa_offset_sf
        case 0x14:  // val_offset
          if (const std::uint64_t reg = code.uleb(); reg == 6 || reg == 16) lost(reg);
          code.uleb();
          break;
        case 0x16: {  // val_expression
          const std::uint64_t reg = code.uleb();
          code.skip(code.uleb());
          lost(reg);
          break;
        }
        case 0x2e:
          code.uleb();
          break;  // GNU_args_size
        default:
          return false;
      }
      if (location > wanted) return true;
    }
    return !code.bad();
  }
  // What stands now is what restore goes back to.
  void begin_function() noexcept { first_ = now_; }

  Rule rule() const noexcept {
    if (now_.return_undefined) return {Cfa::end};
    Rule rule{now_.cfa, now_.fp, static_cast<std::int32_t>(now_.cfa_offset), static_cast<std::int32_t>(now_.fp_offset)};
    const bool wide = now_.cfa_offset > Rule::kMost || now_.cfa_offset < -Rule::kMost || now_.fp_offset > Rule::kMost ||
                      now_.fp_offset < -Rule::kMost;
    if (wide || now_.lost || now_.return_offset != -8) return {};
    return rule;
  }

 private:
  struct State {
    Cfa cfa = Cfa::none;
    Saved fp = Saved::same;
    bool return_undefined = false;
    bool lost = false;  // rbp or the return address is where no rule of ours finds it
    std::int64_t cfa_offset = 0;
    std::int64_t fp_offset = 0;
    std::int64_t return_offset = -8;
  };

  void cfa(std::uint64_t reg, std::int64_t offset) noexcept {
    now_.cfa = reg == 7 ? Cfa::from_sp : reg == 6 ? Cfa::from_fp : Cfa::none;
    now_.cfa_offset = offset;
  }
  void saved_at_cfa(std::uint64_t reg, std::int64_t offset) noexcept {
    if (reg == 6) {
      now_.fp = Saved::at_cfa;
      now_.fp_offset = offset;
    } else if (reg == 16) {
      now_.return_offset = offset;
      now_.return_undefined = false;
    }
  }
  void restore(std::uint64_t reg) noexcept {
    if (reg == 6) {
      now_.fp = first_.fp;
      now_.fp_offset = first_.fp_offset;
    } else if (reg == 16) {
      now_.return_offset = first_.return_offset;
      now_.return_undefined = first_.return_undefined;
    }
  }
  void undefined(std::uint64_t reg) noexcept {
    if (reg == 16) now_.return_undefined = true;
    if (reg == 6) now_.fp = Saved::same;  // the outermost frame's
  }
  void same(std::uint64_t reg) noexcept {
    if (reg == 6) now_.fp = Saved::same;
  }
  void lost(std::uint64_t reg) noexcept {
    if (reg == 6 || reg == 16) now_.lost = true;
  }
  // Of a function that aligns its stack: the CFA is what lies at rbp + offset.
  void cfa_expression(Cursor& code) noexcept {
    const std::uint64_t bytes = code.uleb();
    Cursor inner(code.at(), code.at() + bytes);
    code.skip(bytes);
    now_.cfa = Cfa::none;
    if (code.bad()) return;
    const auto op = inner.take<std::uint8_t>();
    const std::int64_t offset = inner.sleb();
    const auto then = inner.take<std::uint8_t>();
    if (op == 0x76 && then == 0x06 && !inner.bad() && !inner.more()) {  // breg6, deref
      now_.cfa = Cfa::at_fp;
      now_.cfa_offset = offset;
    }
  }
  // The same functions save rbp at an offset from itself.
  void saved_by_expression(std::uint64_t reg, Cursor& code) noexcept {
    const std::uint64_t bytes = code.uleb();
    Cursor inner(code.at(), code.at() + bytes);
    code.skip(bytes);
    if (code.bad() || (reg != 6 && reg != 16)) return;
    const auto op = inner.take<std::uint8_t>();
    const std::int64_t offset = inner.sleb();
    if (reg == 6 && op == 0x76 && !inner.bad() && !inner.more()) {
      now_.fp = Saved::at_fp;
      now_.fp_offset = offset;
    } else {
      now_.lost = true;
    }
  }

  static constexpr std::size_t kDepth = 16;
  std::uint64_t code_align_;
  std::int64_t data_align_;
  State now_{};
  State first_{};
  std::array<State, kDepth> kept_{};
  std::size_t depth_ = 0;
};

// A record of .eh_frame without its length: empty if there is none.
Cursor record_at(std::uint64_t at, std::uint64_t end) noexcept {
  Cursor record(at, end);
  std::uint64_t length = record.take<std::uint32_t>();
  if (length == 0xffffffff) length = record.take<std::uint64_t>();
  if (record.bad() || length > end - record.at()) return {end, end};
  return {record.at(), record.at() + length};
}

struct Common {  // a CIE
  std::uint64_t code_align = 1;
  std::int64_t data_align = 1;
  std::uint8_t encoding = 0;
  bool augmented = false;
  bool signal = false;
  Cursor code{0, 0};
};

std::optional<Common> read_common(std::uint64_t at, std::uint64_t end) noexcept {
  Cursor c = record_at(at, end);
  if (c.take<std::uint32_t>() != 0) return std::nullopt;  // no CIE
  const auto version = c.take<std::uint8_t>();
  std::array<char, 8> text{};
  for (std::size_t i = 0; i < text.size(); ++i) {
    text[i] = static_cast<char>(c.take<std::uint8_t>());
    if (text[i] == '\0') break;
    if (i + 1 == text.size()) return std::nullopt;
  }
  Common common;
  common.code_align = c.uleb();
  common.data_align = c.sleb();
  const std::uint64_t return_register = version == 1 ? c.take<std::uint8_t>() : c.uleb();
  if (return_register != 16 || (version != 1 && version != 3)) return std::nullopt;
  if (text[0] == 'z') {
    const std::uint64_t bytes = c.uleb();
    Cursor data(c.at(), c.at() + bytes);
    c.skip(bytes);
    if (c.bad()) return std::nullopt;
    common.augmented = true;
    for (std::size_t i = 1; text[i] != '\0'; ++i) {
      switch (text[i]) {
        case 'R':
          common.encoding = data.take<std::uint8_t>();
          break;
        case 'L':
          data.take<std::uint8_t>();
          break;
        case 'P': {
          const auto encoding = data.take<std::uint8_t>();
          data.pointer(encoding & 0x7f, 0);
          break;
        }
        case 'S':
          common.signal = true;
          break;
        default:
          return std::nullopt;
      }
    }
    if (data.bad()) return std::nullopt;
  } else if (text[0] != '\0') {
    return std::nullopt;
  }
  if (c.bad()) return std::nullopt;
  common.code = c;
  return common;
}

// The record of the function that holds the address, from the sorted table of .eh_frame_hdr; 0: none.
std::uint64_t find_record(const Module& module, std::uint64_t pc) noexcept {
  Cursor head(module.unwind, module.unwind_high);
  const auto version = head.take<std::uint8_t>();
  const auto frame_encoding = head.take<std::uint8_t>();
  const auto count_encoding = head.take<std::uint8_t>();
  const auto table_encoding = head.take<std::uint8_t>();
  if (version != 1 || table_encoding != 0x3b) return 0;  // sdata4, relative to the header: what every linker writes
  head.pointer(frame_encoding, module.unwind);
  const std::uint64_t count = head.pointer(count_encoding, module.unwind);
  constexpr std::uint64_t kEntry = 8;
  if (head.bad() || count == 0 || count > (module.unwind_high - head.at()) / kEntry) return 0;
  const auto start = [&](std::uint64_t i) {
    Cursor entry(head.at() + i * kEntry, module.unwind_high);
    return module.unwind + static_cast<std::uint64_t>(std::int64_t{entry.take<std::int32_t>()});
  };
  std::uint64_t low = 0;
  std::uint64_t high = count;
  while (high - low > 1) {
    const std::uint64_t middle = low + (high - low) / 2;
    (start(middle) <= pc ? low : high) = middle;
  }
  if (start(low) > pc) return 0;
  Cursor entry(head.at() + low * kEntry + 4, module.unwind_high);
  return module.unwind + static_cast<std::uint64_t>(std::int64_t{entry.take<std::int32_t>()});
}

Rule read_rule(Modules& modules, std::uint64_t pc) noexcept {
  const int index = modules.find(pc);
  if (index < 0) return {};
  const Module& module = modules[static_cast<std::size_t>(index)];
  if (module.unwind == 0) return {};
  const std::uint64_t at = find_record(module, pc);
  if (at < module.unwind_low || at >= module.unwind_high) return {};
  Cursor record = record_at(at, module.unwind_high);
  const std::uint64_t here = record.at();
  const auto back = record.take<std::uint32_t>();
  if (back == 0 || back > here - module.unwind_low) return {};
  const std::optional<Common> common = read_common(here - back, module.unwind_high);
  if (!common || common->signal) return {Cfa::end};
  const std::uint64_t begin = record.pointer(common->encoding, 0);
  const std::uint64_t bytes = record.pointer(common->encoding & 0x0f, 0);
  if (common->augmented) record.skip(record.uleb());
  if (record.bad() || pc < begin || pc - begin >= bytes) return {};
  Program program(common->code_align, common->data_align);
  if (!program.run(common->code, 0, ~std::uint64_t{0})) return {};
  program.begin_function();
  if (!program.run(record, begin, pc)) return {};
  return program.rule();
}

Rule rule_of(Modules& modules, std::uint64_t pc) noexcept {
  Slot& slot = slot_of(pc);
  const std::uint64_t word = slot.rule.load(std::memory_order_relaxed);
  if (word != 0 && (slot.check.load(std::memory_order_relaxed) ^ word) == pc) [[likely]]
    return Rule::unpack(word);
  const Rule rule = read_rule(modules, pc);
  const std::uint64_t fresh = rule.pack();
  slot.check.store(pc ^ fresh, std::memory_order_relaxed);
  slot.rule.store(fresh, std::memory_order_relaxed);
  return rule;
}

#endif

}  // namespace

StackRange readable_stack(std::uint64_t sp) noexcept {
  if (t_stack.high == 0) ask_stack();
  if (sp >= t_stack.low && sp < t_stack.high) return {sp, t_stack.high};
  constexpr std::uint64_t kPage = 4096;
  return {sp, (sp + kPage - 1) / kPage * kPage};
}

bool step_to_caller(Modules& modules, const StackRange& stack, Registers& r, std::uint64_t call) noexcept {
#if defined(__x86_64__)
  const Rule rule = rule_of(modules, call);
  std::uint64_t cfa = 0;
  switch (rule.cfa) {
    case Cfa::from_sp:
      cfa = r.sp;
      break;
    case Cfa::from_fp:
      cfa = r.fp;
      break;
    case Cfa::at_fp:
      if (!read(stack, r.fp + static_cast<std::uint64_t>(std::int64_t{rule.cfa_offset}), cfa)) return false;
      break;
    case Cfa::end:
      return false;
    default:
      return step_by_frame_pointer(stack, r);
  }
  if (rule.cfa != Cfa::at_fp) cfa += static_cast<std::uint64_t>(std::int64_t{rule.cfa_offset});
  std::uint64_t pc = 0;
  if (cfa <= r.sp || !read(stack, cfa - 8, pc)) return false;  // a stack leads upwards
  std::uint64_t fp = r.fp;
  if (rule.fp != Saved::same) {
    const std::uint64_t base = rule.fp == Saved::at_cfa ? cfa : r.fp;
    if (!read(stack, base + static_cast<std::uint64_t>(std::int64_t{rule.fp_offset}), fp)) return false;
  }
  r = {pc, cfa, fp};
  return true;
#else
  (void)modules;
  (void)call;
  return step_by_frame_pointer(stack, r);
#endif
}

std::uint32_t unwind_by_frame_pointers(Registers at, std::uint64_t* calls, std::uint32_t most) noexcept {
  const StackRange stack = readable_stack(at.sp);
  std::uint64_t call = at.pc;
  std::uint32_t n = 0;
  while (n < most) {
    calls[n++] = call;
    if (!step_by_frame_pointer(stack, at) || at.pc < 2) break;
    call = at.pc - 1;
  }
  return n;
}

void forget_unwind_rules() noexcept {
#if defined(__x86_64__)
  for (Slot& slot : g_rules) slot.rule.store(0, std::memory_order_relaxed);
#endif
}

}  // namespace cushion
