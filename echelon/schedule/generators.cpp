#include "echelon/schedule/generators.h"

#include <algorithm>
#include <array>
#include <deque>

namespace echelon {
namespace {

size_t at(int32_t index) {
  return static_cast<size_t>(index);
}

// An empty schedule in which rank r holds the stages r, r + p, r + 2p …
Schedule looped(
    const char* name, int32_t ranks, int32_t microbatches, int32_t per_rank) {
  Schedule schedule{.name = name, .num_microbatches = microbatches};
  schedule.ranks.resize(at(ranks));
  for (int32_t stage = 0; stage < ranks * per_rank; ++stage) {
    schedule.rank_of_stage.push_back(stage % ranks);
  }
  return schedule;
}

// An empty schedule of two stages a rank in the shape of a V: rank r holds the
// stages r and 2p - 1 - r, so the last rank passes its output to itself.
Schedule folded(const char* name, int32_t ranks, int32_t microbatches) {
  Schedule schedule = looped(name, ranks, microbatches, 2);
  for (int32_t stage = ranks; stage < 2 * ranks; ++stage) {
    schedule.rank_of_stage[at(stage)] = 2 * ranks - 1 - stage;
  }
  return schedule;
}

// Writes one rank's list. Each call adds the next microbatch of its kind for
// the rank's `local`-th stage, counted from 0 in ascending order. Microbatches
// past the last are counted but not written: a generator may thus write the
// schedule of more microbatches than there are, and what remains is in order.
class RankBuilder {
 public:
  RankBuilder(Schedule& schedule, int32_t rank)
      : actions_(schedule.ranks[at(rank)]),
        num_microbatches_(schedule.num_microbatches) {
    // The rank holds one of each p stages, counted from this or the other end.
    const int32_t ranks = schedule.num_ranks();
    for (int32_t base = 0; base < schedule.num_stages(); base += ranks) {
      const bool same = schedule.rank_of_stage[at(base + rank)] == rank;
      stages_.push_back(base + (same ? rank : ranks - 1 - rank));
    }
    counts_.resize(stages_.size());
  }
  ~RankBuilder() { actions_.shrink_to_fit(); }
  RankBuilder(const RankBuilder&) = delete;
  RankBuilder& operator=(const RankBuilder&) = delete;

  void forward(int32_t local) { add(ActionKind::forward, local); }
  void backward(int32_t local) { add(ActionKind::backward, local); }
  void backward_input(int32_t local) { add(ActionKind::backward_input, local); }
  void backward_weight(int32_t local) {
    add(ActionKind::backward_weight, local);
  }
  void split_backward(int32_t local) {
    backward_input(local);
    backward_weight(local);
  }
  // How many were added of `kind`; B counts as I and as W too.
  int32_t count(ActionKind kind, int32_t local) const {
    return counts_[at(local)][static_cast<size_t>(kind)];
  }

 private:
  using Counts = std::array<int32_t, 4>;

  void add(ActionKind kind, int32_t local) {
    Counts& counts = counts_[at(local)];
    const auto next = [&](ActionKind counted) -> int32_t& {
      return counts[static_cast<size_t>(counted)];
    };
    const bool whole = kind == ActionKind::backward;
    const int32_t microbatch =
        next(whole ? ActionKind::backward_input : kind)++;
    if (whole) {
      ++next(ActionKind::backward_weight);
      ++next(ActionKind::backward);
    }
    if (microbatch < num_microbatches_) {
      actions_.push_back({kind, stages_[at(local)], microbatch});
    }
  }

