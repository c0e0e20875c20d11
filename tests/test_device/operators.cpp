// Operators of the test device: the CPU's kernels, queued.
//
// run_boxed() stands for every operator with a kernel for CPUs that CUDA runs
// as one call. What it returns is known before it runs: operators in place
// return their arguments, and for others the meta device computes shapes. Its
// work, on the stream's thread, calls the operator with CPU tensors over the
// same memory and copies new results into the tensors that were returned.
//
// Structured operators reach it as their `out` variants: LibTorch allocates the
// results. Views have kernels that queue nothing. An operator that nothing here
// knows is an error with its name.
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

#include "tests/test_device/memory.h"
#include "tests/test_device/operators.h"
#include "tests/test_device/runtime.h"

namespace echelon::test_device {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

constexpr auto kType = c10::DeviceType::PrivateUse1;

// -------------------------------------------------------------- arguments

/// What is done with each tensor of an argument or result.
template <class F>
void for_tensors(const IValue& value, F&& f) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) f(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& tensor : value.toTensorVector()) f(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
      if (tensor && tensor->defined()) f(*tensor);
    }
  }
}

/// `value` with each tensor replaced by f(tensor).
template <class F>
IValue map_tensors(const IValue& value, F&& f) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? IValue(f(value.toTensor())) : value;
  }
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) {
      list.push_back(tensor.defined() ? f(tensor) : tensor);
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
      list.push_back(
          tensor && tensor->defined() ? std::optional<Tensor>(f(*tensor))
                                      : tensor);
    }
    return list;
  }
  return value;
}

bool has_tensors(const IValue& value) {
  return value.isTensor() || value.isTensorList() ||
         value.isOptionalTensorList();
}

Tensor meta_of(const Tensor& tensor) {
  if (!is_ours(tensor)) return tensor;
  return at::detail::empty_strided_meta(
      tensor.sizes(), tensor.strides(), tensor.scalar_type());
}

Tensor empty_like_meta(const Tensor& meta, int device) {
  const ExchangeDevice guard(device);
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(
      meta.sizes(), meta.strides(), device_allocator(), keys,
      meta.scalar_type());
}

[[noreturn]] void refuse(const std::string& op, const std::string& why) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "test device: operator ", op, " ", why, "; called from\n",
      CallStack::here().text());
}

// ------------------------------------------------------------------- kernels

/// The device of the tensors among `arguments`; -1 without any.
int device_of_arguments(
    const std::string& op, c10::ArrayRef<IValue> arguments) {
  int device = -1;
  for (const IValue& argument : arguments) {
    for_tensors(argument, [&](const Tensor& tensor) {
      if (is_ours(tensor)) {
        const int index = tensor.device().index();
        TORCH_CHECK(
            device < 0 || device == index,
            "Expected all tensors to be on the same device, but operator ", op,
            " got tensors of test devices ", device, " and ", index);
        device = index;
      }
    });
  }
  return device;
}

/// Arguments of the CPU that a kernel can take: scalars. Their value is that of
/// now.
Tensor host_argument(const std::string& op, const Tensor& tensor) {
  if (is_ours(tensor)) return tensor;
  TORCH_CHECK(
      tensor.dim() == 0 || tensor.numel() == 0 || tensor.is_meta(),
      "Expected all tensors to be on the same device, but operator ", op,
      " got a tensor ", text_of(tensor), " on ", tensor.device());
  return tensor.unsafeGetTensorImpl()->is_wrapped_number() ? tensor
                                                           : tensor.clone();
}

/// The parts of an operator's schema that decide how it runs.
struct Plan {
  std::vector<int> returned;  // the argument that each result is, or -1
  bool new_results = false;   // some result is no argument
  std::set<size_t> written;   // arguments
};

Plan plan_of(const c10::FunctionSchema& schema) {
  Plan plan;
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    if (alias != nullptr && alias->isWrite()) plan.written.insert(i);
  }
  for (const auto& result : schema.returns()) {
    int from = -1;
    const auto* alias = result.alias_info();
    for (size_t i = 0; alias != nullptr && i < arguments.size(); ++i) {
      const auto* other = arguments[i].alias_info();
      if (other != nullptr && other->beforeSets() == alias->beforeSets()) {
        from = static_cast<int>(i);
      }
    }
    plan.returned.push_back(from);
    plan.new_results = plan.new_results || from < 0;
  }
  return plan;
}

const Plan& cached_plan(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static auto* const plans = new std::unordered_map<c10::OperatorName, Plan>;
  std::lock_guard lock(mutex);
  auto found = plans->find(op.operator_name());
  if (found == plans->end()) {
    found = plans->emplace(op.operator_name(), plan_of(op.schema())).first;
  }
  return found->second;
}

/// LibTorch's boxing of kernels that return references to their arguments reads
/// these after it has dropped them from the stack: another owner keeps them.
void call_boxed(const c10::OperatorHandle& op, Stack& stack) {
  const Stack kept = stack;
  op.callBoxed(&stack);
}

