// Decides which elements of which tensors this rank writes or fills.
//
// Three rules, one after the other, say who writes an element of a parameter.
// The pipeline rank with the tensor's first name has it. Among tensor-parallel
// ranks its owner writes it; they share the elements of replicated tensors
// equally. Replicas then divide what is left into equal parts. The optimizer's
// state goes with its parameter.
#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <torch/types.h>

#include <algorithm>
#include <map>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "echelon/architecture/language_model.h"
#include "echelon/error.h"
#include "echelon/train/saving/saved_state.h"

namespace echelon {
namespace {

using torch::Tensor;

// A tensor of the optimizer's state, such as "exp_avg".
struct Kind {
  std::string name;
  Tensor tensor;
};

// What the optimizer updates, a parameter or a flat shard of several, and its
// state.
struct Updated {
  Tensor parameter;
  std::vector<Kind> kinds;
};

// Finds the state of a parameter by its memory.
class OptimizerState {
 public:
  explicit OptimizerState(const Optimizer& optimizer) {
    std::map<std::string, std::vector<Kind>> kinds;
    for (const auto& [name, tensor] : optimizer.state()) {
      const size_t slash = name.rfind('/');
      kinds[name.substr(0, slash)].push_back({name.substr(slash + 1), tensor});
    }
    for (const auto& group : optimizer.groups()) {
      for (const auto& [name, parameter] : group.parameters) {
        if (parameter.numel() == 0 || !parameter.requires_grad()) continue;
        all_[parameter.storage().unsafeGetStorageImpl()].push_back(
            {parameter, kinds[name]});
      }
    }
  }

  // Returns null for parameters that are not trained.
  const Updated* find(const Tensor& value) const {
    if (value.numel() == 0) return nullptr;
    const auto found = all_.find(value.storage().unsafeGetStorageImpl());
    if (found == all_.end()) return nullptr;
    for (const auto& one : found->second) {
      const int64_t begin =
          value.storage_offset() - one.parameter.storage_offset();
      if (begin >= 0 && begin + value.numel() <= one.parameter.numel()) {
        return &one;
      }
    }
    return nullptr;
  }

 private:
  std::unordered_map<const c10::StorageImpl*, std::vector<Updated>> all_;
};

// The elements of `state` that belong to `value`, a view of updated.parameter.
Tensor
state_of(const Tensor& value, const Updated& updated, const Tensor& state) {
  const Tensor& all = updated.parameter;
  if (value.sizes() == all.sizes()) return state;
  const int64_t begin = value.storage_offset() - all.storage_offset();
  return state.view(-1).narrow(0, begin, value.numel());
}

class Shapes {
 public:
  explicit Shapes(const ModelSource& source) : source_(source) {
    for (const auto& info : source.parameters) shapes_[info.name] = &info.shape;
  }

  const std::vector<int64_t>& of(const std::string& name) const {
    const auto found = shapes_.find(source_.first_name(name));
    if (found != shapes_.end()) return *found->second;
    throw Error(
        "\"" + name +
        "\" is on this rank and not in the list of the model's parameters; "
        "give the list of layers that the model was built from");
  }

