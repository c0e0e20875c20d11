#include "echelon/counting/meta_mode.h"

#include <exception>
#include <utility>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::counting {
namespace {

using c10::IValue;
using torch::jit::Stack;

bool is_real(const at::Tensor& tensor) {
  // Operators take CPU scalars together with tensors of any device.
  return tensor.defined() && !tensor.is_meta() && tensor.dim() > 0;
}

// Every device argument becomes the meta device.
void replace_devices(const c10::FunctionSchema& schema, Stack& stack) {
  const auto& arguments = schema.arguments();
  const size_t first = stack.size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == "device") {
      stack[first + i] = c10::Device(c10::kMeta);
    } else if (arguments[i].name() == "pin_memory") {
      stack[first + i] = IValue();
    }
  }
}

}  // namespace

namespace detail {

MetaMode::MetaMode(OperatorObserver* observer)
    : observer_(observer), scope_(*this) {
  need_meta_kernels();
}

MetaMode::~MetaMode() = default;

void MetaMode::replace_real(IValue& value) {
  if (value.isTensor()) {
    if (is_real(value.toTensor())) value = stand_in(value.toTensor());
  } else if (value.isTensorList()) {
    auto list = value.toTensorList();
    c10::List<at::Tensor> replaced;
    for (const at::Tensor& tensor : list) {
      replaced.push_back(is_real(tensor) ? stand_in(tensor) : tensor);
    }
    value = std::move(replaced);
  } else if (value.isOptionalTensorList()) {
    auto list = value.toOptionalTensorList();
    c10::List<std::optional<at::Tensor>> replaced;
    for (const std::optional<at::Tensor>& tensor : list) {
      replaced.push_back(
          tensor && is_real(*tensor) ? stand_in(*tensor) : tensor);
    }
    value = std::move(replaced);
  }
}

void MetaMode::run(profiling::OperatorCall& call) {
  replace_devices(call.op.schema(), call.stack);
  const size_t first = call.first();
  std::vector<IValue> arguments;
  if (observer_ != nullptr) {
    for (size_t i = first; i < call.stack.size(); ++i) {
      replace_real(call.stack[i]);
    }
    call.keys = call.keys | c10::DispatchKeySet(c10::BackendComponent::MetaBit);
    arguments.assign(
        call.stack.begin() + static_cast<int64_t>(first), call.stack.end());
    call.whole = call.whole || observer_->counts_whole(call.name());
  }
  try {
    call.run_kernel();
  } catch (...) {
    if (failed_.empty()) failed_ = call.name();
    throw;
  }
  if (observer_ != nullptr) {
    observer_->ran(
        call.name(), arguments, at::ArrayRef<IValue>(call.stack).slice(first));
  }
}

at::Tensor MetaMode::stand_in(const at::Tensor& real) {
  const c10::impl::ExcludeDispatchKeyGuard below(
      profiling::OperatorScope::kKey);
  const at::AutoDispatchBelowADInplaceOrView no_history;
  const auto options =
      at::TensorOptions().device(at::kMeta).dtype(real.dtype());
  auto& storage = stand_ins_[real.storage().unsafeGetStorageImpl()];
  if (!storage) {
    const auto bytes = static_cast<int64_t>(real.storage().nbytes());
    storage = at::empty({bytes}, options.dtype(at::kByte)).storage();
    meta_storages_.insert(storage.unsafeGetStorageImpl());
  }
  auto tensor = at::empty({0}, options);
  tensor.set_(storage, real.storage_offset(), real.sizes(), real.strides());
  return tensor;
}

bool MetaMode::stands_in(const c10::StorageImpl* storage) const {
  return meta_storages_.contains(storage);
}

std::string meta_failure(const MetaMode& mode, const std::exception& error) {
  if (dynamic_cast<const c10::NotImplementedError*>(&error) != nullptr &&
      !mode.failed().empty()) {
    return format(
        "operator {} has no kernel that knows shapes alone, so the layer "
        "cannot "
        "be looked at without data; register one for the meta device "
        "(TORCH_LIBRARY_IMPL(aten, Meta, m)), or name the boundaries yourself "
        "(cut = [...])",
        mode.failed());
  }
  return (mode.failed().empty() ? "" : "operator " + mode.failed() + ": ") +
         echelon::detail::first_line(error);
}

}  // namespace detail

BuiltLayer build_on_meta(const LayerDefinition& layer) {
  const detail::MetaMode mode;
  try {
    return layer.build();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw ConfigError(format(
        "layer \"{}\" cannot be built without memory: {}; let its constructor "
        "make tensors with torch's functions and write no values into them by "
        "pointer",
        layer.name, detail::meta_failure(mode, error)));
  }
}

}  // namespace echelon::counting