/// Runs an operator with shapes alone.
std::vector<IValue> shapes_of_results(
    const c10::OperatorHandle& op, c10::ArrayRef<IValue> arguments) {
  // LibTorch's own kernels of these know no meta tensors.
  static const std::set<std::string> like_the_first{
      "aten::abs", "aten::logical_not", "aten::real", "aten::conj_physical"};
  if (like_the_first.contains(op.operator_name().name)) {
    return {meta_of(arguments[0].toTensor())};
  }
  const auto& [name, overload] = op.operator_name();
  if ((name == "aten::max" || name == "aten::min") &&
      (overload.empty() || overload == "unary_out")) {
    return {at::detail::empty_strided_meta(
        {}, {}, arguments[0].toTensor().scalar_type())};
  }
  if (name == "aten::batch_norm_update_stats") {
    const Tensor& like =
        arguments[arguments[1].toTensor().defined() ? 1 : 0].toTensor();
    const Tensor channels = at::detail::empty_strided_meta(
        {arguments[0].toTensor().size(1)}, {1}, like.scalar_type());
    return {channels, channels};
  }
  Stack stack;
  for (const IValue& argument : arguments) {
    stack.push_back(map_tensors(argument, &meta_of));
  }
  const at::AutoDispatchBelowAutograd no_autograd;
  try {
    call_boxed(op, stack);
  } catch (const c10::NotImplementedError&) {
    refuse(
        c10::toString(op.operator_name()),
        "has no kernel that knows the shapes of its results");
  }
  return stack;
}

/// Makes results that are arguments as large as the operator wants them.
void resize_results(
    const Plan& plan, c10::ArrayRef<IValue> arguments,
    const std::vector<IValue>& shapes) {
  for (size_t i = 0; i < shapes.size(); ++i) {
    if (plan.returned[i] < 0 || !shapes[i].isTensor()) continue;
    const Tensor& result =
        arguments[static_cast<size_t>(plan.returned[i])].toTensor();
    const Tensor& wanted = shapes[i].toTensor();
    if (is_ours(result) && result.sizes() != wanted.sizes()) {
      result.resize_(wanted.sizes());
    }
  }
}

/// Whether a result that is an argument may not have its size yet.
bool has_empty_result(const Plan& plan, c10::ArrayRef<IValue> arguments) {
  return std::ranges::any_of(plan.returned, [&](int from) {
    return from >= 0 && arguments[static_cast<size_t>(from)].isTensor() &&
           arguments[static_cast<size_t>(from)].toTensor().numel() == 0;
  });
}

bool writes_out(const c10::FunctionSchema& schema) {
  for (const auto& argument : schema.arguments()) {
    if (argument.is_out()) return true;
  }
  return false;
}

void copy_results(const std::vector<IValue>& results, const Stack& computed) {
  for (size_t i = 0; i < results.size(); ++i) {
    if (results[i].isTensor() && results[i].toTensor().defined()) {
      results[i].toTensor().copy_(computed[i].toTensor());
    } else if (results[i].isTensorList()) {
      const auto to = results[i].toTensorVector();
      const auto from = computed[i].toTensorVector();
      for (size_t j = 0; j < to.size(); ++j) to[j].copy_(from[j]);
    }
  }
}

void run_boxed(
    const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto& schema = op.schema();
  const std::string name = schema.name();
  const size_t first = stack->size() - schema.arguments().size();
  std::vector<IValue> arguments(
      stack->begin() + static_cast<int64_t>(first), stack->end());
  const int index = device_of_arguments(name, arguments);
  if (index < 0) refuse(name, "has no tensor on the device");
  Device& device = device_of(index);
  const Plan& plan = cached_plan(op);
  for (IValue& argument : arguments) {
    argument = map_tensors(argument, [&](const Tensor& tensor) {
      return host_argument(name, tensor);
    });
  }

  std::vector<IValue> results;
  if (plan.new_results || writes_out(schema)) {
    std::vector<IValue> shapes;
    if (plan.new_results || has_empty_result(plan, arguments) ||
        op.hasKernelForDispatchKey(c10::DispatchKey::Meta)) {
      shapes = shapes_of_results(op, arguments);
      resize_results(plan, arguments, shapes);
    }
    for (size_t i = 0; i < plan.returned.size(); ++i) {
      if (plan.returned[i] >= 0) continue;
      if (!has_tensors(shapes[i])) {
        refuse(name, "returns a value that only the host can have");
      }
      results.push_back(map_tensors(shapes[i], [&](const Tensor& meta) {
        return empty_like_meta(meta, index);
      }));
    }
  }

  Launch launch{.name = name};
  for (size_t i = 0; i < arguments.size(); ++i) {
    for_tensors(arguments[i], [&](const Tensor& tensor) {
      if (is_ours(tensor)) {
        launch.accesses.push_back(access_of(tensor, plan.written.contains(i)));
      }
    });
  }
  for (const IValue& result : results) {
    for_tensors(result, [&](const Tensor& tensor) {
      launch.accesses.push_back(access_of(tensor, true));
    });
  }

  // The work keeps addresses, not tensors: memory may be freed as soon as the
  // operator is queued.
  Stack on_cpu;
  for (const IValue& argument : arguments) {
    if (argument.isGenerator()) {
      on_cpu.emplace_back();
      continue;
    }
    on_cpu.push_back(map_tensors(argument, &kernel_view));
  }
  std::vector<IValue> new_on_cpu;
  for (const IValue& result : results) {
    new_on_cpu.push_back(map_tensors(result, &kernel_view));
  }
  std::vector<int> returned = plan.returned;
  device.launch(
      current_stream(index), std::move(launch),
      [op, on_cpu = std::move(on_cpu), new_on_cpu = std::move(new_on_cpu),
       returned] {
        const at::AutoDispatchBelowAutograd no_autograd;
        Stack stack = on_cpu;  // a replay needs the arguments again
        call_boxed(op, stack);
        Stack computed;
        for (size_t i = 0; i < returned.size(); ++i) {
          if (returned[i] < 0) computed.push_back(stack[i]);
        }
        copy_results(new_on_cpu, computed);
      });

  stack->resize(first);
  size_t next = 0;
  for (const int from : plan.returned) {
    stack->push_back(
        from >= 0 ? arguments[static_cast<size_t>(from)] : results[next++]);
  }
}

