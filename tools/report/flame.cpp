#include "tools/report/flame.h"

#include <algorithm>

#include "tools/report/words.h"

namespace cushion {
namespace {

struct Named {  // a sample's frames as they are shown
  std::vector<std::pair<std::string, std::string>> frames;
  std::uint64_t bytes;
  std::uint64_t count;
};

// The samples of one caller, sorted by frames: those that agree at `depth` are one callee.
void grow(FlameFrame& caller, const Named* begin, const Named* end, std::size_t depth) {
  while (begin != end && begin->frames.size() <= depth) ++begin;  // they end in the caller
  while (begin != end) {
    const auto& frame = begin->frames[depth];
    const Named* const next = std::find_if(begin, end, [&](const Named& s) { return s.frames[depth] != frame; });
    FlameFrame& callee = caller.callees.emplace_back();
    callee.name = frame.first;
    callee.place = frame.second;
    for (const Named* s = begin; s != next; ++s) {
      callee.bytes = add(callee.bytes, s->bytes);
      callee.count = add(callee.count, s->count);
    }
    grow(callee, begin, next, depth + 1);
    begin = next;
  }
  std::ranges::stable_sort(caller.callees, std::greater{}, &FlameFrame::bytes);
}

}  // namespace

FlameFrame flame_of(const std::vector<Sample>& samples) {
  std::vector<Named> named;
  FlameFrame root;
  root.name = "all";
  for (const Sample& sample : samples) {
    Named& one = named.emplace_back(Named{{}, sample.bytes, sample.count});
    for (const FramePointer& frame : sample.frames) {
      if (one.frames.size() == FlameFrame::kDeepest) break;
      one.frames.emplace_back(frame_name(*frame), frame_place(*frame));
    }
    root.bytes = add(root.bytes, sample.bytes);
    root.count = add(root.count, sample.count);
  }
  std::ranges::sort(named, {}, &Named::frames);
  grow(root, named.data(), named.data() + named.size(), 0);
  return root;
}

}  // namespace cushion
