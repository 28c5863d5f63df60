// ControlFile: the control page's file. A process has one from its first device allocation until it ends, named by its
// pid, start and pid namespace, in a folder of its user's alone: $XDG_RUNTIME_DIR/cushion, else /tmp/cushion-UID.
//
// Invariant: nothing is created or opened through a symbolic link, in a folder or file of another user's, or in one
// that others may enter. A page is believed only if it is whole, its header says what its name says, and the process of
// that pid has begun when it says and has the file mapped now: a pid that came again, or a process that has become
// another program, has not. Pages whose process is gone are removed by whoever lists them.
// Cost: some twenty system calls at the first allocation (0.2 ms measured on ext4), two at the end.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/control_page.h"

namespace cushion {

// ---- the process's own
class ControlFile {
 public:
  constexpr ControlFile() = default;

  // Null if none can be had (told to the log): the process then cannot be controlled from outside.
  ControlPage* create(std::string_view program, bool helper) noexcept;
  void remove() noexcept;  // safe in signal handlers
  // In a forked child: the page becomes a private one, and the file the parent's alone.
  void detach() noexcept;

 private:
  ControlPage* page_ = nullptr;
  dev_t device_ = 0;
  ino_t inode_ = 0;
  char path_[512]{};
};

// ---- for other processes of the user
// Another process's page, mapped; its file open, for the askers' lock.
class OpenPage {
 public:
  OpenPage(ControlPage* page, int fd) noexcept : page_(page), fd_(fd) {}
  OpenPage(OpenPage&& other) noexcept;
  OpenPage& operator=(OpenPage&&) = delete;
  ~OpenPage();
  ControlPage* operator->() const noexcept { return page_; }
  int fd() const noexcept { return fd_; }

 private:
  ControlPage* page_;
  int fd_;
};

struct PageSearch {
  std::vector<OpenPage> pages;
  std::vector<std::string> problems;  // one line each: pages that are there and cannot be believed
};

// The folders that are looked in, in order.
std::vector<std::string> control_folders();
std::string page_name(const ProcessKey& key);

// The page of one process: one of the two is empty, and has one entry else.
PageSearch find_page(std::int64_t pid, const std::vector<std::string>& folders = control_folders());
// The pages of all processes of the user in this pid namespace. Removes those whose process is gone.
PageSearch list_pages(const std::vector<std::string>& folders = control_folders());

}  // namespace cushion
