#include "echelon/comm/shared_memory/host.h"

#include <malloc.h>
#include <unistd.h>

#include <climits>
#include <vector>

#include "echelon/comm/shared_memory/attachment.h"
#include "echelon/comm/shared_memory/failure.h"
#include "echelon/text/format.h"

namespace echelon::local {
namespace {

class ThreadHub : public Hub {
 public:
  explicit ThreadHub(int size)
      : segment_(Segment::create(size)), joined_(size) {}

  void abort(const std::string& reason) override {
    segment_->verdict().pass(Verdict::Kind::aborted, 0, {}, reason);
    segment_->ring_all();
  }
  std::shared_ptr<Host> join(int rank) {
    const int size = segment_->size();
    if (rank < 0 || rank >= size) {
      throw ConfigError(format("[local] rank {} of a hub of {}", rank, size));
    }
    if (joined_[rank].exchange(true)) {
      throw ConfigError(
          format("[local] rank {} has joined this hub already", rank));
    }
    return std::make_shared<Attachment>(segment_, rank);
  }

 private:
  std::shared_ptr<Segment> segment_;
  std::vector<std::atomic<bool>> joined_;
};

}  // namespace

Attachment::Attachment(std::shared_ptr<Segment> segment, int rank)
    : segment_(std::move(segment)),
      rank_(rank),
      engine_(std::make_shared<Engine>(segment_, rank)) {
  segment_->rank(rank).pid.store(getpid());
  engine_->start();
}

Attachment::~Attachment() {
  segment_->rank(rank_).left.store(1, std::memory_order_seq_cst);
  segment_->ring_all();
  engine_->stop();
  monitor_.reset();
}

void Attachment::publish_status(std::string_view status) {
  std::lock_guard lock(mutex_);
  segment_->status(rank_).publish(status);
}

std::string Attachment::read_status(int rank) const {
  if (rank < 0 || rank >= size()) {
    throw ConfigError(
        format("[local] no rank {} on a host of {}", rank, size()));
  }
  return segment_->status(rank).read();
}

uint64_t Attachment::next_group(const std::string& key) {
  std::lock_guard lock(mutex_);
  return groups_made_[key]++;
}

void Attachment::separate(std::vector<MappedArena> arenas) {
  separate_ = true;
  arenas_ = std::move(arenas);
}

void Attachment::watch(std::unique_ptr<Monitor> monitor) {
  monitor_ = std::move(monitor);
}

void keep_freed_memory() {
#if defined(__GLIBC__)
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, INT_MAX);
#endif
}

std::shared_ptr<Hub> make_hub(int size) {
  keep_freed_memory();
  return std::make_shared<ThreadHub>(size);
}

std::shared_ptr<Host> join_threads(std::shared_ptr<Hub> hub, int rank) {
  return static_cast<ThreadHub&>(*hub).join(rank);
}

}  // namespace echelon::local
