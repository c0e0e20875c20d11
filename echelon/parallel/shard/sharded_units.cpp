// Two components do the work: flat_buffer.h holds parameters and gradients, and
// units.h decides when parameters are unsharded and when gradients are reduced.
// This file connects them to autograd: forward unshards a unit before it uses
// it; a parameter that forward saves is unsharded again when backward unpacks
// it; and a hook on each parameter moves its gradient to the flat buffer as
// soon as autograd has accumulated it. A layer that asks for the memory of the
// gradient (parameter_owner.h) writes it there itself, and the hook finds it
// in place.
#include "echelon/parallel/shard/sharded_units.h"

#include <torch/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/types.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <mutex>
#include <numeric>
#include <tuple>

#include "echelon/error.h"
#include "echelon/parallel/shard/sharded_units_impl.h"
#include "echelon/text/format.h"

namespace echelon {

using sharding::FlatBuffer;
using sharding::ShardContext;
using sharding::Unit;
using sharding::UnitReducer;
using sharding::UnshardedUnits;
using torch::Tensor;

namespace {

using Impl = ShardedUnits::Impl;
using Parameters = std::vector<std::pair<std::string, Tensor>>;

[[noreturn]] void refuse(
    const std::string& unit, const std::string& parameter,
    const std::string& why) {
  throw ConfigError(format(
      "[sharded data parallel] parameter \"{}\" of unit \"{}\" {}", parameter,
      unit, why));
}

// The autograd node that this thread's backward runs; none in forward.
UnshardedUnits::Node current_node() {
  if (torch::autograd::get_current_graph_task_id() == -1) return std::nullopt;
  const auto node = torch::autograd::get_current_node();
  if (!node) return std::nullopt;
  return std::pair(node->thread_id(), node->sequence_nr());
}

void refuse_create_graph(const std::string& unit) {
  if (!torch::GradMode::is_enabled()) return;
  throw ConfigError(format(
      "[sharded data parallel] backward with create_graph reached unit \"{}\", "
      "whose parameters are not there any more when the second backward comes; "
      "use it with data parallelism that does not shard, or stage 1 or 2 and "
      "gradients of inputs alone",
      unit));
}

// Takes the gradient that autograd has accumulated. A hook that the parameter
// had before still runs.
class GradientHook : public torch::autograd::PostAccumulateGradHook {
 public:
  GradientHook(
      std::weak_ptr<Impl> impl, const Impl::Location& location,
      std::unique_ptr<PostAccumulateGradHook> earlier)
      : impl_(std::move(impl)),
        location_(location),
        earlier_(std::move(earlier)) {}

  void operator()(const torch::autograd::Variable& variable) override {
    if (earlier_) (*earlier_)(variable);
    if (const auto impl = impl_.lock()) impl->on_gradient(location_);
  }

 private:
  std::weak_ptr<Impl> impl_;
  Impl::Location location_;
  std::unique_ptr<PostAccumulateGradHook> earlier_;
};

// Where the option asks for registered blocks and the ranks have none, world
// rank 0 says so, once.
void register_blocks(ShardContext& context, torch::Device device) {
  const Group& group = context.shard;
  if (!context.options.shard.registered_buffers || group.size() == 1) return;
  if (device.is_meta()) return;
  const std::string why = group.why_not_registered();
  if (why.empty()) return context.pool.register_with(group);
  static std::once_flag told;
  if (group.ranks()[static_cast<size_t>(group.rank())] != 0) return;
  std::call_once(told, [&] {
    std::fprintf(
        stderr, "warning: [shard] registered_buffers has no effect: %s\n",
        why.c_str());
  });
}

// While it lives the set's units are unsharded.
class Pinned {
 public:
  Pinned(std::shared_ptr<Impl> impl, size_t set) : impl_(std::move(impl)) {
    std::lock_guard lock(impl_->mutex);
    units_ = impl_->unsharded->set(set);
    impl_->use(set);
    impl_->unsharded->pin(units_);
  }
  ~Pinned() {
    std::lock_guard lock(impl_->mutex);
    impl_->unsharded->unpin(units_);
  }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

