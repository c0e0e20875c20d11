#include "echelon/train/strategies/microbatch_loop.h"

#include <torch/types.h>

#include "echelon/profiling/memory_meter.h"

namespace echelon {

Score MicrobatchLoop::run(const Batch& batch, double scale) const {
  Score score;
  int64_t left = num_microbatches;
  for (const Batch& part : split_batch(batch, num_microbatches)) {
    const bool last = --left == 0;
    const auto guard = around ? around(last) : nullptr;
    torch::Tensor loss;
    {
      ScopedSpan span(recorder, "compute", "forward", SpanKind::forward);
      const auto outputs = forward(inputs_of(part));
      const auto sum = objective.loss_sum(outputs, part.targets);
      objective.add_loss(score, sum, part.targets);
      loss = sum * scale;
      keep_as_activations();
    }
    if (before_backward) before_backward(last);
    ScopedSpan span(recorder, "compute", "backward", SpanKind::backward);
    loss.backward();
  }
  return score;
}

Tensors stand_in(const Tensors& inputs) {
  Tensors one;
  for (const auto& input : inputs) {
    auto shape = input.sizes().vec();
    shape[0] = 1;
    one.push_back(torch::zeros(shape, input.options()));
  }
  return one;
}

}  // namespace echelon
