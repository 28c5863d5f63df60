// Mutations: the faults that a build of Cushion can be given (core/mutation.h), by name.
#pragma once

#include <string_view>
#include <vector>

namespace order {

struct Mutation {
  std::string_view name;
  std::string_view sentence;
};

inline const std::vector<Mutation>& Mutations() {
  static const std::vector<Mutation> all{
#define CUSHION_MUTATION(name, sentence) {#name, sentence},
#include "core/mutation.def"
#undef CUSHION_MUTATION
  };
  return all;
}

inline bool IsMutation(std::string_view name) {
  for (const Mutation& mutation : Mutations()) {
    if (mutation.name == name) return true;
  }
  return false;
}

}  // namespace order
