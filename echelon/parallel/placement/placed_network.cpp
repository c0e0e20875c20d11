#include "echelon/parallel/placement/placed_network.h"

#include <c10/core/DeviceGuard.h>

#include <string>
#include <utility>

#include "echelon/error.h"
#include "echelon/layers/layer_modules.h"
#include "echelon/layers/shared_parameters.h"
#include "echelon/layers/ties.h"
#include "echelon/parallel/placement/slice_spans.h"
#include "echelon/parallel/placement/tied_copy.h"

namespace echelon::placement {
namespace {

// From a GPU to the CPU nobody would wait for the values.
torch::Tensor moved(const torch::Tensor& tensor, torch::Device device) {
  return tensor.to(
      device, tensor.scalar_type(), /*non_blocking=*/!device.is_cpu());
}

Tensors moved(const Tensors& tensors, torch::Device device) {
  Tensors there;
  for (const auto& tensor : tensors) there.push_back(moved(tensor, device));
  return there;
}

bool is_on(const torch::Tensor& tensor, torch::Device device) {
  return tensor.device().type() == device.type() &&
         (!device.has_index() || tensor.device().index() == device.index());
}

void check_cut(const LayerList& layers, const Placement& placement) {
  const auto& cut = placement.cut;
  if (!placement.devices.empty() &&
      cut.size() == placement.devices.size() + 1 && cut.front() == 0 &&
      cut.back() == layers.size()) {
    return;
  }
  throw ConfigError(
      "a placement of " + std::to_string(cut.empty() ? 0 : cut.back()) +
      " layers on " + std::to_string(placement.devices.size()) +
      " devices is used for a list of " + std::to_string(layers.size()) +
      " layers; make one for this list with plan_placement");
}

[[noreturn]] void refuse_move() {
  throw Error(
      "a placed network cannot be moved to one device: its placement says "
      "where the layers are; build it with another placement");
}

// Buffers as they were, when it is gone.
class KeptBuffers {
 public:
  explicit KeptBuffers(const torch::nn::Module& module)
      : buffers_(module.buffers()) {
    for (const auto& buffer : buffers_) values_.push_back(buffer.clone());
  }
  ~KeptBuffers() {
    for (size_t i = 0; i < buffers_.size(); ++i) buffers_[i].copy_(values_[i]);
  }
  KeptBuffers(const KeptBuffers&) = delete;
  KeptBuffers& operator=(const KeptBuffers&) = delete;

 private:
  torch::NoGradGuard no_grad_;
  std::vector<torch::Tensor> buffers_;
  std::vector<torch::Tensor> values_;
};

}  // namespace

struct PlacedNetwork::Slice {
  torch::Device device;
  std::string track;
  std::shared_ptr<Network> network;
  std::vector<TiedCopy> copies;
};

PlacedNetwork::PlacedNetwork(
    const LayerList& layers, Placement placement, std::optional<uint64_t> seed)
    : torch::nn::Module("PlacedNetwork"), placement_(std::move(placement)) {
  check_cut(layers, placement_);
  build(layers, seed);
  share_ties(layers);
}

PlacedNetwork::~PlacedNetwork() = default;

void PlacedNetwork::build(
    const LayerList& layers, std::optional<uint64_t> seed) {
  const auto& cut = placement_.cut;
  for (size_t i = 0; i < placement_.devices.size(); ++i) {
    const auto device = placement_.devices[i].device;
    auto network = seed ? build_network(layers, cut[i], cut[i + 1], *seed)
                        : build_network(layers, cut[i], cut[i + 1]);
    network->to(device);
    register_layers(*network);
    slices_.push_back(std::make_unique<Slice>(
        Slice{device, "device " + std::to_string(i), std::move(network), {}}));
  }
  for (const auto& slice : slices_) {
    for (const auto& item : slice->network->named_parameters()) {
      if (is_on(item.value(), slice->device)) continue;
      throw ConfigError(
          "parameter \"" + item.key() + "\" belongs on " + slice->device.str() +
          " and on " + item.value().device().str() +
          ", since layers of two slices share it; let each layer's build make "
          "a module of its own, and tie them (LayerList::tie)");
    }
  }
}

// Under the names that they have in one Network.
void PlacedNetwork::register_layers(const Network& network) {
  for (const auto& layer : network.layers()) {
    if (layer.module != nullptr) {
      register_under(*this, layer.name, layer.module);
    }
  }
}

void PlacedNetwork::share_ties(const LayerList& layers) {
  const auto parameters = named_parameters();
  list_each_parameter_once(*this);
  for (const auto& group : tied_groups(layers, placement_.cut)) {
    const auto& owner = parameters[group.names[0]];
    for (size_t i = 1; i < group.names.size(); ++i) {
      const auto& use = parameters[group.names[i]];
      if (use.is_same(owner)) continue;
      unlist_parameter(*this, group.names[i]);
      for (const auto& slice : slices_) {
        if (group.layers[i] >= slice->network->begin() &&
            group.layers[i] < slice->network->end()) {
          slice->copies.emplace_back(owner, use, slice->device);
        }
      }
    }
  }
}

Tensors PlacedNetwork::run(size_t index, const Tensors& inputs) {
  Slice& slice = *slices_[index];
  const c10::DeviceGuard guard(slice.device);
  for (const auto& copy : slice.copies) copy.refresh();
  const Tensors here = moved(inputs, slice.device);
  if (recorder_ == nullptr || !recorder_->active()) {
    return slice.network->forward(here);
  }
  SliceSpans spans(recorder_, slice.track, slice.device);
  return spans.leave(slice.network->forward(spans.enter(here)));
}

Tensors PlacedNetwork::forward(const Tensors& inputs) {
  Tensors values = inputs;
  for (size_t i = 0; i < slices_.size(); ++i) values = run(i, values);
  return values;
}

torch::Tensor PlacedNetwork::forward(const torch::Tensor& x) {
  Tensors outputs = forward(Tensors{x});
  if (outputs.size() != 1) {
    throw ConfigError(
        "layer \"" + placement_.devices.back().last +
        "\" is the last and returns " + echelon::describe(outputs) +
        "; call forward with Tensors to have them all");
  }
  return std::move(outputs[0]);
}

void PlacedNetwork::set_recorder(Recorder* recorder) {
  recorder_ = recorder;
}

std::optional<NonFinite>
PlacedNetwork::first_nonfinite_layer(const Tensors& inputs) {
  const torch::NoGradGuard no_grad;
  const KeptBuffers kept(*this);
  Tensors values = inputs;
  for (size_t i = 0; i < slices_.size(); ++i) {
    auto& slice = *slices_[i];
    for (const auto& copy : slice.copies) copy.refresh();
    values = moved(values, slice.device);
    if (auto found = slice.network->first_nonfinite_layer(values)) {
      return found;
    }
    values = slice.network->forward(values);
  }
  return std::nullopt;
}

void PlacedNetwork::to(torch::Device, bool) {
  refuse_move();
}

void PlacedNetwork::to(torch::Device, torch::Dtype, bool) {
  refuse_move();
}

void PlacedNetwork::to(torch::Dtype dtype, bool non_blocking) {
  torch::nn::Module::to(dtype, non_blocking);
}

}  // namespace echelon::placement