 private:
  const ModelSource& source_;
  std::map<std::string, const std::vector<int64_t>*> shapes_;
};

std::vector<PlacedBox> boxes_of_part(
    const LocalParameter& part, const std::vector<int64_t>& shape, bool owned) {
  return placed_boxes(
      shape, part.shard ? &part.shard->shard : nullptr,
      part.range ? &*part.range : nullptr, owned);
}

int64_t num_elements(const std::vector<PlacedBox>& boxes) {
  int64_t sum = 0;
  for (const auto& one : boxes) sum += one.box.numel();
  return sum;
}

// The rank with the first element writes what each parameter has once.
bool has_first_element(const std::vector<PlacedBox>& boxes) {
  return std::any_of(boxes.begin(), boxes.end(), [](const PlacedBox& one) {
    return std::all_of(
        one.box.offset.begin(), one.box.offset.end(),
        [](int64_t index) { return index == 0; });
  });
}

const std::vector<PlacedBox>& one_number() {
  static const std::vector<PlacedBox> boxes(1);
  return boxes;
}

// Adds `boxes` of a parameter's value and of its optimizer state.
void add_parameter(
    std::vector<StateShard>& all, const LocalParameter& part,
    const ModelSource& source, const std::vector<int64_t>& shape,
    const OptimizerState& states, const std::vector<PlacedBox>& boxes) {
  if (boxes.empty()) return;
  const std::string& name = source.first_name(part.name);
  const Tensor value = part.value.detach();
  all.push_back({name, SavedKind::parameter, shape, value, boxes});
  const Updated* updated = states.find(value);
  if (updated == nullptr) return;
  for (const auto& kind : updated->kinds) {
    const std::string full = name + "/" + kind.name;
    if (kind.tensor.sizes() == updated->parameter.sizes()) {
      all.push_back(
          {full, SavedKind::optimizer, shape,
           state_of(value, *updated, kind.tensor), boxes});
    } else {
      all.push_back(
          {full, SavedKind::optimizer, {}, kind.tensor, one_number()});
    }
  }
}

// This rank's share of the elements that tensor-parallel ranks replicate, which
// are numbered through all parameters.
class SharedByTensorRanks {
 public:
  SharedByTensorRanks(
      const std::vector<LocalParameter>& parts, const Shapes& shapes,
      const ModelSource& source, const Group& group) {
    int64_t all = 0;
    for (const auto& part : parts) {
      if (is_shared(part, source)) all += numel(shapes.of(part.name));
    }
    own_ = even_range(all, group.rank(), group.size());
  }

  static bool is_shared(const LocalParameter& part, const ModelSource& source) {
    return !part.shard && part.name == source.first_name(part.name) &&
           !source.unsaved.contains(part.name);
  }

  // Called for each replicated parameter, in order.
  std::vector<PlacedBox>
  next(const LocalParameter& part, const std::vector<int64_t>& shape) {
    const int64_t size = numel(shape);
    const IndexRange here = part.range.value_or(IndexRange{0, size});
    const IndexRange own{
        std::clamp(own_.begin - at_, here.begin, here.end) - here.begin,
        std::clamp(own_.end - at_, here.begin, here.end) - here.begin};
    at_ += size;
    return elements_of(boxes_of_part(part, shape, true), own);
  }

 private:
  static int64_t numel(const std::vector<int64_t>& shape) {
    return whole_box(shape).numel();
  }