 private:
  std::shared_ptr<Impl> impl_;
  std::vector<size_t> units_;
};

}  // namespace

std::function<Tensor()>
sharding::UnshardWhenUnpacked::pack(const Tensor& tensor) {
  const auto impl = impl_.lock();
  if (!impl || !tensor.has_storage()) return nullptr;
  std::lock_guard lock(impl->mutex);
  const auto found =
      impl->unit_of.find(tensor.storage().unsafeGetStorageImpl());
  if (found == impl->unit_of.end()) return nullptr;
  // The forward's own set, if it has the unit: backward uses the same sets.
  std::optional<size_t> set = set_;
  if (set) {
    const auto& units = impl->unsharded->set(*set);
    if (std::find(units.begin(), units.end(), found->second) == units.end()) {
      set.reset();
    }
  }
  if (!set) set = impl->unsharded->find_set({found->second});
  return [impl = impl_, set = *set, tensor] {
    if (const auto all = impl.lock()) all->use_in_backward(set);
    return tensor;
  };
}

ShardedUnits::Impl::~Impl() {
  for (const auto& [storage, _] : unit_of) remove_parameter_owner(storage);
}

std::pair<Unit*, FlatBuffer*>
ShardedUnits::Impl::find(const Tensor& tensor) const {
  const auto* storage = tensor.storage().unsafeGetStorageImpl();
  const auto found = unit_of.find(storage);
  if (found == unit_of.end()) return {};
  Unit* unit = units[found->second].get();
  for (const auto& flat : unit->flats) {
    if (flat->storage() == storage) return {unit, flat.get()};
  }
  return {};
}

Tensor ShardedUnits::Impl::gradient_of(const Tensor& weight) {
  // autograd::grad returns its gradients, and adds them to no parameter.
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  if (chosen == nullptr || !chosen->empty()) return {};
  const torch::NoGradGuard no_grad;
  std::lock_guard lock(mutex);
  reducer->begin_default_round();
  const auto [unit, flat] = find(weight);
  if (flat == nullptr || unit->round.launched) return {};
  return flat->gradient_memory(weight);
}

Tensor ShardedUnits::Impl::with_zero_rows(const Tensor& matrix) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::lock_guard lock(mutex);
  const auto* flat = find(matrix).second;
  return flat == nullptr ? Tensor() : flat->with_zero_rows(matrix);
}

void ShardedUnits::Impl::start(torch::Device device) {
  if (context) return;
  context = std::make_unique<ShardContext>(shard, replicate, options, device);
  register_blocks(*context, device);
  if (options.apart) {
    apart = std::make_unique<ShardContext>(
        options.apart->shard, options.apart->replicate, options, device);
    register_blocks(*apart, device);
  }
  unsharded = std::make_unique<UnshardedUnits>(
      units, options.shard, context->keeps_unsharded() || options.unshard_once);
  reducer = std::make_unique<UnitReducer>(units, *context);
}

void ShardedUnits::Impl::check(
    const std::string& name, const Parameters& parameters) const {
  std::map<const c10::StorageImpl*, std::string> seen;
  for (const auto& [parameter, tensor] : parameters) {
    if (tensor.is_sparse() || tensor.layout() != torch::kStrided) {
      refuse(name, parameter, "is sparse; only dense parameters are sharded");
    }
    if (!tensor.is_floating_point()) {
      refuse(
          name, parameter,
          format(
              "is {}; parameters are floating-point numbers, others are "
              "buffers",
              c10::toString(tensor.scalar_type())));
    }
    const auto* storage = tensor.storage().unsafeGetStorageImpl();
    if (const auto other = unit_of.find(storage); other != unit_of.end()) {
      refuse(
          name, parameter,
          format(
              "is in unit \"{}\" too; a parameter that several layers use is "
              "added once, and wrap() names its unit for all of them",
              units[other->second]->name));
    }
    const auto [twin, fresh] = seen.emplace(storage, parameter);
    if (!fresh) {
      refuse(
          name, parameter,
          format(
              "has the memory of \"{}\"; give it its own, or add one of them "
              "alone",
              twin->second));
    }
    if (tensor.is_view() || !tensor.is_leaf()) {
      refuse(
          name, parameter,
          "is a view of another tensor or a result of a computation; "
          "parameters are tensors of their own");
    }
    if (context && tensor.device() != context->pool.device()) {
      refuse(
          name, parameter,
          format(
              "is on {}, other units are on {}; one device for all",
              tensor.device().str(), context->pool.device().str()));
    }
  }
}

void ShardedUnits::Impl::watch_gradients(size_t unit) {
  const auto& flats = units[unit]->flats;
  for (size_t flat = 0; flat < flats.size(); ++flat) {
    if (!flats[flat]->trainable()) continue;
    for (size_t i = 0; i < flats[flat]->num_parameters(); ++i) {
      const Tensor& tensor = flats[flat]->parameter(i);
      auto& hook = torch::autograd::impl::post_acc_grad_hooks(tensor);
      hook = std::make_unique<GradientHook>(
          weak_from_this(), Location{unit, flat, i}, std::move(hook));
    }
  }
}

