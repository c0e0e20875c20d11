#include "echelon/cost/stage_activations.h"

#include <algorithm>
#include <string>

#include "echelon/cost/stage_cut.h"

namespace echelon {
namespace {

bool forwards_first(const std::string& schedule) {
  return schedule == "gpipe" || schedule == "breadth_first";
}

// What the layers of one stage keep for each microbatch, and the most that one
// of them, and its loss, take beside.
std::vector<ActivationBytes> transformer_activations(
    const ModelShape& model, const Strategy& strategy, const Stack& stack) {
  const TransformerShape& shape = *model.transformer;
  const int64_t stages = num_stages(strategy);
  const auto of = [&](bool experts, Recompute recompute) {
    return block_bytes(model, strategy, stack, experts, recompute);
  };
  const bool mixture = shape.experts.experts > 0;
  const ActivationBytes again[2] = {
      of(false, strategy.recompute), of(mixture, strategy.recompute)};
  const ActivationBytes keeps[2] = {
      of(false, Recompute::none), of(mixture, Recompute::none)};
  std::vector<ActivationBytes> parts;
  int64_t layer = 0;
  for (const int64_t blocks : stage_layers(model, strategy)) {
    ActivationBytes part;
    for (int64_t i = 0; i < blocks; ++i, ++layer) {
      const bool recomputed =
          strategy.recompute_layers < 0 || i < strategy.recompute_layers;
      const ActivationBytes& block =
          (recomputed ? again : keeps)[shape.has_experts(layer)];
      part.kept += block.kept;
      part.working = std::max(part.working, block.working);
      part.output = block.output;
    }
    parts.push_back(part);
  }
  // The last stage's backward follows its forward, so the loss of one
  // microbatch is there at a time, and gone when blocks compute; unless all
  // forwards come first.
  const ActivationBytes head = head_bytes(model, strategy, stack);
  const bool waits = stages > 1 && forwards_first(strategy.schedule);
  if (waits) parts.back().kept += head.kept;
  parts.back().working =
      std::max(parts.back().working, head.working + (waits ? 0 : head.kept));
  return parts;
}

std::vector<ActivationBytes>
counted_activations(const ModelShape& model, const Strategy& strategy) {
  std::vector<ActivationBytes> parts;
  size_t layer = 0;
  for (const int64_t layers : stage_layers(model, strategy)) {
    ActivationBytes part;
    for (int64_t i = 0; i < layers; ++i, ++layer) {
      const ActivationBytes one =
          counted_bytes(model.layers[layer], strategy, strategy.recompute);
      part.kept += one.kept;
      part.working = std::max(part.working, one.working);
      part.output = one.output;
    }
    parts.push_back(part);
  }
  return parts;
}

}  // namespace

std::vector<ActivationBytes> stage_activations(
    const ModelShape& model, const Strategy& strategy, const Stack& stack) {
  return model.transformer ? transformer_activations(model, strategy, stack)
                           : counted_activations(model, strategy);
}

}  // namespace echelon
