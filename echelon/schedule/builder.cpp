#include "echelon/schedule/builder.h"

namespace echelon::detail {
namespace {

size_t at(int32_t index) {
  return static_cast<size_t>(index);
}

}  // namespace

Schedule looped(
    const char* name, int32_t ranks, int32_t microbatches, int32_t per_rank) {
  Schedule schedule{.name = name, .num_microbatches = microbatches};
  schedule.ranks.resize(at(ranks));
  for (int32_t stage = 0; stage < ranks * per_rank; ++stage) {
    schedule.rank_of_stage.push_back(stage % ranks);
  }
  return schedule;
}

Schedule folded(const char* name, int32_t ranks, int32_t microbatches) {
  Schedule schedule = looped(name, ranks, microbatches, 2);
  for (int32_t stage = ranks; stage < 2 * ranks; ++stage) {
    schedule.rank_of_stage[at(stage)] = 2 * ranks - 1 - stage;
  }
  return schedule;
}

RankBuilder::RankBuilder(Schedule& schedule, int32_t rank)
    : actions_(schedule.ranks[at(rank)]),
      num_microbatches_(schedule.num_microbatches) {
  // Of each p stages the rank holds one, from this or from the other end.
  const int32_t ranks = schedule.num_ranks();
  for (int32_t base = 0; base < schedule.num_stages(); base += ranks) {
    const bool same = schedule.rank_of_stage[at(base + rank)] == rank;
    stages_.push_back(base + (same ? rank : ranks - 1 - rank));
  }
  counts_.resize(stages_.size());
}

int32_t RankBuilder::count(ActionKind kind, int32_t local) const {
  return counts_[at(local)][static_cast<size_t>(kind)];
}

void RankBuilder::add(ActionKind kind, int32_t local) {
  Counts& counts = counts_[at(local)];
  const auto next = [&](ActionKind of) -> int32_t& {
    return counts[static_cast<size_t>(of)];
  };
  const bool whole = kind == ActionKind::backward;
  const int32_t microbatch = next(whole ? ActionKind::backward_input : kind)++;
  if (whole) {
    ++next(ActionKind::backward_weight);
    ++next(ActionKind::backward);
  }
  if (microbatch < num_microbatches_) {
    actions_.push_back({kind, stages_[at(local)], microbatch});
  }
}

}  // namespace echelon::detail
