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
  const size_t bytes = num_ranks_ * sizeof(Page);
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
  pages_ = static_cast<Page*>(memory);  // zeros
  path_ = format("/proc/{}/fd/{}", ::getpid(), fd_);
}

ProgressBoard::~ProgressBoard() {
  ::munmap(pages_, num_ranks_ * sizeof(Page));
  ::close(fd_);
}

std::vector<RankProgress> ProgressBoard::read() const {
  std::vector<RankProgress> ranks;
  for (size_t i = 0; i < num_ranks_; ++i) {
    const Page& page = pages_[i];
    ranks.push_back({page.count, page.collectives, page.watched});
  }
  return ranks;
}

void ProgressBoard::clear() {
  for (size_t i = 0; i < num_ranks_; ++i) {
    pages_[i].count = pages_[i].collectives = 0;
    pages_[i].watched = false;
  }
}

// Maps the pages up to its own, since a mapping begins where the file does.
ProgressMark::ProgressMark(const std::string& path, int local_rank) {
  if (path.empty() || local_rank < 0) return;
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return;
  rank_ = static_cast<size_t>(local_rank);
  void* memory = map(fd, (rank_ + 1) * sizeof(ProgressBoard::Page), 0);
  ::close(fd);
  if (memory != MAP_FAILED) pages_ = static_cast<ProgressBoard::Page*>(memory);
}

ProgressMark::~ProgressMark() {
  if (pages_ == nullptr) return;
  pause();
  ::munmap(pages_, (rank_ + 1) * sizeof(ProgressBoard::Page));
}

void ProgressMark::advance() {
  if (pages_ == nullptr) return;
  pages_[rank_].count.fetch_add(1);
  pages_[rank_].watched = true;
}

std::atomic<uint64_t>* ProgressMark::collectives() {
  return pages_ != nullptr ? &pages_[rank_].collectives : nullptr;
}

void ProgressMark::pause() {
  if (pages_ != nullptr) pages_[rank_].watched = false;
}

}  // namespace echelon
