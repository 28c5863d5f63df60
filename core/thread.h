// The calling thread's number, asked of the kernel once a thread.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

namespace cushion {

inline long thread_id() noexcept {
  static constinit thread_local long id = 0;
  if (id == 0) id = syscall(SYS_gettid);
  return id;
}

}  // namespace cushion
