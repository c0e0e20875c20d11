#include "echelon/bench/small_training.h"

#include <chrono>
#include <string>
#include <utility>

#include "echelon/layers/layer_list.h"
#include "echelon/train/step_sums.h"

namespace echelon {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

std::string place_before(int64_t layer) {
  return "elsewhere" + std::to_string(layer);
}

Job with_cuts(const SmallSetting& setting) {
  Job job = job_of(setting);
  for (int64_t layer = 1; layer < setting.layers; ++layer) {
    if (setting.begins_stage(layer))
      job.model.cut.push_back(place_before(layer));
  }
  return job;
}

LayerList layers_of(
    const SmallSetting& setting, const Elsewhere& elsewhere,
    const SampleSpec& sample) {
  const LayerList plain = model_source(job_of(setting), sample).layers;
  LayerList layers;
  for (int64_t layer = 0; layer < setting.layers; ++layer) {
    if (setting.begins_stage(layer)) {
      layers.add_function(
          place_before(layer), [&elsewhere](const torch::Tensor& values) {
            if (!values.is_meta())
              elsewhere.spend();  // shapes are asked for as well
            return values;
          });
    }
    layers.add_definition(plain[static_cast<size_t>(layer)]);
  }
  return layers;
}

}  // namespace

Job job_of(const SmallSetting& setting) {
  Job job;
  job.model.name = "mlp";
  job.model.hidden.assign(static_cast<size_t>(setting.layers - 1), 16);
  job.data.name = "dummy";
  job.data.samples = 4096;
  job.data.holdout = 0;
  job.data.shape = {1, 4, 4};
  job.data.classes = 2;
  job.optimizer.name = "adamw";
  job.layout = setting.layout;
  if (setting.stages() > 1) {
    job.pipeline.microbatches = setting.microbatches;
  } else {
    job.train.accumulate = setting.microbatches;
  }
  job.train.batch = setting.layout.data_degree() * setting.microbatches;
  job.train.steps = 1;
  return job;
}

SmallTraining::SmallTraining(
    const SmallSetting& setting, const Elsewhere& elsewhere, World& world)
    : job_(with_cuts(setting)),
      world_(world),
      data_(open_data(job_.data, 0)),
      groups_(world, job_.layout),
      source_(model_source(
          job_,
          whole_layers(layers_of(setting, elsewhere, data_.train->spec())),
          data_.train->spec())),
      objective_(objective_for(source_.sample, source_.classes, {})),
      state_(job_, {source_, world, groups_}, 1),
      loader_(*data_.train, training_batches(job_, data_, groups_)) {
  for (const auto& layer : source_.layers.layers())
    built_.push_back(layer.build());
  if (world.rank() == 0)
    metrics_ = std::make_unique<MetricsWriter>("/dev/null");
}

double SmallTraining::step() {
  const auto begin = Clock::now();
  const Score score =
      state_.model().forward_backward(next_batch(), counts_units(*data_.train));
  const StepSums sums = share_sums({.score = score}, world_);
  state_.update(0, /*measure_norm=*/false, nullptr);
  const double seconds = seconds_since(begin);
  if (metrics_) {
    metrics_->append(
        StepMetrics{.loss = sums.loss_sum, .step_seconds = seconds});
  }
  return seconds_since(begin);
}

double SmallTraining::pass() {
  const Batch batch = piece_of(next_batch(), 0, 1);
  const auto begin = Clock::now();
  Tensors values = {batch.inputs};
  for (const auto& layer : built_) values = layer.forward(values);
  (objective_->loss_sum(values, batch.targets) * 0.5).backward();
  const double seconds = seconds_since(begin);
  for (const auto& layer : built_) {
    if (layer.module) layer.module->zero_grad();
  }
  return seconds;
}

Batch SmallTraining::next_batch() {
  auto batch = loader_.next();
  if (!batch) {
    loader_.start_epoch(++epoch_);
    batch = loader_.next();
  }
  return *std::move(batch);
}

}  // namespace echelon
