// Out: text into an open file, through a small buffer: for what a signal handler may write too.
//
// Never allocates and never throws. The first error sticks; finish() answers it. Not thread safe.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string_view>

#include "core/format.h"
#include "core/output.h"
#include "core/utf8.h"

namespace cushion {

class Out {
 public:
  explicit Out(int fd) noexcept : fd_(fd) {}

  void raw(std::string_view text) noexcept {
    for (; !text.empty();) {
      const std::size_t n = std::min(text.size(), sizeof buffer_ - used_);
      std::memcpy(buffer_ + used_, text.data(), n);
      used_ += n;
      text.remove_prefix(n);
      if (used_ == sizeof buffer_) flush();
    }
  }
  template <class... Args>
  void print(fmt::string_view format, const Args&... args) noexcept {
    char line[512];
    raw(format_into(line, format, args...));
  }
  // A JSON string. Bytes that are not UTF-8 are written as the code points of the same number.
  void quoted(std::string_view text) noexcept {
    raw("\"");
    for (std::size_t i = 0; i < text.size(); ++i) {
      const auto c = static_cast<unsigned char>(text[i]);
      const std::size_t length = utf8_length(text.substr(i));
      if (c == '"' || c == '\\') {
        print("\\{}", text[i]);
      } else if (c < 0x20 || c == 0x7f || length == 0) {
        print("\\u{:04x}", c);
      } else {
        raw(text.substr(i, length));
        i += length - 1;
      }
    }
    raw("\"");
  }
  // 0, or the errno of the first failure.
  int finish() noexcept {
    flush();
    return error_;
  }

 private:
  void flush() noexcept {
    if (error_ == 0) error_ = write_all(fd_, {buffer_, used_});
    used_ = 0;
  }

  int fd_;
  int error_ = 0;
  std::size_t used_ = 0;
  char buffer_[2048];
};

}  // namespace cushion
