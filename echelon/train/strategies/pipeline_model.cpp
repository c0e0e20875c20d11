// Pipeline parallelism partitions the layers into stages. Each stage is data
// parallel in one of two ways: RankLayers shards its parameters (units()), or
// its network is in a DataParallelModule of its own (replicas_). Neither
// reduces by itself. The pipeline says before each backward whose gradients
// come and whether they are that stage's last of the step (before_gradients);
// reductions end in after_backwards, before tied parameters are summed over the
// stages.
#include <algorithm>
#include <map>

#include "echelon/error.h"
#include "echelon/job/pipeline_schedule.h"
#include "echelon/layers/ties.h"
#include "echelon/parallel/pipeline/pipeline.h"
#include "echelon/parallel/pipeline/tied_parameters.h"
#include "echelon/parallel/pipeline/tuple_shape.h"
#include "echelon/schedule/memory.h"
#include "echelon/train/strategies/count_job.h"
#include "echelon/train/strategies/model_partition.h"
#include "echelon/train/strategies/parallel_model.h"
#include "echelon/train/strategies/rank_layers.h"

namespace echelon {
namespace {

bool is_finite(const torch::Tensor& tensor) {
  return !tensor.is_floating_point() || tensor.numel() == 0 ||
         at::isfinite(tensor).all().item<bool>();
}

bool all_finite(const Tensors& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), is_finite);
}

/// Looks for values that are not finite in parameters and outputs, between
/// begin() and end(). It wraps each layer's own forward, inside of which the
/// parameters are unsharded.
class Probe {
 public:
  void begin() { active_ = true, found_.reset(); }
  std::optional<NonFinite> end() {
    active_ = false;
    return found_;
  }

  static LayerForward
  around(std::shared_ptr<Probe> probe, const Layer& layer, bool first) {
    return [probe, layer, first](const Tensors& inputs) {
      Tensors outputs = layer.forward(inputs);
      probe->look(layer, inputs, outputs, first);
      return outputs;
    };
  }

 private:
  void look(
      const Layer& layer, const Tensors& inputs, const Tensors& outputs,
      bool first) {
    if (!active_ || found_) return;
    if (first && !all_finite(inputs)) {
      found_ = NonFinite{"input", "input"};
      return;
    }
    if (layer.module != nullptr) {
      for (const auto& item : layer.module->named_parameters()) {
        if (!is_finite(item.value())) {
          found_ = NonFinite{
              layer.name, "parameter " + layer.name + "." + item.key()};
          return;
        }
      }
    }
    if (!all_finite(outputs)) found_ = NonFinite{layer.name, "output"};
  }

  bool active_ = false;
  std::optional<NonFinite> found_;
};

// A number of the shapes of a batch, not 0; others for other shapes.
int64_t shapes_of(const Batch& batch) {
  pipeline::Fingerprint shapes;
  shapes.add(pipeline::shape_of(inputs_of(batch), "a batch"));
  return shapes.value() | 1;
}

// Announces the partition before anything is built.
ModelPartition announced(ModelPartition partition, const ModelPlace& place) {
  announce(place, partition.lines);
  return partition;
}

class PipelineModel : public ParallelModel {
 public:
  PipelineModel(const Job& job, const ModelPlace& place);

  Score forward_backward(const Batch& batch, bool count_units) override;
  Score evaluate(const Batch& batch) override;
  std::optional<NonFinite> find_nonfinite(const Batch& batch) override;
  std::vector<LocalParameter> parameters() const override {
    return layers_.parameters();
  }
  std::vector<LocalParameter> buffers() const override {
    return layers_.buffers();
  }
  std::vector<ParameterGroup>
  optimizer_groups(double weight_decay) const override {
    return layers_.optimizer_groups(weight_decay);
  }
  void after_update(bool updated) override { layers_.after_update(updated); }
  void before_load() override { layers_.before_load(); }
  void after_load() override { layers_.after_load(); }
  std::optional<PartitionedGradients> partitioned_gradients() const override;
  const ModelPartition* partition() const override { return &partition_; }
  torch::Tensor expert_counts() const override {
    return counted_once(layers_.routers(), counted_here());
  }
  std::vector<std::string> describe() const override {
    return partition_.lines;
  }

 private:
  // Data parallelism of a stage when there are no units().
  struct Replica {
    std::unique_ptr<DataParallelModule> parallel;
    std::unique_ptr<ExpertParallel> experts;
    std::shared_ptr<void> local, experts_local;  // while a step runs
  };

  RankLayersOptions layers_options(const Job& job);
  void make_pipeline(const ModelPlace& place);
  void tie_shards(const std::vector<Tie>& ties);
  void begin_step();
  void before_gradients(int32_t stage, bool last);
  void after_backwards();
  size_t slice_of(int32_t stage) const;
  // One rank of a tensor-parallel group counts their score.
  bool counted_here() const { return tensor_.rank() == 0; }
  // The inputs of the first stage; none on ranks without it.
  std::vector<Tensors> inputs(const std::vector<Batch>& microbatches) const;

