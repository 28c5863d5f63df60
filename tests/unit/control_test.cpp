// The control page's file: made private, believed only where everything about it is right, removed with its process.
#include <fcntl.h>
#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <filesystem>
#include <fstream>

#include "core/control_file.h"

namespace cushion {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class Control : public ::testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/cushion-control-XXXXXX";
    folder_ = mkdtemp(name);
    setenv("XDG_RUNTIME_DIR", folder_.c_str(), 1);
    page_ = file_.create("a program", false);
    ASSERT_NE(page_, nullptr);
    key_ = *own_key();
    path_ = folder_ / "cushion" / page_name(key_);
  }
  void TearDown() override {
    file_.remove();
    unsetenv("XDG_RUNTIME_DIR");
    fs::remove_all(folder_);
  }
  // In the test's own folder: other processes under Cushion may have pages in the user's.
  PageSearch listed() const { return list_pages({(folder_ / "cushion").string()}); }
  std::string problem() {
    const PageSearch search = find_page(getpid());
    EXPECT_NE(search.pages.empty(), search.problems.empty());
    return search.problems.empty() ? "" : search.problems.front();
  }
  // Overwrites bytes of the page's header in the file.
  template <class Value>
  void forge(std::size_t offset, Value value) {
    const int fd = ::open(path_.c_str(), O_WRONLY | O_CLOEXEC);
    ASSERT_EQ(pwrite(fd, &value, sizeof value, static_cast<off_t>(offset)), static_cast<ssize_t>(sizeof value));
    ::close(fd);
  }
  // A child that ends at once, and is waited for: its pid is nobody's.
  static pid_t dead_pid() {
    const pid_t child = fork();
    if (child == 0) _exit(0);
    waitpid(child, nullptr, 0);
    return child;
  }

  fs::path folder_;
  fs::path path_;
  ControlFile file_;
  ControlPage* page_ = nullptr;
  ProcessKey key_;
};

TEST_F(Control, IsThePagesOwnersAlone) {
  struct stat s {};
  ASSERT_EQ(stat(path_.c_str(), &s), 0);
  EXPECT_EQ(s.st_mode & 07777, 0600u);
  ASSERT_EQ(stat(path_.parent_path().c_str(), &s), 0);
  EXPECT_EQ(s.st_mode & 07777, 0700u);
}

TEST_F(Control, IsFoundByPidAndInTheList) {
  page_->add_context(3)->requested.add(1000);
  const PageSearch found = find_page(getpid());
  ASSERT_THAT(found.pages, SizeIs(1));
  EXPECT_STREQ(found.pages[0]->header.program, "a program");
  EXPECT_EQ(found.pages[0]->header.key, key_);
  EXPECT_EQ(found.pages[0]->slots[0].device.load(), 3);
  EXPECT_EQ(found.pages[0]->slots[0].gauges.requested.current(), 1000u);
  EXPECT_THAT(listed().pages, SizeIs(1));
}

TEST_F(Control, ForgedHeadersAreRefused) {
  forge(offsetof(ControlPage::Header, magic), 'X');
  EXPECT_THAT(problem(), HasSubstr("cannot be trusted: it is no control page"));
  EXPECT_THAT(listed().pages, IsEmpty());
  EXPECT_THAT(listed().problems, SizeIs(1));
  forge(offsetof(ControlPage::Header, magic), 'C');
  forge(offsetof(ControlPage::Header, version), ControlPage::kVersion + 1);
  EXPECT_THAT(problem(), HasSubstr("another version of Cushion"));
  forge(offsetof(ControlPage::Header, version), ControlPage::kVersion);
  forge(offsetof(ControlPage::Header, size), std::uint32_t{64});
  EXPECT_THAT(problem(), HasSubstr("another version of Cushion"));
  forge(offsetof(ControlPage::Header, size), static_cast<std::uint32_t>(sizeof(ControlPage)));
  forge(offsetof(ControlPage::Header, key), key_.pid + 1);
  EXPECT_THAT(problem(), HasSubstr("says that it is another process's"));
  forge(offsetof(ControlPage::Header, key), key_.pid);
  EXPECT_EQ(problem(), "");
}

TEST_F(Control, TruncatedPagesAreRefused) {
  for (const std::uintmax_t size : {std::uintmax_t{0}, std::uintmax_t{10}, std::uintmax_t{4096},
                                    std::uintmax_t{sizeof(ControlPage)} - 1, std::uintmax_t{sizeof(ControlPage)} + 1}) {
    // Beside the file, so that nobody has the short one mapped.
    const fs::path copy = folder_ / "copy";
    fs::copy_file(path_, copy, fs::copy_options::overwrite_existing);
    fs::resize_file(copy, size);
    fs::permissions(copy, fs::perms::owner_read | fs::perms::owner_write);
    const fs::path kept = folder_ / "kept";
    fs::rename(path_, kept);
    fs::rename(copy, path_);
    EXPECT_THAT(problem(), HasSubstr("truncated")) << size;
    fs::rename(kept, path_);
  }
  EXPECT_EQ(problem(), "");
}

