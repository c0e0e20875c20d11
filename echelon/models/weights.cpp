// Targets are the tensors of the model (or this rank's shards of them) with the
// names that a file may have for them. A load has two passes: all targets are
// compared with the file, and only when nothing differs are values copied. A
// sharded target reads only its slice of a mapped file.
#include "echelon/models/weights.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <set>

#include "echelon/architecture/check_weights.h"
#include "echelon/architecture/language_model.h"
#include "echelon/architecture/trained_parameters.h"
#include "echelon/architecture/weights_source.h"
#include "echelon/checkpoint/tensors/tensor_file.h"
#include "echelon/error.h"
#include "echelon/layers/sharded_module.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

using NamedTensors = std::vector<std::pair<std::string, torch::Tensor>>;

void append(
    const torch::nn::Module& module, const std::string& prefix,
    NamedTensors& all) {
  const auto add = [&](const auto& items) {
    for (const auto& item : items) {
      if (item.value().defined()) {
        all.emplace_back(prefix + item.key(), item.value());
      }
    }
  };
  add(module.named_parameters(/*recurse=*/false));
  add(module.named_buffers(/*recurse=*/false));
  for (const auto& child : module.named_children()) {
    append(*child.value(), prefix + child.key() + ".", all);
  }
}

std::string dtype_name(torch::Dtype dtype) {
  if (dtype == torch::kFloat64) return "float64";
  if (c10::isFloatingType(dtype)) return "float32";
  return "int64";
}

// A tensor of the model, or this rank's shard of it, and the names that the
// file may have for it.
struct Target {
  std::string name;
  torch::Tensor tensor;
  std::optional<Shard> shard;      // none: it is not sharded
  std::vector<std::string> names;  // the likeliest first

  std::vector<int64_t> full_shape() const {
    return shard ? shard->shape : tensor.sizes().vec();
  }
};

// `prefix`: the list's prefix of the module's own names.
std::vector<Target>
targets_of(const torch::nn::Module& module, const std::string& prefix = "") {
  const auto shards = shards_of(module);
  std::vector<Target> targets;
  for (const auto& [own, tensor] : state_dict(module)) {
    const std::string name = prefix + own;
    targets.push_back({name, tensor, std::nullopt, {name}});
    const auto shard = shards.find(own);
    if (shard != shards.end()) targets.back().shard = shard->second.shard;
  }
  return targets;
}

bool has(const std::vector<std::string>& names, const std::string& name) {
  return std::ranges::count(names, name) > 0;
}

// A tensor of a mapped file is not read yet.
torch::Tensor full_tensor(const WeightsSource::Tensor& tensor) {
  if (tensor.file) return load_tensor(tensor.file, *tensor.info);
  const auto full = torch::empty(
      tensor.facts.shape,
      torch::TensorOptions().dtype(dtype_from_safetensors(tensor.facts.dtype)));
  tensor.read({0, full.numel()}, static_cast<std::byte*>(full.data_ptr()));
  return full;
}

// Reads the file's tensors into the targets; see weights_differences for
// `expected`.
class Loader {
 public:
  Loader(
      const WeightsSource& source, const std::vector<std::string>& parameters,
      std::vector<Target> targets)
      : source_(source), targets_(std::move(targets)) {
    for (const auto& target : targets_) {
      described_.push_back(
          {.name = name_in_file(target),
           .shape = target.full_shape(),
           .kind = has(parameters, target.name) ? ParameterInfo::Kind::parameter
                                                : ParameterInfo::Kind::buffer,
           .dtype = dtype_name(target.tensor.scalar_type())});
    }
  }

  // Throws DataError that lists all differences.
  void check(const std::function<bool(const std::string&)>& expected) const {
    auto lines = weights_differences(source_, described_, expected);
    if (lines.empty()) lines = tied_differences();
    if (lines.empty()) return;
    std::string text = source_.path() + ": does not fit the model";
    for (const auto& line : lines) text += "\n  " + line;
    throw DataError(text);
  }

  void load() const {
    const torch::NoGradGuard no_grad;
    for (const auto& target : targets_) {
      const auto name = name_in_file(target);
      if (source_.find(name) == nullptr) continue;
      auto tensor = target.tensor;
      tensor.copy_(part(target, name));
    }
  }

 private:
  std::string name_in_file(const Target& target) const {
    for (const auto& name : target.names) {
      if (source_.find(name) != nullptr) return name;
    }
    return target.names.front();
  }

  // Reads only the shard of a mapped file.
  torch::Tensor part(const Target& target, const std::string& name) const {
    const auto full = full_tensor(*source_.find(name));
    return target.shard ? slice_of(full, *target.shard) : full;
  }

