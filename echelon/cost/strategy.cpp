#include "echelon/cost/strategy.h"

namespace echelon {
namespace {

// "2 x 12, 6": equal neighbours once.
std::string runs_text(const std::vector<int64_t>& numbers) {
  std::string text;
  for (size_t i = 0; i < numbers.size();) {
    size_t end = i;
    while (end < numbers.size() && numbers[end] == numbers[i]) ++end;
    text += text.empty() ? "" : ", ";
    if (end - i > 1) text += std::to_string(end - i) + " x ";
    text += std::to_string(numbers[i]);
    i = end;
  }
  return text;
}

}  // namespace

std::string to_string(const Strategy& strategy) {
  const char* between = " · ";
  std::string text = to_string(strategy.layout);
  const auto add = [&](const std::string& part) { text += between + part; };
  if (strategy.layout.tp > 1 && strategy.sequence_parallel) {
    add("sequence parallel");
  }
  if (strategy.zero_stage > 0)
    add("ZeRO " + std::to_string(strategy.zero_stage));
  if (strategy.microbatch_size > 0 && strategy.data_ranks() > 0) {
    const int64_t count = strategy.num_microbatches();
    add(std::to_string(count) +
        (count == 1 ? " microbatch of " : " microbatches of ") +
        (strategy.rank_microbatch.empty()
             ? std::to_string(strategy.microbatch_size)
             : runs_text(strategy.rank_microbatch)));
  }
  if (strategy.layout.pp > 1) {
    add(strategy.schedule +
        (strategy.stages_per_rank > 1
             ? ", " + std::to_string(strategy.stages_per_rank) +
                   " stages a rank"
             : ""));
  }
  if (!strategy.stage_layers.empty()) {
    add("stages of " + runs_text(strategy.stage_layers) + " layers");
  }
  if (strategy.recompute != Recompute::none) {
    add("recompute " + to_string(strategy.recompute) +
        (strategy.recompute_layers >= 0
             ? " in " + std::to_string(strategy.recompute_layers) +
                   (strategy.recompute_layers == 1 ? " layer" : " layers") +
                   " a stage"
             : ""));
  }
  if (strategy.offload_optimizer) add("optimizer offloaded");
  if (strategy.offload_activations) add("activations offloaded");
  return text;
}

}  // namespace echelon
