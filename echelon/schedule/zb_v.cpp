#include "echelon/schedule/zb_v.h"

#include <algorithm>

#include "echelon/schedule/builder.h"

namespace echelon {
namespace {

constexpr int32_t kDown = 0;
constexpr int32_t kUp = 1;
using Kind = ActionKind;

class ZbV {
 public:
  ZbV(Schedule& schedule, int32_t rank, int32_t ranks, int32_t microbatches)
      : list_(schedule, rank),
        before_(rank),
        after_(ranks - rank),
        microbatches_(microbatches) {}

  void write() {
    warm_up();
    while (list_.count(Kind::forward, kDown) < microbatches_ ||
           list_.count(Kind::forward, kUp) < microbatches_) {
      if (list_.count(Kind::forward, kDown) < microbatches_) {
        list_.forward(kDown);
      }
      split_backward(kDown);
      list_.forward(kUp);
      split_backward(kUp);
    }
    cool_down();
  }

 private:
  void split_backward(int32_t local) {
    list_.backward_input(local);
    list_.backward_weight(local);
  }

  // Until the first microbatch has gone down, up and is about to come back.
  void warm_up() {
    for (int32_t i = 0; i < 2 * after_ - 1; ++i) list_.forward(kDown);
    for (int32_t i = 0; i < before_; ++i) {
      list_.forward(kUp);
      list_.forward(kDown);
    }
    for (int32_t i = 0; i < after_; ++i) {
      list_.forward(kUp);
      split_backward(kUp);
    }
  }

  // The others wait for the I; the W that are left come last.
  void cool_down() {
    for (int32_t i = 0; i < before_; ++i) {
      list_.backward_input(kDown);
      list_.backward_input(kUp);
    }
    for (int32_t i = 0; i < after_; ++i) split_backward(kDown);
    for (const int32_t local : {kUp, kDown}) {
      while (list_.count(Kind::backward_weight, local) < microbatches_) {
        list_.backward_weight(local);
      }
    }
  }

  detail::RankBuilder list_;
  int32_t before_;  // ranks before this one
  int32_t after_;   // this one and those after it
  int32_t microbatches_;
};

}  // namespace

Schedule make_zb_v(int32_t ranks, int32_t microbatches) {
  Schedule schedule = detail::folded("zb-v", ranks, microbatches);
  const int32_t written = std::max(microbatches, 2 * ranks - 1);
  for (int32_t rank = 0; rank < ranks; ++rank) {
    ZbV(schedule, rank, ranks, written).write();
  }
  return schedule;
}

}  // namespace echelon