  // The file may have a tied parameter under several names.
  std::vector<std::string> tied_differences() const {
    std::vector<std::string> lines;
    for (const auto& target : targets_) {
      const auto first = name_in_file(target);
      for (const auto& name : target.names) {
        const auto* found = source_.find(name);
        if (found == nullptr || name == first) continue;
        const bool equal = found->facts.shape == target.full_shape() &&
                           part(target, first).equal(part(target, name));
        if (equal) continue;
        lines.push_back(format(
            "\"{}\" and \"{}\" differ, but are tied in the model; leave one of "
            "them out",
            first, name));
      }
    }
    return lines;
  }

  const WeightsSource& source_;
  std::vector<Target> targets_;
  std::vector<ParameterInfo> described_;
};

std::vector<std::string> parameter_names(const torch::nn::Module& module) {
  return module.named_parameters().keys();
}

// Gives tied targets all of their names; returns the names of all targets.
std::set<std::string> add_tied_names(
    std::vector<Target>& targets, const std::vector<TiedGroup>& groups) {
  std::set<std::string> names;
  for (auto& target : targets) {
    for (const auto& group : groups) {
      if (has(group.names, target.name)) target.names = group.names;
    }
    names.insert(target.names.begin(), target.names.end());
  }
  return names;
}

// The layer of the list that a name of the file belongs to.
std::optional<size_t> layer_of(const LayerList& list, const std::string& name) {
  for (size_t i = 0; i < list.size(); ++i) {
    if (name.starts_with(list[i].name + ".")) return i;
  }
  return std::nullopt;
}

}  // namespace

NamedTensors state_dict(const torch::nn::Module& module) {
  NamedTensors all;
  append(module, "", all);
  return all;
}

void load_weights(torch::nn::Module& module, const std::string& path) {
  const WeightsSource source(path);
  const Loader loader(source, parameter_names(module), targets_of(module));
  loader.check({});
  loader.load();
}

void load_weights(Network& network, const std::string& path) {
  const auto groups = tied_groups(network.list());
  auto targets = targets_of(network);
  const auto names = add_tied_names(targets, groups);
  const WeightsSource source(path, base_prefix(network.list().names()));
  const Loader loader(source, parameter_names(network), std::move(targets));
  loader.check([&](const std::string& name) {
    if (names.contains(name)) return true;
    const auto layer = layer_of(network.list(), name);
    return layer && (*layer < network.begin() || *layer >= network.end());
  });
  loader.load();
}

void load_adapters(Network& network, const std::string& path) {
  auto targets = targets_of(network);
  std::erase_if(
      targets, [](const Target& target) { return !is_adapter(target.name); });
  const WeightsSource source(path);
  for (const auto& target : targets) {
    if (source.find(target.name) != nullptr) continue;
    throw DataError(format(
        "{}: has no adapter \"{}\"; [lora] rank and targets are those that it "
        "was trained with",
        path, target.name));
  }
  const Loader loader(source, parameter_names(network), std::move(targets));
  loader.check([](const std::string& name) { return !is_adapter(name); });
  loader.load();
}

struct LayerWeights::Impl {
  LayerList list;
  std::vector<TiedGroup> groups;
  WeightsSource source;
};

LayerWeights::LayerWeights(const LayerList& list, const std::string& path)
    : impl_(new Impl{
          list, tied_groups(list),
          WeightsSource(path, base_prefix(list.names()))}) {}

LayerWeights::~LayerWeights() = default;

void LayerWeights::load(size_t index, torch::nn::Module* module) const {
  const std::string prefix = impl_->list[index].name + ".";
  std::vector<Target> targets;
  std::vector<std::string> parameters;
  if (module != nullptr) {
    targets = targets_of(*module, prefix);
    parameters = parameter_names(*module);
    for (auto& name : parameters) name.insert(0, prefix);
  }
  auto names = add_tied_names(targets, impl_->groups);
  // Parameters that are tied to another layer's are checked with that layer.
  for (const auto& group : impl_->groups) {
    names.insert(group.names.begin(), group.names.end());
  }
  // Other ranks may have other experts of this layer.
  const bool has_experts = std::ranges::any_of(
      parameters, [](const auto& name) { return expert_of(name).has_value(); });
  const Loader loader(impl_->source, parameters, std::move(targets));
  loader.check([&](const std::string& name) {
    if (names.contains(name)) return true;
    const auto layer = layer_of(impl_->list, name);
    return layer && (*layer != index || (has_experts && expert_of(name)));
  });
  loader.load();
}

NamedTensors owned_tensors(const Network& network) {
  auto tensors = state_dict(network);
  for (const auto& group : tied_groups(network.list())) {
    if (group.layers[0] >= network.begin()) continue;
    std::erase_if(tensors, [&](const auto& item) {
      return has(group.names, item.first);
    });
  }
  return tensors;
}

void save_weights(
    const torch::nn::Module& module, const std::string& path,
    const safetensors::Metadata& metadata) {
  NamedTensors tensors;
  for (const auto& [name, tensor] : state_dict(module)) {
    tensors.emplace_back(name, tensor.detach());
  }
  save_tensors(path, tensors, metadata);
}

}  // namespace echelon
