#include "echelon/memory/layer_memory.h"

#include <algorithm>
#include <utility>

#include "echelon/memory/activation_storage.h"

namespace echelon {
namespace {

LayerForward recomputed_as(
    cost::Recompute choice, const std::string& name,
    const torch::nn::Module* module, LayerForward forward) {
  if (choice == cost::Recompute::none) return forward;
  RecomputeOptions options{.name = name};
  if (choice == cost::Recompute::selective) options.keep = matmul_operators();
  if (module != nullptr) options.buffers = module->buffers();
  return recomputed(std::move(forward), std::move(options));
}

}  // namespace

LayerList with_forwards(
    const LayerList& layers,
    std::function<LayerForward(size_t, const std::string&, const BuiltLayer&)>
        wrap) {
  LayerList wrapped;
  for (size_t i = 0; i < layers.size(); ++i) {
    LayerDefinition layer = layers[i];
    layer.build = [i, wrap, name = layer.name, build = layer.build] {
      BuiltLayer built = build();
      built.forward = wrap(i, name, built);
      return built;
    };
    wrapped.add_definition(std::move(layer));
  }
  for (const auto& tie : layers.ties()) wrapped.tie(tie.first, tie.second);
  return wrapped;
}

LayerList with_recompute(
    const LayerList& layers, const std::vector<cost::Recompute>& choices) {
  return with_forwards(
      layers,
      [choices](size_t i, const std::string& name, const BuiltLayer& layer) {
        return recomputed_as(
            choices[i], name, layer.module.get(), layer.forward);
      });
}

std::vector<cost::RecomputeCost> recompute_costs(
    const LayerList& layers, const std::vector<counting::TensorSpec>& inputs) {
  std::vector<cost::RecomputeCost> costs(layers.size());
  std::vector<counting::LayerCost> plain;
  for (const auto choice : cost::kRecomputes) {
    const auto counts = counting::count_layers(
        with_recompute(
            layers, std::vector<cost::Recompute>(layers.size(), choice)),
        inputs);
    if (choice == cost::Recompute::none) plain = counts;
    for (size_t i = 0; i < layers.size(); ++i) {
      const auto number = static_cast<size_t>(choice);
      costs[i].name = counts[i].name;
      costs[i].kept_bytes[number] = counts[i].activation_bytes;
      // The batch is in memory anyway.
      if (i == 0) costs[i].kept_bytes[number] -= counts[i].kept_input_bytes;
      costs[i].again_flops[number] =
          std::max(0.0, counts[i].backward_flops - plain[i].backward_flops);
    }
  }
  std::vector<int64_t> repeated;
  for (const auto& cost : plain) repeated.push_back(cost.repeated_bytes);
  cost::keep_for_the_next(costs, repeated);
  return costs;
}

struct LayerMemory::Impl {
  std::vector<cost::Recompute> recompute;
  std::vector<torch::Tensor> parameters;  // of all layers
  std::shared_ptr<SavedTensorHooks> storage;

  // Whether `tensor` is a parameter, or a view of one.
  bool has(const torch::Tensor& tensor) const {
    const auto* storage_of = tensor.storage().unsafeGetStorageImpl();
    return std::any_of(
        parameters.begin(), parameters.end(), [&](const auto& parameter) {
          return parameter.storage().unsafeGetStorageImpl() == storage_of;
        });
  }
};

LayerMemory::LayerMemory(
    const MemoryOptions& options, std::vector<cost::Recompute> recompute,
    int64_t min_bytes)
    : impl_(std::make_shared<Impl>()) {
  impl_->recompute = std::move(recompute);
  const auto is_parameter =
      [impl = std::weak_ptr(impl_)](const torch::Tensor& tensor) {
        const auto alive = impl.lock();
        return alive && alive->has(tensor);
      };
  if (options.activations == Activations::offload) {
    impl_->storage = offload_to_host(is_parameter, min_bytes);
  } else if (options.activations == Activations::bf16) {
    impl_->storage = keep_in_bf16(is_parameter, min_bytes);
  }
}

LayerForward LayerMemory::wrap(
    size_t number, const std::string& name, LayerForward forward,
    std::shared_ptr<torch::nn::Module> module) const {
  if (module != nullptr) {
    const auto parameters = module->parameters();
    impl_->parameters.insert(
        impl_->parameters.end(), parameters.begin(), parameters.end());
  }
  auto wrapped = recomputed_as(
      impl_->recompute.at(number), name, module.get(), std::move(forward));
  if (!impl_->storage) return wrapped;
  // The hooks use Impl, so it must live as long as the forward.
  return
      [impl = impl_, inner = with_hooks(std::move(wrapped), impl_->storage)](
          const std::vector<torch::Tensor>& inputs) { return inner(inputs); };
}

}  // namespace echelon
