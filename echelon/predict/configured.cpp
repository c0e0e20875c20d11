#include "echelon/predict/configured.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "echelon/architecture/language_model.h"
#include "echelon/architecture/parameter_list.h"
#include "echelon/cost/model_catalogue.h"
#include "echelon/cost/strategy.h"
#include "echelon/error.h"
#include "echelon/job/cuda_graphs.h"
#include "echelon/job/pipeline_schedule.h"
#include "echelon/layout/partition.h"

namespace echelon::predict {
namespace {

cost::ModelShape
language_model(const ModelOptions& options, const JobFacts& facts) {
  const LanguageModelShape shape =
      language_model_shape(options, vocabulary(options, facts.classes));
  return {
      .name = options.name,
      .transformer = transformer_shape(shape),
      .seq_len = facts.data.sample_shape.at(0)};
}

// Linear layers, each with an activation.
cost::ModelShape mlp(const ModelOptions& options, const JobFacts& facts) {
  cost::ModelShape model{.name = "mlp"};
  const std::vector<int64_t>& sample = facts.data.sample_shape;
  int64_t inner = std::accumulate(
      sample.begin(), sample.end(), int64_t{1}, std::multiplies<>());
  std::vector<int64_t> widths = options.hidden;
  widths.push_back(facts.classes);
  for (const int64_t width : widths) {
    const auto in = static_cast<double>(inner),
               out = static_cast<double>(width);
    cost::CountedLayer layer;
    const bool first = model.layers.empty();
    const bool last = model.layers.size() + 1 == widths.size();
    layer.name = "fc" + std::to_string(model.layers.size() + 1);
    layer.forward_flops = 2 * in * out;
    layer.backward_flops =
        (first ? 2 : 4) * in * out;  // the batch needs no gradient
    layer.parameters = (in + 1) * out;
    layer.kept_elements = (first ? in : 0) + (last ? 0 : out);
    layer.moved_elements = 3 * out;
    layer.output_elements = out;
    layer.inner = inner;
    layer.columns = width;
    layer.rows = 1;
    model.layers.push_back(layer);
    inner = width;
  }
  return model;
}

cost::ModelShape model_of(const Job& job, const JobFacts& facts) {
  if (job.data.name == DataKind::own && facts.data.sample_shape.empty()) {
    throw ConfigError(
        "[data] name=\"own\": formulas do not know the shape of its samples");
  }
  if (job.model.name == "mlp") return mlp(job.model, facts);
  if (is_language_model(job.model)) return language_model(job.model, facts);
  cost::ImageShape image;
  if (const auto& sizes = facts.data.sample_shape; sizes.size() == 3) {
    image = {sizes[0], sizes[1], sizes[2]};
  }
  return cost::convolution_shape(job.model.name, image, facts.classes);
}

cluster::Precision precision_of(const Job& job) {
  if (job.precision.compute == ComputeDtype::tf32)
    return cluster::Precision::tf32;
  if (job.precision.compute == ComputeDtype::bf16)
    return cluster::Precision::bf16;
  if (job.precision.compute == ComputeDtype::fp16)
    return cluster::Precision::fp16;
  if (job.precision.compute == ComputeDtype::fp8)
    return cluster::Precision::fp8;
  return job.model.dtype == ModelDtype::float64 ? cluster::Precision::fp64
                                                : cluster::Precision::fp32;
}

// Blocks of each stage where the configuration partitions the model; embeddings
// and the last norm and head go with their neighbours.
std::vector<int64_t> stage_layers_of(const Job& job, size_t stages) {
  if (job.layout.pp == 1 || job.model.partition_at.empty()) return {};
  const auto names = list_layers(job.model);
  const bool language = is_language_model(job.model);
  const bool gpt = job.model.name.rfind("gpt", 0) == 0;
  const int64_t before = !language ? 0 : gpt ? 2 : 1;  // embeddings
  const int64_t after = language ? 2 : 0;              // norm, head
  const int64_t blocks = static_cast<int64_t>(names.size()) - before - after;
  std::vector<int64_t> layers;
  int64_t begin = 0;
  for (const size_t boundary :
       partition_at(names, job.model.partition_at, stages)) {
    const int64_t end =
        std::clamp<int64_t>(static_cast<int64_t>(boundary) - before, 0, blocks);
    if (boundary > 0) layers.push_back(end - begin);
    begin = end;
  }
  return layers;
}

int64_t num_layers_of(const cost::ModelShape& model) {
  return model.transformer ? model.transformer->layers
                           : static_cast<int64_t>(model.layers.size());
}

// A "budget" is chosen by layers' counts, which are not known here.
}  // namespace

Configured configured(const Job& job, const JobFacts& facts) {
  Configured made{
      .model = model_of(job, facts), .strategy = configured_strategy(job)};
  auto layers = stage_layers_of(
      job, static_cast<size_t>(cost::num_stages(made.strategy)));
  // The formulas have no stage of embeddings alone.
  if (std::count(layers.begin(), layers.end(), 0) > 0) return made;
  if (std::accumulate(layers.begin(), layers.end(), int64_t{0}) ==
      num_layers_of(made.model)) {
    made.strategy.stage_layers = std::move(layers);
  }
  return made;
}

cost::Strategy configured_strategy(const Job& job) {
  if (job.layout.pp > 1 && !job.pipeline.schedule_file.empty()) {
    throw ConfigError(
        "[layout] schedule_file = \"" + job.pipeline.schedule_file +
        "\": simulate takes the schedules by name; set schedule");
  }
  cost::Strategy strategy;
  strategy.layout = job.layout;
  if (shards_parameters(job) && job.layout.dp_shard * job.layout.cp > 1) {
    strategy.zero_stage = job.shard.stage;
    strategy.unshard_once =
        job.shard.gather == Gather::step ||
        (job.shard.gather == Gather::automatic && job.layout.pp > 1);
  }
  strategy.global_batch = job.train.batch;
  const int64_t passes =
      job.layout.pp > 1 ? microbatches_of(job) : job.train.accumulate;
  strategy.microbatch_size =
      std::max<int64_t>(1, job.train.batch / (strategy.data_ranks() * passes));
  for (const int64_t batch : job.train.rank_batch) {
    strategy.rank_microbatch.push_back(std::max<int64_t>(1, batch / passes));
    strategy.microbatch_size = *std::max_element(
        strategy.rank_microbatch.begin(), strategy.rank_microbatch.end());
  }
  strategy.schedule = job.pipeline.schedule;
  strategy.stages_per_rank = job.pipeline.stages_per_rank;
  strategy.sequence_parallel = job.tensor.sequence_parallel;
  strategy.product_chunks = job.tensor.overlap_chunks;
  strategy.context = job.context;
  strategy.masks_attention =
      job.model.dropout > 0 || job.data.documents != Documents::packed;
  strategy.recompute =
      cost::recompute_of(job.memory.recompute).value_or(cost::Recompute::none);
  strategy.precision = precision_of(job);
  strategy.master = job.model.dtype == ModelDtype::float64
                        ? cluster::Precision::fp64
                        : cluster::Precision::fp32;
  strategy.optimizer = job.optimizer.name;
  strategy.momentum = job.optimizer.momentum;
  strategy.reduce = job.precision.reduce;
  strategy.offload_optimizer = job.memory.offload != Offload::none;
  strategy.offload_activations = job.memory.activations == Activations::offload;
  strategy.graphs = captures_steps(job);
  strategy.framework = "echelon";
  return strategy;
}

}  // namespace echelon::predict