// For operators whose results depend on values, which CUDA waits for as well.
void run_on_host(
    const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto& schema = op.schema();
  const size_t first = stack->size() - schema.arguments().size();
  std::vector<IValue> arguments(
      stack->begin() + static_cast<int64_t>(first), stack->end());
  const int index = device_of_arguments(schema.name(), arguments);
  if (index < 0) refuse(schema.name(), "has no tensor on the device");
  Stack on_cpu;
  for (const IValue& argument : arguments) {
    on_cpu.push_back(map_tensors(argument, [&](const Tensor& tensor) {
      return is_ours(tensor) ? tensor.cpu() : tensor;
    }));
  }
  {
    const at::AutoDispatchBelowAutograd no_autograd;
    call_boxed(op, on_cpu);
  }
  stack->resize(first);
  const c10::Device device(kType, static_cast<c10::DeviceIndex>(index));
  for (const IValue& result : on_cpu) {
    stack->push_back(map_tensors(
        result, [&](const Tensor& tensor) { return tensor.to(device); }));
  }
}

bool is_view(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns()) {
    const auto* alias = result.alias_info();
    if (alias != nullptr && !alias->isWrite()) return true;
  }
  return false;
}

/// Whether CUDA runs the operator as one call.
bool is_one_call(const c10::OperatorHandle& op) {
  using Key = c10::DispatchKey;
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  if (name.starts_with("aten::_foreach_") || name.starts_with("aten::_fused") ||
      name.starts_with("aten::_amp_")) {
    return true;
  }
  if (name == "aten::convolution" || name == "aten::convolution_backward") {
    return true;
  }
  // Structured operators come as their `out` variants.
  return op.hasKernelForDispatchKey(Key::CPU) &&
         !op.hasKernelForDispatchKey(
             Key::CompositeExplicitAutogradNonFunctional);
}

}  // namespace

void register_fallback(torch::Library& library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_boxed>());
}

void register_operators(torch::Library& library) {
  // Kernels of the CPU that LibTorch gives every device under another name.
  static const std::set<std::string> by_hand{
      "aten::empty",
      "aten::empty_strided",
      "aten::_copy_from",
      "aten::_copy_from_and_resize",
      "aten::_local_scalar_dense",
      "aten::resize_",
      "aten::set_",
      "aten::record_stream",
      "aten::is_pinned",
      "aten::_pin_memory",
      "aten::copy_"};
  static const std::set<std::string> by_value{
      "aten::nonzero",  "aten::masked_select", "aten::equal",
      "aten::_unique2", "aten::unique_dim",    "aten::is_nonzero"};
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (!name.name.starts_with("aten::")) continue;
    const auto op = dispatcher.findSchema(name);
    if (!op || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) {
      continue;
    }
    const std::string full =
        name.overload_name.empty()
            ? name.name.substr(6)
            : name.name.substr(6) + "." + name.overload_name;
    if (by_value.contains(name.name)) {
      library.impl(
          full.c_str(),
          torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
      continue;
    }
    if (by_hand.contains(name.name) || is_view(op->schema()) ||
        !is_one_call(*op)) {
      continue;
    }
    library.impl(
        full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_boxed>());
  }
  register_kernels(library);
}

}  // namespace echelon::test_device

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  echelon::test_device::register_operators(library);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  echelon::test_device::register_fallback(library);
}
