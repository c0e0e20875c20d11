// A model on this rank, however it is cut: what the training loop and `verify`
// drive. One implementation per strategy.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "echelon/comm/mesh_groups.h"
#include "echelon/data/dataset.h"
#include "echelon/models/layer_cost.h"
#include "echelon/models/layer_list.h"
#include "echelon/models/network.h"
#include "echelon/models/parameter_list.h"
#include "echelon/optim/clip.h"
#include "echelon/optim/optimizer.h"
#include "echelon/parallel/data/distributed_data_parallel.h"
#include "echelon/timeline/recorder.h"
#include "echelon/train/job.h"
#include "echelon/train/objective.h"

namespace echelon {

/// Ranks with the same samples (those of one pipeline) call everything together,
/// with the same batches. Each sample's loss is counted on one of them alone: sum
/// a Score over the world.
///
/// What is minimised is the objective's loss (objective.h), summed over the units
/// of all ranks and divided by their number, whatever the layout.
class ParallelModel {
 public:
  virtual ~ParallelModel() = default;

  /// Forward and backward over this rank's part of a global batch, in
  /// microbatches; on return the gradients are those of the mean loss over the
  /// global batch.
  ///
  /// `count_units` asks the other ranks how many units there are (counts_units
  /// below). Otherwise batch.global_count says it.
  virtual Score forward_backward(const Batch& batch, bool count_units) = 0;

  /// The model as it is, without gradients, in evaluation mode.
  virtual Score evaluate(const Batch& batch) = 0;

  /// The first layer, in the order of computation, with a NaN or an infinity;
  /// the same on all ranks of one pipeline.
  virtual std::optional<NonFinite> find_nonfinite(const Batch& batch) = 0;

  /// The parameters that this rank updates, by name, each tensor once. One that
  /// is tied to an earlier layer of another part has its own name here.
  virtual NamedTensors parameters() const = 0;
  /// Parameters and buffers that live here, as a state dict has them.
  virtual NamedTensors state() const = 0;

  /// For the norm of all gradients: sums over the ranks that hold other parts of
  /// the model. Null when all of it is here.
  virtual SumOverRanks sum_over_parts() const { return nullptr; }

  /// How the model was cut, a line per part; empty when it was not.
  virtual std::vector<std::string> describe() const { return {}; }
};

/// A model to train: its layers, and every parameter and buffer by name, in the
/// order of a state dict; tied ones once, by the first of their names.
struct ModelSource {
  LayerList layers;
  std::vector<ParameterInfo> parameters;
  SampleSpec sample;    // what it is trained on
  int64_t classes = 0;  // that it tells apart, or words
  /// The other names of tied parameters, and the first one of each.
  std::map<std::string, std::string> first_names;

  /// The name in `parameters` of the tensor that a part calls `name`.
  const std::string& first_name(const std::string& name) const;

  /// Elements of all parameters, buffers left out.
  int64_t num_parameters() const;
};

/// The model that job.model names.
ModelSource model_source(const Job& job, const SampleSpec& sample);
/// A user's own list, whose first layer takes [batch, *sample.input_shape] and
/// whose last returns the scores of the classes. Ties that were not declared are
/// found.
ModelSource model_source(
    const Job& job, const LayerList& layers, const SampleSpec& sample);

/// Whether ranks have to ask each other how many units a batch of this data has.
bool counts_units(const Dataset& dataset);

/// Whether the model's layers draw random masks: then batches have keys.
bool draws_masks(const Job& job);

/// A batch of so many samples, as the model's first layer takes it.
std::vector<TensorSpec>
input_specs(const Job& job, const ModelSource& source, int64_t samples);

/// What a model is built from, beside the job.
struct ModelPlace {
  const ModelSource& source;
  World& world;
  const MeshGroups& groups;  // of the job's layout
  Recorder* recorder = nullptr;  // gets the spans of forward and backward
  /// Told how the model will be cut, a line per part, before anything is built.
  std::function<void(const std::string& line)> announce = nullptr;
};

/// Builds what job.layout asks for. Every rank of the world calls (the ranks of
/// place.groups alone when the layout is one device). Throws what the model, its
/// weights and the strategy's constructor throw. What `place` refers to outlives
/// the result.
std::unique_ptr<ParallelModel>
make_parallel_model(const Job& job, const ModelPlace& place);

/// Tells place.announce, where there is one.
void announce(
    const ModelPlace& place, const std::vector<std::string>& lines);

/// Floating-point parameters and buffers; Module::to would turn the counters of
/// batches into floating point as well.
void to_dtype(torch::nn::Module& module, torch::Dtype dtype);

/// "float64" -> torch::kFloat64.
torch::Dtype dtype_of(const std::string& name);

/// One constructor per strategy; make_parallel_model chooses.
std::unique_ptr<ParallelModel>
make_data_parallel_model(const Job& job, const ModelPlace& place);
std::unique_ptr<ParallelModel>
make_placed_model(const Job& job, const ModelPlace& place);
std::unique_ptr<ParallelModel>
make_pipeline_model(const Job& job, const ModelPlace& place);

/// What data parallelism does with the gradients of one part of the model.
DistributedDataParallelOptions data_parallel_options(const Job& job);

}  // namespace echelon
