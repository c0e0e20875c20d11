// The list of layers cut over the ranks of a pipeline; each stage data parallel.
#include <algorithm>
#include <map>

#include "echelon/error.h"
#include "echelon/models/ties.h"
#include "echelon/models/weights.h"
#include "echelon/parallel/pipeline/pipeline.h"
#include "echelon/parallel/tensor/shared_gradients.h"
#include "echelon/train/model_cut.h"
#include "echelon/train/parallel_model.h"
#include "echelon/train/pipeline_schedule.h"

namespace echelon {
namespace {

bool is_finite(const torch::Tensor& tensor) {
  return !tensor.is_floating_point() || tensor.numel() == 0 ||
         at::isfinite(tensor).all().item<bool>();
}

bool all_finite(const Tensors& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), is_finite);
}

/// Looks at what layers compute, while it is asked to.
class Probe {
 public:
  void begin() { active_ = true, found_.reset(); }
  std::optional<NonFinite> end() {
    active_ = false;
    return found_;
  }

  void look(
      const std::string& layer,
      const torch::nn::Module* module,
      const Tensors& inputs,
      const Tensors& outputs,
      bool first) {
    if (!active_ || found_) return;
    if (first && !all_finite(inputs)) {
      found_ = NonFinite{"input", "input"};
      return;
    }
    if (module != nullptr) {
      for (const auto& item : module->named_parameters()) {
        if (!is_finite(item.value())) {
          found_ = NonFinite{layer, "parameter " + layer + "." + item.key()};
          return;
        }
      }
    }
    if (!all_finite(outputs)) found_ = NonFinite{layer, "output"};
  }

 private:
  bool active_ = false;
  std::optional<NonFinite> found_;
};

class PipelineModel : public ParallelModel {
 public:
  PipelineModel(const Job& job, const ModelPlace& place);

  Score forward_backward(const Batch& batch, bool count_units) override;
  Score evaluate(const Batch& batch) override;
  std::optional<NonFinite> find_nonfinite(const Batch& batch) override;
  std::vector<ParameterPart> parts() const override;
  std::vector<ParameterPart> buffers() const override;
  std::vector<ParameterGroup>
  optimizer_groups(double weight_decay) const override;
  std::optional<SharedOutGradients> shared_out_gradients() const override;
  std::vector<std::string> describe() const override { return cut_.lines; }

 private:
  struct Stage {
    std::shared_ptr<Network> network;
    std::unique_ptr<DataParallelModule> parallel;
    std::unique_ptr<SharedGradients> shared;
    std::unique_ptr<NoSync> local;  // while a step runs
  };

  void build_stages(const Job& job);
  PipelineStage pipeline_stage(int32_t index, const Stage& stage);
  std::vector<Batch> microbatches(const Batch& batch) const;
  // Ranks that compute each layer together have one score.
  bool counted_here() const { return tensor_.rank() == 0; }
  // What the first stage takes; nothing on ranks without it.
  std::vector<Tensors> inputs(const std::vector<Batch>& microbatches) const;

  const Group group_;  // the pipeline
  const Group data_;   // the ranks with this rank's stages and other samples
  const TensorParallel tensor_;  // those that compute these layers with it
  torch::Device device_;
  torch::Dtype dtype_;
  Schedule schedule_;
  std::unique_ptr<Objective> objective_;
  LayerList layers_;
  ModelCut cut_;
  std::shared_ptr<Probe> probe_ = std::make_shared<Probe>();
  std::map<int32_t, Stage> stages_;
  std::unique_ptr<Pipeline> pipeline_;
  std::optional<CountedParts> counted_;
};

PipelineModel::PipelineModel(const Job& job, const ModelPlace& place)
    : group_(place.groups.along(Axis::pp)),
      data_(place.groups.data()),
      tensor_(tensor_parallel(job, place.groups)),
      device_(place.world.device()),
      dtype_(dtype_of(job.model.dtype)),
      schedule_(pipeline_schedule(job)),
      objective_(objective_for(
          place.source.sample, place.source.classes, tensor_)),
      layers_(place.source.cut(tensor_)),
      cut_(cut_into_stages(job, place, schedule_)) {
  announce(place, cut_.lines);
  build_stages(job);
  std::vector<PipelineStage> stages;
  for (const auto& [index, stage] : stages_) {
    stages.push_back(pipeline_stage(index, stage));
  }
  PipelineOptions options;
  options.ties = ties_across(layers_, cut_.boundaries);
  options.device = device_;
  options.recorder = place.recorder;
  options.before_last_backward = [this](int32_t stage) {
    stages_.at(stage).parallel->begin_reduction();
  };
  options.after_backwards = [this] {
    for (auto& [_, stage] : stages_) stage.parallel->finish_reduction();
  };
  pipeline_ = std::make_unique<Pipeline>(
      group_, schedule_, std::move(stages), std::move(options));
  // What is tied to a parameter of an earlier stage is counted there.
  counted_.emplace(parts(), tensor_.rank(), pipeline_->duplicates());
}

