#include "echelon/schedule/dualpipev.h"

#include <deque>

#include "echelon/schedule/builder.h"

namespace echelon {
namespace {

constexpr int32_t kDown = 0;
constexpr int32_t kUp = 1;

class DualPipeV {
 public:
  DualPipeV(Schedule& schedule, int32_t rank, int32_t ranks)
      : list_(schedule, rank),
        upto_(rank + 1),
        after_(ranks - 1 - rank),
        pairs_(schedule.num_microbatches - 2 * ranks + rank + 1) {}

  void write() {
    warm_up();
    for (int32_t i = 0; i < pairs_; ++i) {
      forward_and_backward(kDown, kUp);
      forward_and_backward(kUp, kDown);
    }
    for (int32_t i = 0; i < after_; ++i) {
      list_.backward(kUp);
      forward_and_backward(kUp, kDown);
    }
    cool_down();
  }

 private:
  void forward_and_backward(int32_t forward, int32_t backward) {
    list_.forward(forward);
    list_.backward(backward);
  }

  void split_backward(int32_t local) {
    list_.backward_input(local);
    late_.push_back(local);
  }

  void oldest_weight() {
    if (late_.empty()) return;
    list_.backward_weight(late_.front());
    late_.pop_front();
  }

  void warm_up() {
    for (int32_t i = 0; i < 2 * after_; ++i) list_.forward(kDown);
    for (int32_t i = 0; i < upto_; ++i) {
      list_.forward(kDown);
      list_.forward(kUp);
    }
    for (int32_t i = 0; i < after_; ++i) {
      split_backward(kUp);
      oldest_weight();
      list_.forward(kUp);
    }
  }

  // The backwards that are left, up and down in turn. From the middle on they
  // are split, for the ranks before this one to have their gradients sooner.
  void cool_down() {
    const int32_t whole = upto_;  // of 2 * upto_ backwards
    for (int32_t i = 0; i < 2 * upto_; ++i) {
      finish_backward(i % 2 == 0 ? kUp : kDown, i < whole);
    }
    for (int32_t i = 0; i < after_; ++i) {
      oldest_weight();
      split_backward(kDown);
    }
    while (!late_.empty()) oldest_weight();
  }

  void finish_backward(int32_t local, bool whole) {
    if (whole) {
      list_.backward(local);
    } else {
      split_backward(local);
    }
  }

  detail::RankBuilder list_;
  std::deque<int32_t> late_;  // stages whose W is still to come, oldest first
  int32_t upto_;              // this rank and those before it
  int32_t after_;             // ranks after this one
  int32_t pairs_;
};

}  // namespace

Schedule make_dualpipev(int32_t ranks, int32_t microbatches) {
  Schedule schedule = detail::folded("dualpipev", ranks, microbatches);
  for (int32_t rank = 0; rank < ranks; ++rank) {
    DualPipeV(schedule, rank, ranks).write();
  }
  return schedule;
}

}  // namespace echelon
