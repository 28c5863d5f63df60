#include "core/misuse.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <string>

#include "core/output.h"
#include "core/stack_text.h"

namespace cushion {
namespace {

// One block of text, written at once.
class Text {
 public:
  template <class... Args>
  void print(fmt::string_view format, const Args&... args) {
    text_ += fmt::vformat(format, fmt::make_format_args(args...));
  }
  void raw(std::string_view text) { text_ += text; }
  void stack(const Stacks& stacks, std::uint32_t id, std::string_view what) {
    if (id == 0) return;
    print("  {}\n", what);
    print_stack(*this, stacks, id, "    ", true);
  }
  // Of a block that was found damaged.
  void stacks_of(const Stacks& stacks, const FreedBlock& block) {
    stack(stacks, block.allocated, "the block was allocated from");
    stack(stacks, block.freed, block.allocated != 0 ? "and freed from" : "the block was freed from");
  }
  void write() const noexcept { write_all(STDERR_FILENO, text_); }

 private:
  std::string text_;
};

bool contains(const FreedBlock& block, std::uint64_t address) noexcept {
  return block.address != 0 && (address == block.address || address - block.address < block.bytes);
}

}  // namespace

void Misuse::remember(const FreedBlock& block) noexcept {
  std::lock_guard lock(lock_);
  frees_[count_++ % kFrees] = block;
}

std::optional<FreedBlock> Misuse::recall(std::uint64_t address) const noexcept {
  std::lock_guard lock(lock_);
  for (std::uint64_t back = 1; back <= std::min<std::uint64_t>(count_, kFrees); ++back) {
    const FreedBlock& block = frees_[(count_ - back) % kFrees];
    if (contains(block, address)) return block;
  }
  return std::nullopt;
}

void Misuse::wrong_free(Stacks& stacks, const char* call, std::uint64_t address, const FreedBlock* around,
                        const FreedBlock* before) noexcept try {
  const std::uint64_t earlier = told_.fetch_add(1, std::memory_order_relaxed);
  if (earlier > kMostFrees) return;
  Text text;
  if (earlier == kMostFrees) {
    text.print("cushion: {} wrong frees were told; no more are\n", kMostFrees);
    text.write();
    return;
  }
  text.print("cushion: {} of {:#x}: ", call, address);
  if (around != nullptr && around->address != address) {
    text.print("{} bytes into a block of {} bytes at {:#x}\n", address - around->address, around->bytes,
               around->address);
  } else if (around != nullptr) {
    text.print("freed already, a block of {} bytes\n", around->bytes);
  } else if (before != nullptr && before->address == address) {
    text.print("freed already, a block of {} bytes\n", before->bytes);
  } else if (before != nullptr) {
    text.print("{} bytes into a block of {} bytes at {:#x}, which was freed already\n", address - before->address,
               before->bytes, before->address);
  } else {
    text.print("no block begins there: freed already, or never allocated\n");
  }
  text.stack(stacks, stacks.take(0), "called from");
  if (around != nullptr) text.stack(stacks, around->allocated, "the block was allocated from");
  if (before != nullptr) {
    text.stack(stacks, before->allocated,
               around != nullptr ? "a block that was there before was allocated from" : "the block was allocated from");
    text.stack(stacks, before->freed, around != nullptr ? "and freed from" : "and first freed from");
  }
  text.write();
} catch (...) {  // no host memory for the words
}

void Misuse::overwritten_guard(const Stacks& stacks, const Overwritten& found, std::uint64_t guard) noexcept try {
  Text text;
  text.print(
      "cushion: overwritten behind a block of {} bytes at {:#x}: {} of {} guard bytes, the first {} bytes behind "
      "its end\n",
      found.block.bytes, found.block.address, found.count, guard, found.first);
  text.stacks_of(stacks, found.block);
  text.write();
} catch (...) {  // no host memory for the words
}

void Misuse::written_after_free(const Stacks& stacks, const Overwritten& found) noexcept try {
  Text text;
  text.print("cushion: written to after its free, a block of {} bytes at {:#x}: {} bytes, the first at offset {}\n",
             found.block.bytes, found.block.address, found.count, found.first);
  text.stacks_of(stacks, found.block);
  text.write();
} catch (...) {  // no host memory for the words
}

}  // namespace cushion