  const Group group_;  // the pipeline
  const Group data_;   // data-parallel ranks with the same stages
  const Group shard_;  // those of them that shard the parameters
  const TensorParallel tensor_;
  torch::Device device_;
  torch::Dtype dtype_;
  Schedule schedule_;
  std::vector<int32_t> stages_;  // of this rank
  TrainingObjective objective_;
  LayerList list_;
  ModelPartition partition_;
  bool unshard_once_;
  std::shared_ptr<Probe> probe_ = std::make_shared<Probe>();
  RankLayers layers_;
  std::vector<Replica> replicas_;
  std::unique_ptr<TiedParameters> tied_shards_;
  std::unique_ptr<Pipeline> pipeline_;
  std::optional<CountedElements> counted_;
};

PipelineModel::PipelineModel(const Job& job, const ModelPlace& place)
    : group_(place.groups.along(Axis::pp)),
      data_(place.groups.data()),
      shard_(
          shards_parameters(job) ? place.groups.expert_shard()
                                 : place.groups.along(Axis::dp_shard)),
      tensor_(tensor_parallel(job, place.groups)),
      device_(place.world.device()),
      dtype_(compute_dtype(job)),
      schedule_(pipeline_schedule(job)),
      stages_(schedule_.stages_of(group_.rank())),
      objective_(objective_on(job, place, tensor_)),
      list_(place.source.sharded(tensor_)),
      partition_(
          announced(partition_into_stages(job, place, schedule_), place)),
      unshard_once_(unshards_once(job, place.source)),
      layers_(job, place, list_, layers_options(job)) {
  if (layers_.units() == nullptr) {
    for (const auto& network : layers_.networks()) {
      const auto reduction =
          data_parallel_options(job.train, job.model.sync_batch_norm);
      replicas_.push_back(
          {std::make_unique<DataParallelModule>(
               *network, data_, without_experts(reduction, place.groups)),
           std::make_unique<ExpertParallel>(
               *network, place.groups, reduction)});
    }
  }
  make_pipeline(place);
  // A parameter that is tied to one of an earlier stage is counted there.
  auto elsewhere =
      tied_shards_ ? tied_shards_->duplicates() : pipeline_->duplicates();
  elsewhere.merge(counted_elsewhere(parameters(), place.groups));
  counted_.emplace(parameters(), tensor_.rank(), elsewhere);
}

RankLayersOptions PipelineModel::layers_options(const Job& job) {
  RankLayersOptions options;
  for (const int32_t stage : stages_) {
    const auto at = static_cast<size_t>(stage);
    options.slices.emplace_back(
        partition_.boundaries[at], partition_.boundaries[at + 1]);
  }
  options.ties = ties_across(list_, partition_.boundaries);
  options.unshard_once = unshard_once_;
  options.in_flight = stored_activations(schedule_).ranks.at(
      static_cast<size_t>(group_.rank()));
  options.innermost = [probe = probe_](const Layer& layer, size_t index) {
    return Probe::around(probe, layer, index == 0);
  };
  return options;
}

void PipelineModel::make_pipeline(const ModelPlace& place) {
  std::vector<PipelineStage> stages;
  for (size_t i = 0; i < stages_.size(); ++i) {
    stages.push_back(stage_of(*layers_.networks()[i], stages_[i]));
  }
  PipelineOptions options;
  options.device = device_;
  options.recorder = place.recorder;
  options.before_gradients = [this](int32_t stage, bool last) {
    before_gradients(stage, last);
  };
  options.after_backwards = [this] { after_backwards(); };
  auto ties = ties_across(list_, partition_.boundaries);
  std::erase_if(ties, [&](const Tie& tie) {  // they have no gradients
    return place.source.frozen.contains(place.source.first_name(tie.first));
  });
  if (layers_.units() == nullptr) {
    options.ties = ties;
  } else {
    tie_shards(ties);
  }
  pipeline_ = std::make_unique<Pipeline>(
      group_, schedule_, std::move(stages), std::move(options));
}

// A tied parameter has a flat buffer of its own, so that the shards of all
// stages are the same range of it.
void PipelineModel::tie_shards(const std::vector<Tie>& ties) {
  std::map<std::string, int32_t> stage_of_name;
  for (size_t i = 0; i < stages_.size(); ++i) {
    for (const auto& item : layers_.networks()[i]->named_parameters()) {
      stage_of_name[item.key()] = stages_[i];
    }
  }
  const auto flats = layers_.units()->flat_shards();
  std::vector<StageParameter> tied;
  for (const auto& part : parameters()) {
    // May be empty on this rank; the others ask for it all the same.
    StageParameter own{
        part.name, stage_of_name.at(part.name), part.value.detach()};
    for (const auto& flat : flats) {
      if (part.value.numel() > 0 &&
          flat.tensor.data_ptr() == part.value.data_ptr()) {
        own.tensor = flat.tensor;
      }
    }
    tied.push_back(std::move(own));
  }
  tied_shards_ = std::make_unique<TiedParameters>(group_, ties, tied, device_);
  tied_shards_->check_equal();
}

size_t PipelineModel::slice_of(int32_t stage) const {
  return static_cast<size_t>(
      std::find(stages_.begin(), stages_.end(), stage) - stages_.begin());
}

