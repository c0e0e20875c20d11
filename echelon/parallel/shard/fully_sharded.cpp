// An operator finds its parameters unsharded in this way. Their storage belongs
// to a flat buffer, whose owner parameter_owner_of() names. A dispatch key
// that has no meaning of its own and precedes all others gets a fallback
// kernel, which looks at the arguments of each operator and unshards the units
// that they belong to. The fallback runs only in threads that include the key:
// where a ForwardScope lives, and where backward recomputes such a forward,
// since LibTorch then restores the thread's state.
#include "echelon/parallel/shard/fully_sharded.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>
#include <torch/nn/module.h>
#include <torch/types.h>

#include <algorithm>
#include <map>

#include "echelon/error.h"
#include "echelon/layers/parameter_owner.h"
#include "echelon/parallel/shard/sharded_units_impl.h"
#include "echelon/text/format.h"
#include "echelon/text/nearest.h"

namespace echelon {
namespace {

using torch::Tensor;
using UnitsPtr = std::shared_ptr<ShardedUnits::Impl>;

constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

// The units whose parameters an operator reads, by owner.
using Needed = std::vector<std::pair<UnitsPtr, std::vector<size_t>>>;

void add_needed(const Tensor& tensor, Needed& needed) {
  const auto owner =
      std::dynamic_pointer_cast<ShardedUnits::Impl>(parameter_owner_of(tensor));
  if (!owner) return;
  const auto* storage = tensor.storage().unsafeGetStorageImpl();
  auto found = std::find_if(needed.begin(), needed.end(), [&](const auto& one) {
    return one.first == owner;
  });
  if (found == needed.end()) found = needed.insert(found, {owner, {}});
  auto& units = found->second;
  const size_t unit = owner->unit_of.at(storage);
  if (std::find(units.begin(), units.end(), unit) == units.end()) {
    units.push_back(unit);
  }
}

void add_needed(const c10::IValue& value, Needed& needed) {
  if (value.isTensor()) {
    add_needed(value.toTensor(), needed);
  } else if (value.isTensorList()) {
    for (const Tensor& tensor : value.toTensorList())
      add_needed(tensor, needed);
  } else if (value.isList()) {
    for (const auto& one : value.toListRef()) add_needed(one, needed);
  }
}

// Unshards units for an operator, and again in backward if it saves their
// parameters.
struct Reader {
  explicit Reader(const Needed& needed) {
    for (const auto& [owner, units] : needed) {
      const std::lock_guard lock(owner->mutex);
      const size_t set = owner->unsharded->find_set(units);
      owner->use(set);
      if (!owner->unshards_in_backward() || !torch::GradMode::is_enabled())
        continue;
      scopes.push_back(std::make_unique<SavedTensorScope>(
          std::make_shared<sharding::UnshardWhenUnpacked>(owner, set)));
    }
  }
  ~Reader() {
    while (!scopes.empty()) scopes.pop_back();
  }
  std::vector<std::unique_ptr<SavedTensorScope>> scopes;
};

void unshard_arguments(
    const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Needed needed;
  const size_t count = op.schema().arguments().size();
  for (size_t i = stack->size() - count; i < stack->size(); ++i) {
    add_needed((*stack)[i], needed);
  }
  // The operators that this one calls read the same parameters.
  const c10::impl::ExcludeDispatchKeyGuard exclude(kKey);
  if (needed.empty()) {
    op.callBoxed(stack);
    return;
  }
  const Reader reader(needed);
  op.callBoxed(stack);
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, library) {
  library.fallback(
      torch::CppFunction::makeFromBoxedFunction<&unshard_arguments>());
}

// While it lives, operators of this thread unshard their arguments.
struct ForwardScope {
  explicit ForwardScope(std::shared_ptr<SavedTensorHooks> hooks)
      : include(kKey) {
    if (hooks) scope.emplace(std::move(hooks));
  }
  // The scope serves functions of users, which save tensors without being
  // operators.
  std::optional<SavedTensorScope> scope;
  c10::impl::IncludeDispatchKeyGuard include;
};

// ---------------------------------------------------------------------- names

// "blocks.*" becomes "blocks.0", "blocks.1", …
std::vector<std::string> expand(
    const std::vector<std::string>& patterns,
    const std::vector<std::string>& names) {
  std::vector<std::string> units;
  for (const auto& pattern : patterns) {
    const bool star = pattern.ends_with(".*") || pattern == "*";
    const std::string prefix =
        star ? pattern.substr(0, pattern.size() - 1) : pattern;
    bool matches = false;
    for (const auto& name : names) {
      const bool child = star && name.starts_with(prefix) &&
                         name.find('.', prefix.size()) == std::string::npos;
      if (!child && name != pattern) continue;
      matches = true;
      units.push_back(name);
    }
    if (matches) continue;
    const std::string asked =
        star && pattern != "*" ? prefix.substr(0, prefix.size() - 1) : pattern;
    throw ConfigError(format(
        "[sharded data parallel] no submodule matches the unit \"{}\"{}",
        pattern, config::did_you_mean(asked, names)));
  }
  return units;
}

void check_nesting(const std::vector<std::string>& units) {
  for (const auto& inner : units) {
    if (std::count(units.begin(), units.end(), inner) > 1) {
      throw ConfigError(format(
          "[sharded data parallel] unit \"{}\" is named twice; name each "
          "submodule once",
          inner));
    }
    for (const auto& outer : units) {
      if (!inner.starts_with(outer + ".")) continue;
      throw ConfigError(format(
          "[sharded data parallel] unit \"{}\" lies inside unit \"{}\"; name "
          "the outer one alone, or its parts alone",
          inner, outer));
    }
  }
}

}  // namespace

// --------------------------------------------------------------------- module

struct FullyShardedModule::Impl : std::enable_shared_from_this<Impl> {
  explicit Impl(const FullyShardedOptions& options)
      : units(options.shard, options.replicate, options.sharding) {}

