// The first run records the results of the selected operators, in the order of
// their calls. finish() keeps those that nobody has changed in place and that
// were made before the last saved tensor; they pass through the saved-tensor
// hooks, which may offload them. The second run makes the same calls: each
// takes the next record, returns its results instead of computing, and sets the
// random generators as the operator left them. A call whose record was dropped
// runs again.
//
// Running statistics must change once only. So in the second run an operator
// that writes a buffer writes a copy.
#include "echelon/memory/kept_results.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/core/Tensor.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "echelon/error.h"
#include "echelon/memory/saved_tensors.h"
#include "echelon/text/format.h"

namespace echelon::detail {
namespace {

using at::Tensor;
using c10::IValue;

// Only new tensors and plain values are kept. Views, results that are
// arguments, and lists are recomputed.
bool can_keep(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  if (schema.is_mutable()) return false;
  for (const auto& result : schema.returns()) {
    if (result.alias_info() != nullptr) return false;
    if (result.type()->kind() == c10::TypeKind::ListType) return false;
  }
  return true;
}

bool is_tensor(const IValue& value) {
  return value.isTensor() && value.toTensor().defined();
}

bool writes(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

bool is_running_statistic(const c10::Argument& argument) {
  return argument.name() == "running_mean" || argument.name() == "running_var";
}

Tensor copy_of(const Tensor& tensor) {
  const c10::impl::ExcludeDispatchKeyGuard below(
      profiling::OperatorScope::kKey);
  return tensor.clone();
}

}  // namespace

std::vector<at::Generator>
generators_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Generator> generators = {
      at::globalContext().defaultGenerator(at::kCPU)};
  for (const auto& tensor : tensors) {
    if (!at::accelerator::isAccelerator(tensor.device().type())) continue;
    const auto& one = at::globalContext().defaultGenerator(tensor.device());
    if (std::find(generators.begin(), generators.end(), one) ==
        generators.end()) {
      generators.push_back(one);
    }
  }
  return generators;
}

RandomState::RandomState(const std::vector<at::Generator>& generators) {
  for (auto generator : generators) {
    const std::lock_guard lock(generator.mutex());
    states_.emplace_back(generator, generator.get_state());
  }
}

void RandomState::restore() const {
  for (auto [generator, state] : states_) {
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state);
  }
}

// Both states are bytes in host memory.
bool RandomState::operator==(const RandomState& other) const {
  return std::equal(
      states_.begin(), states_.end(), other.states_.begin(),
      other.states_.end(), [](const auto& a, const auto& b) {
        return a.second.nbytes() == b.second.nbytes() &&
               std::memcmp(
                   a.second.const_data_ptr(), b.second.const_data_ptr(),
                   a.second.nbytes()) == 0;
      });
}

// Keeps an alias of the tensor: the tensor itself is about to get a graph,
// which would be kept with it.
KeptResults::Value::Value(const IValue& result) : plain_(result) {
  if (!is_tensor(result)) return;
  plain_ = result.toTensor().tensor_data();
  counter_ = result.toTensor().unsafeGetTensorImpl()->version_counter();
  version_ = counter_.current_version();
}

void KeptResults::Value::save() {
  if (!is_tensor(plain_)) return;
  saved_ = save_tensor(plain_.toTensor());
  plain_ = {};
}

bool KeptResults::Value::intact() const {
  return !counter_.enabled() || counter_.current_version() == version_;
}

IValue KeptResults::Value::get() const {
  return saved_ ? IValue(saved_().variable_data()) : plain_;
}

bool KeptResults::Call::intact() const {
  return !values.empty() &&
         std::all_of(values.begin(), values.end(), [](const Value& value) {
           return value.intact();
         });
}

void KeptResults::finish(size_t saved) {
  for (auto& call : calls_) {
    if (call.saved_before < saved && call.intact()) {
      for (auto& value : call.values) value.save();
    } else {
      call.values.clear();
      call.random_after = {};
    }
  }
}

ResultRecorder::ResultRecorder(
    const std::unordered_set<std::string>& names, KeptResults& results,
    std::function<size_t()> saved, const std::vector<at::Generator>& generators)
    : names_(names),
      results_(results),
      saved_(std::move(saved)),
      generators_(generators) {}

