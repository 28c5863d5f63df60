#include "core/asking.h"

#include <fmt/format.h>
#include <linux/futex.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <thread>

#include "core/utf8.h"

namespace cushion {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr auto kAtOnce = 200ms;
constexpr auto kPause = 1ms;

std::uint64_t at(RequestState state) { return static_cast<std::uint64_t>(state); }

bool is_gone(const ProcessKey& key) { return key_of(key.pid) != key; }

// The file's lock, so that one asks after another; given back with it.
class Turn {
 public:
  Turn(int fd, Clock::time_point deadline) : fd_(fd) {
    while (!(has_ = flock(fd, LOCK_EX | LOCK_NB) == 0) && Clock::now() < deadline) std::this_thread::sleep_for(kPause);
  }
  ~Turn() {
    if (has_) flock(fd_, LOCK_UN);
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
  explicit operator bool() const { return has_; }

 private:
  int fd_;
  bool has_ = false;
};

template <std::size_t N>
std::string bounded(const char (&text)[N]) {
  return {text, strnlen(text, N)};
}

}  // namespace

void ring(const OpenPage& page) {
  page->word.fetch_or(ControlPage::kAttention, std::memory_order_release);
  page->doorbell.fetch_add(1, std::memory_order_release);
  syscall(SYS_futex, &page->doorbell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

Answer ask(const OpenPage& page, RequestKind kind, const std::string& text, std::chrono::milliseconds patience,
           std::chrono::milliseconds work, void (*waiting)(const OpenPage&)) {
  const ProcessKey key = page->header.key;
  const auto deadline = Clock::now() + patience;
  if (text.size() >= sizeof page->text) return {false, fmt::format("longer than {} bytes", sizeof page->text - 1)};
  const Turn turn(page.fd(), deadline);
  if (!turn) return {false, fmt::format("another cushion ctl is asking process {}", key.pid)};
  std::atomic<std::uint64_t>& request = page->request;
  // An asker that died left its request, or the answer to it. One that is being answered just now is waited for.
  for (std::uint64_t left = request.load(std::memory_order_acquire); left != at(RequestState::idle);) {
    if (left != at(RequestState::taken)) {
      if (request.compare_exchange_strong(left, at(RequestState::idle), std::memory_order_acq_rel)) break;
      continue;
    }
    if (is_gone(key)) return {false, fmt::format("process {} has ended", key.pid)};
    if (Clock::now() >= deadline) return {false, fmt::format("process {} is busy with an earlier request", key.pid)};
    std::this_thread::sleep_for(kPause);
    left = request.load(std::memory_order_acquire);
  }
  page->kind = kind;
  page->text[text.copy(page->text, sizeof page->text - 1)] = '\0';
  request.store(at(RequestState::posted), std::memory_order_release);
  ring(page);

  const auto patient_until = Clock::now() + std::min<Clock::duration>(kAtOnce, patience);
  bool told = waiting == nullptr;
  while (request.load(std::memory_order_acquire) != at(RequestState::done)) {
    if (is_gone(key)) return {false, fmt::format("process {} has ended", key.pid)};
    if (!told && Clock::now() >= patient_until) {
      told = true;
      waiting(page);
    }
    std::uint64_t posted = at(RequestState::posted);
    // What is taken is under way: it is waited for.
    if (Clock::now() >= deadline + work)
      return {false, fmt::format("process {} has begun what was asked for, and has not ended it", key.pid)};
    if (Clock::now() >= deadline &&
        request.compare_exchange_strong(posted, at(RequestState::idle), std::memory_order_acq_rel)) {
      const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(patience).count();
      if (page->header.helper != 0)
        return {false, fmt::format("process {} did not answer in {} s, though CUSHION_CTL=on: nothing was done. Is it "
                                   "stopped?",
                                   key.pid, seconds)};
      return {false, fmt::format("process {} made no allocation call in {} s: nothing was done. Started with "
                                 "CUSHION_CTL=on it would answer at once",
                                 key.pid, seconds)};
    }
    std::this_thread::sleep_for(kPause);
  }
  Answer answer{page->failed == 0, std::string(Printable<400>(bounded(page->answer)).view())};
  request.store(at(RequestState::idle), std::memory_order_release);
  return answer;
}

bool others_trim(std::chrono::milliseconds patience) {
  const auto deadline = Clock::now() + patience;
  bool any = false;
  for (const OpenPage& page : list_pages().pages) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
    if (left <= 0ms) break;
    if (page->header.helper == 0 || page->header.key == own_key()) continue;
    any = ask(page, RequestKind::trim, "", left, 0ms, nullptr).done || any;
  }
  return any;
}

}  // namespace cushion
