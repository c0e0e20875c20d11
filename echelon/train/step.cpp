#include "echelon/train/step.h"

#include "echelon/optim/clip.h"

namespace echelon {

int64_t total_steps(const Job& job, int64_t batches_per_epoch) {
  return job.train.steps > 0 ? job.train.steps
                             : job.train.epochs * batches_per_epoch;
}

TrainingState::TrainingState(
    const Job& job, const ModelPlace& place, int64_t total_steps)
    : options_(job.optimizer),
      model_(make_parallel_model(job, place)),
      optimizer_(make_optimizer(
          job.optimizer,
          model_->optimizer_groups(job.optimizer.weight_decay))),
      schedule_(job.optimizer, total_steps) {}

double TrainingState::update(
    int64_t step, bool measure_norm, Recorder* recorder) {
  ScopedSpan span(recorder, "compute", "optimizer", SpanKind::optimizer);
  double norm = 0;
  if (options_.clip_norm > 0 || measure_norm) {
    const auto shared = model_->shared_out_gradients();
    const auto* parts = shared ? &*shared : nullptr;
    norm = options_.clip_norm > 0
        ? clip_gradients(optimizer_->parameters(), options_.clip_norm, parts)
        : gradient_norm(optimizer_->parameters(), parts);
  }
  optimizer_->set_learning_rate(
      options_.learning_rate * schedule_.factor(step));
  optimizer_->step();
  optimizer_->zero_grad();
  model_->after_update();
  return norm;
}

}  // namespace echelon