void ResultRecorder::run(profiling::OperatorCall& call) {
  if (inside_ || !names_.contains(call.name()) || !can_keep(call.op)) {
    call.run();
    return;
  }
  const bool random = call.op.hasTag(at::Tag::nondeterministic_seeded);
  const auto before = random ? RandomState(generators_) : RandomState();
  call.whole = true;
  const std::string name = call.name();
  const size_t first = call.first();
  call.run();
  record(name, c10::ArrayRef<IValue>(call.stack).slice(first));
  if (!random) return;
  RandomState after(generators_);
  if (after != before) results_.calls().back().random_after = std::move(after);
}

profiling::OperatorHandler::Results ResultRecorder::run_region(
    const std::string& name, const std::function<Results()>& next) {
  if (inside_ || !names_.contains(name)) return next();
  inside_ = true;
  const auto leave = c10::make_scope_exit([&] { inside_ = false; });
  const auto results = next();
  record(name, std::vector<IValue>(results.begin(), results.end()));
  return results;
}

void ResultRecorder::record(
    const std::string& name, c10::ArrayRef<IValue> values) {
  auto& call = results_.calls().emplace_back();
  call.name = name;
  call.saved_before = saved_();
  for (const auto& value : values) call.values.emplace_back(value);
}

Replay::Replay(
    const std::unordered_set<std::string>& names, KeptResults& results,
    const std::vector<at::Tensor>& buffers, const std::string& layer)
    : names_(names), results_(results), layer_(layer) {
  for (const auto& buffer : buffers) {
    if (!buffer.defined()) continue;
    buffers_.insert(buffer.storage().unsafeGetStorageImpl());
  }
}

// Returns null when the call must run again.
KeptResults::Call* Replay::next_call(const std::string& name) {
  auto& calls = results_.calls();
  if (next_ == calls.size() || calls[next_].name != name) {
    throw Error(format(
        "recompute of layer \"{}\": its forward came to {} where it {} the "
        "first time; what a layer computes may depend on its inputs and "
        "parameters alone",
        layer_, name,
        next_ == calls.size() ? "had ended" : "had " + calls[next_].name));
  }
  auto& call = calls[next_++];
  return call.intact() ? &call : nullptr;
}

void Replay::run(profiling::OperatorCall& call) {
  if (inside_) {
    call.run();
    return;
  }
  if (names_.contains(call.name()) && can_keep(call.op)) {
    if (const auto* kept = next_call(call.name())) {
      call.stack.resize(call.first());
      for (const auto& value : kept->values) call.stack.push_back(value.get());
      kept->random_after.restore();
      return;
    }
    call.whole = true;
  } else {
    protect_buffers(call);
  }
  call.run();
}

profiling::OperatorHandler::Results Replay::run_region(
    const std::string& name, const std::function<Results()>& next) {
  if (inside_ || !names_.contains(name)) return next();
  const auto* kept = next_call(name);
  if (kept == nullptr) {
    inside_ = true;
    const auto leave = c10::make_scope_exit([&] { inside_ = false; });
    return next();
  }
  Results results;
  for (const auto& value : kept->values) {
    results.push_back(value.get().toTensor());
  }
  return results;
}

// An operator that writes into a buffer gets a copy of it. The copy is made
// below autograd, which therefore sees no difference.
void Replay::protect_buffers(profiling::OperatorCall& call) const {
  const auto& schema = call.op.schema();
  const bool normalises = call.name().find("batch_norm") != std::string::npos;
  if (!normalises && (buffers_.empty() || !schema.is_mutable())) return;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    auto& value = call.stack[call.first() + i];
    if (!is_tensor(value)) continue;
    const auto& argument = schema.arguments()[i];
    const auto& tensor = value.toTensor();
    const bool statistic = normalises && is_running_statistic(argument);
    const bool written =
        writes(argument) &&
        buffers_.contains(tensor.storage().unsafeGetStorageImpl());
    if (statistic || written) value = copy_of(tensor);
  }
}

}  // namespace echelon::detail
