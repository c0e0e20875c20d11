// A seeded build is independent of the order and the place of building: random
// operators inside a layer's build draw from a generator seeded by the seed and
// the layer's name (SeededBuild), and parameters are then initialised by name
// (initialize_shards). So any slice of a list gets the values of the whole
// model.
//
// Layers are built one by one and offered to on_new_layer at once, so a caller
// may shard or move each before the next exists. Tied parameters: the first
// name in this network owns the tensor, and later uses share it; when the
// group's first name is in another slice, that layer is built once more for its
// value.
#include "echelon/layers/network.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "echelon/error.h"
#include "echelon/layers/parameter_init.h"
#include "echelon/layers/registration.h"
#include "echelon/layers/sharded_module.h"
#include "echelon/profiling/memory_meter.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

// -------------------------------------------------------------- seeded build

// A dispatch key without other use, above all others. The fallback is called
// only in threads that include the key.
constexpr auto kSeededKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

thread_local at::Generator* current_generator = nullptr;

bool is_generator(const c10::Argument& argument) {
  const auto& type = *argument.type();
  if (type.kind() == c10::TypeKind::GeneratorType) return true;
  return type.kind() == c10::TypeKind::OptionalType &&
         type.expectRef<c10::OptionalType>().getElementType()->kind() ==
             c10::TypeKind::GeneratorType;
}

// An operator that makes a new tensor calls one that fills it, which comes
// through here again.
void with_current_generator(
    const c10::OperatorHandle& op, c10::DispatchKeySet keys,
    torch::jit::Stack* stack) {
  if (current_generator != nullptr &&
      keys.has_backend(c10::BackendComponent::CPUBit)) {
    const auto& arguments = op.schema().arguments();
    const size_t first = stack->size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); ++i) {
      auto& value = (*stack)[first + i];
      if (value.isNone() && is_generator(arguments[i])) {
        value = *current_generator;
      }
    }
  }
  op.redispatchBoxed(
      keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kSeededKey),
      stack);
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericWrapper, library) {
  library.fallback(
      torch::CppFunction::makeFromBoxedFunction<&with_current_generator>());
}

// While it lives, random operators of this thread on CPU tensors that are not
// given a generator draw from one of its own, seeded by the seed and the
// layer's name as torch::manual_seed seeds torch's. The default generator is
// neither read nor advanced. So other threads, which may be ranks that build
// their layers or draw their samples, have no influence.
class SeededBuild {
 public:
  SeededBuild(uint64_t seed, std::string_view layer)
      : generator_(at::detail::createCPUGenerator(parameter_key(seed, layer))),
        outer_(std::exchange(current_generator, &generator_)),
        include_(kSeededKey) {}
  ~SeededBuild() { current_generator = outer_; }
  SeededBuild(const SeededBuild&) = delete;
  SeededBuild& operator=(const SeededBuild&) = delete;

 private:
  at::Generator generator_;
  at::Generator* outer_;  // of a SeededBuild around this one
  c10::impl::IncludeDispatchKeyGuard include_;
};

// ------------------------------------------------------------------ building

bool is_finite(const torch::Tensor& tensor) {
  return !tensor.is_floating_point() || tensor.numel() == 0 ||
         at::isfinite(tensor).all().item<bool>();
}

bool all_finite(const Tensors& tensors) {
  return std::ranges::all_of(tensors, is_finite);
}

BuiltLayer
build_layer(const LayerDefinition& layer, std::optional<uint64_t> seed) {
  try {
    std::optional<SeededBuild> generator;
    if (seed) generator.emplace(*seed, layer.name);
    return layer.build();
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::Error& error) {
    throw ConfigError(format(
        "layer \"{}\" cannot be built: {}", layer.name,
        detail::first_line(error)));
  }
}

BuiltLayer
initialized_layer(const LayerDefinition& layer, std::optional<uint64_t> seed) {
  BuiltLayer built = build_layer(layer, seed);
  if (!seed || built.module == nullptr) return built;
  if (layer.initialize) {
    layer.initialize(*built.module, *seed);
  } else {
    initialize_shards(*built.module, layer.name + ".", *seed);
  }
  return built;
}

// While it lives, batch statistics are those of this rank, even for modules
// that compute them over ranks.
class OwnStatistics {
 public:
  explicit OwnStatistics(torch::nn::Module* layer) {
    if (layer == nullptr) return;
    for (const auto& module : layer->modules()) {
      hide_norm<torch::nn::BatchNorm1dImpl>(*module);
      hide_norm<torch::nn::BatchNorm2dImpl>(*module);
      hide_norm<torch::nn::BatchNorm3dImpl>(*module);
    }
  }
  ~OwnStatistics() {
    for (auto& [member, tensor] : hidden_) *member = std::move(tensor);
  }
  OwnStatistics(const OwnStatistics&) = delete;
  OwnStatistics& operator=(const OwnStatistics&) = delete;

