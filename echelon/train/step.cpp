#include "echelon/train/step.h"

#include <algorithm>
#include <memory>

#include "echelon/error.h"
#include "echelon/models/weights.h"
#include "echelon/optim/clip.h"

namespace echelon {
namespace {

BucketHook hook_of(const TrainOptions& options) {
  if (options.compress == "bf16") return bf16_hook();
  if (options.compress == "fp16") return fp16_hook();
  if (options.compress == "powersgd") {
    return powersgd_hook(
        {.rank = options.powersgd_rank, .seed = options.seed});
  }
  return all_reduce_hook();
}

std::shared_ptr<Network> build(
    const Job& job,
    const std::vector<int64_t>& input_shape,
    int64_t classes,
    torch::Device device) {
  auto network =
      make_network(job.model, input_shape, classes, job.train.seed);
  if (!job.model.weights.empty()) load_weights(*network, job.model.weights);
  network->to(device);
  network->train();
  return network;
}

int64_t count_correct(
    const torch::Tensor& scores, const torch::Tensor& targets) {
  return scores.argmax(1).eq(targets).sum().item<int64_t>();
}

}  // namespace

torch::Dtype dtype_of(const std::string& name) {
  return name == "float64" ? torch::kFloat64 : torch::kFloat32;
}

int64_t total_steps(const Job& job, int64_t batches_per_epoch) {
  return job.train.steps > 0 ? job.train.steps
                             : job.train.epochs * batches_per_epoch;
}

TrainingState::TrainingState(
    const Job& job,
    const std::vector<int64_t>& input_shape,
    int64_t classes,
    int64_t total_steps,
    const Group& group,
    torch::Device device)
    : job_(job),
      device_(device),
      dtype_(dtype_of(job.model.dtype)),
      network_(build(job, input_shape, classes, device)),
      schedule_(job.optimizer, total_steps) {
  DistributedDataParallelOptions options;
  options.bucket_bytes = job.train.bucket_bytes;
  options.find_unused_parameters = job.train.find_unused_parameters;
  options.sync_batch_norm = job.model.sync_batch_norm;
  options.hook = hook_of(job.train);
  parallel_ =
      std::make_unique<DistributedDataParallel<std::shared_ptr<Network>>>(
          network_, group, std::move(options));
  optimizer_ = make_optimizer(job.optimizer, *network_);
}

Batch TrainingState::prepared(const Batch& batch) const {
  Batch ready = batch;
  ready.inputs = batch.inputs.to(device_, dtype_, /*non_blocking=*/true);
  ready.targets = batch.targets.to(device_, /*non_blocking=*/true);
  return ready;
}

Score TrainingState::forward_backward(
    const Batch& raw, bool count_samples, Recorder* recorder) {
  const Batch batch = prepared(raw);
  Score score;
  score.count = batch.inputs.size(0);
  const int64_t pieces = job_.train.accumulate;
  for (int64_t piece = 0; piece < pieces; ++piece) {
    const int64_t begin = score.count * piece / pieces;
    const int64_t length = score.count * (piece + 1) / pieces - begin;
    const auto targets = batch.targets.narrow(0, begin, length);
    std::unique_ptr<NoSync> local;
    if (piece + 1 < pieces) local.reset(new NoSync(parallel_->no_sync()));
    torch::Tensor loss_sum;
    torch::Tensor loss;
    {
      ScopedSpan span(recorder, "compute", "forward", SpanKind::forward);
      const auto scores =
          parallel_->forward(batch.inputs.narrow(0, begin, length));
      loss_sum = torch::nn::functional::cross_entropy(
          scores, targets,
          torch::nn::functional::CrossEntropyFuncOptions().reduction(
              torch::kSum));
      // Every sample weighs the same, on whichever rank it is: the wrapper
      // divides the sum of the ranks' gradients by their number.
      loss = count_samples
          ? parallel_->global_mean(loss_sum, score.count)
          : loss_sum * (static_cast<double>(parallel_->group().size()) /
                        static_cast<double>(batch.global_count));
      score.loss_sum += loss_sum.item<double>();
      score.correct += count_correct(scores.detach(), targets);
    }
    ScopedSpan span(recorder, "compute", "backward", SpanKind::backward);
    loss.backward();
  }
  return score;
}

double TrainingState::update(
    int64_t step, bool measure_norm, Recorder* recorder) {
  ScopedSpan span(recorder, "compute", "optimizer", SpanKind::optimizer);
  double norm = 0;
  if (job_.optimizer.clip_norm > 0) {
    norm = clip_gradients(optimizer_->parameters(), job_.optimizer.clip_norm);
  } else if (measure_norm) {
    norm = gradient_norm(optimizer_->parameters());
  }
  optimizer_->set_learning_rate(
      job_.optimizer.learning_rate * schedule_.factor(step));
  optimizer_->step();
  optimizer_->zero_grad();
  return norm;
}

Score TrainingState::evaluate(const Batch& raw) {
  torch::NoGradGuard no_grad;
  const Batch batch = prepared(raw);
  Score score;
  score.count = batch.inputs.size(0);
  if (score.count == 0) return score;
  const bool training = network_->is_training();
  network_->eval();
  const auto scores = network_->forward(batch.inputs);
  network_->train(training);
  score.loss_sum =
      torch::nn::functional::cross_entropy(
          scores, batch.targets,
          torch::nn::functional::CrossEntropyFuncOptions().reduction(
              torch::kSum))
          .item<double>();
  score.correct = count_correct(scores, batch.targets);
  return score;
}

}  // namespace echelon
