// Two threads, since a thread can sleep either in poll() or on a word of
// memory. The poller waits for pidfds and sockets; it also owns this rank's
// word, so the kernel marks the word when the process dies. The watcher sleeps
// on the next rank's word. Whoever changes `left` from 0 to 2 passes the
// verdict, so a loss is reported once, and a rank that left on purpose (1) is
// not reported.
#include "echelon/comm/shared_memory/monitor.h"

#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <string>
#include <thread>

#include "echelon/text/format.h"

namespace echelon::local {
namespace {

void futex(std::atomic<uint32_t>& word, int operation, uint32_t value) {
  syscall(
      SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, nullptr,
      nullptr, 0);
}

class ProcessMonitor : public Monitor {
 public:
  ProcessMonitor(
      std::shared_ptr<Segment> segment, int rank,
      std::vector<PeerSocket> sockets)
      : segment_(std::move(segment)),
        rank_(rank),
        sockets_(std::move(sockets)) {
    stop_event_ = eventfd(0, EFD_CLOEXEC);
    poller_ = std::thread([this] { poll_peers(); });
    watcher_ = std::thread([this] { watch_next(); });
  }

  ~ProcessMonitor() override {
    stop_.store(true);
    const uint64_t one = 1;
    (void)!write(stop_event_, &one, sizeof(one));
    futex(next_word(), FUTEX_WAKE, INT_MAX);
    poller_.join();
    // Between its look at stop_ and its sleep the watcher misses a wake-up.
    while (!watcher_over_.load()) {
      futex(next_word(), FUTEX_WAKE, INT_MAX);
      std::this_thread::yield();
    }
    watcher_.join();
    close(stop_event_);
    for (const auto& socket : sockets_) {
      close(socket.descriptor);
    }
  }

 private:
  int next() const { return (rank_ + 1) % segment_->size(); }
  std::atomic<uint32_t>& next_word() const {
    return segment_->rank(next()).alive;
  }

  void lost(int rank) {
    auto& block = segment_->rank(rank);
    uint32_t here = 0;
    if (!block.left.compare_exchange_strong(here, 2)) {
      return;  // it left on purpose, or somebody was faster
    }
    segment_->verdict().pass(
        Verdict::Kind::lost, 0, {rank},
        format(
            "rank {} of this host (pid {}) was lost: its process ended", rank,
            block.pid.load()));
    segment_->ring_all();
  }

  void poll_peers() {
    pthread_setname_np(pthread_self(), "echelon-peers");
    hold_word();
    std::vector<pollfd> polled = {{stop_event_, POLLIN, 0}};
    std::vector<int> ranks = {-1};
    std::vector<int> pid_descriptors;
    for (const auto& socket : sockets_) {
      polled.push_back({socket.descriptor, POLLIN, 0});
      ranks.push_back(socket.rank);
    }
    for (int r = 0; r < segment_->size(); ++r) {
      const auto& peer = segment_->rank(r);
      if (r == rank_ ||
          peer.pid_namespace != segment_->rank(rank_).pid_namespace) {
        continue;
      }
      const int descriptor =
          static_cast<int>(syscall(SYS_pidfd_open, peer.pid.load(), 0));
      if (descriptor >= 0) {
        polled.push_back({descriptor, POLLIN, 0});
        ranks.push_back(r);
        pid_descriptors.push_back(descriptor);
      } else if (errno == ESRCH) {
        lost(r);
      }
    }
    while (!stop_.load()) {
      if (poll(polled.data(), polled.size(), -1) <= 0) {
        continue;
      }
      for (size_t i = 1; i < polled.size(); ++i) {
        if (polled[i].revents != 0) {
          lost(ranks[i]);
          polled[i].fd = -1;
        }
      }
    }
    for (const int descriptor : pid_descriptors) {
      close(descriptor);
    }
    drop_word();
  }

  // Gives the kernel the list of words to mark when this thread dies. glibc's
  // own list for the thread is free: the thread takes no robust mutex.
  void hold_word() {
    auto& word = segment_->rank(rank_).alive;
    entry_.next = &robust_.list;
    robust_.list.next = &entry_;
    robust_.futex_offset =
        reinterpret_cast<char*>(&word) - reinterpret_cast<char*>(&entry_);
    robust_.list_op_pending = nullptr;
    syscall(SYS_set_robust_list, &robust_, sizeof(robust_));
    word.store(static_cast<uint32_t>(syscall(SYS_gettid)) | FUTEX_WAITERS);
    futex(word, FUTEX_WAKE, INT_MAX);
  }

  void drop_word() {
    auto& word = segment_->rank(rank_).alive;
    word.store(0);
    robust_.list.next = &robust_.list;
    futex(word, FUTEX_WAKE, INT_MAX);
  }

  void watch_next() {
    pthread_setname_np(pthread_self(), "echelon-next");
    while (!stop_.load() && segment_->rank(next()).left.load() == 0) {
      const uint32_t value = next_word().load();
      if ((value & FUTEX_OWNER_DIED) != 0) {
        lost(next());
        break;
      }
      futex(next_word(), FUTEX_WAIT, value);
    }
    watcher_over_.store(true);
  }

  std::shared_ptr<Segment> segment_;
  int rank_;
  std::vector<PeerSocket> sockets_;
  int stop_event_;
  robust_list entry_{};
  robust_list_head robust_{};
  std::atomic<bool> stop_{false};
  std::atomic<bool> watcher_over_{false};
  std::thread poller_;
  std::thread watcher_;
};

}  // namespace

std::unique_ptr<Monitor> watch_processes(
    std::shared_ptr<Segment> segment, int rank,
    std::vector<PeerSocket> sockets) {
  return std::make_unique<ProcessMonitor>(
      std::move(segment), rank, std::move(sockets));
}

}  // namespace echelon::local
