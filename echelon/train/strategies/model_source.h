// The model to train as a list of layers, complete or sharded over
// tensor-parallel ranks.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "echelon/architecture/language_model.h"
#include "echelon/architecture/parameter_list.h"
#include "echelon/comm/mesh_groups.h"
#include "echelon/counting/layer_cost.h"
#include "echelon/data/dataset.h"
#include "echelon/job/job.h"
#include "echelon/layers/layer_list.h"
#include "echelon/parallel/tensor/tensor_parallel.h"
#include "echelon/timeline/metrics.h"
#include "echelon/train/strategies/objective.h"

namespace echelon {

/// Returns a list of layers for a rank of a tensor-parallel group; for a group
/// of one rank, the default, the complete layers.
using LayerFactory = std::function<LayerList(const TensorParallel&)>;

/// The layers of OwnParts: a list, or a function that shards it.
class OwnLayers {
 public:
  OwnLayers() = default;
  OwnLayers(const LayerList& layers);
  OwnLayers(LayerFactory layers) : layers_(std::move(layers)) {}
  template <class F>
  requires std::is_invocable_r_v<LayerList, F, const TensorParallel&>
  OwnLayers(F layers) : layers_(std::move(layers)) {}

  const LayerFactory& factory() const { return layers_; }

 private:
  LayerFactory layers_;  // empty: the job's model
};

/// What a program, or a library, brings in place of what the job names. All of
/// it is optional; every rank brings the same.
struct OwnParts {
  /// In place of [model]: the first layer takes the data's samples. Without
  /// `objective`, the last one returns a score for each class (of a text: for
  /// each token of the vocabulary, at each position).
  OwnLayers layers;
  /// In place of [data]; its shuffle, holdout, workers … still count.
  std::shared_ptr<const Dataset> dataset;
  /// Samples for evaluation alone; null: [data] holdout says how many of
  /// `dataset` are held out.
  std::shared_ptr<const Dataset> holdout;
  /// Null: next token for texts, classification otherwise.
  std::shared_ptr<const Objective> objective;
  /// Measured in each evaluation, beside the loss.
  std::vector<Metric> metrics;
  /// Called on rank 0 after each step, with what metrics.jsonl gets.
  std::function<void(const timeline::StepMetrics&)> on_step;
};

/// A model to train: its layers, and every parameter and buffer by name, in the
/// order of a state dict. A tied parameter is listed once, by its first name.
struct ModelSource {
  std::string name;      // as reports say it
  LayerList layers;      // complete, as one device has them
  LayerFactory sharded;  // as a tensor-parallel rank has them
  std::vector<ParameterInfo> parameters;
  SampleSpec sample;    // of the data it is trained on
  int64_t classes = 0;  // or the vocabulary size of a language model
  /// What it is trained for, on a tensor-parallel rank.
  std::function<std::shared_ptr<const Objective>(const TensorParallel&)>
      objective;
  std::vector<Metric> metrics;  // the program's
  /// The vocabulary of which tensor-parallel ranks have shards of the scores,
  /// where the program brings what is given whole ones; 0: no such.
  int64_t sharded_scores = 0;
  /// The other names of tied parameters, and the first one of each.
  std::map<std::string, std::string> first_names;
  /// Parameters without requires_grad: optimizers keep no state of them.
  std::set<std::string> frozen;
  /// Of these, what checkpoints leave out because [model] weights has it: all
  /// but the adapters, when adapters train.
  std::set<std::string> unsaved;

  /// The name in `parameters` of the tensor that a layer calls `name`.
  const std::string& first_name(const std::string& name) const;

  /// Elements of all parameters, without buffers.
  int64_t num_parameters() const;
};

/// The model that job.model names.
ModelSource model_source(const Job& job, const SampleSpec& sample);
/// The shape of the language model that job.model names; none: it names none.
std::optional<LanguageModelShape>
language_shape(const Job& job, const ModelSource& source);
/// The names of its matrices with a row for each id of the vocabulary: the
/// embedding and the head.
std::set<std::string>
vocabulary_matrices(const Job& job, const ModelSource& source);
/// A user's own list (null: the same as above), whose first layer takes [batch,
/// *sample.input_shape] (and then Batch::more) and whose last returns the
/// scores. It is called by the list's name, "own model" without one. Ties that
/// were not declared are found.
///
/// Sharded lists have the same layers and names as the complete one; otherwise
/// ConfigError. No full parameter is built for them: the shards themselves say
/// how they are initialised (sharded_module.h), in any number of shards.
ModelSource model_source(
    const Job& job, const LayerFactory& layers, const SampleSpec& sample);
/// The same with the objective and metrics of `own` too.
ModelSource
model_source(const Job& job, const OwnParts& own, const SampleSpec& sample);
/// A list that cannot be sharded: throws ConfigError for more than one rank.
LayerFactory whole_layers(const LayerList& layers);

/// The job as a checkpoint and config.toml have it: what is a program's own is
/// no model and no data set that a configuration can name.
Job with_own_names(Job job, const OwnParts& own);

/// The data of `own`, or the job's.
TrainingData data_of(const Job& job, const OwnParts& own);

/// Whether ranks must ask each other how many units a batch of this data has.
bool counts_units(const Dataset& dataset, const ModelSource& source);

/// Whether the model's layers draw random masks ([model] dropout above 0, and
/// the data is text): then batches have keys.
bool draws_masks(const ModelOptions& model, const SampleSpec& sample);

/// The dtype of forward and backward: [precision] compute, or [model] dtype.
torch::Dtype compute_dtype(const Job& job);

/// A batch of `samples` samples, as the model's first layer takes it in
/// job.layout.
std::vector<counting::TensorSpec>
input_specs(const Job& job, const ModelSource& source, int64_t samples);

/// Converts floating-point parameters and buffers; Module::to would convert the
/// batch counters of batch norms as well.
void to_dtype(torch::nn::Module& module, torch::Dtype dtype);

torch::Dtype dtype_of(ModelDtype dtype);

/// The shape of a sample's inputs on a context-parallel rank.
std::vector<int64_t>
tokens_here(const SampleSpec& sample, const ContextParallel& context);

/// [samples, ...shape].
std::vector<int64_t>
with_samples(int64_t samples, const std::vector<int64_t>& shape);

/// How many forward and backward passes a rank makes in a step: microbatches of
/// a pipeline, or accumulated ones.
int64_t passes_per_step(const Job& job);

/// The groups of the job's ranks. Every rank of the world calls this.
MeshGroups mesh_groups(World& world, const Job& job);

/// What this rank's layers are built with. `groups` are the job's, or of one
/// rank.
TensorParallel tensor_parallel(const Job& job, const MeshGroups& groups);

/// A rank of the job's tensor-parallel group that sends nothing, the first of
/// its context-parallel and expert-parallel groups: for layers that are built
/// to be counted.
TensorParallel silent_tensor_parallel(const Job& job, int rank = 0);

}  // namespace echelon
