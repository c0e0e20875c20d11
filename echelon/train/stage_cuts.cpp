#include "echelon/train/stage_cuts.h"

#include <algorithm>
#include <utility>

#include "echelon/error.h"

namespace echelon {
namespace {

std::vector<int64_t> layers_of(const std::vector<size_t>& boundaries) {
  std::vector<int64_t> layers;
  for (size_t i = 0; i + 1 < boundaries.size(); ++i) {
    layers.push_back(static_cast<int64_t>(boundaries[i + 1] - boundaries[i]));
  }
  return layers;
}

// Of each rank of the world in its pipeline.
std::vector<int64_t> pipeline_ranks(const Mesh& mesh) {
  std::vector<int64_t> ranks;
  for (int64_t rank = 0; rank < mesh.size(); ++rank) {
    ranks.push_back(mesh.coordinate(rank, Axis::pp));
  }
  return ranks;
}

}  // namespace

StageCuts::StageCuts(
    const Mesh& mesh, const Schedule& schedule, StageWork work, int64_t every)
    : rank_of_stage_(schedule.rank_of_stage),
      num_ranks_(static_cast<size_t>(schedule.num_ranks())),
      work_(std::move(work)),
      every_(every),
      times_(pipeline_ranks(mesh), num_ranks_) {}

std::vector<double>
StageCuts::work_of_ranks(const std::vector<size_t>& cut) const {
  std::vector<double> work(num_ranks_, 0);
  for (size_t stage = 0; stage < rank_of_stage_.size(); ++stage) {
    double& sum = work.at(static_cast<size_t>(rank_of_stage_[stage]));
    for (size_t layer = cut[stage]; layer < cut[stage + 1]; ++layer) {
      sum += work_.layers[layer];
    }
  }
  return work;
}

std::optional<timeline::Rebalance> StageCuts::after_step(
    int64_t step, const std::vector<double>& seconds, int64_t steps_left,
    double cost) {
  const auto times = times_.after_step(seconds, every_ * patience_);
  if (!times) return std::nullopt;
  timeline::Rebalance change{
      .step = step,
      .before = layers_of(work_.boundaries),
      .seconds = *times,
      .of = timeline::Divided::layers};
  if (std::ranges::min(change.seconds) <= 0) return std::nullopt;
  if (const double before = std::exchange(slowest_, 0); before > 0) {
    const bool brought = change.slowest_before() <= (1 - kLeastGain) * before;
    patience_ = brought ? 1 : 2 * patience_;
    if (!brought) return std::nullopt;
  }

  const std::vector<double> work = work_of_ranks(work_.boundaries);
  std::vector<double> rates;  // by pipeline rank: work a second
  for (size_t i = 0; i < num_ranks_; ++i) {
    rates.push_back(work[i] / change.seconds[i]);
  }
  if (std::ranges::min(rates) <= 0) return std::nullopt;
  std::vector<double> speeds;
  for (const int32_t rank : rank_of_stage_) {
    speeds.push_back(rates[static_cast<size_t>(rank)]);
  }
  try {
    next_ = balance(work_.layers, rank_of_stage_.size(), work_.memory, speeds);
  } catch (const ConfigError&) {
    return std::nullopt;  // the cut that the user chose does not fit either
  }
  const std::vector<double> then = work_of_ranks(next_);
  for (size_t i = 0; i < num_ranks_; ++i) {
    change.expected_seconds =
        std::max(change.expected_seconds, then[i] / rates[i]);
  }
  const double now = change.slowest_before();
  const double saved = now - change.expected_seconds;
  const double steps =
      std::min(static_cast<double>(steps_left), kRepaySeconds / now);
  if (saved < kLeastGain * now || saved * steps <= cost) return std::nullopt;
  change.after = layers_of(next_);
  asked_ = now;
  return change;
}

void StageCuts::changed() {
  slowest_ = asked_;
  work_.boundaries = next_;
  measure_anew();
}

}  // namespace echelon
