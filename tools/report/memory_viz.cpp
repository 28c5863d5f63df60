// memory-viz: PyTorch's snapshot of memory (torch.cuda._memory_viz, pytorch.org/memory_viz), a pickle of the few
// opcodes that both readers know. A report has no addresses, so live blocks are laid one after another, a segment for
// each device and stream.
#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <map>
#include <string_view>

#include "tools/report/exports.h"
#include "tools/report/words.h"

namespace cushion {
namespace {

constexpr std::uint64_t kSeparate = 1000;  // a kind of more blocks than this becomes one block
constexpr std::uint64_t kTraces = 64;      // devices that the viewer lists

class Pickle {  // protocol 4
 public:
  Pickle() { content_ = "\x80\x04"; }

  Pickle& number(std::uint64_t value) {
    constexpr auto kMost = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
    content_ += "\x8a\x08";  // LONG1 of eight bytes
    little(std::min(value, kMost), 8);
    return *this;
  }
  Pickle& text(std::string_view text) {
    content_ += 'X';
    little(text.size(), 4);
    content_ += text;
    return *this;
  }
  Pickle& no() { return op('\x89'); }
  Pickle& pair() { return op('\x86'); }  // of the last two values
  Pickle& begin_list() { return op(']').op('('); }
  Pickle& end_list() { return op('e'); }
  Pickle& begin_dict() { return op('}').op('('); }
  Pickle& end_dict() { return op('u'); }
  // Keeps the last value, to be had again by the number that this returns.
  std::uint64_t keep() {
    op('\x94');
    return kept_++;
  }
  Pickle& again(std::uint64_t kept) {
    op('j');
    little(kept, 4);
    return *this;
  }
  std::string take() {
    op('.');
    return std::move(content_);
  }

 private:
  Pickle& op(char code) {
    content_ += code;
    return *this;
  }
  void little(std::uint64_t value, int bytes) {
    for (; bytes > 0; --bytes, value >>= 8) content_ += static_cast<char>(value & 0xFF);
  }
  std::string content_;
  std::uint64_t kept_ = 0;
};

struct Segment {
  std::vector<std::pair<const LiveBlocks*, const Report*>> blocks;
  std::uint64_t bytes = 0;
};

class Snapshot {
 public:
  Exported of(const std::vector<Report>& reports) {
    std::map<std::pair<std::uint64_t, std::string>, Segment> segments;
    std::uint64_t devices = 0;
    for (const Report& report : reports) {
      for (const LiveBlocks& blocks : report.live) {
        if (blocks.bytes() == 0) continue;
        Segment& segment = segments[{blocks.device, blocks.stream.value_or("0")}];
        segment.blocks.emplace_back(&blocks, &report);
        segment.bytes = add(segment.bytes, blocks.bytes());
        devices = std::max(devices, std::min(blocks.device, kTraces - 1) + 1);
      }
    }
    if (segments.empty()) return {{}, {"nothing was live at exit: there is nothing to export"}};
    out_.begin_dict().text("segments").begin_list();
    for (const auto& [place, one] : segments) segment(place.first, place.second, one);
    out_.end_list().text("device_traces").begin_list();
    for (std::uint64_t i = 0; i < devices; ++i) out_.begin_list().end_list();
    out_.end_list().end_dict();
    Exported exported{out_.take(), {"addresses are made up, and there is no trace of events: reports hold neither"}};
    if (lacks_stacks_) exported.lacks.emplace_back("blocks without a call stack have no frames");
    return exported;
  }

 private:
  void segment(std::uint64_t device, const std::string& stream, const Segment& segment) {
    std::uint64_t id = 0;  // of the legacy and of no stream, as PyTorch has it
    std::from_chars(stream.data(), stream.data() + stream.size(), id);
    out_.begin_dict();
    field("device", device);
    field("stream", id);
    field("address", next_);
    field("total_size", segment.bytes);
    field("allocated_size", segment.bytes);
    field("active_size", segment.bytes);
    field("requested_size", segment.bytes);
    out_.text("segment_type").text("large").text("segment_pool_id").number(0).number(0).pair();
    out_.text("is_expandable").no().text("frames").begin_list().end_list().text("blocks").begin_list();
    for (const auto& [blocks, report] : segment.blocks) {
      const bool separate = blocks->count <= kSeparate;
      for (std::uint64_t i = 0; i < (separate ? blocks->count : 1); ++i)
        block(separate ? blocks->size : blocks->bytes(), *blocks, *report);
    }
    out_.end_list().end_dict();
  }
  void block(std::uint64_t size, const LiveBlocks& blocks, const Report& report) {
    out_.begin_dict();
    field("address", next_);
    field("size", size);
    field("requested_size", size);
    out_.text("state").text("active_allocated").text("frames");
    frames(blocks.stack ? &report.stacks[*blocks.stack] : nullptr);
    out_.end_dict();
    next_ = add(next_, size);
  }
  void frames(const Stack* stack) {  // each stack is written once
    lacks_stacks_ = lacks_stacks_ || stack == nullptr;
    if (const auto kept = kept_.find(stack); kept != kept_.end()) {
      out_.again(kept->second);
      return;
    }
    out_.begin_list();
    for (const FramePointer& frame : stack == nullptr ? std::vector<FramePointer>() : stack->frames) {
      out_.begin_dict().text("name").text(frame_name(*frame)).text("filename");
      out_.text(plain(frame->file.empty() && frame->module ? frame->module->path : frame->file));
      field("line", frame->line);
      out_.end_dict();
    }
    out_.end_list();
    kept_[stack] = out_.keep();
  }
  void field(const char* key, std::uint64_t value) { out_.text(key).number(value); }

  Pickle out_;
  std::map<const Stack*, std::uint64_t> kept_;
  std::uint64_t next_ = std::uint64_t{1} << 32;  // the first address that is made up
  bool lacks_stacks_ = false;
};

}  // namespace

Exported to_memory_viz(const std::vector<Report>& reports) { return Snapshot().of(reports); }

}  // namespace cushion
