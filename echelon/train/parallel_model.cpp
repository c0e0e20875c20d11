#include "echelon/train/parallel_model.h"

#include "echelon/models/make_network.h"
#include "echelon/models/meta_mode.h"
#include "echelon/models/ties.h"
#include "echelon/models/weights.h"

namespace echelon {
namespace {

BucketHook hook_of(const TrainOptions& options) {
  if (options.compress == "bf16") return bf16_hook();
  if (options.compress == "fp16") return fp16_hook();
  if (options.compress == "powersgd") {
    return powersgd_hook(
        {.rank = options.powersgd_rank, .seed = options.seed});
  }
  return all_reduce_hook();
}

// The same layers, built with parameters of this dtype.
LayerList in_dtype(const LayerList& given, torch::Dtype dtype) {
  LayerList layers;
  for (LayerDefinition definition : given.layers()) {
    definition.build = [dtype, build = definition.build] {
      BuiltLayer layer = build();
      if (layer.module) to_dtype(*layer.module, dtype);
      return layer;
    };
    layers.add_definition(std::move(definition));
  }
  for (const auto& tie : given.ties()) layers.tie(tie.first, tie.second);
  return layers;
}

}  // namespace

torch::Dtype dtype_of(const std::string& name) {
  return name == "float64" ? torch::kFloat64 : torch::kFloat32;
}

void to_dtype(torch::nn::Module& module, torch::Dtype dtype) {
  const auto convert = [dtype](const auto& tensors) {
    for (auto tensor : tensors) {
      if (tensor.is_floating_point() && tensor.scalar_type() != dtype) {
        tensor.set_data(tensor.detach().to(dtype));
      }
    }
  };
  convert(module.parameters());
  convert(module.buffers());
}

DistributedDataParallelOptions data_parallel_options(const Job& job) {
  DistributedDataParallelOptions options;
  options.bucket_bytes = job.train.bucket_bytes;
  options.find_unused_parameters = job.train.find_unused_parameters;
  options.sync_batch_norm = job.model.sync_batch_norm;
  options.hook = hook_of(job.train);
  return options;
}

const std::string& ModelSource::first_name(const std::string& name) const {
  const auto found = first_names.find(name);
  return found == first_names.end() ? name : found->second;
}

int64_t ModelSource::num_parameters() const {
  int64_t sum = 0;
  for (const auto& info : parameters) {
    if (info.kind == ParameterInfo::Kind::parameter) {
      sum += info.num_elements();
    }
  }
  return sum;
}

ModelSource model_source(
    const Job& job, const std::vector<int64_t>& input_shape, int64_t classes) {
  return {
      .layers = model_layers(job.model, input_shape, classes),
      .parameters = list_parameters(job.model, input_shape, classes),
      .input_shape = input_shape};
}

ModelSource model_source(
    const Job& job,
    const LayerList& given,
    const std::vector<int64_t>& input_shape) {
  LayerList layers = in_dtype(given, dtype_of(job.model.dtype));
  for (const auto& tie : find_ties(layers, build_on_meta)) {
    layers.tie(tie.first, tie.second);
  }
  ModelSource source{.layers = layers, .input_shape = input_shape};
  for (const auto& group : tied_groups(layers)) {
    for (size_t i = 1; i < group.names.size(); ++i) {
      source.first_names[group.names[i]] = group.names[0];
    }
  }
  for (const auto& definition : layers.layers()) {
    const BuiltLayer layer = build_on_meta(definition);
    if (!layer.module) continue;
    const auto parameters = layer.module->named_parameters();
    for (const auto& [name, tensor] : state_dict(*layer.module)) {
      if (source.first_names.count(definition.name + "." + name) > 0) continue;
      const bool trained = parameters.contains(name);
      source.parameters.push_back(
          {.name = definition.name + "." + name,
           .shape = tensor.sizes().vec(),
           .kind = trained ? ParameterInfo::Kind::parameter
                           : ParameterInfo::Kind::buffer,
           .dtype = tensor.is_floating_point() ? job.model.dtype : "int64"});
    }
  }
  return source;
}

void announce(
    const ModelPlace& place, const std::vector<std::string>& lines) {
  if (!place.announce) return;
  for (const auto& line : lines) place.announce(line);
}

Batch prepared(const Batch& batch, torch::Device device, torch::Dtype dtype) {
  Batch ready = batch;
  ready.inputs = batch.inputs.to(device, dtype, /*non_blocking=*/true);
  ready.targets = batch.targets.to(device, /*non_blocking=*/true);
  return ready;
}

torch::Tensor
loss_sum_of(const torch::Tensor& scores, const torch::Tensor& targets) {
  return torch::nn::functional::cross_entropy(
      scores,
      targets,
      torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
}

int64_t
count_correct(const torch::Tensor& scores, const torch::Tensor& targets) {
  return scores.argmax(1).eq(targets).sum().item<int64_t>();
}

std::unique_ptr<ParallelModel>
make_parallel_model(const Job& job, const ModelPlace& place) {
  if (job.layout.pp > 1) return make_pipeline_model(job, place);
  if (!job.model.devices.empty()) return make_placed_model(job, place);
  return make_data_parallel_model(job, place);
}

}  // namespace echelon
