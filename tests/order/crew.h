// Crew: the threads of a program, which take turns. Thread 0 is the caller's own.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <semaphore>
#include <thread>

#include "tests/order/program.h"

namespace order {

class Crew {
 public:
  ~Crew() {
    for (int thread = 1; thread < kThreads; ++thread) End(thread);
  }

  // Runs it on the thread, and returns when it is done.
  void Run(int thread, const std::function<void()>& work) {
    if (thread == 0) return work();
    std::unique_ptr<Member>& member = members_[static_cast<std::size_t>(thread)];
    if (member == nullptr) member = std::make_unique<Member>();
    member->work = &work;
    member->begin.release();
    member->end.acquire();
  }

  // The thread ends; the next work makes another one.
  void End(int thread) { members_[static_cast<std::size_t>(thread)] = nullptr; }

 private:
  struct Member {
    const std::function<void()>* work = nullptr;  // null: the end
    std::binary_semaphore begin{0}, end{0};       // hand the turn over, and `work` with it
    std::thread thread{[this] {
      for (begin.acquire(); work != nullptr; begin.acquire()) {
        (*work)();
        end.release();
      }
    }};
    Member() = default;
    ~Member() {
      work = nullptr;
      begin.release();
      thread.join();
    }
  };
  std::array<std::unique_ptr<Member>, kThreads> members_;
};

}  // namespace order
