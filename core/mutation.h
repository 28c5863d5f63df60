// Mutation: a fault that a test puts into the core, to show that its checker would find it (tests/order).
//
// In the product mutated() is constantly false, and nothing of it is left. Only a build that tests make, and that is
// never installed, defines CUSHION_MUTANT and says which fault it has.
#pragma once

namespace cushion {

enum class Mutation {
#define CUSHION_MUTATION(name, settings, sentence) name,
#include "core/mutation.def"
#undef CUSHION_MUTATION
};

#ifdef CUSHION_MUTANT
bool mutated(Mutation fault) noexcept;
#else
constexpr bool mutated(Mutation) noexcept { return false; }
#endif

}  // namespace cushion
