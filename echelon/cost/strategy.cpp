#include "echelon/cost/strategy.h"

#include <algorithm>
#include <numeric>

#include "echelon/schedule/options.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon::cost {
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

/// Layers of each stage; empty when the layers are not of such stages.
std::vector<int64_t>
counted_stages(const std::vector<int64_t>& stage_of_layer, int64_t stages) {
  std::vector<int64_t> counts(static_cast<size_t>(stages), 0);
  int64_t last = 0;
  for (const int64_t stage : stage_of_layer) {
    if (stage < last || stage >= stages) return {};
    last = stage;
    ++counts[static_cast<size_t>(stage)];
  }
  const bool whole = std::count(counts.begin(), counts.end(), 0) == 0;
  return whole ? counts : std::vector<int64_t>();
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
  if (strategy.layout.cp > 1 && strategy.context.way != ContextWay::automatic) {
    parts.push_back(to_string(strategy.context.way));
    if (strategy.context.way == ContextWay::ulysses_ring) {
      parts.back() += format(" in groups of {}", strategy.context.ulysses);
    }
  }
  add_if(strategy.zero_stage > 0, format("ZeRO {}", strategy.zero_stage));
  if (strategy.microbatch_size > 0 && strategy.data_ranks() > 0) {
    const int64_t count = strategy.num_microbatches();
    parts.push_back(format(
        "{} of {}", counted(count, "microbatch"),
        strategy.rank_microbatch.empty()
            ? std::to_string(strategy.microbatch_size)
            : runs_text(strategy.rank_microbatch)));
  }
  if (strategy.layout.pp > 1) {
    parts.push_back(to_string(strategy.schedule));
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
      parts.back() += format(" in {} a stage", counted(layers, "layer"));
    }
  }
  add_if(strategy.offload_optimizer, "optimizer offloaded");
  add_if(strategy.offload_activations, "activations offloaded");
  return join(parts, " · ");
}

int64_t stages_per_rank(const Strategy& strategy) {
  if (strategy.layout.pp == 1) return 1;
  if (strategy.stages_per_rank > 0) return strategy.stages_per_rank;
  return stages_per_rank_of(strategy.schedule);
}

int64_t num_stages(const Strategy& strategy) {
  return strategy.layout.pp * stages_per_rank(strategy);
}

bool ends_on_one_rank(const Strategy& strategy) {
  return strategy.layout.pp == 1 || is_v_shaped(strategy.schedule);
}

std::vector<int64_t>
stage_layers(const ModelShape& model, const Strategy& strategy) {
  if (!strategy.stage_layers.empty()) return strategy.stage_layers;
  const int64_t stages = num_stages(strategy);
  return model.transformer ? blocks_of_stages(model.transformer->layers, stages)
                           : layers_of_stages(model, stages);
}

std::vector<int64_t> blocks_of_stages(int64_t blocks, int64_t stages) {
  std::vector<int64_t> counts(static_cast<size_t>(stages), blocks / stages);
  const int64_t over = blocks % stages;
  const int64_t first = (stages - over) / 2;
  for (int64_t i = 0; i < over; ++i) ++counts[static_cast<size_t>(first + i)];
  return counts;
}

std::vector<int64_t> layers_of_stages(
    const std::vector<double>& flops, int64_t stages,
    const std::vector<int64_t>& counted) {
  if (auto counts = counted_stages(counted, stages); !counts.empty())
    return counts;
  return layers_by_weight(
      flops, std::vector<double>(static_cast<size_t>(stages), 1.0));
}

std::vector<int64_t> layers_by_weight(
    const std::vector<double>& flops, const std::vector<double>& weights) {
  const auto stages = static_cast<int64_t>(weights.size());
  const double all = std::accumulate(flops.begin(), flops.end(), 0.0);
  std::vector<double> ends(weights.size());
  std::partial_sum(weights.begin(), weights.end(), ends.begin());
  std::vector<int64_t> counts(static_cast<size_t>(stages), 0);
  auto left = static_cast<int64_t>(flops.size());
  double sum = 0;
  int64_t stage = 0;
  for (const double layer : flops) {
    const double end = all * ends[static_cast<size_t>(stage)] / ends.back();
    const bool full = sum + layer / 2 > end || left < stages - stage;
    if (stage + 1 < stages && counts[static_cast<size_t>(stage)] > 0 && full) {
      ++stage;
    }
    ++counts[static_cast<size_t>(stage)];
    sum += layer;
    --left;
  }
  return counts;
}

std::vector<double> flops_of_layers(const ModelShape& model) {
  std::vector<double> flops;
  for (const CountedLayer& layer : model.layers) {
    flops.push_back(layer.forward_flops + layer.backward_flops);
  }
  return flops;
}

std::vector<int64_t> layers_of_stages(const ModelShape& model, int64_t stages) {
  std::vector<int64_t> counted;
  for (const CountedLayer& layer : model.layers) counted.push_back(layer.stage);
  return layers_of_stages(flops_of_layers(model), stages, counted);
}

}  // namespace echelon::cost
