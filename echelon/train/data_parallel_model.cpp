// The whole model on every rank.
#include <algorithm>

#include "echelon/models/make_network.h"
#include "echelon/models/weights.h"
#include "echelon/train/parallel_model.h"

namespace echelon {
namespace {

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

class DataParallelModel : public ParallelModel {
 public:
  DataParallelModel(
      const Job& job,
      const std::vector<int64_t>& input_shape,
      int64_t classes,
      const Group& group,
      torch::Device device)
      : accumulate_(job.train.accumulate),
        device_(device),
        dtype_(dtype_of(job.model.dtype)),
        network_(build(job, input_shape, classes, device)),
        parallel_(network_, group, data_parallel_options(job)) {}

  Score forward_backward(
      const Batch& batch, bool count_samples, Recorder* recorder) override;
  Score evaluate(const Batch& batch) override;

  std::optional<NonFinite> find_nonfinite(const Batch& batch) override {
    return network_->first_nonfinite_layer(
        prepared(batch, device_, dtype_).inputs);
  }
  NamedTensors parameters() const override {
    NamedTensors all;
    for (const auto& item : network_->named_parameters()) {
      all.emplace_back(item.key(), item.value());
    }
    return all;
  }
  NamedTensors state() const override { return state_dict(*network_); }

 private:
  int64_t accumulate_;
  torch::Device device_;
  torch::Dtype dtype_;
  std::shared_ptr<Network> network_;
  DistributedDataParallel<std::shared_ptr<Network>> parallel_;
};

Score DataParallelModel::forward_backward(
    const Batch& raw, bool count_samples, Recorder* recorder) {
  const Batch batch = prepared(raw, device_, dtype_);
  Score score;
  score.count = batch.inputs.size(0);
  for (int64_t piece = 0; piece < accumulate_; ++piece) {
    const int64_t begin = score.count * piece / accumulate_;
    const int64_t length = score.count * (piece + 1) / accumulate_ - begin;
    const auto targets = batch.targets.narrow(0, begin, length);
    std::unique_ptr<NoSync> local;
    if (piece + 1 < accumulate_) local.reset(new NoSync(parallel_.no_sync()));
    torch::Tensor loss;
    {
      ScopedSpan span(recorder, "compute", "forward", SpanKind::forward);
      const auto scores =
          parallel_.forward(batch.inputs.narrow(0, begin, length));
      const auto loss_sum = loss_sum_of(scores, targets);
      // Every sample weighs the same, on whichever rank it is: the wrapper
      // divides the sum of the ranks' gradients by their number.
      loss = count_samples
          ? parallel_.global_mean(loss_sum, score.count)
          : loss_sum * (static_cast<double>(parallel_.group().size()) /
                        static_cast<double>(batch.global_count));
      score.loss_sum += loss_sum.item<double>();
      score.correct += count_correct(scores.detach(), targets);
    }
    ScopedSpan span(recorder, "compute", "backward", SpanKind::backward);
    loss.backward();
  }
  return score;
}

Score DataParallelModel::evaluate(const Batch& raw) {
  torch::NoGradGuard no_grad;
  const Batch batch = prepared(raw, device_, dtype_);
  Score score;
  score.count = batch.inputs.size(0);
  if (score.count == 0) return score;
  const bool training = network_->is_training();
  network_->eval();
  const auto scores = network_->forward(batch.inputs);
  network_->train(training);
  score.loss_sum = loss_sum_of(scores, batch.targets).item<double>();
  score.correct = count_correct(scores, batch.targets);
  return score;
}

}  // namespace

std::unique_ptr<ParallelModel> make_data_parallel_model(
    const Job& job,
    const std::vector<int64_t>& input_shape,
    int64_t classes,
    const MeshGroups& groups,
    torch::Device device) {
  return std::make_unique<DataParallelModel>(
      job, input_shape, classes, groups.data(), device);
}

}  // namespace echelon
