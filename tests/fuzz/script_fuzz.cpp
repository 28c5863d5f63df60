// doctor's reader of `#!` lines: any bytes are read, and what is named is one word of the first line. Input: the bytes.
#include <string_view>

#include "tests/fuzz/require.h"
#include "tools/script.h"

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  const std::string_view head(reinterpret_cast<const char*>(data), size);
  const std::string name = cushion::interpreter_of(head);
  require(name.empty() || head.starts_with("#!"));
  require(name.find_first_of(" \t\n\v\f\r") == std::string::npos);
  require(head.substr(0, head.find('\n')).find(name) != std::string_view::npos);
  return 0;
}
