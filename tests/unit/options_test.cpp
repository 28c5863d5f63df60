// Options: every line of the table is accepted, refused and described as it says of itself.
#include "core/options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>

#include <algorithm>

namespace cushion {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;
using ::testing::SizeIs;

OptionsResult read(std::vector<const char*> environment) {
  environment.push_back(nullptr);
  return read_options(environment.data());
}

Options valid(std::vector<const char*> environment) {
  OptionsResult result = read(std::move(environment));
  EXPECT_THAT(result.errors, IsEmpty());
  EXPECT_THAT(result.warnings, IsEmpty());
  return result.options;
}

TEST(Options, EveryDefaultIsValidAndDescribedAsWritten) {
  const auto described = describe(valid({}));
  ASSERT_THAT(described, SizeIs(option_table().size()));
  for (std::size_t i = 0; i < described.size(); ++i) {
    const OptionInfo& option = option_table()[i];
    EXPECT_EQ(check_option(option.name, option.fallback), "");
    EXPECT_THAT(described[i], Pair(option.name, option.fallback));
  }
}

TEST(Options, NoEnvironmentMeansDefaults) { EXPECT_THAT(read_options(nullptr).errors, IsEmpty()); }

TEST(Options, EveryWordOfARangeIsAcceptedAndReadsBack) {
  for (const OptionInfo& option : option_table()) {
    std::string_view range = option.range;
    if (range.find('|') == std::string_view::npos) continue;
    while (!range.empty()) {
      const std::string word(range.substr(0, range.find('|')));
      range.remove_prefix(std::min(word.size() + 1, range.size()));
      const std::string entry = std::string("CUSHION_") + option.name + "=" + word;
      EXPECT_THAT(describe(valid({entry.c_str()})), Contains(Pair(option.name, word)));
    }
  }
}

TEST(Options, EnumeratorsStandInTheOrderOfTheirWords) {
  EXPECT_EQ(valid({"CUSHION_ALLOCATOR=cuda"}).allocator, AllocatorKind::cuda);
  EXPECT_EQ(valid({"CUSHION_ALLOCATOR=async"}).allocator, AllocatorKind::async);
  EXPECT_EQ(valid({"CUSHION_FREE=deferred"}).free, FreeMode::deferred);
  EXPECT_EQ(valid({"CUSHION_INIT=zero"}).init, InitMode::zero);
  EXPECT_EQ(valid({"CUSHION_INIT=JUNK"}).init, InitMode::junk);
  EXPECT_EQ(valid({"CUSHION_TRACK=on"}).track, Tracking{TrackLevel::on});
  EXPECT_EQ(valid({"CUSHION_DISABLE=0"}).disable, DisableMode::never);
  EXPECT_EQ(valid({"CUSHION_DISABLE=1"}).disable, DisableMode::always);
  EXPECT_EQ(valid({"CUSHION_LOG_LEVEL=error"}).log_level, LogLevel::error);
  EXPECT_EQ(valid({"CUSHION_LOG_LEVEL=trace"}).log_level, LogLevel::trace);
}

TEST(Options, ABadWordNamesItselfAndTheValidOnes) {
  EXPECT_EQ(check_option("ALLOCATOR", "pol"),
            "CUSHION_ALLOCATOR=pol is not valid: use pool, arena, binning, async or cuda");
  EXPECT_EQ(check_option("INIT", ""), "CUSHION_INIT= is not valid: use none, zero or junk");
  EXPECT_THAT(read({"CUSHION_ALLOCATOR=pool|cuda", "CUSHION_FREE=sync "}).errors, SizeIs(2));
}

// Every option of the table, so that a new one is covered too. A text is anything; all others refuse what is no value,
// in one short printable line that names the option, what was given (its first bytes) and the valid values.
TEST(Options, WhatIsNoValueIsRefusedByEveryOption) {
  const std::string huge(1 << 20, 'x');
  const std::string nines(1 << 20, '9');
  for (const OptionInfo& option : option_table()) {
    const bool is_text = std::string_view(option.range).find("pattern") != std::string_view::npos;
    for (const std::string& value :
         {std::string(), std::string(" "), std::string("-1"), std::string("+1"), std::string("18446744073709551616"),
          std::string("99999999999999999999999h"), std::string("1e400"), std::string("\xff\xfe\x80"),
          std::string("a\nb\x1b[2J"), std::string("%s%n"), huge, nines}) {
      const std::string entry = std::string("CUSHION_") + option.name + "=" + value;
      const OptionsResult result = read({entry.c_str()});
      EXPECT_THAT(result.warnings, IsEmpty());
      if (is_text) {
        EXPECT_THAT(result.errors, IsEmpty());
        EXPECT_THAT(describe(result.options), Contains(Pair(option.name, value)));
        continue;
      }
      ASSERT_THAT(result.errors, SizeIs(1)) << option.name << " takes " << value.substr(0, 40);
      const std::string& line = result.errors.front();
      EXPECT_LT(line.size(), 400U);
      EXPECT_THAT(line, ::testing::StartsWith(std::string("CUSHION_") + option.name + "="));
      EXPECT_THAT(line, HasSubstr(" is not valid: use "));
      const bool shown_as_it_is = value.size() < 40 && value.find_first_of("\n\xff") == std::string::npos;
      EXPECT_THAT(line, HasSubstr(shown_as_it_is ? value : std::string()));
      std::string_view range = option.range;
      while (!range.empty()) {
        const std::string word(range.substr(0, range.find('|')));
        EXPECT_THAT(line, HasSubstr(word));
        range.remove_prefix(std::min(word.size() + 1, range.size()));
      }
      for (const char c : line) EXPECT_FALSE(static_cast<unsigned char>(c) < 0x20 || c == 0x7F);
    }
  }
}

TEST(Options, OfANameGivenTwiceTheFirstCounts) {
  EXPECT_EQ(valid({"CUSHION_FREE=deferred", "CUSHION_FREE=sync"}).free, FreeMode::deferred);
}

struct SizeCase {
  const char* text;
  std::uint64_t bytes;
};
class Sizes : public ::testing::TestWithParam<SizeCase> {};
TEST_P(Sizes, AreReadExactly) {
  const std::string entry = std::string("CUSHION_INITIAL_SIZE=") + GetParam().text;
  EXPECT_EQ(valid({entry.c_str()}).initial_size.of(1'000'000), GetParam().bytes);
}
INSTANTIATE_TEST_SUITE_P(Options, Sizes,
                         ::testing::Values(SizeCase{"0", 0}, SizeCase{"1000", 1000}, SizeCase{"7B", 7},
                                           SizeCase{"1k", 1024}, SizeCase{"2KB", 2000},
                                           SizeCase{"512MiB", 512ULL << 20}, SizeCase{"512mib", 512ULL << 20},
                                           SizeCase{"8G", 8ULL << 30}, SizeCase{"1.5GiB", 3ULL << 29},
                                           SizeCase{"2TB", 2'000'000'000'000},
                                           SizeCase{"16777215TiB", 16777215ULL << 40},
                                           SizeCase{"18446744073709551615", ~0ULL}, SizeCase{"50%", 500'000},
                                           SizeCase{"12.5%", 125'000}, SizeCase{"0%", 0}, SizeCase{"100%", 1'000'000}));

class BadSizes : public ::testing::TestWithParam<const char*> {};
TEST_P(BadSizes, AreRefused) {
  EXPECT_THAT(check_option("MAX_SIZE", GetParam()), HasSubstr(" is not valid: use 0 to 100%"));
}
INSTANTIATE_TEST_SUITE_P(Options, BadSizes,
                         ::testing::Values("", " ", "-1", "+1", "nan", "inf", "NaN%", "101%", "100.1%", "1e9", "0x10",
                                           "1.G", ".5G", "1..5G", "5 G", "5GG", "5X", "%", "50%%", "16777216TiB",
                                           "18446744073709551616", "99999999999999999999999999M",
                                           "17179869183.99999999999999GiBs", "1,5G", "512MiB\n"));

TEST(Options, ASizeBelowItsRangeIsRefused) {
  EXPECT_EQ(check_option("SEGMENT_SIZE", "2MiB"), "");
  EXPECT_EQ(check_option("SEGMENT_SIZE", "1MiB"), "CUSHION_SEGMENT_SIZE=1MiB is not valid: use 2MiB to 100%");
}

TEST(Options, Durations) {
  EXPECT_EQ(valid({"CUSHION_OOM_WAIT=250ms"}).oom_wait.ns, 250'000'000U);
  EXPECT_EQ(valid({"CUSHION_OOM_WAIT=1.5s"}).oom_wait.ns, 1'500'000'000U);
  EXPECT_EQ(valid({"CUSHION_OOM_WAIT=2min"}).oom_wait.ns, 120'000'000'000U);
  EXPECT_EQ(valid({"CUSHION_OOM_WAIT=0"}).oom_wait.ns, 0U);
  EXPECT_EQ(valid({"CUSHION_OOM_WAIT=1h"}).oom_wait.ns, 3'600'000'000'000U);
  for (const char* bad : {"", "1", "61min", "2h", "-1s", "1e3ms", "99999999999999999999h", "1m"}) {
    EXPECT_THAT(check_option("OOM_WAIT", bad), HasSubstr("use 0 to 1h")) << bad;
  }
}

TEST(Options, TrackingBeginsAfterATimeOrCalls) {
  EXPECT_EQ(valid({"CUSHION_TRACK_AFTER=30s"}).track_after.ns, 30'000'000'000U);
  EXPECT_EQ(valid({"CUSHION_TRACK_AFTER=10000calls"}).track_after.calls, 10'000U);
  EXPECT_EQ(valid({"CUSHION_TRACK_AFTER=10000calls"}).track_after.ns, 0U);
  for (const char* bad : {"30", "-1s", "1.5calls", "calls", "10 calls", "30s10calls", "99999999999999999999calls"})
    EXPECT_THAT(check_option("TRACK_AFTER", bad), HasSubstr("a time like 30s")) << bad;
}

TEST(Options, TheTogglingSignalHasANameOrANumber) {
  for (const char* text : {"USR2", "SIGUSR2", "sigusr2", "12"}) {
    const std::string entry = std::string("CUSHION_TRACK_SIGNAL=") + text;
    EXPECT_EQ(valid({entry.c_str()}).track_signal.number, SIGUSR2) << text;
  }
  EXPECT_EQ(valid({"CUSHION_TRACK_SIGNAL=10"}).track_signal.number, SIGUSR1);
  EXPECT_EQ(valid({"CUSHION_TRACK_SIGNAL=off"}).track_signal.number, 0);
  for (const char* bad : {"SIGKILL", "9", "USR3", "SIG", "0", "1 2", "SIGoff"})
    EXPECT_EQ(check_option("TRACK_SIGNAL", bad),
              std::string("CUSHION_TRACK_SIGNAL=") + bad + " is not valid: use off, USR1 or USR2");
}

TEST(Options, EveryLevelOfTrackingIsAWordOfItsOption) {
  for (std::size_t i = 0; i < std::size(kTrackLevels); ++i) {
    const std::string entry = std::string("CUSHION_TRACK=") += kTrackLevels[i];
    EXPECT_EQ(valid({entry.c_str()}).track.level, static_cast<TrackLevel>(i));
    EXPECT_NE(tracking_values().find(kTrackLevels[i]), std::string_view::npos);
  }
}

TEST(Options, ASampleHasItsSize) {
  EXPECT_EQ(valid({"CUSHION_TRACK=sampled"}).track, (Tracking{TrackLevel::sampled, std::uint64_t{64} << 20}));
  EXPECT_EQ(valid({"CUSHION_TRACK=Sampled:512k"}).track, (Tracking{TrackLevel::sampled, std::uint64_t{512} << 10}));
  EXPECT_EQ(valid({"CUSHION_TRACK=sampled:1"}).track, (Tracking{TrackLevel::sampled, 1}));
  for (const char* bad : {"sampled:", "sampled:0", "sampled:x", "sampled:1%", "sampled:8388608TiB", "stacks:1",
                          "on:", ":", "sampled:1:2", "sample"})
    EXPECT_EQ(check_option("TRACK", bad),
              std::string("CUSHION_TRACK=") + bad + " is not valid: use off, on, stacks, sampled or sampled:SIZE");
}

TEST(Options, ACountIsAWholeNumberWithinItsBounds) {
  EXPECT_EQ(valid({"CUSHION_STACK_DEPTH=1"}).stack_depth.value, 1u);
  EXPECT_EQ(valid({"CUSHION_STACK_DEPTH=128"}).stack_depth.value, 128u);
  for (const char* bad : {"0", "129", "-1", "1.5", "", "x", "10 ", "99999999999999999999"})
    EXPECT_EQ(check_option("STACK_DEPTH", bad),
              std::string("CUSHION_STACK_DEPTH=") + bad + " is not valid: use 1 to 128");
}

TEST(Options, TheRankIsTheLaunchers) {
  const auto rank = [](std::vector<const char*> environment) {
    environment.push_back(nullptr);
    return std::string(find_rank(environment.data()));
  };
  EXPECT_EQ(rank({"PATH=/bin"}), "");
  for (const char* name :
       {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID", "RANK"}) {
    const std::string entry = std::string(name) += "=3";
    EXPECT_EQ(rank({entry.c_str()}), "3");
  }
  EXPECT_EQ(rank({"SLURM_PROCID=0", "OMPI_COMM_WORLD_RANK=5"}), "5");
  EXPECT_EQ(rank({"SLURM_PROCID=0", "RANK=7"}), "0");
  EXPECT_EQ(rank({"SLURM_PROCID=0", "RANK=7", "TORCHELASTIC_RUN_ID=x"}), "7");
  EXPECT_EQ(rank({"RANKING=9"}), "");
}

TEST(Options, PatternsMatchTheWholeText) {
  EXPECT_TRUE(matches_pattern("lib*.so*", "libfoo.so.12"));
  EXPECT_TRUE(matches_pattern("", ""));
  EXPECT_TRUE(matches_pattern("*", ""));
  EXPECT_TRUE(matches_pattern("a?c", "abc"));
  EXPECT_FALSE(matches_pattern("a?c", "abbc"));
  EXPECT_FALSE(matches_pattern("foo", "libfoo"));
}

TEST(Options, WhatIsDescribedReadsBackTheSame) {
  for (const auto& [name, value] :
       {std::pair{"MAX_SIZE", "33.3%"}, std::pair{"MAX_SIZE", "0.00001%"}, std::pair{"MAX_SIZE", "1001"},
        std::pair{"MAX_SIZE", "1536MiB"}, std::pair{"OOM_WAIT", "7us"}, std::pair{"OOM_WAIT", "45min"},
        std::pair{"TRACK", "sampled:1MiB"}, std::pair{"TRACK", "stacks"}, std::pair{"STACK_DEPTH", "20"},
        std::pair{"TRACK_AFTER", "90s"}, std::pair{"TRACK_AFTER", "7calls"}, std::pair{"REPORT", "/tmp/a b/%p.json"},
        std::pair{"PROGRAMS", ""}}) {
    const std::string entry = std::string("CUSHION_") + name + "=" + value;
    EXPECT_THAT(describe(valid({entry.c_str()})), Contains(Pair(name, value)));
  }
}

TEST(Options, AnUnknownNameGetsTheNearestAndStopsNothing) {
  const OptionsResult result =
      read({"PATH=/bin", "CUSHION_ALOCATOR=cuda", "CUSHION_free=sync", "CUSHION_=1", "CUSHION_FREE", "XCUSHION_A=1"});
  EXPECT_THAT(result.errors, IsEmpty());
  ASSERT_THAT(result.warnings, SizeIs(3));
  EXPECT_EQ(result.warnings[0], "CUSHION_ALOCATOR is not an option: did you mean CUSHION_ALLOCATOR?");
  EXPECT_EQ(result.warnings[1], "CUSHION_free is not an option: did you mean CUSHION_FREE?");
  EXPECT_EQ(result.options.allocator, AllocatorKind::pool);
}

TEST(Options, MessagesAreOneShortLineOfValidText) {
  const std::string huge(1 << 20, 'x');
  EXPECT_THAT(check_option("FREE", huge), HasSubstr("xxx... (1048576 bytes)"));
  EXPECT_LT(check_option("FREE", huge).size(), 200U);
  EXPECT_LT(check_option("FREE", std::string(1 << 20, '\xff')).size(), 400U);
  EXPECT_LT(check_option("MAX_SIZE", std::string(1 << 20, '9')).size(), 200U);
  EXPECT_LT(check_option(huge, "").size(), 300U);
  EXPECT_THAT(check_option("FREE", "a\nb\x1b[2J\xff\xc0\x80\xed\xa0\x80"),
              HasSubstr("=a\\x0ab\\x1b[2J\\xff\\xc0\\x80\\xed\\xa0\\x80 is"));
  EXPECT_THAT(check_option("FREE", "größe"), HasSubstr("=größe is"));
  EXPECT_THAT(check_option("FREE", "\xc3"), HasSubstr("=\\xc3 is"));
}

class Inert : public ::testing::Test {
 protected:
  void TearDown() override {
    unsetenv("CUSHION_DISABLE");
    unsetenv("CUSHION_PROGRAMS");
  }
  static bool filtered(const char* programs, const char* program) {
    setenv("CUSHION_PROGRAMS", programs, 1);
    return inert(program);
  }
};

TEST_F(Inert, OnlyWhenDisabled) {
  EXPECT_FALSE(inert("train"));
  EXPECT_FALSE(inert(nullptr));
  for (const auto& [value, expected] :
       {std::pair{"1", true}, std::pair{"0", false}, std::pair{"", false}, std::pair{"yes", false}}) {
    setenv("CUSHION_DISABLE", value, 1);
    EXPECT_EQ(inert("train"), expected) << value;
  }
}

TEST_F(Inert, UnderCheckersUnlessToldToServe) {
  EXPECT_FALSE(serves_under_checkers());
  for (const auto& [value, expected] :
       {std::pair{"0", true}, std::pair{"auto", false}, std::pair{"1", false}, std::pair{"no", false}}) {
    setenv("CUSHION_DISABLE", value, 1);
    EXPECT_EQ(serves_under_checkers(), expected) << value;
  }
}

TEST_F(Inert, ProgramsAreNamedOrLeftOut) {
  EXPECT_FALSE(filtered("", "train"));
  EXPECT_FALSE(filtered(" , ", "train"));
  EXPECT_FALSE(filtered("train", "train"));
  EXPECT_TRUE(filtered("train", "trainer"));
  EXPECT_TRUE(filtered("train", nullptr));
  EXPECT_FALSE(filtered("serve, tr*n", "train"));
  EXPECT_FALSE(filtered("python3.??", "python3.11"));
  EXPECT_TRUE(filtered("python3.??", "python3.9"));
  EXPECT_TRUE(filtered("!python*", "python3"));
  EXPECT_FALSE(filtered("!python*", "train"));
  EXPECT_TRUE(filtered("*,!train", "train"));
  EXPECT_FALSE(filtered("*a*b*c", "xxaxxbxbxxc"));
  EXPECT_TRUE(filtered("*a*b*c", "xxaxxbxbxxcd"));
  EXPECT_FALSE(filtered("train**", "train"));
  EXPECT_TRUE(filtered("train?", "train"));
}

TEST(Options, PathPatterns) {
  const PathWords words{{'p', "42"}, {'h', "node1"}, {'e', "train"}, {'r', ""}};
  EXPECT_EQ(expand_path("/tmp/%e-%h.%p%r.json", words), "/tmp/train-node1.42.json");
  EXPECT_EQ(expand_path("%%p %q %", words), "%p %q %");
  EXPECT_EQ(expand_path("", words), "");
  EXPECT_EQ(expand_path("%e", {{'e', "%p"}, {'p', "1"}}), "%p");
}

}  // namespace
}  // namespace cushion
