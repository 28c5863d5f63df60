#include "core/ipc.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <iterator>

#include "core/format.h"
#include "core/output.h"
#include "core/process_key.h"

namespace cushion {
namespace {

constexpr char kMagic[8] = {'C', 'U', 'S', 'H', 'I', 'P', 'C', '1'};

struct Ticket {
  char magic[8];
  ProcessKey key;
  std::uint32_t file;  // the descriptor in that process
  std::uint32_t slot;
  std::array<std::uint64_t, 2> token;
};
static_assert(sizeof(Ticket) <= sizeof(CUipcMemHandle::reserved));

}  // namespace

bool Ipc::open_records(const char*& why) noexcept {
  if (records_ != nullptr) return true;
  why = "no file can be made for what other processes need to know";
  const int file = memfd_create("cushion-ipc", MFD_CLOEXEC);
  if (file < 0) return false;
  constexpr std::size_t kBytes = kMost * sizeof(Record);
  void* const at = reserve(file, static_cast<off_t>(kBytes)) == 0
                       ? mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0)
                       : MAP_FAILED;
  if (at == MAP_FAILED) {
    ::close(file);
    return false;
  }
  records_ = static_cast<Record*>(at);
  file_ = file;
  return true;
}

void Ipc::clear(Record& record) noexcept {
  // An exchange, so that what is written to the record later does not come before it.
  std::atomic_ref(record.token[0]).exchange(0, std::memory_order_seq_cst);
}

std::optional<CUipcMemHandle> Ipc::issue(CUdeviceptr block, CUcontext context, const Place& place,
                                         const char*& why) noexcept try {
  std::lock_guard lock(mutex_);
  const std::optional<ProcessKey> key = own_key();
  if (!key) {
    why = "/proc cannot be read";
    return std::nullopt;
  }
  if (!open_records(why)) return std::nullopt;
  if (issued_blocks_ == nullptr) issued_blocks_ = new std::unordered_map<CUdeviceptr, Issued>;
  auto found = issued_blocks_->find(block);
  if (found == issued_blocks_->end()) {
    std::array<std::uint64_t, 2> token{};
    while (token[0] == 0) {
      if (getrandom(token.data(), sizeof token, 0) == sizeof token || errno == EINTR) continue;
      why = "the system has no random numbers";
      return std::nullopt;
    }
    std::uint32_t slot = 0;
    while (slot < kMost && records_[slot].token[0] != 0) ++slot;
    if (slot == kMost) {
      why = "4096 blocks are exported already";
      return std::nullopt;
    }
    found = issued_blocks_->emplace(block, Issued{slot, context}).first;
    issued_.fetch_add(1, std::memory_order_relaxed);
    Record& record = records_[slot];
    record.place = place;
    record.token[1] = token[1];
    std::atomic_ref(record.token[0]).store(token[0], std::memory_order_release);
  }
  Ticket ticket{};
  std::memcpy(ticket.magic, kMagic, sizeof kMagic);
  ticket.key = *key;
  ticket.file = static_cast<std::uint32_t>(file_);
  ticket.slot = found->second.slot;
  ticket.token = records_[ticket.slot].token;
  CUipcMemHandle handle{};
  std::memcpy(handle.reserved, &ticket, sizeof ticket);
  return handle;
} catch (...) {
  why = "the host has no memory";
  return std::nullopt;
}

bool Ipc::has(CUdeviceptr block) noexcept {
  std::lock_guard lock(mutex_);
  return issued_blocks_ != nullptr && issued_blocks_->contains(block);
}

void Ipc::withdraw(CUdeviceptr block) noexcept {
  std::lock_guard lock(mutex_);
  if (issued_blocks_ == nullptr) return;
  const auto found = issued_blocks_->find(block);
  if (found == issued_blocks_->end()) return;
  clear(records_[found->second.slot]);
  issued_blocks_->erase(found);
  issued_.fetch_sub(1, std::memory_order_relaxed);
}

void Ipc::forget(CUcontext context) noexcept {
  std::lock_guard lock(mutex_);
  if (issued_blocks_ != nullptr) {
    std::erase_if(*issued_blocks_, [&](const auto& entry) {
      if (entry.second.context != context) return false;
      clear(records_[entry.second.slot]);
      issued_.fetch_sub(1, std::memory_order_relaxed);
      return true;
    });
  }
  if (opened_ != nullptr) std::erase_if(*opened_, [&](const auto& entry) { return entry.second.context == context; });
}

bool Ipc::is_ticket(const CUipcMemHandle& handle) noexcept {
  return std::memcmp(handle.reserved, kMagic, sizeof kMagic) == 0;
}

std::optional<Ipc::Place> Ipc::redeem(const CUipcMemHandle& handle, const char*& why) noexcept {
  Ticket ticket{};
  std::memcpy(static_cast<void*>(&ticket), handle.reserved, sizeof ticket);
  const std::optional<ProcessKey> own = own_key();
  const std::optional<ProcessKey> there = key_of(ticket.key.pid);
  if (!own || own->pid_namespace != ticket.key.pid_namespace) {
    why = "its process is in another pid namespace";
    return std::nullopt;
  }
  if (!there || *there != ticket.key) {
    why = "its process has ended";
    return std::nullopt;
  }
  char path[64]{};
  format_into(path, "/proc/{}/fd/{}", ticket.key.pid, ticket.file);
  struct stat s {};
  why = "its process cannot be asked: another user's, or it has closed the file that says";
  // Before it is opened: what else has that number now may be anything.
  if (ticket.slot >= kMost || stat(path, &s) != 0 || !S_ISREG(s.st_mode) || s.st_uid != geteuid() ||
      s.st_size != static_cast<off_t>(kMost * sizeof(Record)))
    return std::nullopt;
  const int file = ::open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (file < 0) return std::nullopt;
  Record once{};
  Record twice{};
  const auto read = [&](Record& record) {
    return pread(file, &record, sizeof record, static_cast<off_t>(ticket.slot * sizeof record)) ==
           static_cast<ssize_t>(sizeof record);
  };
  const bool whole = read(once) && read(twice) && std::memcmp(&once, &twice, sizeof once) == 0;
  ::close(file);
  if (!whole || once.token != ticket.token || ticket.token[0] == 0) {
    why = "its block was freed";
    return std::nullopt;
  }
  return once.place;
}

CUdeviceptr Ipc::opened(CUdeviceptr segment, CUcontext context, const Place& place) noexcept try {
  std::lock_guard lock(mutex_);
  if (opened_ == nullptr) opened_ = new std::map<CUdeviceptr, Opened>;
  const CUdeviceptr block = segment + place.offset;
  Opened& entry = (*opened_)[block];
  entry = {block, place.bytes, segment, context, entry.times + 1};
  return block;
} catch (...) {
  return 0;
}

std::optional<Ipc::Opened> Ipc::opened_at(CUdeviceptr address) noexcept {
  std::lock_guard lock(mutex_);
  if (opened_ == nullptr) return std::nullopt;
  const auto next = opened_->upper_bound(address);
  if (next == opened_->begin()) return std::nullopt;
  const Opened& entry = std::prev(next)->second;
  return address - entry.block < entry.bytes ? std::optional(entry) : std::nullopt;
}

void Ipc::closed(CUdeviceptr block) noexcept {
  std::lock_guard lock(mutex_);
  if (const auto found = opened_->find(block); found != opened_->end() && --found->second.times == 0)
    opened_->erase(found);
}

}  // namespace cushion
