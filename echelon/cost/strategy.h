// How a job trains a model: everything that its time and memory depend on,
// except model and cluster; and the partition of a model into pipeline stages.
#pragma once

#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "echelon/cluster/device.h"
#include "echelon/cost/choose_recompute.h"
#include "echelon/cost/model_shape.h"
#include "echelon/layout/layout.h"
#include "echelon/options/context.h"
#include "echelon/options/optimizer.h"
#include "echelon/options/precision.h"
#include "echelon/schedule/options.h"

namespace echelon::cost {

struct Strategy {
  Layout layout;
  bool sequence_parallel = false;  // read when tp > 1
  /// Read when tp > 1: chunks of a matmul beside whose collective nothing else
  /// could run ([layout] overlap_chunks). 0: not chosen yet (choices.h), and
  /// one where nothing chooses.
  int64_t product_chunks = 0;
  /// Read when cp > 1: how attention reaches the other ranks' keys, and whether
  /// it tells documents apart or drops probabilities, for which cut sequences
  /// have no fused kernel.
  ContextParallelOptions context;
  bool masks_attention = false;
  int64_t zero_stage = 0;  // of dp_shard: 0 when that is 1
  /// Stage 3: parameters stay unsharded for the whole step ([shard] gather).
  bool unshard_once = false;

  int64_t global_batch = 0;     // samples
  int64_t microbatch_size = 1;  // samples; the largest where ranks differ
  /// By data-parallel rank, where devices of several kinds take microbatches of
  /// several sizes ([train] rank_batch); empty: each takes microbatch_size.
  std::vector<int64_t> rank_microbatch;
  int64_t seq_len = 0;                                // 0: the model's usual
  ScheduleKind schedule = ScheduleKind::one_f_one_b;  // read when pp > 1
  int64_t stages_per_rank = 0;  // 0: the schedule's default
  /// Blocks (of counted models: layers) of each stage, where devices of several
  /// kinds hold stages of several sizes ([model] cut); empty: as evenly as
  /// possible.
  std::vector<int64_t> stage_layers;

  Recompute recompute = Recompute::none;
  /// Layers of each stage that `recompute` is for; the others keep everything.
  /// -1: all.
  int64_t recompute_layers = -1;
  cluster::Precision precision = cluster::Precision::bf16;
  /// The precision of master parameters.
  cluster::Precision master = cluster::Precision::fp32;
  /// In which ranks sum gradients; same: as the framework does.
  ReduceDtype reduce = ReduceDtype::same;
  OptimizerKind optimizer = OptimizerKind::adamw;
  double momentum = 0;  // of sgd; above 0, it keeps a value for each element
  bool offload_optimizer = false;
  bool offload_activations = false;
  /// Steps may be CUDA graphs, where they can (steps_are_graphs()).
  bool graphs = true;
  /// The framework: a name of framework_names() (framework.h).
  std::string framework = "echelon";

  /// Tokens of a sequence, of a model that has `usual`.
  int64_t seq_len_or(int64_t usual) const {
    return seq_len > 0 ? seq_len : usual;
  }
  /// Ranks that see different samples. The ranks that share a layer's experts
  /// (ep) each bring their own samples and exchange tokens at the experts;
  /// elsewhere they are data parallel.
  int64_t data_ranks() const { return layout.data_degree() * layout.ep; }
  /// Microbatches of one data-parallel rank in a step.
  int64_t num_microbatches() const { return global_batch / round_samples(); }
  /// Samples of one microbatch on all data-parallel ranks.
  int64_t round_samples() const {
    if (rank_microbatch.empty()) return data_ranks() * microbatch_size;
    return std::accumulate(
        rank_microbatch.begin(), rank_microbatch.end(), int64_t{0});
  }
};

/// "dp=2,tp=4 · 8 microbatches of 1 · 1f1b · recompute all": one line for
/// people.
std::string to_string(const Strategy& strategy);

/// The strategy's, or the schedule's default; 1 without a pipeline.
int64_t stages_per_rank(const Strategy& strategy);
/// pp * stages_per_rank.
int64_t num_stages(const Strategy& strategy);

/// Whether one rank has the first and the last stage, so that tied weights are
/// one tensor: without a pipeline, or in a v-shaped one.
bool ends_on_one_rank(const Strategy& strategy);

/// Blocks (of counted models: layers) of each stage: the strategy's, otherwise
/// by the rules below.
std::vector<int64_t>
stage_layers(const ModelShape& model, const Strategy& strategy);

/// Blocks of each stage, spread evenly; the remainder goes to the stages in the
/// middle, which have neither embedding nor head.
std::vector<int64_t> blocks_of_stages(int64_t blocks, int64_t stages);

/// Layers of each stage by their FLOPs: a stage ends where its share does, and
/// has at least one layer. `counted`: the stage that each layer was counted
/// for, which is used if there are as many stages, in order.
std::vector<int64_t> layers_of_stages(
    const std::vector<double>& flops, int64_t stages,
    const std::vector<int64_t>& counted = {});
/// The same of the model's layers.
std::vector<int64_t> layers_of_stages(const ModelShape& model, int64_t stages);
/// The same in proportion to the stages' weights.
std::vector<int64_t> layers_by_weight(
    const std::vector<double>& flops, const std::vector<double>& weights);
std::vector<double> flops_of_layers(const ModelShape& model);

}  // namespace echelon::cost
