#include "echelon/train/parallel_model.h"

#include <algorithm>

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

int64_t classes_of(const Job& job, const SampleSpec& sample) {
  return job.model.classes > 0 ? job.model.classes : sample.classes;
}

std::vector<int64_t>
batch_shape(int64_t samples, const std::vector<int64_t>& sample) {
  std::vector<int64_t> shape = {samples};
  shape.insert(shape.end(), sample.begin(), sample.end());
  return shape;
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

ModelSource model_source(const Job& job, const SampleSpec& sample) {
  const int64_t classes = classes_of(job, sample);
  return {
      .layers = model_layers(job.model, sample.input_shape, classes),
      .parameters = list_parameters(job.model, sample.input_shape, classes),
      .sample = sample,
      .classes = classes};
}

ModelSource model_source(
    const Job& job, const LayerList& given, const SampleSpec& sample) {
  LayerList layers = in_dtype(given, dtype_of(job.model.dtype));
  for (const auto& tie : find_ties(layers, build_on_meta)) {
    layers.tie(tie.first, tie.second);
  }
  ModelSource source{
      .layers = layers, .sample = sample, .classes = classes_of(job, sample)};
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

bool counts_units(const Dataset& dataset) {
  const SampleSpec spec = dataset.spec();
  return dataset.may_skip() || (is_text(spec) && !spec.every_target_counts);
}

std::vector<TensorSpec>
input_specs(const Job& job, const ModelSource& source, int64_t samples) {
  const bool text = is_text(source.sample);
  std::vector<TensorSpec> specs = {
      {batch_shape(samples, source.sample.input_shape),
       text ? torch::kInt64 : dtype_of(job.model.dtype)}};
  for (const auto& more : source.sample.more) {
    specs.push_back({batch_shape(samples, more.shape), more.dtype});
  }
  if (draws_masks(job)) specs.push_back({{samples}, torch::kInt64});
  return specs;
}

bool draws_masks(const Job& job) {
  return job.model.dropout > 0;
}

std::unique_ptr<ParallelModel>
make_parallel_model(const Job& job, const ModelPlace& place) {
  if (job.layout.pp > 1) return make_pipeline_model(job, place);
  if (!job.model.devices.empty()) return make_placed_model(job, place);
  return make_data_parallel_model(job, place);
}

}  // namespace echelon