 private:
  // convert_sync_batch_norm recognises a module by these tensors, so it does
  // not recognise one with copies.
  template <class Norm>
  void hide_norm(torch::nn::Module& module) {
    auto* norm = dynamic_cast<Norm*>(&module);
    if (norm == nullptr) return;
    for (auto* member :
         {&norm->weight, &norm->running_mean, &norm->running_var}) {
      if (!member->defined()) continue;
      hidden_.emplace_back(member, *member);
      *member = member->detach().clone();
    }
  }

  std::vector<std::pair<torch::Tensor*, torch::Tensor>> hidden_;
};

using NamedTensors = torch::OrderedDict<std::string, torch::Tensor>;

const torch::Tensor&
parameter_to_tie(const NamedTensors& parameters, const std::string& name) {
  const auto* tensor = parameters.find(name);
  if (tensor == nullptr) {
    detail::no_parameter_to_tie(name, parameters.keys());
  }
  return *tensor;
}

// Copies the initial value of a group's first parameter, which is in another
// slice, to `parameter`, which has name number `use` of the group.
void copy_initial_value(
    const LayerList& list, const TiedGroup& group, size_t use,
    torch::Tensor parameter, uint64_t seed) {
  const auto& layer = list[group.layers[0]];
  const BuiltLayer built = initialized_layer(layer, seed);
  NamedTensors theirs;
  if (built.module != nullptr) {
    for (const auto& item : built.module->named_parameters()) {
      theirs.insert(layer.name + "." + item.key(), item.value());
    }
  }
  const auto& source = parameter_to_tie(theirs, group.names[0]);
  detail::check_tied_shapes(
      group.names[0], source.sizes(), group.names[use], parameter.sizes());
  const torch::NoGradGuard no_grad;
  parameter.copy_(source);
}

void copy_tensors(
    const NamedTensors& from, const NamedTensors& to,
    const std::optional<torch::Device>& device) {
  for (const auto& item : from) {
    const auto& source = item.value();
    auto target = to[item.key()];
    if (target.is_same(source)) {
      throw Error(format(
          "\"{}\" cannot be copied: the layer's build returns the same tensor "
          "each time; let it make a new module",
          item.key()));
    }
    target.set_data(source.detach().to(
        source.options().device(device.value_or(source.device())),
        /*non_blocking=*/false,
        /*copy=*/true));
    target.set_requires_grad(source.requires_grad());
  }
}

}  // namespace

// The state while a network's layers are built one after the other.
struct Network::Builder {
  Network& network;
  std::optional<uint64_t> seed;
  const OnNewLayer& on_new_layer;
  std::vector<TiedGroup> groups;
  // first[g]: the first name of groups[g] that this network has.
  std::vector<std::optional<size_t>> first;
  NamedTensors parameters{};  // under all of their names
  std::set<const c10::TensorImpl*> seen;

  void add(size_t index) {
    const auto& definition = network.list_[index];
    auto [module, forward] = initialized_layer(definition, seed);
    network.layers_.push_back(
        {definition.name, std::move(module), std::move(forward)});
    NewLayer built{index, network.layers_.back(), {}, {}};
    if (built.layer.module != nullptr) {
      register_under(network, definition.name, built.layer.module);
      take_parameters(built);
      list_each_parameter_once(network);
    }
    share_ties(built);
    if (on_new_layer) on_new_layer(built);
    mark_activations(network.layers_.back());
  }

  // Tells the memory meter which tensors are activations.
  static void mark_activations(Layer& layer) {
    layer.forward = [inner = std::move(layer.forward)](const Tensors& inputs) {
      Tensors outputs = inner(inputs);
      if (torch::GradMode::is_enabled()) profiling::keep_as_activations();
      return outputs;
    };
  }

  void take_parameters(NewLayer& built) {
    std::set<const c10::TensorImpl*> own;
    for (const auto& item : built.layer.module->named_parameters()) {
      const auto* tensor = item.value().unsafeGetTensorImpl();
      const std::string name = built.layer.name + "." + item.key();
      parameters.insert(name, item.value());
      if (!own.insert(tensor).second) continue;
      if (seen.insert(tensor).second) {
        built.parameters.emplace_back(name, item.value());
      } else {
        built.shared.push_back(item.value());
      }
    }
  }

  void share_ties(NewLayer& built) {
    for (size_t g = 0; g < groups.size(); ++g) {
      for (size_t i = 0; i < groups[g].names.size(); ++i) {
        if (groups[g].layers[i] == built.index) share_tie(built, g, i);
      }
    }
  }

  // The first name that this network has owns the group's tensor; later names
  // share it.
  void share_tie(NewLayer& built, size_t group_index, size_t use) {
    const auto& group = groups[group_index];
    const auto& name = group.names[use];
    const auto tensor = parameter_to_tie(parameters, name);
    auto& owner_use = first[group_index];
    if (!owner_use) {
      owner_use = use;
      if (use > 0 && seed) {
        copy_initial_value(network.list_, group, use, tensor, *seed);
      }
      return;
    }
    const auto& owner_name = group.names[*owner_use];
    const auto owner = parameters[owner_name];
    detail::check_tied_shapes(owner_name, owner.sizes(), name, tensor.sizes());
    if (tensor.is_same(owner)) return;
    network.share(owner, tensor, name);
    std::erase_if(built.parameters, [&](const auto& one) {
      return one.second.is_same(tensor);
    });
    built.shared.push_back(owner);
  }
};

