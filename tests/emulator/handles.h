// Handles: opaque values that name the driver's objects.
//
// Invariant: an unknown or stale handle is never followed, it is not in the table. Handles of streams and events are
// used again after destroy, the last one first, as the real driver does (contract §3, measured for streams); those of
// contexts are not. Cost: a hash look-up.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

namespace emu {

enum class Reuse { kNever, kLastFirst };

template <class Handle, class Object>
class Handles {
 public:
  explicit Handles(std::uintptr_t first, Reuse reuse = Reuse::kLastFirst) : next_(first), reuse_(reuse) {}

  Handle Reserve() {
    if (!released_.empty()) {
      const Handle handle = released_.back();
      released_.pop_back();
      return handle;
    }
    next_ += 64;
    return reinterpret_cast<Handle>(next_);
  }

  void Put(Handle handle, std::shared_ptr<Object> object) { objects_[handle] = std::move(object); }

  Handle Add(std::shared_ptr<Object> object) {
    const Handle handle = Reserve();
    Put(handle, std::move(object));
    return handle;
  }

  std::shared_ptr<Object> Find(Handle handle) const {
    const auto found = objects_.find(handle);
    return found == objects_.end() ? nullptr : found->second;
  }

  std::size_t size() const { return objects_.size(); }

  // Forgets the handle and returns what it named.
  std::shared_ptr<Object> Take(Handle handle) {
    const auto found = objects_.find(handle);
    if (found == objects_.end()) return nullptr;
    std::shared_ptr<Object> object = std::move(found->second);
    objects_.erase(found);
    if (reuse_ == Reuse::kLastFirst) released_.push_back(handle);
    return object;
  }

  template <class Predicate>
  void TakeIf(Predicate predicate) {
    std::vector<Handle> gone;
    for (const auto& [handle, object] : objects_) {
      if (predicate(*object)) gone.push_back(handle);
    }
    for (Handle handle : gone) Take(handle);
  }

 private:
  std::uintptr_t next_;
  Reuse reuse_;
  std::vector<Handle> released_;
  std::unordered_map<Handle, std::shared_ptr<Object>> objects_;
};

}  // namespace emu
