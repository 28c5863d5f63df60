// Mutations: the faults that a build of Cushion can be given (core/mutation.h), by name.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace order {

struct Mutation {
  std::string_view name;
  std::string_view settings;  // where it shows soon
  std::string_view sentence;
};

inline const std::vector<Mutation>& Mutations() {
  static const std::vector<Mutation> all{
#define CUSHION_MUTATION(name, settings, sentence) {#name, settings, sentence},
#include "core/mutation.def"
#undef CUSHION_MUTATION
  };
  return all;
}

inline const Mutation& MutationNamed(std::string_view name) {
  for (const Mutation& mutation : Mutations()) {
    if (mutation.name == name) return mutation;
  }
  throw std::invalid_argument("no mutation is called " + std::string(name));
}

}  // namespace order
