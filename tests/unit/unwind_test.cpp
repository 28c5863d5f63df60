// Unwinding, held to what the compiler's own unwinder says of the same stack.
#include "core/unwind.h"

#include <gnu/libc-version.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <ucontext.h>
#include <unwind.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

namespace cushion {
namespace {

using Calls = std::vector<std::uint64_t>;
constexpr std::uint32_t kMost = 120;

Modules& modules() {
  static Modules all;
  return all;
}

// Both walks of the stack above the caller. The first call of each lies in this function, at two places of it.
struct Walks {
  Calls ours;
  Calls reference;
};
[[gnu::noinline]] Walks walk() {
  Walks walks;
  walks.ours.resize(kMost);
  walks.ours.resize(unwind(modules(), registers_here(), walks.ours.data(), kMost, [](std::uint64_t) { return false; }));
  _Unwind_Backtrace(
      [](_Unwind_Context* context, void* to) {
        auto& calls = *static_cast<Calls*>(to);
        const std::uint64_t ip = _Unwind_GetIP(context);
        if (ip != 0 && calls.size() < kMost) calls.push_back(ip - 1);
        return _URC_NO_REASON;
      },
      &walks.reference);
  walks.ours.erase(walks.ours.begin());
  walks.reference.erase(walks.reference.begin());
  return walks;
}

void expect_same(const Walks& walks, std::size_t at_least) {
  EXPECT_GE(walks.reference.size(), at_least);
  EXPECT_EQ(walks.ours, walks.reference);
}

[[gnu::noinline]] Walks through_alloca(std::size_t bytes) {
  auto* room = static_cast<volatile char*>(__builtin_alloca(bytes));
  room[bytes - 1] = 1;
  Walks walks = walk();
  room[0] = 2;
  return walks;
}

// The compiler aligns the stack, and says where the frame is by an expression.
[[gnu::noinline]] Walks through_alignment(std::size_t bytes) {
  alignas(256) volatile char block[512];
  block[bytes % 512] = 1;
  Walks walks = through_alloca(bytes);
  block[0] = block[bytes % 512];
  return walks;
}

[[gnu::noinline, gnu::optimize("omit-frame-pointer")]] Walks without_frame_pointer(int depth) {
  if (depth == 0) return walk();
  Walks walks = without_frame_pointer(depth - 1);
  walks.ours.reserve(walks.ours.size() + 1);
  return walks;
}

[[gnu::noinline, gnu::optimize("no-omit-frame-pointer")]] Walks with_frame_pointer(int depth) {
  if (depth == 0) return walk();
  Walks walks = depth % 2 != 0 ? with_frame_pointer(depth - 1) : without_frame_pointer(depth - 1);
  walks.ours.reserve(walks.ours.size() + 1);
  return walks;
}

// ...through many registers that the callee must save.
[[gnu::noinline]] Walks through_arithmetic(std::uint64_t seed) {
  std::uint64_t x[12];
  std::iota(std::begin(x), std::end(x), seed);
  Walks walks = with_frame_pointer(static_cast<int>(seed % 7));
  volatile std::uint64_t sum = 0;
  for (const std::uint64_t value : x) sum = sum + value;
  return walks;
}

TEST(Unwind, SaysWhatTheCompilersUnwinderSays) {
  expect_same(walk(), 5);
  for (const std::size_t bytes : {16u, 100u, 5000u}) expect_same(through_alloca(bytes), 6);
  for (const std::size_t bytes : {16u, 100u, 5000u}) expect_same(through_alignment(bytes), 7);
  for (const int depth : {0, 1, 2, 3, 10, 40}) {
    expect_same(without_frame_pointer(depth), static_cast<std::size_t>(depth) + 5);
    expect_same(with_frame_pointer(depth), static_cast<std::size_t>(depth) + 5);
  }
  for (std::uint64_t seed = 0; seed < 20; ++seed) expect_same(through_arithmetic(seed), 6);
}

TEST(Unwind, PassesThroughTheLibrariesThatCallBack) {
  int values[] = {3, 1, 2};
  static Walks seen;
  std::qsort(values, 3, sizeof values[0], [](const void* a, const void* b) {
    seen = walk();
    return *static_cast<const int*>(a) - *static_cast<const int*>(b);
  });
  expect_same(seen, 7);
  std::function<Walks()> inner = [] { return walk(); };
  for (int i = 0; i < 5; ++i) inner = [inner] { return through_alloca(64).ours.empty() ? Walks{} : inner(); };
  expect_same(inner(), 10);
}

TEST(Unwind, EndsAtTheStartOfAThread) {
  Walks seen;
  std::thread([&] { seen = through_alignment(33); }).join();
  expect_same(seen, 5);
}

// Constructors, catch blocks and destructors of one function have rules of their own.
TEST(Unwind, IsRightInsideExceptionHandling) {
  struct Guard {
    Walks& to;
    ~Guard() { to = walk(); }
  };
  Walks in_destructor;
  Walks in_catch;
  try {
    const Guard guard{in_destructor};
    throw 1;
  } catch (int) {
    in_catch = walk();
  }
  expect_same(in_catch, 5);
  // Through the unwinder that runs the destructor, both go as far as each other.
  EXPECT_EQ(in_destructor.ours, in_destructor.reference);
}

TEST(Unwind, StopsAtTheMostThatIsWanted) {
  Calls calls(kMost, 0);
  for (std::uint32_t most = 1; most < 4; ++most) {
    std::fill(calls.begin(), calls.end(), 0);
    EXPECT_EQ(unwind(modules(), registers_here(), calls.data(), most, [](std::uint64_t) { return false; }), most);
    EXPECT_EQ(calls[most], 0u);
  }
}

// A fiber's stack is not the thread's: at least the call itself is found, and nothing outside is read.
ucontext_t g_main;
ucontext_t g_fiber;
std::uint32_t g_found = 0;
TEST(Unwind, IsSafeOnAStackThatIsNotTheThreads) {
  std::vector<char> stack(64 << 10);
  getcontext(&g_fiber);
  g_fiber.uc_stack.ss_sp = stack.data();
  g_fiber.uc_stack.ss_size = stack.size();
  g_fiber.uc_link = &g_main;
  makecontext(
      &g_fiber,
      [] {
        Calls calls(kMost);
        g_found = unwind(modules(), registers_here(), calls.data(), kMost, [](std::uint64_t) { return false; });
      },
      0);
  swapcontext(&g_main, &g_fiber);
  EXPECT_GE(g_found, 1u);
}

TEST(Unwind, IsSafeFromRegistersThatLeadNowhere) {
  std::mt19937_64 random(7);
  Calls calls(kMost);
  const Registers here = registers_here();
  for (int i = 0; i < 20000; ++i) {
    Registers r = here;
    switch (random() % 4) {
      case 0:
        r.pc = random();
        break;
      case 1:
        r.fp = random();
        break;
      case 2:
        r.fp = here.sp + random() % 65536;
        break;
      default:
        r.pc = here.pc + random() % (1 << 20);
        break;
    }
    EXPECT_LE(unwind(modules(), r, calls.data(), kMost, [](std::uint64_t) { return false; }), kMost);
  }
}

TEST(Unwind, AModuleSaysWhereItWasLoadedFrom) {
  const int at =
      modules().find(reinterpret_cast<std::uint64_t>(&gnu_get_libc_version) /* what no sanitizer replaces */);
  ASSERT_GE(at, 0);
  const Module& libc = modules()[static_cast<std::size_t>(at)];
  EXPECT_NE(std::string_view(libc.path).find("libc.so"), std::string_view::npos) << libc.path;
  EXPECT_FALSE(libc.program);
  const int own = modules().find(reinterpret_cast<std::uint64_t>(&through_arithmetic));
  ASSERT_GE(own, 0);
  EXPECT_TRUE(modules()[static_cast<std::size_t>(own)].program);
  EXPECT_EQ(modules().find(16), -1);
}

}  // namespace
}  // namespace cushion
