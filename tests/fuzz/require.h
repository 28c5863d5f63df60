// require: ends a fuzz target at a broken promise, in every build type.
#pragma once

#include <cstdlib>

inline void require(bool kept) {
  if (!kept) std::abort();
}