TEST_F(Control, LinksAndOpenFilesAreRefused) {
  fs::permissions(path_, fs::perms::owner_read | fs::perms::owner_write | fs::perms::others_read);
  EXPECT_THAT(problem(), HasSubstr("others may have written it"));
  fs::permissions(path_, fs::perms::owner_read | fs::perms::owner_write);
  fs::create_hard_link(path_, folder_ / "second");
  EXPECT_THAT(problem(), HasSubstr("others may have written it"));
  fs::remove(path_);
  fs::create_symlink(folder_ / "second", path_);
  EXPECT_THAT(problem(), HasSubstr("symbolic link"));
  fs::remove(path_);
  fs::create_directory(path_);
  EXPECT_THAT(problem(), HasSubstr("cannot be trusted"));
}

TEST_F(Control, FoldersThatOthersMayEnterAreNotLookedIn) {
  const fs::path folder = path_.parent_path();
  fs::permissions(folder, fs::perms::group_exec, fs::perm_options::add);
  EXPECT_THAT(problem(), HasSubstr("no control page"));
  EXPECT_THAT(list_pages({folder.string()}).pages, IsEmpty());
  fs::permissions(folder, fs::perms::owner_all);
  fs::rename(folder, folder_ / "elsewhere");
  fs::create_directory_symlink(folder_ / "elsewhere", folder);
  EXPECT_THAT(problem(), HasSubstr("no control page"));
  ControlFile other;  // nor written to
  setenv("XDG_RUNTIME_DIR", folder_.c_str(), 1);
  EXPECT_NE(other.create("other", false), nullptr);
  EXPECT_THAT(find_page(getpid(), {fmt::format("/tmp/cushion-{}", geteuid())}).pages, SizeIs(1));
  other.remove();
}

TEST_F(Control, ADeadProcessesPageIsRemovedByWhoeverLists) {
  const ProcessKey dead{dead_pid(), key_.start, key_.pid_namespace};
  const fs::path stale = path_.parent_path() / page_name(dead);
  fs::copy_file(path_, stale);
  EXPECT_THAT(find_page(dead.pid).problems, ElementsAre(HasSubstr("there is no process")));
  EXPECT_THAT(listed().pages, SizeIs(1));
  EXPECT_FALSE(fs::exists(stale));
  EXPECT_TRUE(fs::exists(path_));
}

TEST_F(Control, APidThatCameAgainIsNotTheOldProcess) {
  const ProcessKey old{key_.pid, key_.start - 1, key_.pid_namespace};
  const fs::path stale = path_.parent_path() / page_name(old);
  fs::rename(path_, stale);
  EXPECT_THAT(problem(), HasSubstr("has no control page"));
  EXPECT_THAT(listed().pages, IsEmpty());
  EXPECT_FALSE(fs::exists(stale));
}

TEST_F(Control, AProcessThatBecameAnotherProgramIsNotTheOldOne) {
  int ready[2];
  ASSERT_EQ(pipe2(ready, O_CLOEXEC), 0);
  const pid_t child = fork();
  if (child == 0) {
    ControlFile file;
    if (file.create("before", false) == nullptr) _exit(1);
    execl("/bin/sleep", "sleep", "30", static_cast<char*>(nullptr));
    _exit(1);
  }
  ::close(ready[1]);
  char byte = 0;
  EXPECT_EQ(read(ready[0], &byte, 1), 0);  // closed by the exec
  ::close(ready[0]);
  const fs::path stale = path_.parent_path() / page_name(key_of(child).value());
  EXPECT_TRUE(fs::exists(stale));
  EXPECT_THAT(find_page(child).problems, ElementsAre(HasSubstr("was another program")));
  EXPECT_THAT(listed().pages, SizeIs(1));
  EXPECT_FALSE(fs::exists(stale));
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

TEST_F(Control, APageOfAnotherPidNamespaceIsLeftAlone) {
  const fs::path foreign = path_.parent_path() / page_name({key_.pid, 1, key_.pid_namespace + 1});
  fs::copy_file(path_, foreign);
  EXPECT_THAT(listed().pages, SizeIs(1));
  EXPECT_TRUE(fs::exists(foreign));
}

TEST_F(Control, AForkedChildHasAPageOfItsOwn) {
  const pid_t child = fork();
  if (child == 0) {
    file_.detach();
    page_->word.store(7);
    file_.remove();
    _exit(page_->header.version == 0 ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(page_->word.load(), 0u);
  EXPECT_EQ(problem(), "");
}

TEST_F(Control, OnlyItsOwnFileIsRemoved) {
  fs::remove(path_);
  std::ofstream(path_) << "another's";
  file_.remove();
  EXPECT_TRUE(fs::exists(path_));
}

TEST_F(Control, ProcessesOfOthersAreNamedAsSuch) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can start a process of another user";
  const pid_t child = fork();
  if (child == 0) {
    if (setuid(65534) != 0) _exit(1);
    sleep(30);
    _exit(0);
  }
  while (true) {
    struct stat s {};
    ASSERT_EQ(stat(fmt::format("/proc/{}", child).c_str(), &s), 0);
    if (s.st_uid == 65534) break;
  }
  EXPECT_THAT(find_page(child).problems, ElementsAre(HasSubstr("is another user's (65534)")));
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

TEST(ProcessKey, OfOneselfIsTheSameFromOutside) {
  ASSERT_TRUE(own_key());
  EXPECT_EQ(key_of(getpid()), own_key());
  EXPECT_EQ(own_key()->pid, getpid());
  EXPECT_FALSE(key_of(0));
  EXPECT_FALSE(key_of(-1));
}

}  // namespace
}  // namespace cushion
