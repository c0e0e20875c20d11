#include "echelon/cost/choices.h"

#include <algorithm>
#include <array>

#include "echelon/cost/context_way.h"
#include "echelon/cost/framework.h"
#include "echelon/cost/layer_work.h"
#include "echelon/cost/operation_time.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon::cost {

std::pair<size_t, std::string>
cheapest(const std::vector<OpenWay>& ways, const std::string& what) {
  constexpr double kEqual = 1.01;
  const double least =
      std::ranges::min_element(ways, {}, &OpenWay::seconds)->seconds;
  const auto best = std::ranges::find_if(
      ways, [&](const OpenWay& one) { return one.seconds <= kEqual * least; });
  std::string why = format(
      "{}: {} a layer by the cost model, for {}", best->name,
      format_seconds(best->seconds), what);
  const char* before = "; ";
  for (auto one = ways.begin(); one != ways.end(); ++one) {
    if (one == best) continue;
    why += format("{}{} {}", before, one->name, format_seconds(one->seconds));
    before = ", ";
  }
  return {static_cast<size_t>(best - ways.begin()), why};
}

double block_seconds(
    const ModelShape& model, const Strategy& strategy,
    const cluster::Cluster& cluster) {
  const Framework framework = framework_on(
      find_framework(strategy.framework), cluster.node_of(0).device);
  const auto layers = layer_work(model, strategy, framework);
  const LayerWork& block = layers.at(1);
  double seconds = 0;
  for (const Operations* pass : {&block.forward, &block.backward_input}) {
    seconds +=
        pass_seconds(*pass, strategy, cluster, framework, /*rank=*/0).total();
  }
  return seconds;
}

ProductChunksChoice choose_product_chunks(
    const ModelShape& model, const Strategy& strategy,
    const cluster::Cluster& cluster) {
  if (strategy.layout.tp == 1) return {};
  if (strategy.product_chunks > 0) return {strategy.product_chunks, ""};
  const Framework framework = framework_on(
      find_framework(strategy.framework), cluster.node_of(0).device);
  if (!framework.overlaps_products || !model.transformer) return {};
  constexpr std::array<int64_t, 4> kChunks = {1, 2, 4, 8};
  std::vector<OpenWay> ways;
  Strategy tried = strategy;
  for (const int64_t chunks : kChunks) {
    tried.product_chunks = chunks;
    ways.push_back(
        {std::to_string(chunks), block_seconds(model, tried, cluster)});
  }
  const auto [best, why] = cheapest(
      ways,
      format(
          "{} of {} on {}", counted(strategy.microbatch_size, "sequence"),
          counted(strategy.seq_len_or(model.seq_len), "token"), cluster.name));
  return {.chunks = kChunks.at(best), .why = why};
}

Strategy with_choices(
    const ModelShape& model, Strategy strategy,
    const cluster::Cluster& cluster) {
  if (!model.transformer) return strategy;
  strategy.context = choose_context_way(model, strategy, cluster).options;
  strategy.product_chunks =
      choose_product_chunks(model, strategy, cluster).chunks;
  return strategy;
}

}  // namespace echelon::cost
