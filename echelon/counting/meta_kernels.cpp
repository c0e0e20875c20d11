// Kernels for the meta device that PyTorch has only in Python: the C++ library
// lacks them. An operator that has a kernel keeps its own. A kernel here finds
// the shapes, dtypes and memory order of the results, and no values. The memory
// order matters as well: it decides which operators after this one copy their
// inputs. The dispatcher learns of the kernels when the program is loaded.
#include <torch/csrc/jit/frontend/function_schema_parser.h>
#include <torch/library.h>
#include <torch/types.h>

#include <ATen/ExpandUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "echelon/counting/meta_mode.h"
#include "echelon/layers/computing_device.h"

namespace echelon::counting {
namespace {

using at::Tensor;
using c10::SymInt;
using Ints = c10::SymIntArrayRef;
using MaybeTensor = std::optional<Tensor>;
using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

Tensor like(const Tensor& x) {
  return at::empty_like(x, at::MemoryFormat::Contiguous);
}

// Returns a tensor in the order of x: channels last stays channels last.
Tensor ordered_like(const Tensor& x) {
  return at::empty_like(x, x.suggest_memory_format());
}

Tensor sized(Ints sizes, const Tensor& x) {
  return at::empty_symint(sizes, x.options());
}

Tensor ordered(Ints sizes, const Tensor& x, at::MemoryFormat order) {
  return at::empty_symint(sizes, x.options(), order);
}

Tensor sized_if(bool wanted, Ints sizes, const Tensor& x) {
  return wanted ? sized(sizes, x) : Tensor();
}

template <class T>
T one_or_each(c10::ArrayRef<T> values, size_t i) {
  return values.size() == 1 ? values[0] : values[i];
}

// Channels last if images or weights are, as the kernels for processors choose.
at::MemoryFormat order_of_convolution(const Tensor& x, const Tensor& weight) {
  const auto order = x.suggest_memory_format();
  return order == at::MemoryFormat::Contiguous ? weight.suggest_memory_format()
                                               : order;
}

Tensor convolution(
    const Tensor& x, const Tensor& weight, const MaybeTensor&, Ints stride,
    Ints padding, Ints dilation, bool transposed, Ints output_padding,
    SymInt groups) {
  std::vector<SymInt> sizes{
      x.sym_size(0),
      transposed ? weight.sym_size(1) * groups : weight.sym_size(0)};
  for (int64_t dim = 2; dim < x.dim(); ++dim) {
    const auto i = static_cast<size_t>(dim - 2);
    const SymInt reach = one_or_each(dilation, i) * (weight.sym_size(dim) - 1);
    const SymInt pad = one_or_each(padding, i) * 2;
    const SymInt step = one_or_each(stride, i);
    sizes.push_back(
        transposed ? (x.sym_size(dim) - 1) * step - pad + reach + 1 +
                         one_or_each(output_padding, i)
                   : (x.sym_size(dim) + pad - reach - 1) / step + 1);
  }
  const SymInt taken =
      transposed ? weight.sym_size(0) : weight.sym_size(1) * groups;
  TORCH_CHECK(
      x.dim() == weight.dim() && x.sym_size(1) == taken,
      "a convolution with weights ", weight.sizes(), " takes ", taken,
      " channels, but the input is ", x.sizes());
  for (const SymInt& size : sizes) {
    TORCH_CHECK(
        size >= 0, "a convolution with weights ", weight.sizes(),
        " leaves nothing of an input ", x.sizes());
  }
  return ordered(sizes, x, order_of_convolution(x, weight));
}

Three convolution_backward(
    const Tensor& gradient, const Tensor& x, const Tensor& weight,
    at::OptionalSymIntArrayRef, Ints, Ints, Ints, bool, Ints, SymInt,
    std::array<bool, 3> mask) {
  const auto order = order_of_convolution(x, weight);
  const auto like_either = [&](bool wanted, const Tensor& one) {
    return wanted ? at::empty_like(one, order) : Tensor();
  };
  return {
      like_either(mask[0], x), like_either(mask[1], weight),
      sized_if(mask[2], {gradient.sym_size(1)}, x)};
}

Three batch_norm(
    const Tensor& x, const MaybeTensor&, const MaybeTensor&, const MaybeTensor&,
    const MaybeTensor&, bool training, double, double) {
  // Statistics of the batch exist in training alone.
  const SymInt saved = training ? x.sym_size(1) : SymInt(0);
  return {ordered_like(x), sized({saved}, x), sized({saved}, x)};
}

Three norm_gradients(
    const Tensor& x, const SymInt& channels, const std::array<bool, 3>& mask) {
  return {
      mask[0] ? ordered_like(x) : Tensor(), sized_if(mask[1], {channels}, x),
      sized_if(mask[2], {channels}, x)};
}

Three batch_norm_backward(
    const Tensor&, const Tensor& x, const MaybeTensor&, const MaybeTensor&,
    const MaybeTensor&, const MaybeTensor&, const MaybeTensor&, bool, double,
    std::array<bool, 3> mask) {
  return norm_gradients(x, x.sym_size(1), mask);
}

// Statistics over the last `normalized` dimensions.
std::vector<SymInt> sizes_of_statistics(const Tensor& x, size_t normalized) {
  auto sizes = x.sym_sizes().vec();
  std::fill(
      sizes.end() - static_cast<int64_t>(normalized), sizes.end(), SymInt(1));
  return sizes;
}

Three layer_norm(
    const Tensor& x, Ints normalized, const MaybeTensor&, const MaybeTensor&,
    double) {
  const auto sizes = sizes_of_statistics(x, normalized.size());
  return {like(x), sized(sizes, x), sized(sizes, x)};
}

Three layer_norm_backward(
    const Tensor&, const Tensor& x, Ints normalized, const Tensor&,
    const Tensor&, const MaybeTensor&, const MaybeTensor&,
    std::array<bool, 3> mask) {
  return {
      mask[0] ? like(x) : Tensor(), sized_if(mask[1], normalized, x),
      sized_if(mask[2], normalized, x)};
}

Three group_norm(
    const Tensor& x, const MaybeTensor&, const MaybeTensor&, SymInt batch,
    SymInt, SymInt, int64_t groups, double) {
  const std::vector<SymInt> sizes{batch, SymInt(groups)};
  return {ordered_like(x), sized(sizes, x), sized(sizes, x)};
}

Three group_norm_backward(
    const Tensor&, const Tensor& x, const Tensor&, const Tensor&,
    const MaybeTensor&, SymInt, SymInt channels, SymInt, int64_t,
    std::array<bool, 3> mask) {
  return norm_gradients(x, channels, mask);
}

Tensor index_select(const Tensor& x, int64_t dim, const Tensor& index) {
  auto sizes = x.sym_sizes().vec();
  if (!sizes.empty()) {
    sizes[static_cast<size_t>(dim < 0 ? dim + x.dim() : dim)] =
        index.sym_numel();
  }
  return sized(sizes, x);
}

Tensor embedding_backward(
    const Tensor& gradient, const Tensor&, SymInt rows, SymInt, bool) {
  return sized({rows, gradient.sym_size(-1)}, gradient);
}

Tensor where(const Tensor& condition, const Tensor& a, const Tensor& b) {
  const auto sizes =
      at::infer_size(condition.sizes(), at::infer_size(a.sizes(), b.sizes()));
  const Tensor& one = a.dim() > 0 ? a : b;
  // A scalar or a row that is broadcast has no memory order.
  const auto order = one.sizes() == at::IntArrayRef(sizes)
                         ? one.suggest_memory_format()
                         : at::MemoryFormat::Contiguous;
  return at::empty(sizes, one.options(), order);
}

Tensor& where_out(const Tensor&, const Tensor&, const Tensor&, Tensor& out) {
  return out;
}

Tensor logical_not(const Tensor& x) {
  return at::empty_like(x, x.options().dtype(at::kBool));
}

// CPUs keep what backward needs.
Two log_sigmoid(const Tensor& x) {
  const bool kept = computing_device(x) == at::kCPU;
  return {like(x), kept ? like(x) : sized({SymInt(0)}, x)};
}

// Pools any number of dimensions, which are the last ones.
Tensor adaptive_average_pool(const Tensor& x, Ints output) {
  auto sizes = x.sym_sizes().vec();
  const size_t first = sizes.size() - output.size();
  for (size_t i = 0; i < output.size(); ++i) sizes[first + i] = output[i];
  return ordered(sizes, x, x.suggest_memory_format());
}

Two prelu_backward(const Tensor&, const Tensor& x, const Tensor&) {
  return {ordered_like(x), ordered_like(x)};
}

// padding: before and after, the last dimension first.
Tensor pad(const Tensor& x, Ints padding) {
  auto sizes = x.sym_sizes().vec();
  for (size_t i = 0; i < padding.size() / 2; ++i) {
    sizes[sizes.size() - 1 - i] += padding[2 * i] + padding[2 * i + 1];
  }
  return ordered(sizes, x, x.suggest_memory_format());
}

// x [batch, channels, …], or without batch: a column for each position of the
// kernel.
Tensor columns_of_image(
    const Tensor& x, at::IntArrayRef kernel, at::IntArrayRef dilation,
    at::IntArrayRef padding, at::IntArrayRef stride) {
  const int64_t first = x.dim() - 2;
  int64_t rows = x.size(first - 1);
  int64_t places = 1;
  for (size_t i = 0; i < 2; ++i) {
    rows *= kernel[i];
    places *= (x.size(first + static_cast<int64_t>(i)) + 2 * padding[i] -
               dilation[i] * (kernel[i] - 1) - 1) /
                  stride[i] +
              1;
  }
  std::vector<int64_t> sizes{rows, places};
  if (first == 2) sizes.insert(sizes.begin(), x.size(0));
  return at::empty(sizes, x.options());
}

Tensor image_of_columns(
    const Tensor& x, Ints output, at::IntArrayRef kernel, at::IntArrayRef,
    at::IntArrayRef, at::IntArrayRef) {
  std::vector<SymInt> sizes{
      x.sym_size(-2) / (kernel[0] * kernel[1]), output[0], output[1]};
  if (x.dim() == 3) sizes.insert(sizes.begin(), x.sym_size(0));
  return sized(sizes, x);
}

// Attention asks whether its queries are its keys.
bool equal(const Tensor& a, const Tensor& b) {
  return a.is_alias_of(b) && a.sizes() == b.sizes() &&
         a.strides() == b.strides() && a.storage_offset() == b.storage_offset();
}

Tensor repeat(const Tensor& x, Ints repeats) {
  std::vector<SymInt> sizes(repeats.begin(), repeats.end());
  const size_t front = sizes.size() - static_cast<size_t>(x.dim());
  for (size_t i = front; i < sizes.size(); ++i) {
    sizes[i] *= x.sym_size(static_cast<int64_t>(i - front));
  }
  return sized(sizes, x);
}

Two rms_norm(
    const Tensor& x, at::IntArrayRef normalized, const MaybeTensor&,
    std::optional<double>) {
  return {like(x), sized(sizes_of_statistics(x, normalized.size()), x)};
}

// Like x [batch, heads, length, width], in the memory order of what the fused
// kernel returns: heads before widths.
Tensor heads_inside(const Tensor& x, const c10::SymInt& width) {
  return sized({x.sym_size(0), x.sym_size(2), x.sym_size(1), width}, x)
      .transpose(1, 2);
}

Two flash_attention(
    const Tensor& query, const Tensor&, const Tensor& value, double, bool,
    const MaybeTensor&, std::optional<double>) {
  const auto sum_dtype =
      query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return {
      heads_inside(query, value.sym_size(3)),
      at::empty_symint(
          {query.sym_size(0), query.sym_size(2), query.sym_size(1)},
          query.options().dtype(sum_dtype))
          .transpose(1, 2)};
}

Three flash_attention_backward(
    const Tensor&, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor&, const Tensor&, double, bool, const MaybeTensor&,
    std::optional<double>) {
  return {
      heads_inside(query, query.sym_size(3)),
      heads_inside(key, key.sym_size(3)),
      heads_inside(value, value.sym_size(3))};
}

// Takes the fused kernel, which keeps no matrix of scores, wherever one exists;
// the meta device by itself would take the plain formula. GPUs have one for
// values of another width than keys.
Tensor attention(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const MaybeTensor& mask, double dropout, bool causal,
    std::optional<double> scale, bool grouped) {
  const bool fused = query.dim() == 4 && key.dim() == 4 && value.dim() == 4 &&
                     (query.size(3) == value.size(3) ||
                      computing_device(query) == torch::kCUDA) &&
                     !(mask && mask->defined() && mask->requires_grad());
  return fused ? std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(
                     query, key, value, dropout, causal, mask, scale))
               : std::get<0>(at::_scaled_dot_product_attention_math(
                     query, key, value, mask, dropout, causal, std::nullopt,
                     scale, grouped));
}

Two rms_norm_backward(
    const Tensor&, const Tensor& x, at::IntArrayRef normalized, const Tensor&,
    const MaybeTensor&, std::array<bool, 2> mask) {
  return {
      mask[0] ? like(x) : Tensor(),
      mask[1] ? at::empty(normalized, x.options()) : Tensor()};
}

// Serves any operator: one in place returns its first argument, any other a new
// tensor like argument `index`, contiguous or in the argument's order.
template <size_t index, bool keeps_order>
void like_argument(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t first = stack->size() - schema.arguments().size();
  const Tensor x = (*stack)[first + index].toTensor();
  stack->resize(first);
  stack->emplace_back(
      schema.is_mutable() ? x
      : keeps_order       ? ordered_like(x)
                          : like(x));
}

template <class Function>
void add(
    torch::Library& library, const std::string& name, Function&& function) {
  const auto op = c10::Dispatcher::singleton().findSchema(
      torch::jit::parseName("aten::" + name));
  if (op && !op->hasKernelForDispatchKey(c10::DispatchKey::Meta)) {
    library.impl(name.c_str(), std::forward<Function>(function));
  }
}

template <size_t index, bool keeps_order = true>
void add_like(torch::Library& library, const std::string& name) {
  add(library, name,
      torch::CppFunction::makeFromBoxedFunction<
          &like_argument<index, keeps_order>>());
}

}  // namespace

