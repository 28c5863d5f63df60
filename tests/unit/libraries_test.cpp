// Walks over the loaded libraries, beside forks.
#include "core/libraries.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <string_view>
#include <thread>
#include <vector>

namespace cushion {
namespace {

TEST(Libraries, TheProgramComesFirstAndEachHoldsItsOwnAddresses) {
  int seen = 0;
  bool has_libc = false;
  for_each_library([&](const dl_phdr_info& library) {
    const bool own = addresses_of(library).holds(reinterpret_cast<std::uint64_t>(&addresses_of));
    EXPECT_EQ(own, seen == 0);
    has_libc = has_libc || std::string_view(library.dlpi_name).find("libc.so") != std::string_view::npos;
    ++seen;
    return false;
  });
  EXPECT_GT(seen, 2);
  EXPECT_TRUE(has_libc);
}

TEST(Libraries, AWalkStopsWhereItIsTold) {
  int seen = 0;
  for_each_library([&](const dl_phdr_info&) { return ++seen == 2; });
  EXPECT_EQ(seen, 2);
}

// A child whose parent was inside a walk must still be able to load a library.
TEST(Libraries, AForkedChildCanLoadLibraries) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizer's runtime has a lock in dlopen that the child would wait for";
#endif
  unloads();  // the handlers are there
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      while (!stop) for_each_library([](const dl_phdr_info&) { return false; });
    });
  }
  for (int round = 0; round < 200; ++round) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);
      int seen = 0;
      dl_iterate_phdr([](dl_phdr_info*, std::size_t, void* to) { return ++*static_cast<int*>(to), 0; }, &seen);
      _exit(dlopen("libresolv.so.2", RTLD_NOW) != nullptr && seen > 2 ? 33 : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status)) << "round " << round << ", signal " << WTERMSIG(status);
    ASSERT_EQ(WEXITSTATUS(status), 33);
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace cushion