void PipelineModel::begin_step() {
  layers_.sync_buffers();
  if (auto* units = layers_.units()) {
    // Nothing is reduced until before_gradients() names the stage whose
    // gradients come.
    units->begin_backward({.last = false, .keep_unsharded = true});
  }
  for (auto& replica : replicas_) {
    replica.parallel->sync_buffers();
    // Gradients add up until the stage's last backward (before_gradients).
    replica.local = replica.parallel->no_sync();
    replica.experts_local = replica.experts->begin_step();
  }
}

void PipelineModel::before_gradients(int32_t stage, bool last) {
  const size_t slice = slice_of(stage);
  auto* units = layers_.units();
  if (units == nullptr) {
    if (!last) return;
    replicas_[slice].parallel->begin_reduction();
    replicas_[slice].experts->begin_reduction();
    return;
  }
  if (layers_.units_of(slice).empty()) return;
  // With parameters unsharded for all of the step, gradients are reduced after
  // the last microbatch only.
  if (unshard_once_ && !last) return;
  units->begin_backward({.last = last, .units = layers_.units_of(slice)});
}

void PipelineModel::after_backwards() {
  if (auto* units = layers_.units()) {
    units->finish();
    tied_shards_->sum_gradients();
  }
  for (auto& replica : replicas_) {
    replica.parallel->finish_reduction();
    replica.experts->finish_reduction();
  }
}

std::vector<Tensors>
PipelineModel::inputs(const std::vector<Batch>& microbatches) const {
  std::vector<Tensors> inputs;
  if (!pipeline_->has_first_stage()) return inputs;
  for (const auto& one : microbatches) inputs.push_back(inputs_of(one));
  return inputs;
}

Score PipelineModel::forward_backward(const Batch& raw, bool count_units) {
  const Batch batch = objective_.prepared(raw, device_, dtype_);
  const auto scale =
      loss_scale(objective_, batch, data_, count_units).times(gradient_scale_);
  begin_step();
  Score score;
  const auto pieces = split_batch(batch, schedule_.num_microbatches);
  // Every rank of the pipeline has read the same batch. Where a rank may have
  // left samples out, they ask each other. Not every unit of a complete batch
  // need count.
  const bool complete =
      !count_units || (objective_.counts_units() && !batch.may_skip);
  const int64_t shapes = complete ? shapes_of(batch) : 0;
  pipeline_->step(
      inputs(pieces),
      [&](const Tensors& outputs, int64_t microbatch) {
        const Tensors targets =
            targets_of(pieces[static_cast<size_t>(microbatch)]);
        const auto sum = objective_.loss_sum(outputs, targets);
        objective_.add_loss(score, sum, targets);
        return scale * sum;
      },
      shapes);
  for (auto& replica : replicas_) {
    replica.local.reset();
    replica.experts_local.reset();
  }
  layers_.finish_shared();
  layers_.routers().finish();
  return counted_here() ? score : Score{};
}

Score PipelineModel::evaluate(const Batch& raw) {
  const torch::NoGradGuard no_grad;
  const Batch batch = objective_.prepared(raw, device_, dtype_);
  const bool empty = batch.inputs.size(0) == 0;
  // With sharded parameters or experts, other ranks that gather with this one
  // have samples.
  if (empty && shard_.size() == 1 && tensor_.experts.size() == 1 &&
      !objective_.needs_whole_batch()) {
    return {};
  }
  std::vector<Batch> pieces;
  if (empty) {
    const Tensors one = stand_in(inputs_of(batch));
    pieces.resize(static_cast<size_t>(schedule_.num_microbatches));
    for (auto& piece : pieces) {
      piece.inputs = one[0];
      piece.more.assign(one.begin() + 1, one.end());
    }
  } else {
    pieces = split_batch(batch, schedule_.num_microbatches);
  }
  layers_.train(false);
  const auto outputs = pipeline_->evaluate(inputs(pieces));
  layers_.train(true);
  Score score;
  for (size_t i = 0; i < outputs.size(); ++i) {
    score_batch(
        objective_, score, outputs[i], empty ? batch : pieces[i], empty);
  }
  return counted_here() ? score : Score{};
}

std::optional<NonFinite> PipelineModel::find_nonfinite(const Batch& raw) {
  const Batch batch = objective_.prepared(raw, device_, dtype_);
  probe_->begin();
  pipeline_->evaluate(inputs(split_batch(batch, schedule_.num_microbatches)));
  const auto found = probe_->end();
  auto first = found;
  for (const auto& group : {tensor_.group, tensor_.context.group, group_}) {
    first = earliest(first, partition_.layers, group, device_);
  }
  return first;
}

std::optional<PartitionedGradients>
PipelineModel::partitioned_gradients() const {
  return counted_->partition(
      parameters(),
      sum_over({tensor_.group, shard_, tensor_.experts, group_}, device_));
}

}  // namespace

std::unique_ptr<ParallelModel>
make_pipeline_model(const Job& job, const ModelPlace& place) {
  return std::make_unique<PipelineModel>(job, place);
}

}  // namespace echelon