// MetaMode calls this. Without a call into this file, the linker would leave it
// out of a static library's users, and its registrations with it.
void detail::need_meta_kernels() {}

}  // namespace echelon::counting

TORCH_LIBRARY_IMPL(aten, Meta, library) {
  using namespace echelon::counting;
  add(library, "convolution", &convolution);
  add(library, "convolution_backward", &convolution_backward);
  add(library, "native_batch_norm", &batch_norm);
  add(library, "native_batch_norm_backward", &batch_norm_backward);
  add(library, "native_layer_norm", &layer_norm);
  add(library, "native_layer_norm_backward", &layer_norm_backward);
  add(library, "native_group_norm", &group_norm);
  add(library, "native_group_norm_backward", &group_norm_backward);
  add(library, "index_select", &index_select);
  add(library, "embedding_dense_backward", &embedding_backward);
  add(library, "where.self", &where);
  add(library, "where.self_out", &where_out);
  add(library, "logical_not", &logical_not);
  add(library, "log_sigmoid_forward", &log_sigmoid);
  add(library, "_adaptive_avg_pool2d", &adaptive_average_pool);
  add(library, "_adaptive_avg_pool3d", &adaptive_average_pool);
  add(library, "_prelu_kernel_backward", &prelu_backward);
  for (const char* name :
       {"flip", "relu", "relu_", "_prelu_kernel", "hardtanh", "hardtanh_"}) {
    add_like<0>(library, name);
  }
  for (const char* name :
       {"_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward",
        "hardtanh_backward"}) {
    add_like<1>(library, name);
  }
  for (const char* name :
       {"mse_loss_backward", "log_sigmoid_backward", "glu_backward"}) {
    add_like<1, /*keeps_order=*/false>(library, name);
  }
  for (const char* name :
       {"reflection_pad1d", "reflection_pad2d", "reflection_pad3d",
        "replication_pad1d", "replication_pad2d", "replication_pad3d"}) {
    add(library, name, &pad);
    add_like<1>(library, std::string(name) + "_backward");
  }
  add(library, "equal", &equal);
  add(library, "im2col", &columns_of_image);
  add(library, "col2im", &image_of_columns);
  add(library, "repeat", &repeat);
  add(library, "_fused_rms_norm", &rms_norm);
  add(library, "_fused_rms_norm_backward", &rms_norm_backward);
  add(library, "_scaled_dot_product_flash_attention_for_cpu", &flash_attention);
  add(library, "_scaled_dot_product_flash_attention_for_cpu_backward",
      &flash_attention_backward);
}

TORCH_LIBRARY_IMPL(aten, AutogradMeta, library) {
  library.impl("scaled_dot_product_attention", &echelon::counting::attention);
}
