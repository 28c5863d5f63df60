// The part of libcushion_mutant.so that says which fault it has: the one that ORDER_MUTATION names.
#include <cstdlib>
#include <iterator>
#include <string_view>

#include "core/mutation.h"

namespace cushion {
namespace {

constexpr std::string_view kNames[] = {
#define CUSHION_MUTATION(name, settings, sentence) #name,
#include "core/mutation.def"
#undef CUSHION_MUTATION
};

int Chosen() noexcept {
  const char* const name = std::getenv("ORDER_MUTATION");
  for (int i = 0; name != nullptr && i < static_cast<int>(std::size(kNames)); ++i) {
    if (name == kNames[i]) return i;
  }
  return -1;
}

}  // namespace

bool mutated(Mutation fault) noexcept {
  static const int chosen = Chosen();
  return static_cast<int>(fault) == chosen;
}

}  // namespace cushion
