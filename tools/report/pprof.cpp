// pprof: profile.proto (github.com/google/pprof), gzip-compressed. Few messages of few fields, so they are written by
// hand: a field is its number and kind, then a number in base 128 or a length and bytes.
#include <zlib.h>

#include <map>
#include <stdexcept>
#include <string_view>

#include "tools/report/exports.h"
#include "tools/report/samples.h"
#include "tools/report/words.h"

namespace cushion {
namespace {

class Message {
 public:
  void number(unsigned field, std::uint64_t value) {
    varint(field << 3);
    varint(value);
  }
  void bytes(unsigned field, std::string_view content) {
    varint(field << 3 | 2);
    varint(content.size());
    content_ += content;
  }
  void message(unsigned field, const Message& part) { bytes(field, part.content_); }
  const std::string& content() const { return content_; }

 private:
  void varint(std::uint64_t value) {
    for (; value >= 0x80; value >>= 7) content_ += static_cast<char>(value | 0x80);
    content_ += static_cast<char>(value);
  }
  std::string content_;
};

// profile.proto's numbers are signed.
std::uint64_t as_signed(std::uint64_t value) { return std::min<std::uint64_t>(value, INT64_MAX); }

class Profile {
 public:
  Profile() { string(""); }

  void value_type(const char* type, const char* unit) { profile_.message(1, type_of(type, unit)); }
  void sample(const Sample& sample) {
    Message out;
    std::vector<FramePointer> place;  // frames that were inlined, and the last one, into which they were
    for (std::size_t i = sample.frames.size(); i-- > 0;) {
      place.push_back(sample.frames[i]);
      if (sample.frames[i]->inlined && i != 0) continue;
      out.number(1, location(place));
      place.clear();
    }
    out.number(2, as_signed(sample.count));
    out.number(2, as_signed(sample.bytes));
    profile_.message(2, out);
  }
  void time(double started_s, double duration_s) {
    const auto nanoseconds = [](double s) { return s > 0 && s < 9e9 ? static_cast<std::uint64_t>(s * 1e9) : 0; };
    profile_.number(9, nanoseconds(started_s));
    profile_.number(10, nanoseconds(duration_s));
  }
  std::string take() {
    profile_.message(11, type_of("space", "bytes"));
    profile_.number(12, 1);
    profile_.number(14, string("inuse_space"));
    for (const std::string& text : strings_in_order_) profile_.bytes(6, text);
    return profile_.content();
  }

 private:
  Message type_of(const char* type, const char* unit) {
    Message out;
    out.number(1, string(type));
    out.number(2, string(unit));
    return out;
  }
  std::uint64_t string(const std::string& text) {
    const auto [at, is_new] = strings_.try_emplace(text, strings_.size());
    if (is_new) strings_in_order_.push_back(text);
    return at->second;
  }
  // Where modules lay in memory is not in a report: addresses are those of the modules' files.
  std::uint64_t mapping(const Module& module) {
    const auto [at, is_new] = mappings_.try_emplace({module.path, module.build_id}, mappings_.size() + 1);
    if (is_new) {
      Message out;
      out.number(1, at->second);
      out.number(5, string(module.path));
      out.number(6, string(module.build_id));
      for (const unsigned has : {7U, 8U, 9U, 10U}) out.number(has, 1);  // functions, files, lines, inlined frames
      profile_.message(3, out);
    }
    return at->second;
  }
  std::uint64_t function(const Frame& frame) {
    const std::string name = frame_name(frame);
    const auto [at, is_new] = functions_.try_emplace({name, frame.file}, functions_.size() + 1);
    if (is_new) {
      Message out;
      out.number(1, at->second);
      out.number(2, string(name));
      out.number(3, string(name));
      out.number(4, string(frame.file));
      profile_.message(5, out);
    }
    return at->second;
  }
  std::uint64_t location(const std::vector<FramePointer>& frames) {
    Message out;
    const Frame& outermost = *frames.back();
    if (outermost.module) out.number(2, mapping(*outermost.module));
    out.number(3, outermost.offset);
    for (const FramePointer& frame : frames) {
      Message line;
      line.number(1, function(*frame));
      line.number(2, as_signed(frame->line));
      out.message(4, line);
    }
    const auto [at, is_new] = locations_.try_emplace(out.content(), locations_.size() + 1);
    if (is_new) {
      out.number(1, at->second);
      profile_.message(4, out);
    }
    return at->second;
  }

  Message profile_;
  std::vector<std::string> strings_in_order_;
  std::map<std::string, std::uint64_t> strings_;
  std::map<std::pair<std::string, std::string>, std::uint64_t> mappings_;
  std::map<std::pair<std::string, std::string>, std::uint64_t> functions_;
  std::map<std::string, std::uint64_t> locations_;  // by their content but the number
};

std::string compressed(const std::string& content) {
  z_stream stream{};
  constexpr int kGzip = 15 + 16;
  if (deflateInit2(&stream, Z_DEFAULT_COMPRESSION, Z_DEFLATED, kGzip, 8, Z_DEFAULT_STRATEGY) != Z_OK)
    throw std::runtime_error("zlib has no memory");
  std::string input = content;  // zlib's pointers are not const
  std::string out;
  stream.next_in = reinterpret_cast<Bytef*>(input.data());
  std::size_t left = input.size();
  int state = Z_OK;
  while (state != Z_STREAM_END) {
    char part[1 << 16];
    constexpr std::size_t kPiece = std::size_t{1} << 30;  // its counts have 32 bits
    if (stream.avail_in == 0) {
      stream.avail_in = static_cast<uInt>(std::min(left, kPiece));
      left -= stream.avail_in;
    }
    stream.next_out = reinterpret_cast<Bytef*>(part);
    stream.avail_out = sizeof part;
    state = deflate(&stream, left == 0 ? Z_FINISH : Z_NO_FLUSH);
    out.append(part, sizeof part - stream.avail_out);
  }
  deflateEnd(&stream);
  return out;
}

}  // namespace

Exported to_pprof(const std::vector<Report>& reports) {
  Samples samples = live_samples(reports);
  if (samples.all.empty()) return {{}, std::move(samples.lacks)};
  Profile profile;
  profile.value_type("inuse_objects", "count");
  profile.value_type("inuse_space", "bytes");
  for (const Sample& sample : samples.all) profile.sample(sample);
  profile.time(reports.front().started_unix_s, reports.front().duration_s);
  return {compressed(profile.take()), std::move(samples.lacks)};
}

}  // namespace cushion
