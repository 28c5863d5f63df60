// Attention: what is asked of the process while it runs: another level of tracking, a mark, a report, fresh figures.
// Requests come through the control page, by a signal or by the C API.
//
// Whoever asks sets kAttention in the page's word; the next allocation call, or the helper thread, comes here. Locks:
// attend_mutex_ alone, tried and never waited for, held while a request is answered; the report's locks come below it.
// Only `trim` calls the driver.
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <optional>
#include <string>

#include "core/format.h"
#include "core/log.h"
#include "core/metrics.h"
#include "core/output.h"
#include "core/runtime.h"
#include "core/totals.h"

namespace cushion {
namespace {

// Text that another process wrote into the page: up to its end, wherever that is.
template <std::size_t N>
std::string_view bounded(const char (&text)[N]) noexcept {
  return {text, strnlen(text, N - 1)};
}

template <std::size_t N>
void put(char (&to)[N], std::string_view text) noexcept {
  to[text.copy(to, N - 1)] = '\0';
}

}  // namespace

void Runtime::attend() noexcept {
  ControlPage& page = *shared_.page;
  if ((page.word.load(std::memory_order_relaxed) & ControlPage::kCounting) != 0) count_towards_start();
  if ((page.word.load(std::memory_order_relaxed) & ControlPage::kAttention) == 0) return;
  std::unique_lock lock(attend_mutex_, std::try_to_lock);
  if (!lock) return;
  // Before anything is looked at: what is asked for from here on sets it again, and the next call comes. Acquire: what
  // was asked before it is seen.
  page.word.fetch_and(~ControlPage::kAttention, std::memory_order_acq_rel);
  if (toggles_.exchange(0, std::memory_order_relaxed) != 0)
    set_track(page.level() == TrackLevel::off ? tracking_when_on() : Tracking{});
  answer(page);
  publish(page);
  refresh_metrics();
}

// At most every kMetricsAge: a scrape takes no more.
void Runtime::refresh_metrics() noexcept {
  const std::uint64_t now = monotonic_ns();
  if (program_->metrics.empty() || program_->pid != getpid() || now < metrics_due_) return;
  metrics_due_ = now + kMetricsAge;
  write_metrics(*this, true);
}

void Runtime::toggle_track() noexcept {
  toggles_.fetch_xor(1, std::memory_order_relaxed);  // an even number of signals changes nothing
  shared_.page->word.fetch_or(ControlPage::kAttention, std::memory_order_release);
}

Tracking Runtime::tracking_when_on() const noexcept {
  return options().track.level != TrackLevel::off ? options().track : Tracking{TrackLevel::on};
}

void Runtime::set_track(Tracking wanted) noexcept {
  const TrackLevel level = wanted.level;
  std::atomic<std::uint32_t>& word = shared_.page->word;
  if (level == TrackLevel::sampled) shared_.page->interval.store(wanted.interval, std::memory_order_relaxed);
  std::uint32_t before = word.load(std::memory_order_relaxed);
  // Relaxed: a block says for itself how it was tracked, so nothing hangs on who sees the level when.
  while (!word.compare_exchange_weak(before, (before & ControlPage::kAttention) | static_cast<std::uint32_t>(level),
                                     std::memory_order_relaxed)) {
  }
  if ((before & ControlPage::kLevel) == static_cast<std::uint32_t>(level)) return;
  switches_.fetch_add(1, std::memory_order_relaxed);
  log::info("tracking is {}", name_of(level));
}

void Runtime::begin_tracking() noexcept {
  const bool later = options().track_after.ns != 0 || options().track_after.calls != 0;
  if (chosen_) return;
  shared_.page->interval.store(options().track.interval, std::memory_order_relaxed);
  shared_.page->word.store(later ? ControlPage::kCounting : static_cast<std::uint32_t>(options().track.level),
                           std::memory_order_relaxed);
}

void Runtime::count_towards_start() noexcept {
  const TrackStart& after = options().track_after;
  const bool reached = after.calls != 0 ? calls_before_.fetch_add(1, std::memory_order_relaxed) >= after.calls
                                        : monotonic_ns() - program_->loaded.clock.ns >= after.ns;
  if (reached) set_track(tracking_when_on());
}

void Runtime::answer(ControlPage& page) noexcept {
  const auto at = [](RequestState state) { return static_cast<std::uint64_t>(state); };
  std::uint64_t posted = at(RequestState::posted);
  if (!page.request.compare_exchange_strong(posted, at(RequestState::taken), std::memory_order_acq_rel)) return;
  page.failed = 0;
  page.answer[0] = '\0';
  try {
    fulfil(page, std::string(bounded(page.text)));  // a copy: what others can write may lose its end
  } catch (...) {
    page.failed = ENOMEM;
    put(page.answer, reason_of(ENOMEM));
  }
  page.request.store(at(RequestState::done), std::memory_order_release);
}

void Runtime::fulfil(ControlPage& page, const std::string& text) noexcept {
  switch (page.kind) {
    case RequestKind::track:
      if (const std::optional<Tracking> wanted = parse_tracking(text)) {
        set_track(*wanted);
      } else {
        page.failed = EINVAL;
        put(page.answer, "the process knows no such level");
      }
      break;
    case RequestKind::mark:
      if (!mark(text)) {
        page.failed = ENOSPC;
        char line[80];
        put(page.answer, format_into(line, "the process keeps {} marks at most", Marks::kMost));
      }
      break;
    case RequestKind::report:
      page.failed = report_now(text.empty() ? nullptr : text.c_str());
      if (page.failed == EBUSY) {
        put(page.answer, "the exit report of a running process goes there");
      } else if (page.failed != 0) {
        put(page.answer, reason_of(page.failed));
      }
      break;
    case RequestKind::trim: {
      char line[80];
      put(page.answer, format_into(line, "{} bytes given back", trim()));
      break;
    }
    default:
      page.failed = ENOSYS;
      put(page.answer, "the process knows no such request");
  }
}

void Runtime::publish(ControlPage& page) noexcept {
  shared_.for_each_context([](Context& context) { context.settle(); });
  const Totals totals(shared_);
  page.counted.calls.store(sum(totals.served) + sum(totals.forwarded), std::memory_order_relaxed);
  page.counted.frees.store(totals.frees_served + totals.frees_forwarded, std::memory_order_relaxed);
  page.counted.hits.store(sum(totals.served) - totals.misses, std::memory_order_relaxed);
  page.counted.waits.store(totals.free_waits + totals.memory_waits, std::memory_order_relaxed);
  page.counted.at_ns.store(monotonic_ns(), std::memory_order_release);
}

bool Runtime::mark(std::string_view name) noexcept {
  std::uint64_t live = 0;
  std::uint64_t held = 0;
  use(live, held);
  return marks_.add(name, live);
}

int Runtime::report_now(const char* path) noexcept {
  if (program_ == nullptr || program_->pid != getpid()) return EPERM;
  return write_report_now(*this, path);
}

}  // namespace cushion
