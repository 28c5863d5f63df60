#include "core/timeline.h"

#include <gtest/gtest.h>

#include <memory>

namespace cushion {
namespace {

TEST(TimeLine, ThinsItselfAndStaysEven) {
  const auto line = std::make_unique<TimeLine>();
  line->configure(10);
  constexpr std::uint64_t kEnd = 1'000'000;
  for (std::uint64_t ns = 1; ns <= kEnd; ++ns) {
    if (line->due(ns)) line->add(ns, [&](std::uint64_t& live, std::uint64_t& held) { live = held = ns; });
  }
  ASSERT_GT(line->size(), TimeLine::kMost / 4);
  ASSERT_LE(line->size(), TimeLine::kMost);
  EXPECT_EQ((*line)[0].ns, 1u);
  const std::uint64_t distance = (*line)[1].ns - (*line)[0].ns;
  for (std::size_t i = 1; i < line->size(); ++i) {
    const std::uint64_t gap = (*line)[i].ns - (*line)[i - 1].ns;
    EXPECT_LE(gap, 2 * distance);
    EXPECT_EQ((*line)[i].live, (*line)[i].ns);
    EXPECT_EQ((*line)[i].held, (*line)[i].ns);
  }
  EXPECT_GE((*line)[line->size() - 1].ns, kEnd - 2 * distance);
}

TEST(TimeLine, TakesNoPointBeforeItIsDue) {
  const auto line = std::make_unique<TimeLine>();
  line->configure(100);
  int asked = 0;
  for (const std::uint64_t ns : {5, 6, 104, 105, 204, 205})
    line->add(ns, [&](std::uint64_t&, std::uint64_t&) { ++asked; });
  EXPECT_EQ(asked, 3);
  EXPECT_EQ(line->size(), 3u);
}

}  // namespace
}  // namespace cushion