void PipelineModel::build_stages(const Job& job) {
  for (const int32_t index : schedule_.stages_of(group_.rank())) {
    const auto at = static_cast<size_t>(index);
    Stage stage;
    stage.network = build_network(
        layers_, cut_.boundaries[at], cut_.boundaries[at + 1], job.train.seed);
    if (!job.model.weights.empty()) {
      load_weights(*stage.network, job.model.weights);
    }
    to_dtype(*stage.network, dtype_);
    stage.network->to(device_);
    stage.network->train();
    stage.parallel = std::make_unique<DataParallelModule>(
        *stage.network, data_, data_parallel_options(job));
    stage.shared = std::make_unique<SharedGradients>(*stage.network, tensor_);
    stages_.emplace(index, std::move(stage));
  }
}

PipelineStage PipelineModel::pipeline_stage(int32_t index, const Stage& stage) {
  PipelineStage result = stage_of(*stage.network, index);
  bool first = index == 0;
  for (auto& [name, layer] : result.layers) {
    layer.forward = [probe = probe_, name = name, layer = layer,
                     first](const Tensors& inputs) {
      Tensors outputs = layer.forward(inputs);
      probe->look(name, layer.module.get(), inputs, outputs, first);
      return outputs;
    };
    first = false;
  }
  return result;
}

std::vector<Batch> PipelineModel::microbatches(const Batch& batch) const {
  const int64_t count = schedule_.num_microbatches;
  const int64_t size = batch.inputs.size(0);
  std::vector<Batch> pieces;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t begin = size * i / count;
    pieces.push_back(
        piece_of(batch, begin, size * (i + 1) / count - begin));
  }
  return pieces;
}

std::vector<Tensors>
PipelineModel::inputs(const std::vector<Batch>& microbatches) const {
  std::vector<Tensors> inputs;
  if (!pipeline_->has_first_stage()) return inputs;
  for (const auto& one : microbatches) inputs.push_back(inputs_of(one));
  return inputs;
}

Score PipelineModel::forward_backward(const Batch& raw, bool count_units) {
  const Batch batch = objective_->prepared(raw, device_, dtype_);
  const double scale = loss_scale(*objective_, batch, data_, count_units);
  for (auto& [_, stage] : stages_) {
    stage.parallel->sync_buffers();
    stage.local.reset(new NoSync(stage.parallel->no_sync()));
  }
  Score score;
  const auto pieces = microbatches(batch);
  pipeline_->step(
      inputs(pieces), [&](const Tensors& outputs, int64_t microbatch) {
        const auto& targets = pieces[static_cast<size_t>(microbatch)].targets;
        const auto sum = objective_->loss_sum(outputs, targets);
        objective_->add_loss(score, sum, targets);
        return sum * scale;
      });
  for (auto& [_, stage] : stages_) {
    stage.local.reset();
    stage.shared->finish();
  }
  return counted_here() ? score : Score{};
}

Score PipelineModel::evaluate(const Batch& raw) {
  const torch::NoGradGuard no_grad;
  const Batch batch = objective_->prepared(raw, device_, dtype_);
  Score score;
  if (batch.inputs.size(0) == 0) return score;
  const auto pieces = microbatches(batch);
  for (auto& [_, stage] : stages_) stage.network->eval();
  const auto outputs = pipeline_->evaluate(inputs(pieces));
  for (auto& [_, stage] : stages_) stage.network->train();
  for (size_t i = 0; i < outputs.size(); ++i) {
    objective_->evaluate(score, outputs[i], pieces[i].targets);
  }
  return counted_here() ? score : Score{};
}

std::optional<NonFinite> PipelineModel::find_nonfinite(const Batch& raw) {
  const Batch batch = objective_->prepared(raw, device_, dtype_);
  probe_->begin();
  pipeline_->evaluate(inputs(microbatches(batch)));
  const auto found = probe_->end();
  return earliest(
      earliest(found, cut_.layers, tensor_.group, device_), cut_.layers,
      group_, device_);
}

std::vector<ParameterPart> PipelineModel::parts() const {
  std::vector<ParameterPart> all;
  for (const auto& [_, stage] : stages_) {
    const auto own = parameter_parts(*stage.network);
    all.insert(all.end(), own.begin(), own.end());
  }
  return all;
}

std::vector<ParameterPart> PipelineModel::buffers() const {
  std::vector<ParameterPart> all;
  for (const auto& [_, stage] : stages_) {
    const auto own = buffer_parts(*stage.network);
    all.insert(all.end(), own.begin(), own.end());
  }
  return all;
}

std::vector<ParameterGroup>
PipelineModel::optimizer_groups(double weight_decay) const {
  NamedTensors all;
  for (const auto& part : parts()) all.emplace_back(part.name, part.value);
  return parameter_groups(all, weight_decay);
}

std::optional<SharedOutGradients> PipelineModel::shared_out_gradients() const {
  return SharedOutGradients{
      .counted = counted_->of(gradients_of(parts())),
      .sum = sum_over({tensor_.group, group_})};
}

}  // namespace

std::unique_ptr<ParallelModel>
make_pipeline_model(const Job& job, const ModelPlace& place) {
  return std::make_unique<PipelineModel>(job, place);
}

}  // namespace echelon
