#include "echelon/comm/trace/progress.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

void* map(int fd, size_t bytes, off_t at) {
  return ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, at);
}

}  // namespace

ProgressBoard::ProgressBoard(int num_ranks)
    : num_ranks_(static_cast<size_t>(num_ranks)),
      fd_(::memfd_create("echelon-progress", MFD_CLOEXEC)) {
  const size_t bytes = num_ranks_ * sizeof(Slot);
  void* memory = MAP_FAILED;
  if (fd_ >= 0 && ::ftruncate(fd_, static_cast<off_t>(bytes)) == 0) {
    memory = map(fd_, bytes, 0);
  }
  if (memory == MAP_FAILED) {
    const int error = errno;
    if (fd_ >= 0) ::close(fd_);
    throw Error(format(
        "[launch] no memory for the progress of {} ranks: {}", num_ranks,
        std::strerror(error)));
  }
  slots_ = static_cast<Slot*>(memory);  // zeros
  path_ = format("/proc/{}/fd/{}", ::getpid(), fd_);
}

ProgressBoard::~ProgressBoard() {
  ::munmap(slots_, num_ranks_ * sizeof(Slot));
  ::close(fd_);
}

std::vector<RankProgress> ProgressBoard::read() const {
  std::vector<RankProgress> ranks;
  for (size_t i = 0; i < num_ranks_; ++i) {
    const Slot& slot = slots_[i];
    ranks.push_back(
        {slot.count, slot.collectives, slot.phase, slot.checkpoint_ns});
  }
  return ranks;
}

void ProgressBoard::clear() {
  for (size_t i = 0; i < num_ranks_; ++i) {
    slots_[i].count = slots_[i].collectives = 0;
    slots_[i].phase = RankPhase::other;
    slots_[i].checkpoint_ns = 0;
  }
}

// Maps the slots before its own too: a mapping begins at a page of the file.
ProgressMark::ProgressMark(const std::string& path, int local_rank) {
  if (path.empty() || local_rank < 0) return;
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return;
  rank_ = static_cast<size_t>(local_rank);
  void* memory = map(fd, (rank_ + 1) * sizeof(ProgressBoard::Slot), 0);
  ::close(fd);
  if (memory != MAP_FAILED) slots_ = static_cast<ProgressBoard::Slot*>(memory);
}

ProgressMark::~ProgressMark() {
  if (slots_ == nullptr) return;
  pause();
  ::munmap(slots_, (rank_ + 1) * sizeof(ProgressBoard::Slot));
}

void ProgressMark::advance(RankPhase phase) {
  if (slots_ == nullptr) return;
  slots_[rank_].count.fetch_add(1);
  slots_[rank_].phase = phase;
}

void ProgressMark::add_checkpoint(double seconds) {
  if (slots_ == nullptr || seconds <= 0) return;
  slots_[rank_].checkpoint_ns.fetch_add(static_cast<uint64_t>(seconds * 1e9));
}

std::atomic<uint64_t>* ProgressMark::collectives() {
  return slots_ != nullptr ? &slots_[rank_].collectives : nullptr;
}

void ProgressMark::pause() {
  if (slots_ != nullptr) slots_[rank_].phase = RankPhase::other;
}

}  // namespace echelon
