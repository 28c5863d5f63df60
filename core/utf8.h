// Bytes of unknown origin, shown: how much of a text is well-formed UTF-8, and a text made fit for a line of a
// terminal. Allocates nothing.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <string_view>

namespace cushion {

// Length of the well-formed UTF-8 sequence at the front of `text`, 0 if there is none.
inline std::size_t utf8_length(std::string_view text) noexcept {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return 1;
  const std::size_t length = lead >= 0xC2 && lead <= 0xDF   ? 2
                             : lead >= 0xE0 && lead <= 0xEF ? 3
                             : lead >= 0xF0 && lead <= 0xF4 ? 4
                                                            : 0;
  if (length == 0 || text.size() < length) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
  }
  const bool overlong = (lead == 0xE0 && byte(1) < 0xA0) || (lead == 0xF0 && byte(1) < 0x90);
  const bool outside = (lead == 0xED && byte(1) > 0x9F) || (lead == 0xF4 && byte(1) > 0x8F);
  return overlong || outside ? 0 : length;
}

// `text` in one line: control and non-UTF-8 bytes escaped, and what is longer than `Most` bytes cut off, its length
// said.
template <std::size_t Most>
class Printable {
 public:
  explicit Printable(std::string_view text) noexcept {
    constexpr char kHex[] = "0123456789abcdef";
    for (std::string_view rest = text; !rest.empty();) {
      if (text.size() - rest.size() >= Most) {
        add("... (");
        size_ = static_cast<std::size_t>(std::to_chars(text_ + size_, text_ + sizeof text_, text.size()).ptr - text_);
        add(" bytes)");
        return;
      }
      const auto byte = static_cast<unsigned char>(rest.front());
      const std::size_t length = byte < 0x20 || byte == 0x7F ? 0 : utf8_length(rest);
      if (length == 0) {
        const char escaped[] = {'\\', 'x', kHex[byte >> 4], kHex[byte & 15]};
        add({escaped, sizeof escaped});
      } else {
        add(rest.substr(0, length));
      }
      rest.remove_prefix(std::max<std::size_t>(length, 1));
    }
  }
  std::string_view view() const noexcept { return {text_, size_}; }

 private:
  void add(std::string_view part) noexcept { size_ += part.copy(text_ + size_, sizeof text_ - size_); }

  std::size_t size_ = 0;
  char text_[4 * Most + 40];
};

}  // namespace cushion
