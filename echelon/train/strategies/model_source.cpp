#include "echelon/train/strategies/model_source.h"

#include <algorithm>
#include <utility>

#include "echelon/architecture/language_model.h"
#include "echelon/counting/meta_mode.h"
#include "echelon/error.h"
#include "echelon/job/pipeline_schedule.h"
#include "echelon/layers/ties.h"
#include "echelon/models/make_network.h"
#include "echelon/models/weights.h"
#include "echelon/train/strategies/objective.h"

namespace echelon {
namespace {

void check_same_layers(const LayerList& whole, const LayerList& cut) {
  if (whole.names() == cut.names()) return;
  throw ConfigError(
      "the list of layers that is cut over tensor-parallel ranks has " +
      std::to_string(cut.size()) + " layers, the whole one " +
      std::to_string(whole.size()) +
      ", or they have other names; let the function give the same layers for "
      "any number of ranks");
}

// Ties may have been found in the whole list.
LayerList with_ties_of(const LayerList& whole, const LayerList& cut) {
  check_same_layers(whole, cut);
  LayerList layers;
  for (const auto& definition : cut.layers()) layers.add_definition(definition);
  for (const auto& tie : whole.ties()) layers.tie(tie.first, tie.second);
  return layers;
}

int64_t classes_of(const Job& job, const SampleSpec& sample) {
  if (is_language_model(job.model)) {
    return vocabulary(job.model, sample.classes);
  }
  return job.model.classes > 0 ? job.model.classes : sample.classes;
}

std::vector<int64_t>
batch_shape(int64_t samples, const std::vector<int64_t>& sample) {
  std::vector<int64_t> shape = {samples};
  shape.insert(shape.end(), sample.begin(), sample.end());
  return shape;
}

// Parameters and buffers of a list, tied ones by their first name alone.
void list_tensors(ModelSource& source, const std::string& dtype) {
  for (const auto& definition : source.layers.layers()) {
    const BuiltLayer layer = build_on_meta(definition);
    if (!layer.module) continue;
    const auto parameters = layer.module->named_parameters();
    for (const auto& [own_name, tensor] : state_dict(*layer.module)) {
      const std::string name = definition.name + "." + own_name;
      if (source.first_names.count(name) > 0) continue;
      const bool is_parameter = parameters.contains(own_name);
      if (is_parameter && !tensor.requires_grad()) source.frozen.insert(name);
      source.parameters.push_back(
          {.name = name,
           .shape = tensor.sizes().vec(),
           .kind = is_parameter ? ParameterInfo::Kind::parameter
                                : ParameterInfo::Kind::buffer,
           .dtype = tensor.is_floating_point() ? dtype : "int64"});
    }
  }
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

torch::Dtype compute_dtype(const Job& job) {
  if (job.precision.compute == "bf16") return torch::kBFloat16;
  if (job.precision.compute == "fp16") return torch::kHalf;
  return dtype_of(job.model.dtype);
}

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

const std::string& ModelSource::first_name(const std::string& name) const {
  const auto found = first_names.find(name);
  return found == first_names.end() ? name : found->second;
}

int64_t ModelSource::num_parameters() const {
  return echelon::num_parameters(parameters);
}

ModelSource model_source(const Job& job, const SampleSpec& sample) {
  if (is_language_model(job.model) != is_text(sample)) {
    throw ConfigError(
        "[model] name=\"" + job.model.name + "\" " +
        (is_text(sample)
             ? "tells classes apart, but each sample is a sequence of whole "
               "numbers with as many targets, which is a text"
             : "says the next token, but the samples are no texts: whole "
               "numbers, in one dimension, with as many targets") +
        "; use another model or other data");
  }
  ModelSource source;
  source.sample = sample;
  source.classes = classes_of(job, sample);
  source.cut = [model = job.model, shape = sample.input_shape,
                classes = source.classes](const TensorParallel& parallel) {
    return model_layers(model, shape, classes, parallel);
  };
  source.layers = source.cut({});
  for (auto& info :
       list_parameters(job.model, sample.input_shape, source.classes)) {
    if (info.tied_to.empty()) {
      source.parameters.push_back(std::move(info));
    } else {
      source.first_names[info.name] = info.tied_to;
    }
  }
  return source;
}

ModelSource model_source(
    const Job& job, const LayerFactory& given, const SampleSpec& sample) {
  const torch::Dtype dtype = dtype_of(job.model.dtype);
  ModelSource source;
  source.sample = sample;
  source.classes = classes_of(job, sample);
  source.layers = in_dtype(given({}), dtype);
  for (const auto& tie : find_ties(source.layers, build_on_meta)) {
    source.layers.tie(tie.first, tie.second);
  }
  source.cut = [given, dtype,
                whole = source.layers](const TensorParallel& parallel) {
    if (parallel.size() == 1) return whole;
    return with_ties_of(whole, in_dtype(given(parallel), dtype));
  };
  for (const auto& group : tied_groups(source.layers)) {
    for (size_t i = 1; i < group.names.size(); ++i) {
      source.first_names[group.names[i]] = group.names[0];
    }
  }
  list_tensors(source, job.model.dtype);
  return source;
}

LayerFactory whole_layers(const LayerList& layers) {
  return [layers](const TensorParallel& parallel) {
    if (parallel.size() > 1) {
      throw ConfigError(
          "[layout] tp=" + std::to_string(parallel.size()) +
          ": a list of layers of one's own is cut when it is given as a "
          "function of TensorParallel; give one, or set tp = 1");
    }
    return layers;
  };
}

bool counts_units(const Dataset& dataset) {
  const SampleSpec spec = dataset.spec();
  return dataset.may_skip() || (is_text(spec) && !spec.every_target_counts);
}

bool draws_masks(const Job& job, const SampleSpec& sample) {
  return job.model.dropout > 0 && is_text(sample);
}

std::vector<TensorSpec>
input_specs(const Job& job, const ModelSource& source, int64_t samples) {
  const auto& sample = source.sample;
  const auto shape = batch_shape(samples, sample.input_shape);
  std::vector<TensorSpec> specs = {
      {shape, is_text(sample) ? torch::kInt64 : dtype_of(job.model.dtype)}};
  for (const auto& more : sample.more) {
    specs.push_back({batch_shape(samples, more.shape), more.dtype});
  }
  const bool cut = job.layout.tp > 1 && job.tensor.sequence_parallel;
  if (is_text(sample) && cut && sample.more.empty()) {
    specs.push_back({shape, torch::kInt64});  // documents: objective.h
  }
  if (draws_masks(job, sample)) specs.push_back({{samples}, torch::kInt64});
  return specs;
}

}  // namespace echelon