  std::vector<Action>& actions_;
  std::vector<int32_t> stages_;
  std::vector<Counts> counts_;
  int32_t num_microbatches_;
};

// The rank's stage at each step: rounds of microbatches pass through all of its
// stages. Backwards see the stages from the other end.
std::vector<int32_t>
stage_by_step(int32_t ranks, int32_t microbatches, int32_t per_rank) {
  const int32_t rounds = std::max(1, microbatches / ranks);
  std::vector<int32_t> stages;
  stages.reserve(static_cast<size_t>(microbatches) * per_rank);
  for (int32_t round = 0; round < rounds; ++round) {
    const int32_t length =
        microbatches / rounds + (round < microbatches % rounds ? 1 : 0);
    for (int32_t local = 0; local < per_rank; ++local) {
      stages.insert(stages.end(), static_cast<size_t>(length), local);
    }
  }
  return stages;
}

// Each hop keeps `slack` more microbatches in flight, before I or before W.
Schedule make_late_weights(
    const char* name, int32_t ranks, int32_t microbatches, int32_t slack) {
  Schedule schedule = looped(name, ranks, microbatches, 1);
  for (int32_t rank = 0; rank < ranks; ++rank) {
    RankBuilder list(schedule, rank);
    const int32_t warmup = slack * (ranks - 1 - rank);
    const int32_t delay = slack * rank;
    // Step k: forward of k, I of k - warmup, W of k - warmup - delay.
    const int32_t last = microbatches + warmup + delay;
    for (int32_t step = 0; step < last; ++step) {
      const int32_t input = step - warmup;
      if (step < microbatches) list.forward(0);
      if (input >= 0 && input < microbatches) list.backward_input(0);
      if (input >= delay) list.backward_weight(0);
    }
  }
  return schedule;
}

// The stages of a V's rank.
constexpr int32_t kDown = 0;
constexpr int32_t kUp = 1;

class ZbV {
 public:
  ZbV(Schedule& schedule, int32_t rank, int32_t ranks, int32_t microbatches)
      : list_(schedule, rank),
        before_(rank),
        after_(ranks - rank),
        microbatches_(microbatches) {}

  void write() {
    warm_up();
    while (list_.count(ActionKind::forward, kDown) < microbatches_ ||
           list_.count(ActionKind::forward, kUp) < microbatches_) {
      if (list_.count(ActionKind::forward, kDown) < microbatches_) {
        list_.forward(kDown);
      }
      list_.split_backward(kDown);
      list_.forward(kUp);
      list_.split_backward(kUp);
    }
    cool_down();
  }

 private:
  // Until the first microbatch has gone down, up and is about to come back.
  void warm_up() {
    for (int32_t i = 0; i < 2 * after_ - 1; ++i) list_.forward(kDown);
    for (int32_t i = 0; i < before_; ++i) {
      list_.forward(kUp);
      list_.forward(kDown);
    }
    for (int32_t i = 0; i < after_; ++i) {
      list_.forward(kUp);
      list_.split_backward(kUp);
    }
  }

  // The other ranks wait for the I; the remaining W come last.
  void cool_down() {
    for (int32_t i = 0; i < before_; ++i) {
      list_.backward_input(kDown);
      list_.backward_input(kUp);
    }
    for (int32_t i = 0; i < after_; ++i) list_.split_backward(kDown);
    for (const int32_t local : {kUp, kDown}) {
      while (list_.count(ActionKind::backward_weight, local) < microbatches_) {
        list_.backward_weight(local);
      }
    }
  }

  RankBuilder list_;
  int32_t before_;  // ranks before this one
  int32_t after_;   // this one and those after it
  int32_t microbatches_;
};

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
    deferred_.push_back(local);
  }

  void oldest_weight() {
    if (deferred_.empty()) return;
    list_.backward_weight(deferred_.front());
    deferred_.pop_front();
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

  // The remaining backwards, up and down in turn. From the middle on they are
  // split, so that the ranks before this one have their gradients sooner.
  void cool_down() {
    const int32_t whole = upto_;  // of 2 * upto_ backwards
    for (int32_t i = 0; i < 2 * upto_; ++i) {
      const int32_t local = i % 2 == 0 ? kUp : kDown;
      i < whole ? list_.backward(local) : split_backward(local);
    }
    for (int32_t i = 0; i < after_; ++i) {
      oldest_weight();
      split_backward(kDown);
    }
    while (!deferred_.empty()) oldest_weight();
  }

  RankBuilder list_;
  std::deque<int32_t> deferred_;  // stages whose W is due, oldest first
  int32_t upto_;                  // this rank and those before it
  int32_t after_;                 // ranks after this one
  int32_t pairs_;
};

}  // namespace

