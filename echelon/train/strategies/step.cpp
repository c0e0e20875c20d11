#include "echelon/train/strategies/step.h"

#include "echelon/optim/clip.h"
#include "echelon/profiling/memory_meter.h"
#include "echelon/train/strategies/layer_norms.h"
#include "echelon/train/strategies/model_source.h"

namespace echelon {

LoaderOptions training_batches(
    const Job& job, const TrainingData& data, const MeshGroups& groups) {
  LoaderOptions options;
  options.samples = data.train_samples;
  options.global_batch = job.train.batch;
  options.rank = groups.data_index();
  options.num_ranks = groups.data().size();
  if (options.num_ranks > 1) options.rank_batch = job.train.rank_batch;
  options.seed = job.train.seed;
  options.shuffle = job.data.shuffle;
  options.drop_last = job.data.drop_last;
  options.workers = job.data.workers;
  options.prefetch = job.data.prefetch;
  options.sample_keys = draws_masks(job, data.train->spec());
  return options;
}

int64_t total_steps(const Job& job, int64_t batches_per_epoch) {
  return job.train.steps > 0 ? job.train.steps
                             : job.train.epochs * batches_per_epoch;
}

namespace {

// What `make` allocates is of `kind`.
template <class Make>
auto of_kind(MemoryKind kind, const Make& make) {
  const MemoryKindScope scope(kind);
  return make();
}

// Gradients that autograd leaves whole; those of parts are named where they are
// made.
void name_whole_gradients(const ParallelModel& model) {
  std::vector<torch::Tensor> leaves;
  for (const auto& part : model.parts()) {
    if (!part.range && part.value.is_leaf() && part.value.requires_grad()) {
      leaves.push_back(part.value);
    }
  }
  name_gradients(leaves);
}

}  // namespace

TrainingState::TrainingState(
    const Job& job, const ModelPlace& place, int64_t total_steps)
    : options_(job.optimizer),
      model_(of_kind(
          MemoryKind::parameters,
          [&] { return make_parallel_model(job, place); })),
      optimizer_(of_kind(
          MemoryKind::optimizer_state,
          [&] {
            return make_optimizer(
                job.optimizer,
                model_->optimizer_groups(job.optimizer.weight_decay));
          })),
      schedule_(job.optimizer, total_steps),
      scaler_(
          job.precision,
          job.precision.compute == "fp16" && job.precision.loss_scale == 0) {
  name_whole_gradients(*model_);
  model_->set_gradient_scale(scaler_.scale());
}

void TrainingState::load_loss_scale(const LossScaler::State& state) {
  scaler_.load_state(state);
  model_->set_gradient_scale(scaler_.scale());
}

// Whether all gradients are finite.
bool TrainingState::unscale() {
  std::vector<torch::Tensor> gradients;
  for (const auto& parameter : optimizer_->parameters()) {
    gradients.push_back(parameter.grad());
  }
  const auto shared = model_->shared_out_gradients();
  const bool finite =
      scaler_.unscale(gradients, shared ? shared->sum : SumOverRanks());
  model_->set_gradient_scale(scaler_.scale());
  return finite;
}

// Of all gradients; clips them when that is asked for.
double TrainingState::norm() {
  const auto shared = model_->shared_out_gradients();
  const auto* parts = shared ? &*shared : nullptr;
  const auto parameters = optimizer_->parameters();
  return options_.clip_norm > 0
             ? clip_gradients(parameters, options_.clip_norm, parts)
             : gradient_norm(parameters, parts);
}

StepUpdate TrainingState::update(
    int64_t step, bool measure_norm, Recorder* recorder,
    const std::vector<std::string>* layers) {
  ScopedSpan span(recorder, "compute", "optimizer", SpanKind::optimizer);
  StepUpdate result;
  if (scaler_.active()) {
    result.loss_scale = scaler_.scale();
    result.updated = unscale();
  }
  if (result.updated) {
    if (layers) result.layer_norms = layer_norms(*model_, *layers);
    if (options_.clip_norm > 0 || measure_norm) result.norm = norm();
    optimizer_->set_learning_rate(
        options_.learning_rate * schedule_.factor(step));
    optimizer_->step();
  }
  optimizer_->zero_grad();
  model_->after_update(result.updated);
  return result;
}

}  // namespace echelon