  IndexRange own_;
  int64_t at_ = 0;
};

// Divides `parts`, the same on all ranks of a group, into equal numbers of
// bytes and returns this rank's.
std::vector<StateShard>
share_out(std::vector<StateShard> parts, const Group& group) {
  if (group.size() == 1) return parts;
  const auto width = [](const StateShard& part) {
    return static_cast<int64_t>(part.tensor.element_size());
  };
  int64_t bytes = 0;
  for (const auto& part : parts) {
    bytes += num_elements(part.boxes) * width(part);
  }
  const IndexRange own = even_range(bytes, group.rank(), group.size());
  std::vector<StateShard> shared;
  int64_t at = 0;
  for (auto& part : parts) {
    const int64_t elements = num_elements(part.boxes);
    // An element belongs to the rank that its first byte falls to.
    const auto index = [&](int64_t byte) {
      const int64_t within = std::max<int64_t>(byte - at, 0);
      return std::min((within + width(part) - 1) / width(part), elements);
    };
    part.boxes = elements_of(part.boxes, {index(own.begin), index(own.end)});
    at += elements * width(part);
    if (!part.boxes.empty()) shared.push_back(std::move(part));
  }
  return shared;
}

void append(std::vector<StateShard>& all, std::vector<StateShard> more) {
  std::move(more.begin(), more.end(), std::back_inserter(all));
}

void drop_numbers_of_others(std::vector<StateShard>& parts, size_t begin) {
  if (begin == parts.size() || has_first_element(parts[begin].boxes)) return;
  const auto from = parts.begin() + static_cast<std::ptrdiff_t>(begin);
  parts.erase(
      std::remove_if(
          from, parts.end(),
          [](const StateShard& part) {
            return part.kind == SavedKind::optimizer && part.shape.empty();
          }),
      parts.end());
}

// The parameters of this pipeline rank and their optimizer state.
std::vector<StateShard> parameters_to_save(
    const TrainingState& state, const ModelSource& source,
    const MeshGroups& groups) {
  const Shapes shapes(source);
  const OptimizerState states(state.optimizer());
  const auto parts = state.model().parameters();
  SharedByTensorRanks shared(parts, shapes, source, groups.along(Axis::tp));
  // A parameter with a range is replicated over dp_replicate only, others over
  // all data-parallel ranks; experts over those that have the same ones.
  std::vector<StateShard> ranged, whole, ranged_experts, whole_experts;
  for (const auto& part : parts) {
    if (part.name != source.first_name(part.name)) continue;
    if (source.unsaved.contains(part.name)) continue;
    const auto& shape = shapes.of(part.name);
    const auto boxes = part.shard ? boxes_of_part(part, shape, true)
                                  : shared.next(part, shape);
    const bool expert = expert_of(part.name).has_value();
    auto& all = part.range ? (expert ? ranged_experts : ranged)
                           : (expert ? whole_experts : whole);
    const size_t begin = all.size();
    add_parameter(all, part, source, shape, states, boxes);
    drop_numbers_of_others(all, begin);
  }
  auto all = share_out(std::move(whole), groups.data());
  append(all, share_out(std::move(ranged), groups.replicate()));
  append(all, share_out(std::move(whole_experts), groups.same_experts()));
  append(
      all,
      share_out(std::move(ranged_experts), groups.along(Axis::dp_replicate)));
  return all;
}

std::vector<StateShard> buffers_to_save(
    const TrainingState& state, const ModelSource& source,
    const MeshGroups& groups) {
  std::vector<StateShard> all;
  if (groups.data().rank() > 0) return all;
  const Shapes shapes(source);
  for (const auto& part : state.model().buffers()) {
    if (!part.shard && groups.along(Axis::tp).rank() > 0) continue;
    const auto& shape = shapes.of(part.name);
    auto boxes = boxes_of_part(part, shape, true);
    if (boxes.empty()) continue;
    all.push_back(
        {source.first_name(part.name), SavedKind::buffer, shape,
         part.value.detach(), std::move(boxes)});
  }
  return all;
}

}  // namespace

std::vector<detail::RandomSource>
detail::random_sources(const World& world, const MeshGroups& groups) {
  // The name has the place in the mesh, which does not depend on the axes'
  // order.
  const int64_t rank =
      groups.mesh().size() == 1 ? 0 : groups.mesh().place(world.rank());
  auto& context = at::globalContext();
  std::vector<RandomSource> sources = {
      {"random/cpu/" + std::to_string(rank),
       context.defaultGenerator(torch::kCPU)}};
  const auto type = world.device().type();
  if (at::accelerator::isAccelerator(type)) {
    sources.push_back(
        {"random/" + c10::DeviceTypeName(type, /*lower_case=*/true) + "/" +
             std::to_string(rank),
         context.defaultGenerator(world.device())});
  }
  return sources;
}

std::vector<StateShard> shards_to_save(
    const TrainingState& state, const ModelSource& source, const World& world,
    const MeshGroups& groups) {
  auto all = parameters_to_save(state, source, groups);
  append(all, buffers_to_save(state, source, groups));
  for (auto& [name, generator] : detail::random_sources(world, groups)) {
    const std::lock_guard lock(generator.mutex());
    const Tensor bytes = generator.get_state();
    const std::vector<int64_t> shape = bytes.sizes().vec();
    all.push_back(
        {name, SavedKind::random, shape, bytes,
         placed_boxes(shape, nullptr, nullptr, true)});
  }
  return all;
}

std::vector<StateShard>
shards_to_load(const TrainingState& state, const ModelSource& source) {
  const Shapes shapes(source);
  const OptimizerState states(state.optimizer());
  std::vector<StateShard> all;
  for (const auto& part : state.model().parameters()) {
    if (source.unsaved.contains(source.first_name(part.name))) continue;
    const auto& shape = shapes.of(part.name);
    add_parameter(
        all, part, source, shape, states, boxes_of_part(part, shape, false));
  }
  for (const auto& part : state.model().buffers()) {
    const auto& shape = shapes.of(part.name);
    auto boxes = boxes_of_part(part, shape, false);
    if (boxes.empty()) continue;
    all.push_back(
        {source.first_name(part.name), SavedKind::buffer, shape,
         part.value.detach(), std::move(boxes)});
  }
  return all;
}

}  // namespace echelon
