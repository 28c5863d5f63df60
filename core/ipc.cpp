#include "core/ipc.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
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

std::optional<CUipcMemHandle> Ipc::issue(CUdeviceptr block, const Place& place, const char*& why) noexcept try {
  std::lock_guard lock(mutex_);
  const std::optional<ProcessKey> key = own_key();
  if (!key) {
    why = "/proc cannot be read";
    return std::nullopt;
  }
  if (!open_records(why)) return std::nullopt;
  if (slots_ == nullptr) slots_ = new std::unordered_map<CUdeviceptr, std::uint32_t>;
  auto found = slots_->find(block);
  if (found == slots_->end()) {
    std::uint32_t slot = 0;
    while (slot < kMost && records_[slot].token[0] != 0) ++slot;
    if (slot == kMost) {
      why = "4096 blocks are exported already";
      return std::nullopt;
    }
    found = slots_->emplace(block, slot).first;
    issued_.fetch_add(1, std::memory_order_relaxed);
  }
  Record& record = records_[found->second];
  // After a reset of the device the address may be another block's.
  const bool same = std::memcmp(&record.place, &place, sizeof place) == 0;
  while (!same || record.token[0] == 0) {
    record.place = place;
    if (getrandom(record.token.data(), sizeof record.token, 0) != sizeof record.token) record.token[0] = 0;
    if (record.token[0] != 0) break;
    if (errno == EINTR) continue;
    why = "the system has no random numbers";
    return std::nullopt;
  }
  Ticket ticket{};
  std::memcpy(ticket.magic, kMagic, sizeof kMagic);
  ticket.key = *key;
  ticket.file = static_cast<std::uint32_t>(file_);
  ticket.slot = found->second;
  ticket.token = record.token;
  CUipcMemHandle handle{};
  std::memcpy(handle.reserved, &ticket, sizeof ticket);
  return handle;
} catch (...) {
  why = "the host has no memory";
  return std::nullopt;
}

bool Ipc::withdraw(CUdeviceptr block) noexcept {
  std::lock_guard lock(mutex_);
  if (slots_ == nullptr) return false;
  const auto found = slots_->find(block);
  if (found == slots_->end()) return false;
  records_[found->second] = {};
  slots_->erase(found);
  issued_.fetch_sub(1, std::memory_order_relaxed);
  return true;
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
  const int file = ::open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (file < 0) {
    why = "its process cannot be asked (another user's, or not dumpable)";
    return std::nullopt;
  }
  Record record{};
  const ssize_t got = pread(file, &record, sizeof record, static_cast<off_t>(ticket.slot * sizeof record));
  ::close(file);
  if (got != static_cast<ssize_t>(sizeof record) || record.token != ticket.token || ticket.token[0] == 0) {
    why = "its block was freed";
    return std::nullopt;
  }
  return record.place;
}

CUdeviceptr Ipc::opened(CUdeviceptr segment, const Place& place) noexcept try {
  std::lock_guard lock(mutex_);
  if (opened_ == nullptr) opened_ = new std::map<CUdeviceptr, Opened>;
  const CUdeviceptr block = segment + place.offset;
  Opened& entry = (*opened_)[block];
  entry = {block, place.bytes, segment, entry.times + 1};
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
