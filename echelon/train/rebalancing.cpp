#include "echelon/train/rebalancing.h"

#include <cstdio>
#include <sstream>
#include <utility>

#include "echelon/error.h"
#include "echelon/job/pipeline_schedule.h"
#include "echelon/text/format.h"

namespace echelon {

bool Rebalancing::is_wanted(const Job& job, const World& world) {
  const int64_t every = job.train.rebalance_every;
  if (every == 0 || (job.layout.data_ranks() == 1 && job.layout.pp == 1)) {
    return false;
  }
  if (!world.device().is_cpu()) {
    throw ConfigError(format(
        "[train] rebalance_every = {}: how long a rank works is measured on "
        "CPUs, and this one computes on {}; set rank_batch, as `echelon "
        "explain` says after a run, or leave rebalance_every out",
        every, world.device().str()));
  }
  return true;
}

Rebalancing::Rebalancing(
    const Job& job, World& world, const MeshGroups& groups,
    const ModelPartition* stages, bool saves, double cut_seconds,
    Loader& loader, RunLog& log)
    : job_(job), world_(world), groups_(groups), loader_(loader), log_(log) {
  if (stages != nullptr) begin_stages(*stages, saves);
  if (stages_) agree_on_cost(cut_seconds);
  if (job_.layout.data_ranks() > 1) begin_batch();
}

// Stages that the user has chosen stay, and so do those that fill the memory
// evenly.
void Rebalancing::begin_stages(const ModelPartition& stages, bool saves) {
  if (!job_.model.partition_at.empty() ||
      job_.model.balance == StageBalance::memory) {
    return;
  }
  if (!saves) {
    if (world_.rank() == 0) {
      std::printf(
          "stages stay as they are: to cut them anew, training needs copies in "
          "memory (elastic.memory) or checkpoints to go on from\n");
      std::fflush(stdout);
    }
    return;
  }
  layers_ = stages.layers;
  stages_.emplace(
      groups_.mesh(), pipeline_schedule(job_),
      StageWork{stages.boundaries, stages.work, stages.memory},
      job_.train.rebalance_every);
}

void Rebalancing::begin_batch() {
  const auto& train = job_.train;
  const int64_t degree = job_.layout.data_ranks();
  auto samples = train.rank_batch;
  if (samples.empty()) {
    samples.assign(static_cast<size_t>(degree), train.batch / degree);
  }
  batch_.emplace(
      groups_.mesh(), std::move(samples),
      job_.layout.pp > 1 ? microbatches_of(job_) : train.accumulate,
      train.rebalance_every);
  std::string divided;
  for (const auto& one : log_.rebalances()) {
    if (one.of == timeline::Divided::samples) divided = join(one.after, " ");
  }
  std::istringstream last(world_.exchange(divided)[0]);
  samples.clear();
  for (int64_t one = 0; last >> one;) samples.push_back(one);
  if (batch_->resume(samples)) loader_.divide(samples);
}

void Rebalancing::agree_on_cost(double seconds) {
  cut_seconds_ = std::stod(world_.exchange(format("{:.6e}", seconds))[0]);
}

// All ranks have the same times, and so do the same.
void Rebalancing::after_step(
    int64_t step, const std::vector<double>& work, int64_t steps_left) {
  if (batch_) {
    const auto change = batch_->after_step(step, work);
    if (change && steps_left > 0) {
      loader_.divide(change->after);
      if (world_.rank() == 0) log_.add(*change);
      if (stages_) stages_->measure_anew();
      return;
    }
  }
  if (!stages_ || steps_left <= 0) return;
  cut_ = stages_->after_step(step, work, steps_left, cut_seconds_);
}

std::vector<std::string> Rebalancing::new_cut() const {
  const auto& boundaries = stages_->boundaries();
  std::vector<std::string> first_layers;
  for (size_t i = 1; i + 1 < boundaries.size(); ++i) {
    first_layers.push_back(layers_[boundaries[i]]);
  }
  return first_layers;
}

void Rebalancing::cut_done(double seconds) {
  const timeline::Rebalance change = *std::exchange(cut_, std::nullopt);
  stages_->changed();
  if (batch_) batch_->measure_anew();
  if (world_.rank() == 0) log_.add(change);
  agree_on_cost(seconds);
}

void Rebalancing::cut_failed() {
  cut_.reset();
  stages_.reset();
  if (world_.rank() == 0) {
    log_.message("warning: stages stay as they are: the state was not saved");
  }
}

}  // namespace echelon
