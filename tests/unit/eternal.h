// Pools and contexts live as long as the process, in the product and so in tests: their records are read without a
// lock, and there is no moment at which they may go.
#pragma once

#include <memory>
#include <utility>
#include <vector>

namespace cushion {

template <class T, class... Arguments>
T& eternal(Arguments&&... arguments) {
  static auto* const kept = new std::vector<std::unique_ptr<T>>;
  return *kept->emplace_back(std::make_unique<T>(std::forward<Arguments>(arguments)...));
}

}  // namespace cushion