  void add(torch::nn::Module& module, const FullyShardedOptions& options);
  void on_output();
  void change_no_sync(int by) {
    const std::lock_guard lock(mutex);
    no_sync += by;
  }

  ShardedUnits units;
  std::mutex mutex;
  int no_sync = 0;
  int task = -1;  // autograd's number of the last backward
};

// Assigns each parameter to the first unit that names it, or to the rest of the
// module; a parameter that the rest uses as well belongs to the rest.
void FullyShardedModule::Impl::add(
    torch::nn::Module& module, const FullyShardedOptions& options) {
  const auto names = expand(
      options.units, module.named_modules("", /*include_self=*/false).keys());
  check_nesting(names);
  const size_t rest = names.size();
  struct Parameter {
    std::string name;
    Tensor tensor;
    size_t unit;
  };
  std::vector<Parameter> parameters;
  std::map<const c10::TensorImpl*, size_t> seen;
  for (const auto& item : module.named_parameters()) {
    size_t unit = 0;
    while (unit < rest && !item.key().starts_with(names[unit] + ".")) ++unit;
    const auto [known, fresh] =
        seen.emplace(item.value().unsafeGetTensorImpl(), parameters.size());
    if (fresh) {
      parameters.push_back({item.key(), item.value(), unit});
      continue;
    }
    auto& other = parameters[known->second];
    if (other.unit == unit) continue;
    if (other.unit != rest && unit != rest) {
      throw ConfigError(format(
          "[sharded data parallel] \"{}\" of unit \"{}\" and \"{}\" of unit "
          "\"{}\" are one parameter, and a parameter is in one unit; make a "
          "submodule that has both the unit, or name neither, so that it is in "
          "the rest of the module",
          other.name, names[other.unit], item.key(), names[unit]));
    }
    other.unit = rest;
  }
  const auto add_unit = [&](const std::string& name, size_t index) {
    sharding::FlatBuffer::Named own;
    for (const auto& parameter : parameters) {
      if (parameter.unit == index) {
        own.emplace_back(parameter.name, parameter.tensor);
      }
    }
    if (own.empty() && index != rest) {
      throw ConfigError(format(
          "[sharded data parallel] unit \"{}\" has no parameters of its own; "
          "leave it out",
          name));
    }
    if (!own.empty()) units.add(name, own, !options.broadcast_values);
  };
  // The rest is unit 0, which is reduced last: what is used at both ends of the
  // module gets its gradient last.
  add_unit("rest of the module", rest);
  for (size_t i = 0; i < rest; ++i) add_unit(names[i], i);
  if (!options.broadcast_values) return;
  const torch::NoGradGuard no_grad;
  for (auto& item : module.named_buffers()) {
    const Tensor values = item.value().contiguous();
    const Call call{.label = "values of " + item.key()};
    options.shard.broadcast(values, 0, call);
    options.replicate.broadcast(values, 0, call);
    if (!values.is_same(item.value())) item.value().copy_(values);
  }
}

void FullyShardedModule::Impl::on_output() {
  // autograd::grad reaches no parameter, or a few that the caller chose.
  const auto* selected = torch::autograd::get_current_graph_task_exec_info();
  if (selected != nullptr && !selected->empty()) return;
  const std::lock_guard lock(mutex);
  const int current = torch::autograd::get_current_graph_task_id();
  if (task == current) return;
  task = current;
  units.begin_backward({.last = no_sync == 0, .keep_unsharded = true});
  if (no_sync > 0) return;
  torch::autograd::Engine::get_default_engine().queue_callback(
      [weak = weak_from_this()] {
        if (const auto self = weak.lock()) self->units.finish();
      });
}

FullyShardedModule::FullyShardedModule(
    torch::nn::Module& module, FullyShardedOptions options)
    : impl_(std::make_shared<Impl>(options)) {
  impl_->add(module, options);
}

FullyShardedModule::~FullyShardedModule() = default;

std::shared_ptr<void> FullyShardedModule::begin_forward() {
  const auto& units = impl_->units.impl();
  std::shared_ptr<SavedTensorHooks> hooks;
  if (units->unshards_in_backward()) {
    hooks =
        std::make_shared<sharding::UnshardWhenUnpacked>(units, std::nullopt);
  }
  return std::make_shared<ForwardScope>(std::move(hooks));
}

void FullyShardedModule::watch(const Tensor& output) {
  if (!output.defined() || !output.requires_grad()) return;
  output.register_hook([weak = std::weak_ptr(impl_)](const Tensor&) {
    if (const auto impl = weak.lock()) impl->on_output();
  });
}

std::shared_ptr<void> FullyShardedModule::no_sync() {
  impl_->change_no_sync(1);
  return {nullptr, [impl = impl_](void*) { impl->change_no_sync(-1); }};
}

void FullyShardedModule::after_update(bool updated) {
  impl_->units.after_update(updated);
}

std::vector<ParameterGroup>
FullyShardedModule::parameter_groups(double weight_decay) const {
  return impl_->units.parameter_groups(weight_decay);
}

std::vector<Tensor> FullyShardedModule::parameters() const {
  std::vector<Tensor> shards;
  for (const auto& shard : impl_->units.flat_shards()) {
    shards.push_back(shard.tensor);
  }
  return shards;
}

ShardedUnits& FullyShardedModule::units() {
  return impl_->units;
}

const ShardedUnits& FullyShardedModule::units() const {
  return impl_->units;
}

}  // namespace echelon