void ShardedUnits::Impl::on_gradient(const Location& location) {
  const auto [unit, flat, parameter] = location;
  const auto& buffer = *units[unit]->flats[flat];
  Tensor& gradient = buffer.parameter(parameter).mutable_grad();
  refuse_create_graph(units[unit]->name);
  if (gradient.defined() && gradient.is_sparse()) {
    refuse(
        units[unit]->name, buffer.parameter_name(parameter),
        "got a sparse gradient; only dense ones are reduced: build the "
        "embedding with sparse(false)");
  }
  const torch::NoGradGuard no_grad;
  std::lock_guard lock(mutex);
  const Tensor taken = std::move(gradient);
  gradient.reset();
  reducer->add(unit, flat, parameter, taken);
  // Backward has used the unit for the last time when it has all its gradients.
  if (reducer->complete(unit)) unsharded->reshard(unit);
}

void ShardedUnits::Impl::use(size_t set) {
  unsharded->use(set, current_node(), reducer->last());
}

void ShardedUnits::Impl::use_in_backward(size_t set) {
  std::lock_guard lock(mutex);
  refuse_create_graph(units[unsharded->set(set).front()]->name);
  unsharded->use_by_node(set, current_node(), reducer->last());
}

void ShardedUnits::Impl::refresh(void (FlatBuffer::*changed)()) {
  unsharded->reset_order();
  for (const auto& unit : units) {
    for (const auto& flat : unit->flats) ((*flat).*changed)();
  }
  for (const auto& unit : units) {
    if (context->keeps_unsharded() || unit->pins > 0) unit->start_unshard();
  }
  // All all-gathers are under way before the first one is waited for.
  for (const auto& unit : units) {
    if (unit->pins > 0) unit->finish_unshard();
  }
}

// --------------------------------------------------------------------- public

ShardedUnits::ShardedUnits(
    Group shard, Group replicate, ShardedUnitsOptions options)
    : impl_(std::make_shared<Impl>(
          std::move(shard), std::move(replicate), std::move(options))) {}

ShardedUnits::~ShardedUnits() = default;

size_t ShardedUnits::add(
    const std::string& name, const Parameters& parameters, bool equal) {
  std::lock_guard lock(impl_->mutex);
  impl_->check(name, parameters);
  const size_t index = impl_->units.size();
  auto unit = std::make_unique<Unit>();
  unit->name = name;

  // One buffer per dtype and requires_grad, another for parameters apart, and
  // one per parameter in `own_buffer`.
  using Kind = std::tuple<bool, torch::Dtype, std::string, bool>;
  std::vector<std::pair<Kind, Parameters>> kinds;
  for (const auto& parameter : parameters) {
    const auto& [full_name, tensor] = parameter;
    const auto& options = impl_->options;
    const bool alone = options.own_buffer.contains(full_name);
    const Kind kind{
        tensor.requires_grad(), tensor.scalar_type(), alone ? full_name : "",
        options.apart && options.apart->has(full_name)};
    auto found = std::find_if(kinds.begin(), kinds.end(), [&](const auto& one) {
      return one.first == kind;
    });
    if (found == kinds.end()) found = kinds.insert(found, {kind, {}});
    found->second.push_back(parameter);
  }
  std::map<std::string, Impl::Location> locations;
  for (const auto& [kind, members] : kinds) {
    impl_->start(members.front().second.device());
    const auto& [trains, dtype, alone, apart] = kind;
    std::string flat_name = name;
    if (!alone.empty()) flat_name += "/" + alone;
    if (apart) flat_name += "/apart";
    if (!trains) flat_name += "/frozen";
    if (dtype != std::get<1>(kinds.front().first)) {
      flat_name += std::string("/") + c10::toString(dtype);
    }
    unit->flats.push_back(std::make_unique<FlatBuffer>(
        apart ? *impl_->apart : *impl_->context, flat_name, members, equal));
    const auto& flat = *unit->flats.back();
    if (flat.trainable()) unit->num_trainable += flat.num_parameters();
    impl_->unit_of[flat.storage()] = index;
    set_parameter_owner(flat.storage(), impl_);
    for (size_t i = 0; i < flat.num_parameters(); ++i) {
      locations[flat.parameter_name(i)] = {index, unit->flats.size() - 1, i};
    }
  }
  for (const auto& [parameter, _] : parameters) {
    impl_->added.push_back(locations.at(parameter));
  }
  unit->begin_round();
  impl_->units.push_back(std::move(unit));
  impl_->watch_gradients(index);
  return index;
}

size_t ShardedUnits::size() const {
  return impl_->units.size();
}

std::optional<size_t> ShardedUnits::unit_of(const Tensor& parameter) const {
  const auto found =
      impl_->unit_of.find(parameter.storage().unsafeGetStorageImpl());
  if (found == impl_->unit_of.end()) return std::nullopt;
  return found->second;
}

