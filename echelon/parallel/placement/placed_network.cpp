// Slices run one after the other, each on its device, and tensors are moved
// between them. A tied parameter of another slice is one parameter for the
// optimizer: its owner is registered, the other slices have copies that are
// refreshed before each forward. Spans of backward are found with autograd
// nodes at both ends of a slice, which pass gradients through and note the
// time.
#include "echelon/parallel/placement/placed_network.h"

#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <string>
#include <utility>

#include "echelon/error.h"
#include "echelon/layers/graph_node.h"
#include "echelon/layers/registration.h"
#include "echelon/layers/ties.h"
#include "echelon/text/format.h"

namespace echelon::placement {
namespace {

namespace autograd = torch::autograd;

Tensors moved(const Tensors& tensors, torch::Device device) {
  Tensors there;
  for (const auto& tensor : tensors) {
    there.push_back(echelon::moved(tensor, device));
  }
  return there;
}

bool is_on(const torch::Tensor& tensor, torch::Device device) {
  return tensor.device().type() == device.type() &&
         (!device.has_index() || tensor.device().index() == device.index());
}

// Passes gradients through, and calls `seen` when all of them have arrived.
struct Passage : autograd::Node {
  explicit Passage(std::function<void()> seen) : seen(std::move(seen)) {}
  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    seen();
    return std::move(gradients);
  }
  std::function<void()> seen;
};

// Puts one Passage behind the tensors that require gradients. Returns whether
// there was one.
bool pass(Tensors& tensors, std::function<void()> seen) {
  Tensors tracked;
  for (const auto& tensor : tensors) {
    if (tensor.requires_grad()) tracked.push_back(tensor);
  }
  if (tracked.empty() || !torch::GradMode::is_enabled()) return false;
  const auto node = make_node<Passage>(std::move(seen));
  node->set_next_edges(autograd::collect_next_edges(tracked));
  for (auto& tensor : tensors) {
    if (!tensor.requires_grad()) continue;
    tensor = tensor.detach();
    autograd::set_history(tensor, node);
  }
  return true;
}

// Records when one pass through a slice computes: a span for forward, and one
// for backward, which begins when gradients of the outputs arrive and ends when
// those of the inputs leave. A forward without gradients counts as evaluation.
// The recorder must live until backward has run.
class SliceSpans : public std::enable_shared_from_this<SliceSpans> {
 public:
  SliceSpans(
      timeline::Recorder* recorder, std::string track, torch::Device device)
      : recorder_(recorder), track_(std::move(track)), device_(device) {}

  // Returns the inputs as the slice must use them.
  Tensors enter(const Tensors& inputs) {
    Tensors tracked = inputs;
    has_entry_ = pass(tracked, [self = shared_from_this()] {
      self->record("backward", timeline::SpanKind::backward);
    });
    begin_ = now();
    return tracked;
  }

  // Returns the outputs as the next slice must use them.
  Tensors leave(const Tensors& outputs) {
    record(
        "forward", torch::GradMode::is_enabled()
                       ? timeline::SpanKind::forward
                       : timeline::SpanKind::evaluation);
    Tensors tracked = outputs;
    pass(tracked, [self = shared_from_this()] {
      self->begin_ = self->now();
      if (self->has_entry_) return;
      // No slice comes before this one: its backward ends with the whole one.
      autograd::Engine::get_default_engine().queue_callback(
          [self] { self->record("backward", timeline::SpanKind::backward); });
    });
    return tracked;
  }

 private:
  timeline::Moment now() const {
    return recorder_->now(device_.has_index() ? device_.index() : -1);
  }
  void record(const char* name, timeline::SpanKind kind) {
    recorder_->add(
        {.track = track_, .name = name, .kind = kind}, begin_, now());
  }

  timeline::Recorder* recorder_;
  std::string track_;
  torch::Device device_;
  bool has_entry_ = false;
  timeline::Moment begin_;
};

void check_partition(const LayerList& layers, const Placement& placement) {
  const auto& boundaries = placement.boundaries;
  if (!placement.devices.empty() &&
      boundaries.size() == placement.devices.size() + 1 &&
      boundaries.front() == 0 && boundaries.back() == layers.size()) {
    return;
  }
  throw ConfigError(format(
      "a placement of {} layers on {} devices is used for a list of {} layers; "
      "make one for this list with plan_placement",
      boundaries.empty() ? 0 : boundaries.back(), placement.devices.size(),
      layers.size()));
}

[[noreturn]] void refuse_move() {
  throw Error(
      "a placed network cannot be moved to one device: its placement says "
      "where the layers are; build it with another placement");
}

}  // namespace

struct PlacedNetwork::Slice {
  torch::Device device;
  std::string track;
  std::shared_ptr<Network> network;
  /// Parameters that it uses and that another slice owns, perhaps on another
  /// device.
  std::vector<SharedParameter> copies;
};

PlacedNetwork::PlacedNetwork(
    const LayerList& layers, Placement placement, std::optional<uint64_t> seed)
    : torch::nn::Module("PlacedNetwork"), placement_(std::move(placement)) {
  check_partition(layers, placement_);
  build(layers, seed);
  share_ties(layers);
}

PlacedNetwork::~PlacedNetwork() = default;

void PlacedNetwork::build(
    const LayerList& layers, std::optional<uint64_t> seed) {
  const auto& boundaries = placement_.boundaries;
  for (size_t i = 0; i < placement_.devices.size(); ++i) {
    const auto device = placement_.devices[i].device;
    auto network =
        build_network(layers, boundaries[i], boundaries[i + 1], seed);
    network->to(device);
    register_layers(*network);
    slices_.push_back(std::make_unique<Slice>(
        Slice{device, "device " + std::to_string(i), std::move(network), {}}));
  }
  for (const auto& slice : slices_) {
    for (const auto& item : slice->network->named_parameters()) {
      if (is_on(item.value(), slice->device)) continue;
      throw ConfigError(format(
          "parameter \"{}\" belongs on {} and on {}, since layers of two "
          "slices share it; let each layer's build make a module of its own, "
          "and tie them (LayerList::tie)",
          item.key(), slice->device.str(), item.value().device().str()));
    }
  }
}

// Registers layers under the names that they have in one Network.
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
  for (const auto& group : tied_groups(layers, placement_.boundaries)) {
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
  const auto spans =
      std::make_shared<SliceSpans>(recorder_, slice.track, slice.device);
  return spans->leave(slice.network->forward(spans->enter(here)));
}

Tensors PlacedNetwork::forward(const Tensors& inputs) {
  Tensors values = inputs;
  for (size_t i = 0; i < slices_.size(); ++i) values = run(i, values);
  return values;
}

torch::Tensor PlacedNetwork::forward(const torch::Tensor& x) {
  return only_output(forward(Tensors{x}), placement_.devices.back().last);
}

void PlacedNetwork::set_recorder(timeline::Recorder* recorder) {
  recorder_ = recorder;
}

std::optional<NonFinite>
PlacedNetwork::first_nonfinite_layer(const Tensors& inputs) {
  const torch::NoGradGuard no_grad;
  const SavedBuffers saved(*this);
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

}  // namespace echelon::placement
