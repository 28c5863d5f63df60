// format_into: text into a buffer of the caller's, cut to fit. Allocates nothing for numbers and strings, never throws.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <string_view>

namespace cushion {

template <std::size_t N, class... Args>
std::string_view format_into(char (&buffer)[N], fmt::string_view format, const Args&... args) noexcept {
  try {
    const auto end = fmt::vformat_to_n(buffer, N, format, fmt::make_format_args(args...));
    return {buffer, std::min(end.size, N)};
  } catch (...) {  // a format that does not match its arguments
    return {};
  }
}

}  // namespace cushion
