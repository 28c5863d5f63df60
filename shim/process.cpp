#include "shim/process.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <mutex>

#include "core/format.h"
#include "core/libraries.h"
#include "core/log.h"
#include "core/options.h"
#include "shim/helper.h"
#include "shim/hooks.h"

namespace cushion {

constinit std::atomic<Life> g_life{Life::fresh};

namespace {

// When the process loaded us. The coarse clock is the one that file times are taken from.
constinit LoadTime g_loaded{};
__attribute__((constructor)) void note_load_time() {
  clock_gettime(CLOCK_REALTIME_COARSE, &g_loaded.wall);
  g_loaded.clock = ClockPair::now();
}

constinit std::atomic<int> g_status{0};  // what exit was called with

constinit std::mutex g_start_mutex;  // one thread starts the runtime; g_life's release shows it to the others

// Deadly signals. A handler is installed only where the disposition is the default one: JVMs and others live with
// SIGSEGV. It writes the report with what may be called in a handler, and dies as the program would have.
constexpr int kFaults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
constexpr int kDeadly[] = {SIGSEGV, SIGBUS,  SIGFPE,  SIGILL,  SIGABRT, SIGTERM, SIGINT,  SIGHUP,
                           SIGQUIT, SIGXCPU, SIGXFSZ, SIGALRM, SIGUSR1, SIGUSR2, SIGPIPE, SIGSYS};

void on_deadly_signal(int number, siginfo_t* info, void*) noexcept {
  const int saved = errno;
  if (g_life.load(std::memory_order_acquire) == Life::serving) {
    char how[] = "signal 00";
    how[7] = static_cast<char>('0' + number / 10);
    how[8] = static_cast<char>('0' + number % 10);
    if (number < 10) {
      how[7] = how[8];
      how[8] = '\0';
    }
    runtime().report(how, Patience::none);
  }
  struct sigaction plain {};
  plain.sa_handler = SIG_DFL;
  sigaction(number, &plain, nullptr);
  // A fault happens again when the handler returns, and so leaves a core at its place. Every other signal is over: it
  // is raised again, also one from the terminal, which comes from the kernel as a fault does.
  bool again = false;
  for (const int fault : kFaults) again = again || (number == fault && info != nullptr && info->si_code > 0);
  if (!again) raise(number);
  errno = saved;
}

// Whether the program left the signal alone.
bool is_default(int number) noexcept {
  struct sigaction now {};
  return sigaction(number, nullptr, &now) == 0 && (now.sa_flags & SA_SIGINFO) == 0 && now.sa_handler == SIG_DFL;
}

void watch_signals() noexcept {
  for (const int number : kDeadly) {
    if (!is_default(number)) continue;
    struct sigaction ours {};
    ours.sa_sigaction = on_deadly_signal;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&ours.sa_mask);
    sigaction(number, &ours, nullptr);
  }
}

// The signal of TRACK_SIGNAL. A vfork child has our handlers and our memory, and is not us.
void on_toggle(int) noexcept {
  const int saved = errno;
  if (g_life.load(std::memory_order_acquire) == Life::serving && runtime().program().pid == getpid())
    runtime().toggle_track();
  errno = saved;
}

// Before watch_signals, which leaves alone what is not default.
void watch_toggle(int number) noexcept {
  if (number == 0) return;
  if (!is_default(number)) {
    log::complain("CUSHION_TRACK_SIGNAL: the program handles this signal itself, and keeps it");
    return;
  }
  struct sigaction ours {};
  ours.sa_handler = on_toggle;
  ours.sa_flags = SA_RESTART | SA_ONSTACK;
  sigemptyset(&ours.sa_mask);
  sigaction(number, &ours, nullptr);
}

void finish(const char* how) noexcept {
  if (g_life.load(std::memory_order_acquire) != Life::serving) return;
  runtime().end_background();
  runtime().report(how, Patience::some);
}

// A fork waits for a start under way, so that the child inherits either nothing or the whole. Threads that start at the
// same time may each register these handlers, which then run as often at one fork: the depth makes that harmless.
constinit thread_local int t_forking = 0;
void before_fork() noexcept {
  if (t_forking++ != 0) return;
  g_start_mutex.lock();
  g_bind_mutex.lock();  // in start()'s order
}
void in_forking_parent() noexcept {
  if (--t_forking != 0) return;
  g_bind_mutex.unlock();
  g_start_mutex.unlock();
}
void in_forked_child() noexcept {
  if (g_life.load(std::memory_order_relaxed) == Life::serving) {
    g_life.store(Life::forked, std::memory_order_release);
    runtime().forked();
  }
  in_forking_parent();
}

void at_quick_exit_hook() { finish("quick_exit"); }

// The library of a tool that checks memory accesses, if one is loaded: compute-sanitizer's own, or NVIDIA's Sanitizer
// API, which others are built on. They know the driver's allocations only: of a served block they would see the segment
// that it lies in, and miss every access beyond the block. Takes the loader's lock.
const char* access_checker() noexcept {
  for (const char* name : {"libsanitizer-collection.so", "libsanitizer-public.so"})
    if (is_loaded(name)) return name;
  return nullptr;
}

// With g_start_mutex held.
void start(const char* checker) noexcept {
  if (g_life.load(std::memory_order_relaxed) != Life::fresh) return;
  if (inert(program_invocation_short_name)) {
    g_life.store(Life::native, std::memory_order_release);
    return;
  }
  if (checker != nullptr && !serves_under_checkers()) {
    char line[160];
    log::complain(
        format_into(line, "{} is loaded: running on native CUDA; CUSHION_DISABLE=0 serves all the same", checker));
    g_life.store(Life::native, std::memory_order_release);
    return;
  }
  const bool started = runtime().start(environ, program_invocation_short_name, g_loaded);
  if (started) {
    at_quick_exit(at_quick_exit_hook);
    on_exit(
        [](int status, void*) {
          g_status.store(status, std::memory_order_relaxed);
          if (g_life.load(std::memory_order_acquire) == Life::serving) runtime().end_background();
        },
        nullptr);
    watch_toggle(runtime().options().track_signal.number);
    watch_signals();
    if (runtime().options().ctl == CtlMode::on && !start_helper(runtime()))
      log::complain("CUSHION_CTL: no thread can be had; the next allocation call answers");
  }
  g_life.store(started ? Life::serving : Life::native, std::memory_order_release);
}

// Runs after the program's atexit handlers and its own static destructors, so that what they free is not called a leak.
// (A library's that the loader finalises after us may still free; that is answered by late_free.)
__attribute__((destructor)) void at_unload() {
  if (g_life.load(std::memory_order_acquire) != Life::serving) return;
  finish("exit");
  const int status = g_status.load(std::memory_order_relaxed);
  const int code = runtime().exit_code(status);
  g_life.store(Life::ended, std::memory_order_release);
  if (code == status) return;
  std::fflush(nullptr);  // what exit would still have done; other libraries' destructors are left out
  for (;;) syscall(SYS_exit_group, code);
}

[[noreturn]] void leave(int status) noexcept {
  finish("_exit");
  const int code = g_life.load(std::memory_order_acquire) == Life::serving ? runtime().exit_code(status) : status;
  for (;;) syscall(SYS_exit_group, code);
}

}  // namespace

void start_serving() noexcept {
  // Before the lock is first taken: a fork in another thread must find the handlers in place.
  static constinit std::atomic<bool> registered{false};
  if (!registered.load(std::memory_order_acquire)) {
    pthread_atfork(before_fork, in_forking_parent, in_forked_child);
    registered.store(true, std::memory_order_release);
  }
  // Binding takes the loader's lock, which a thread that is waiting for ours may hold.
  if (!bind_driver()) return;  // no driver is loaded: this allocation fails natively, the next may not
  const char* const checker = access_checker();
  std::lock_guard lock(g_start_mutex);
  start(checker);
}

bool may_start() noexcept {
  return g_life.load(std::memory_order_acquire) == Life::fresh && !inert(program_invocation_short_name);
}

bool choose_track_before_start(Tracking wanted) noexcept {
  if (!may_start()) return false;
  std::lock_guard lock(g_start_mutex);
  if (g_life.load(std::memory_order_relaxed) != Life::fresh) return false;
  runtime().choose_track(wanted);
  return true;
}

}  // namespace cushion

extern "C" {
__attribute__((visibility("default"))) void _exit(int status) { cushion::leave(status); }
__attribute__((visibility("default"))) void _Exit(int status) noexcept { cushion::leave(status); }
}
