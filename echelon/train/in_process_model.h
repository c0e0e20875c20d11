// A whole model in one process, on one device or several, data parallel over
// processes: what the two strategies share.
#pragma once

#include <memory>
#include <optional>
#include <utility>

#include "echelon/models/weights.h"
#include "echelon/train/parallel_model.h"

namespace echelon {

/// `Net` is a torch::nn::Module that maps inputs to scores, on whatever devices:
/// Network or PlacedNetwork.
template <class Net>
class InProcessModel : public ParallelModel {
 public:
  /// `first` takes the inputs, `last` has the scores. `recorder`: for spans of
  /// forward and backward on the track "compute"; null when the network records
  /// its own.
  InProcessModel(
      const Job& job,
      const Group& data,
      std::shared_ptr<Net> network,
      torch::Device first,
      torch::Device last,
      Recorder* recorder)
      : accumulate_(job.train.accumulate),
        dtype_(dtype_of(job.model.dtype)),
        first_(first),
        last_(last),
        recorder_(recorder),
        network_(std::move(network)),
        parallel_(network_, data, data_parallel_options(job)) {}

  Score forward_backward(const Batch& raw, bool count_samples) override {
    const Batch batch = placed(raw);
    Score score;
    score.count = batch.inputs.size(0);
    for (int64_t piece = 0; piece < accumulate_; ++piece) {
      const int64_t begin = score.count * piece / accumulate_;
      const int64_t length = score.count * (piece + 1) / accumulate_ - begin;
      std::unique_ptr<NoSync> local;
      if (piece + 1 < accumulate_) local.reset(new NoSync(parallel_.no_sync()));
      torch::Tensor loss;
      {
        ScopedSpan span(recorder_, "compute", "forward", SpanKind::forward);
        loss = scaled_loss(batch, begin, length, count_samples, score);
      }
      ScopedSpan span(recorder_, "compute", "backward", SpanKind::backward);
      loss.backward();
    }
    return score;
  }

  Score evaluate(const Batch& raw) override {
    const torch::NoGradGuard no_grad;
    const Batch batch = placed(raw);
    Score score;
    score.count = batch.inputs.size(0);
    if (score.count == 0) return score;
    network_->eval();
    const auto scores = network_->forward(batch.inputs);
    network_->train();
    score.loss_sum =
        loss_sum_of(scores, batch.targets).template item<double>();
    score.correct = count_correct(scores, batch.targets);
    return score;
  }

  std::optional<NonFinite> find_nonfinite(const Batch& raw) override {
    return network_->first_nonfinite_layer(Tensors{placed(raw).inputs});
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
  Batch placed(const Batch& raw) const {
    Batch batch = prepared(raw, first_, dtype_);
    batch.targets = batch.targets.to(last_, /*non_blocking=*/true);
    return batch;
  }

  torch::Tensor scaled_loss(
      const Batch& batch,
      int64_t begin,
      int64_t length,
      bool count_samples,
      Score& score) {
    const auto targets = batch.targets.narrow(0, begin, length);
    const auto scores =
        parallel_.forward(batch.inputs.narrow(0, begin, length));
    const auto loss_sum = loss_sum_of(scores, targets);
    score.loss_sum += loss_sum.template item<double>();
    score.correct += count_correct(scores.detach(), targets);
    // Every sample weighs the same, on whichever rank it is: the wrapper
    // divides the sum of the ranks' gradients by their number.
    if (count_samples) return parallel_.global_mean(loss_sum, score.count);
    return loss_sum * (static_cast<double>(parallel_.group().size()) /
                       static_cast<double>(batch.global_count));
  }

  int64_t accumulate_;
  torch::Dtype dtype_;
  torch::Device first_;
  torch::Device last_;
  Recorder* recorder_;
  std::shared_ptr<Net> network_;
  DistributedDataParallel<std::shared_ptr<Net>> parallel_;
};

}  // namespace echelon
