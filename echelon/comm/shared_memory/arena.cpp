#include "echelon/comm/shared_memory/arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "echelon/error.h"

namespace echelon::local {
namespace {

constexpr size_t kBlock = 4096;
constexpr size_t kAlwaysKept = size_t{1} << 30;

}  // namespace

Arena::Arena() {
  bytes_ = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) *
           static_cast<size_t>(sysconf(_SC_PAGESIZE)) / kBlock * kBlock;
  descriptor_ = memfd_create("echelon-tensors", MFD_CLOEXEC);
  void* base = MAP_FAILED;
  if (descriptor_ >= 0 &&
      ftruncate(descriptor_, static_cast<off_t>(bytes_)) == 0) {
    base = mmap(
        nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE,
        descriptor_, 0);
  }
  if (base == MAP_FAILED) {
    throw CommError(
        std::string("[local] no shared memory for tensors: ") +
        std::strerror(errno) + "; join without share_tensors");
  }
  base_ = static_cast<char*>(base);
  // A child of fork() would write into its parent's tensors.
  madvise(base_, bytes_, MADV_DONTFORK);
  insert_free(0, {bytes_, 0});
}

Arena::~Arena() {
  munmap(base_, bytes_);
  close(descriptor_);
}

Arena& Arena::of_process() {
  static auto* arena = new Arena;  // tensors may outlive everything
  return *arena;
}

size_t Arena::used_bytes() const {
  std::lock_guard lock(mutex_);
  return used_bytes_;
}

size_t Arena::size_of(const void* data) const {
  std::lock_guard lock(mutex_);
  return used_.at(static_cast<size_t>(static_cast<const char*>(data) - base_));
}

void Arena::insert_free(size_t offset, Block block) {
  free_.emplace(offset, block);
  free_by_size_.emplace(block.bytes, offset);
  kept_bytes_ += block.touched;
}

void* Arena::allocate(size_t bytes) {
  bytes = std::max(kBlock, (bytes + kBlock - 1) / kBlock * kBlock);
  std::lock_guard lock(mutex_);
  const auto fit = free_by_size_.lower_bound({bytes, 0});
  if (fit == free_by_size_.end()) {
    return nullptr;
  }
  const size_t offset = fit->second;
  const Block block = free_.at(offset);
  free_by_size_.erase(fit);
  free_.erase(offset);
  kept_bytes_ -= block.touched;
  if (block.bytes > bytes) {
    const size_t rest = block.bytes - bytes;
    insert_free(
        offset + bytes,
        {rest, block.touched > bytes ? block.touched - bytes : 0});
  }
  used_.emplace(offset, bytes);
  used_bytes_ += bytes;
  return base_ + offset;
}

void Arena::release(void* data) {
  std::lock_guard lock(mutex_);
  size_t offset = static_cast<size_t>(static_cast<char*>(data) - base_);
  const auto used = used_.find(offset);
  Block block{used->second, used->second};
  used_bytes_ -= block.bytes;
  used_.erase(used);
  if (kept_bytes_ + block.bytes > std::max(kAlwaysKept, used_bytes_) &&
      madvise(base_ + offset, block.bytes, MADV_REMOVE) == 0) {
    block.touched = 0;
  }
  const auto join = [&](std::map<size_t, Block>::iterator neighbour) {
    offset = std::min(offset, neighbour->first);
    block.bytes += neighbour->second.bytes;
    block.touched += neighbour->second.touched;
    kept_bytes_ -= neighbour->second.touched;
    free_by_size_.erase({neighbour->second.bytes, neighbour->first});
    free_.erase(neighbour);
  };
  auto after = free_.lower_bound(offset);
  if (after != free_.end() && after->first == offset + block.bytes) {
    join(after);
  }
  after = free_.lower_bound(offset);
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second.bytes == offset) {
      join(before);
    }
  }
  insert_free(offset, block);
}

}  // namespace echelon::local
