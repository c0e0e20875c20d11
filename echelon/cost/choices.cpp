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
namespace {

constexpr double kEqualChunks = 1.01;

}  // namespace

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
  struct Candidate {
    int64_t chunks;
    double seconds = 0;
  };
  std::array<Candidate, 4> all = {{{1}, {2}, {4}, {8}}};
  Strategy tried = strategy;
  for (Candidate& one : all) {
    tried.product_chunks = one.chunks;
    one.seconds = block_seconds(model, tried, cluster);
  }
  const double least =
      std::ranges::min_element(all, {}, &Candidate::seconds)->seconds;
  const auto best = std::ranges::find_if(all, [&](const Candidate& one) {
    return one.seconds <= kEqualChunks * least;
  });
  ProductChunksChoice choice{.chunks = best->chunks, .why = ""};
  choice.why = format(
      "{}: {} a layer by the cost model, for {} of {} on {}", best->chunks,
      format_seconds(best->seconds),
      counted(strategy.microbatch_size, "sequence"),
      counted(strategy.seq_len_or(model.seq_len), "token"), cluster.name);
  const char* before = "; ";
  for (const Candidate& one : all) {
    if (one.chunks == best->chunks) continue;
    choice.why +=
        format("{}{} {}", before, one.chunks, format_seconds(one.seconds));
    before = ", ";
  }
  return choice;
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
