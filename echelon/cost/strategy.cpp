#include "echelon/cost/strategy.h"

#include "echelon/text/format.h"

namespace echelon {
namespace {

// "2 x 12, 6": equal neighbours once.
std::string runs_text(const std::vector<int64_t>& numbers) {
  std::vector<std::string> runs;
  for (size_t i = 0; i < numbers.size();) {
    size_t end = i;
    while (end < numbers.size() && numbers[end] == numbers[i]) ++end;
    runs.push_back(
        end - i > 1 ? format("{} x {}", end - i, numbers[i])
                    : std::to_string(numbers[i]));
    i = end;
  }
  return join(runs, ", ");
}

}  // namespace

std::string to_string(const Strategy& strategy) {
  std::vector<std::string> parts = {to_string(strategy.layout)};
  const auto add_if = [&](bool holds, const std::string& part) {
    if (holds) parts.push_back(part);
  };
  add_if(
      strategy.layout.tp > 1 && strategy.sequence_parallel,
      "sequence parallel");
  add_if(strategy.zero_stage > 0, format("ZeRO {}", strategy.zero_stage));
  if (strategy.microbatch_size > 0 && strategy.data_ranks() > 0) {
    const int64_t count = strategy.num_microbatches();
    parts.push_back(format(
        "{} {} of {}", count, count == 1 ? "microbatch" : "microbatches",
        strategy.rank_microbatch.empty()
            ? std::to_string(strategy.microbatch_size)
            : runs_text(strategy.rank_microbatch)));
  }
  if (strategy.layout.pp > 1) {
    parts.push_back(strategy.schedule);
    if (strategy.stages_per_rank > 1) {
      parts.back() += format(", {} stages a rank", strategy.stages_per_rank);
    }
  }
  add_if(
      !strategy.stage_layers.empty(),
      format("stages of {} layers", runs_text(strategy.stage_layers)));
  if (strategy.recompute != Recompute::none) {
    const int64_t layers = strategy.recompute_layers;
    parts.push_back("recompute " + to_string(strategy.recompute));
    if (layers >= 0) {
      parts.back() +=
          format(" in {} {} a stage", layers, layers == 1 ? "layer" : "layers");
    }
  }
  add_if(strategy.offload_optimizer, "optimizer offloaded");
  add_if(strategy.offload_activations, "activations offloaded");
  return join(parts, " · ");
}

}  // namespace echelon
