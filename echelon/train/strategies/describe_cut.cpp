#include "echelon/train/strategies/describe_cut.h"

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "echelon/counting/meta_mode.h"
#include "echelon/job/pipeline_schedule.h"
#include "echelon/layers/sharded_module.h"
#include "echelon/train/strategies/objective.h"

namespace echelon {
namespace {

// Tokens of one microbatch, where samples are texts.
int64_t tokens_of(const Job& job, const ModelSource& source) {
  if (!is_text(source.sample)) return 0;
  const int64_t passes =
      job.layout.pp > 1 ? microbatches_of(job) : job.train.accumulate;
  const int64_t samples = job.train.batch / (job.layout.data_degree() * passes);
  return std::max<int64_t>(1, samples) * source.sample.input_shape[0];
}

Shard shard_of(
    const std::map<std::string, ParameterShard>& shards,
    const std::string& name, const torch::Tensor& tensor, int rank) {
  const auto found = shards.find(name);
  return found == shards.end() ? replicated(tensor.sizes().vec(), rank)
                               : found->second.shard;
}

}  // namespace

TensorCut describe_cut(const Job& job, const ModelSource& source) {
  const int ranks = static_cast<int>(job.layout.tp);
  TensorCut cut{.ranks = ranks};
  if (ranks == 1) return cut;
  cut.cuts_tokens = job.tensor.sequence_parallel && is_text(source.sample);
  cut.tokens = tokens_of(job, source);
  for (int rank = 0; rank < ranks; ++rank) {
    const LayerList layers =
        source.cut({Group::silent("tp", rank, ranks), job.tensor});
    cut.layers.resize(layers.size());
    for (size_t i = 0; i < layers.size(); ++i) {
      cut.layers[i].name = layers[i].name;
      const BuiltLayer layer = build_on_meta(layers[i]);
      if (!layer.module) continue;
      const auto shards = shards_of(*layer.module);
      auto& parameters = cut.layers[i].parameters;
      size_t at = 0;
      for (const auto& item : layer.module->named_parameters()) {
        if (rank == 0) {
          const std::string name = layers[i].name + "." + item.key();
          parameters.push_back(
              {.name = item.key(), .tied = source.first_names.count(name) > 0});
        }
        parameters[at++].parts.push_back(
            shard_of(shards, item.key(), item.value(), rank));
      }
    }
  }
  return cut;
}

}  // namespace echelon