Network::Network(
    const LayerList& list, size_t begin, size_t end,
    std::optional<uint64_t> seed, const OnNewLayer& on_new_layer)
    : torch::nn::Module("Network"), list_(list), begin_(begin) {
  if (begin >= end || end > list.size()) {
    throw ConfigError(format(
        "layers {} to {} are to be built of a list of {}; the first is at most "
        "the last, and the last at most {}",
        begin, end, list.size(), list.size()));
  }
  layers_.reserve(end - begin);  // the callback keeps references to layers
  Builder builder{
      .network = *this,
      .seed = seed,
      .on_new_layer = on_new_layer,
      .groups = tied_groups(list_)};
  builder.first.resize(builder.groups.size());
  for (size_t i = begin; i < end; ++i) builder.add(i);
}

void Network::share(
    const torch::Tensor& parameter, const torch::Tensor& use,
    const std::string& name) {
  unlist_parameter(*this, name);
  auto& layer = layers_[list_.layer_of_parameter(name) - begin_];
  layer.forward = [shared = SharedParameter(parameter, use),
                   forward = std::move(layer.forward)](const Tensors& inputs) {
    shared.refresh();
    return forward(inputs);
  };
}

const std::string& Network::producer_of(size_t layer) const {
  static const std::string input;
  if (layer > 0) return layers_[layer - 1].name;
  return begin_ > 0 ? list_[begin_ - 1].name : input;
}

Tensors Network::run(Tensors values) {
  for (size_t i = 0; i < layers_.size(); ++i) {
    values =
        run_layer(layers_[i].name, layers_[i].forward, values, producer_of(i));
  }
  return values;
}

Tensors Network::forward(const Tensors& inputs) {
  return run(inputs);
}

torch::Tensor Network::forward(torch::Tensor x) {
  Tensors values;
  values.push_back(std::move(x));
  return only_output(run(std::move(values)), layers_.back().name);
}

void Network::set_unshard(
    std::function<std::shared_ptr<void>(size_t layer)> unshard) {
  unshard_ = std::move(unshard);
}

std::optional<NonFinite>
Network::first_nonfinite_layer(const torch::Tensor& x) {
  return first_nonfinite_layer(Tensors{x});
}

std::optional<NonFinite> Network::first_nonfinite_layer(const Tensors& inputs) {
  const SavedBuffers buffers(*this);
  const auto parameters = named_parameters();
  Tensors values = inputs;
  std::optional<NonFinite> found;
  if (!all_finite(inputs)) found = NonFinite{"input", "input"};
  for (size_t i = 0; i < layers_.size(); ++i) {
    const auto& layer = layers_[i];
    const auto unsharded = unshard_ ? unshard_(i) : nullptr;
    const OwnStatistics statistics(layer.module.get());
    for (const auto& parameter : parameters) {
      if (!found && parameter.key().starts_with(layer.name + ".") &&
          !is_finite(parameter.value())) {
        found = NonFinite{layer.name, "parameter " + parameter.key()};
      }
    }
    // Run all layers, also after a bad input: ranks that compute with this one
    // wait in each of them.
    values = run_layer(layer.name, layer.forward, values, producer_of(i));
    if (!found && !all_finite(values)) found = NonFinite{layer.name, "output"};
  }
  return found;
}

std::shared_ptr<torch::nn::Module>
Network::clone(const std::optional<torch::Device>& device) const {
  const torch::NoGradGuard no_grad;
  const SeededBuild generator(0, "");  // does not advance torch's own
  auto copy = build_network(list_, begin_, end());
  copy_tensors(named_parameters(), copy->named_parameters(), device);
  copy_tensors(named_buffers(), copy->named_buffers(), device);
  const auto modules = copy->named_modules();
  for (const auto& item : named_modules()) {  // outer ones before inner ones
    modules[item.key()]->train(item.value()->is_training());
  }
  return copy;
}

std::shared_ptr<Network> build_network(
    const LayerList& list, size_t begin, size_t end,
    std::optional<uint64_t> seed, const OnNewLayer& on_new_layer) {
  return std::make_shared<Network>(list, begin, end, seed, on_new_layer);
}

SavedBuffers::SavedBuffers(const torch::nn::Module& module)
    : buffers_(module.buffers()) {
  for (const auto& buffer : buffers_) values_.push_back(buffer.clone());
}

SavedBuffers::~SavedBuffers() {
  for (size_t i = 0; i < buffers_.size(); ++i) buffers_[i].copy_(values_[i]);
}

torch::Tensor only_output(Tensors outputs, const std::string& layer) {
  if (outputs.size() != 1) {
    throw ConfigError(format(
        "layer \"{}\" is the last and returns {}; call forward with Tensors to "
        "have them all",
        layer, describe(outputs)));
  }
  return std::move(outputs[0]);
}

}  // namespace echelon