void ShardedUnits::share(const Tensor& parameter) {
  std::lock_guard lock(impl_->mutex);
  if (auto* flat = impl_->find(parameter).second) flat->share(parameter);
}

ShardedUnits::Forward
ShardedUnits::wrap(std::vector<size_t> units, Forward forward) {
  std::erase_if(
      units, [&](size_t unit) { return impl_->units.at(unit)->flats.empty(); });
  if (units.empty()) return forward;
  const size_t set = impl_->unsharded->make_set(std::move(units));
  std::shared_ptr<SavedTensorHooks> hooks;
  if (impl_->unshards_in_backward()) {
    hooks = std::make_shared<sharding::UnshardWhenUnpacked>(impl_, set);
  }
  return [impl = impl_, set, hooks,
          forward = std::move(forward)](const std::vector<Tensor>& inputs) {
    const Pinned pinned(impl, set);
    std::optional<SavedTensorScope> scope;
    if (hooks && torch::GradMode::is_enabled()) scope.emplace(hooks);
    return forward(inputs);
  };
}

std::shared_ptr<void> ShardedUnits::unshard(std::vector<size_t> units) {
  if (units.empty()) {
    units.resize(size());
    std::iota(units.begin(), units.end(), 0);
  }
  std::lock_guard lock(impl_->mutex);
  for (const size_t unit : units) impl_->units[unit]->start_unshard();
  for (const size_t unit : units) impl_->units[unit]->finish_unshard();
  impl_->unsharded->pin(units);
  return {nullptr, [impl = impl_, units](void*) {
            std::lock_guard lock(impl->mutex);
            impl->unsharded->unpin(units);
            for (const size_t unit : units) impl->unsharded->reshard(unit);
          }};
}

void ShardedUnits::begin_backward(const BackwardPass& pass) {
  std::lock_guard lock(impl_->mutex);
  if (!impl_->reducer) return;
  const torch::NoGradGuard no_grad;
  const auto& options = impl_->options;
  // Where nothing is sharded, reducing early gains nothing.
  const bool early = options.shard.stage >= 2 && impl_->shard.size() > 1;
  impl_->reducer->begin_round(
      pass.units, pass.last || (early && !pass.keep_unsharded), pass.last);
}

void ShardedUnits::finish() {
  std::lock_guard lock(impl_->mutex);
  if (!impl_->reducer) return;
  const torch::NoGradGuard no_grad;
  impl_->reducer->finish();
  if (impl_->apart) impl_->apart->pool.trim();
}

void ShardedUnits::after_update(bool updated) {
  std::lock_guard lock(impl_->mutex);
  if (!impl_->reducer) return;
  const torch::NoGradGuard no_grad;
  impl_->reducer->clear();
  if (updated) impl_->refresh(&FlatBuffer::after_update);
}

void ShardedUnits::before_load() {
  std::lock_guard lock(impl_->mutex);
  for (const auto& unit : impl_->units) unit->finish_unshard();
}

void ShardedUnits::after_load() {
  std::lock_guard lock(impl_->mutex);
  if (!impl_->reducer) return;
  const torch::NoGradGuard no_grad;
  impl_->reducer->clear();
  impl_->refresh(&FlatBuffer::after_load);
}

std::vector<ShardedUnits::FlatShard> ShardedUnits::flat_shards() const {
  std::vector<FlatShard> shards;
  for (const auto& unit : impl_->units) {
    for (const auto& flat : unit->flats) {
      if (!flat->trainable()) continue;
      for (auto& shard : flat->shards()) shards.push_back(std::move(shard));
    }
  }
  return shards;
}

std::vector<ParameterGroup>
ShardedUnits::parameter_groups(double weight_decay) const {
  std::vector<ParameterGroup> groups(2);
  groups[0].weight_decay = weight_decay;
  for (const auto& [name, decays, tensor] : flat_shards()) {
    groups[decays ? 0 : 1].parameters.emplace_back(name, tensor);
  }
  return groups;
}

std::vector<ShardedPart> ShardedUnits::parts() const {
  std::vector<ShardedPart> parts;
  for (const auto& [unit, flat, parameter] : impl_->added) {
    parts.push_back(impl_->units[unit]->flats[flat]->part(parameter));
  }
  return parts;
}

std::vector<ShardedUnits::UnitBytes> ShardedUnits::bytes() const {
  std::vector<UnitBytes> all;
  for (const auto& unit : impl_->units) {
    UnitBytes bytes{.name = unit->name};
    for (const auto& flat : unit->flats) {
      const auto one = flat->bytes();
      bytes.shard += one.shard;
      bytes.unsharded += one.unsharded;
      bytes.gradient += one.gradient;
    }
    all.push_back(bytes);
  }
  return all;
}

}  // namespace echelon
