#include "echelon/train/bench_host_work.h"

#include <torch/torch.h>

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "echelon/cluster/local_machine.h"
#include "echelon/data/loader.h"
#include "echelon/explain/counted_layers.h"
#include "echelon/explain/predict_run.h"
#include "echelon/timeline/metrics.h"
#include "echelon/train/bench_fits.h"
#include "echelon/train/counted_shape.h"
#include "echelon/train/step.h"
#include "echelon/train/step_sums.h"

namespace echelon {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kSteps = 40;
constexpr int64_t kRounds = 25;
constexpr Microbatches kOfData = {1, 5};
constexpr Microbatches kOfPipeline = {4, 16};

// A sample for each microbatch of each rank.
Job small_job(const Layout& layout, int64_t layers, int64_t microbatches) {
  Job job;
  job.model.name = "mlp";
  job.model.hidden.assign(static_cast<size_t>(layers - 1), 16);
  job.data.name = "dummy";
  job.data.samples = 4096;
  job.data.holdout = 0;
  job.data.shape = {1, 4, 4};
  job.data.classes = 2;
  job.optimizer.name = "adamw";
  job.layout = layout;
  if (layout.pp > 1) {
    job.pipeline.microbatches = microbatches;
  } else {
    job.train.accumulate = microbatches;
  }
  job.train.batch = layout.data_degree() * microbatches;
  job.train.steps = 1;
  return job;
}

// As the training loop has it, without a run's folder.
class SmallTraining {
 public:
  SmallTraining(const Job& job, World& world)
      : job_(job),
        world_(world),
        data_(open_data(job.data, 0)),
        groups_(world, job.layout),
        source_(model_source(job, data_.train->spec())),
        state_(job_, {source_, world, groups_}, 1),
        loader_(*data_.train, training_batches(job_, data_, groups_)) {
    if (world.rank() == 0) {
      metrics_ = std::make_unique<MetricsWriter>("/dev/null");
    }
  }

  // What is known of the machine so far makes of it.
  double predicted(const MachineMeasurement& measured) const {
    return predict_step(
               configured_as_counted(counted_shape(job_, source_), job_, job_),
               cluster_of(measured, look_at_machine()))
        .step_seconds;
  }

  // Its seconds.
  double step() {
    const auto begin = Clock::now();
    auto batch = loader_.next();
    if (!batch) {
      loader_.start_epoch(++epoch_);
      batch = loader_.next();
    }
    const Score score =
        state_.model().forward_backward(*batch, counts_units(*data_.train));
    const StepSums sums = share_sums({.score = score}, world_);
    state_.update(0, /*measure_norm=*/false, nullptr);
    const auto seconds =
        std::chrono::duration<double>(Clock::now() - begin).count();
    if (metrics_) {
      metrics_->append(StepMetrics{.loss = sums.loss_sum, .step_seconds = seconds});
    }
    return std::chrono::duration<double>(Clock::now() - begin).count();
  }

 private:
  const Job job_;
  World& world_;
  const TrainingData data_;
  MeshGroups groups_;
  ModelSource source_;
  TrainingState state_;
  Loader loader_;
  std::unique_ptr<MetricsWriter> metrics_;
  int64_t epoch_ = 0;
};

using Rounds = std::vector<std::vector<double>>;

// By which the steps of each round from `first` on are longer than predicted.
Rounds beside(
    const Rounds& rounds, const std::vector<double>& predicted, size_t first) {
  Rounds longer;
  for (const auto& seconds : rounds) {
    auto& row = longer.emplace_back();
    for (size_t i = 0; i < predicted.size(); ++i) {
      row.push_back(seconds[first + i] - predicted[i]);
    }
  }
  return longer;
}

}  // namespace

HostWork bench_host_work(
    BenchMeter& meter, World& world, MachineMeasurement measured) {
  const SmallSteps small{
      .ranks = world.size(), .of_data = kOfData, .of_pipeline = kOfPipeline};
  std::vector<std::unique_ptr<SmallTraining>> trainings;
  std::vector<std::function<double()>> steps;
  const auto add = [&](const Layout& layout, int64_t layers, Microbatches counts) {
    for (const int64_t microbatches : {counts.few, counts.many}) {
      trainings.push_back(std::make_unique<SmallTraining>(
          small_job(layout, layers, microbatches), world));
      steps.push_back([&training = *trainings.back()] { return training.step(); });
    }
  };
  const Layout data{.dp_replicate = small.ranks};
  add(data, small.few_layers, kOfData);
  add(data, small.many_layers, kOfData);
  if (small.ranks > 1) {
    add({.pp = small.ranks}, small.few_layers * small.ranks, kOfPipeline);
  }
  const Rounds rounds = meter.rounds_of_own_seconds(steps, kSteps, kRounds);
  const auto predicted = [&](size_t first, size_t end) {
    std::vector<double> seconds;
    for (size_t i = first; i < end; ++i) {
      seconds.push_back(trainings[i]->predicted(measured));
    }
    return seconds;
  };
  constexpr size_t kData = 4;
  measured.host_work = fit_host_work(small, beside(rounds, predicted(0, kData), 0));
  return with_pipeline_work(
      measured.host_work, small,
      beside(rounds, predicted(kData, trainings.size()), kData));
}

}  // namespace echelon