Schedule make_gpipe(int32_t ranks, int32_t microbatches) {
  Schedule schedule = make_breadth_first(ranks, microbatches, 1);
  schedule.name = "gpipe";
  return schedule;
}

Schedule make_1f1b(int32_t ranks, int32_t microbatches) {
  Schedule schedule = looped("1f1b", ranks, microbatches, 1);
  for (int32_t rank = 0; rank < ranks; ++rank) {
    RankBuilder list(schedule, rank);
    const int32_t warmup = std::min(ranks - 1 - rank, microbatches);
    for (int32_t m = 0; m < warmup; ++m) list.forward(0);
    for (int32_t m = warmup; m < microbatches; ++m) {
      list.forward(0);
      list.backward(0);
    }
    for (int32_t m = 0; m < warmup; ++m) list.backward(0);
  }
  return schedule;
}

Schedule
make_interleaved(int32_t ranks, int32_t microbatches, int32_t stages_per_rank) {
  if (stages_per_rank == 1) {
    Schedule schedule = make_1f1b(ranks, microbatches);
    schedule.name = "interleaved";
    return schedule;
  }
  const int32_t v = stages_per_rank;
  Schedule schedule = looped("interleaved", ranks, microbatches, v);
  const auto stages = stage_by_step(ranks, microbatches, v);
  const int32_t steps = v * microbatches;
  const int32_t rounds = std::max(1, microbatches / ranks);
  const int32_t longest = (microbatches + rounds - 1) / rounds;
  for (int32_t rank = 0; rank < ranks; ++rank) {
    RankBuilder list(schedule, rank);
    const auto local = [&](int32_t step) {
      return stages[static_cast<size_t>(step)];
    };
    const int32_t warmup =
        std::min(steps, (v - 1) * longest + 2 * (ranks - 1 - rank));
    for (int32_t step = 0; step < steps + warmup; ++step) {
      if (step < steps) list.forward(local(step));
      if (step >= warmup) list.backward(v - 1 - local(step - warmup));
    }
  }
  return schedule;
}

Schedule make_breadth_first(
    int32_t ranks, int32_t microbatches, int32_t stages_per_rank) {
  Schedule schedule =
      looped("breadth_first", ranks, microbatches, stages_per_rank);
  for (int32_t rank = 0; rank < ranks; ++rank) {
    RankBuilder list(schedule, rank);
    for (int32_t local = 0; local < stages_per_rank; ++local) {
      for (int32_t m = 0; m < microbatches; ++m) list.forward(local);
    }
    for (int32_t local = stages_per_rank - 1; local >= 0; --local) {
      for (int32_t m = 0; m < microbatches; ++m) list.backward(local);
    }
  }
  return schedule;
}

Schedule make_zb_h1(int32_t ranks, int32_t microbatches) {
  return make_late_weights("zb-h1", ranks, microbatches, 1);
}

Schedule make_zb_h2(int32_t ranks, int32_t microbatches) {
  return make_late_weights("zb-h2", ranks, microbatches, 2);
}

Schedule make_zb_v(int32_t ranks, int32_t microbatches) {
  Schedule schedule = folded("zb-v", ranks, microbatches);
  const int32_t written = std::max(microbatches, 2 * ranks - 1);
  for (int32_t rank = 0; rank < ranks; ++rank) {
    ZbV(schedule, rank, ranks, written).write();
  }
  return schedule;
}

Schedule make_dualpipev(int32_t ranks, int32_t microbatches) {
  Schedule schedule = folded("dualpipev", ranks, microbatches);
  for (int32_t rank = 0; rank < ranks; ++rank) {
    DualPipeV(schedule, rank, ranks).write();
  }
  return schedule;
}

}  // namespace echelon
