// Shapes of operators whose kernels for the meta device live in Python alone:
// the C++ library has none. An operator that has one keeps its own.
#include <torch/csrc/jit/frontend/function_schema_parser.h>
#include <torch/library.h>
#include <torch/types.h>

#include <ATen/ExpandUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "echelon/counting/meta_mode.h"

namespace echelon {
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

// In the order of x: channels last stays channels last.
Tensor ordered_like(const Tensor& x) {
  return at::empty_like(x, x.suggest_memory_format());
}

Tensor sized(Ints sizes, const Tensor& x) {
  return at::empty_symint(sizes, x.options());
}

Tensor ordered(Ints sizes, const Tensor& x, at::MemoryFormat order) {
  return at::empty_symint(sizes, x.options(), order);
}

Tensor like_if(bool wanted, const Tensor& x) {
  return wanted ? like(x) : Tensor();
}

Tensor sized_if(bool wanted, Ints sizes, const Tensor& x) {
  return wanted ? sized(sizes, x) : Tensor();
}

template <class T>
T one_or_each(c10::ArrayRef<T> values, size_t i) {
  return values.size() == 1 ? values[0] : values[i];
}

// Channels last if images or weights are: so the kernels for processors choose.
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
  const SymInt saved = training ? x.sym_size(1) : SymInt(0);
  return {ordered_like(x), sized({saved}, x), sized({saved}, x)};
}

Three batch_norm_backward(
    const Tensor&, const Tensor& x, const MaybeTensor&, const MaybeTensor&,
    const MaybeTensor&, const MaybeTensor&, const MaybeTensor&, bool, double,
    std::array<bool, 3> mask) {
  const SymInt channels = x.sym_size(1);
  return {
      mask[0] ? ordered_like(x) : Tensor(), sized_if(mask[1], {channels}, x),
      sized_if(mask[2], {channels}, x)};
}

Three layer_norm(
    const Tensor& x, Ints normalized, const MaybeTensor&, const MaybeTensor&,
    double) {
  std::vector<SymInt> sizes;
  const int64_t kept = x.dim() - static_cast<int64_t>(normalized.size());
  for (int64_t dim = 0; dim < x.dim(); ++dim) {
    sizes.push_back(dim < kept ? x.sym_size(dim) : SymInt(1));
  }
  return {like(x), sized(sizes, x), sized(sizes, x)};
}

Three layer_norm_backward(
    const Tensor&, const Tensor& x, Ints normalized, const Tensor&,
    const Tensor&, const MaybeTensor&, const MaybeTensor&,
    std::array<bool, 3> mask) {
  return {
      like_if(mask[0], x), sized_if(mask[1], normalized, x),
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
  return {
      mask[0] ? ordered_like(x) : Tensor(), sized_if(mask[1], {channels}, x),
      sized_if(mask[2], {channels}, x)};
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
  // Of scalars and rows no order is known.
  const auto order = one.sizes() == at::IntArrayRef(sizes)
                         ? one.suggest_memory_format()
                         : at::MemoryFormat::Contiguous;
  return at::empty(sizes, one.options(), order);
}

Tensor& where_out(const Tensor&, const Tensor&, const Tensor&, Tensor& out) {
  return out;
}

Tensor
mse_loss_backward(const Tensor&, const Tensor& x, const Tensor&, int64_t) {
  return like(x);
}

Tensor flip(const Tensor& x, at::IntArrayRef) {
  return ordered_like(x);
}

Tensor same(const Tensor& x) {
  return ordered_like(x);
}

Tensor logical_not(const Tensor& x) {
  return at::empty_like(x, x.options().dtype(at::kBool));
}

Tensor& same_in_place(Tensor& x) {
  return x;
}

Two log_sigmoid(const Tensor& x) {
  return {like(x), sized({SymInt(0)}, x)};
}

Tensor log_sigmoid_backward(const Tensor&, const Tensor& x, const Tensor&) {
  return like(x);
}

// For any number of pooled dimensions, the last ones.
Tensor adaptive_average_pool(const Tensor& x, Ints output) {
  auto sizes = x.sym_sizes().vec();
  const size_t first = sizes.size() - output.size();
  for (size_t i = 0; i < output.size(); ++i) sizes[first + i] = output[i];
  return ordered(sizes, x, x.suggest_memory_format());
}

Tensor second_like(const Tensor&, const Tensor& x) {
  return ordered_like(x);
}

Tensor prelu(const Tensor& x, const Tensor&) {
  return ordered_like(x);
}

Two prelu_backward(const Tensor&, const Tensor& x, const Tensor&) {
  return {ordered_like(x), ordered_like(x)};
}

Tensor clamp(const Tensor& x, const at::Scalar&, const at::Scalar&) {
  return ordered_like(x);
}

Tensor& clamp_in_place(Tensor& x, const at::Scalar&, const at::Scalar&) {
  return x;
}

Tensor clamp_backward(
    const Tensor&, const Tensor& x, const at::Scalar&, const at::Scalar&) {
  return ordered_like(x);
}

// padding: before and after, the last dimension first.
Tensor pad(const Tensor& x, Ints padding) {
  auto sizes = x.sym_sizes().vec();
  for (size_t i = 0; i < padding.size() / 2; ++i) {
    sizes[sizes.size() - 1 - i] += padding[2 * i] + padding[2 * i + 1];
  }
  return ordered(sizes, x, x.suggest_memory_format());
}

Tensor pad_backward(const Tensor&, const Tensor& x, Ints) {
  return ordered_like(x);
}

// x [batch, channels, …] or without batch: a column for each place of the
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

Tensor gated_backward(const Tensor&, const Tensor& x, int64_t) {
  return like(x);
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
  std::vector<SymInt> sizes;
  const int64_t kept = x.dim() - static_cast<int64_t>(normalized.size());
  for (int64_t dim = 0; dim < x.dim(); ++dim) {
    sizes.push_back(dim < kept ? x.sym_size(dim) : SymInt(1));
  }
  return {like(x), sized(sizes, x)};
}

// query [batch, heads, length, width], the output of a fused attention: as its
// kernel lays it out, heads before widths.
Two flash_attention(
    const Tensor& query, const Tensor&, const Tensor& value, double, bool,
    const MaybeTensor&, std::optional<double>) {
  const auto sum_dtype =
      query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return {
      sized(
          {query.sym_size(0), query.sym_size(2), query.sym_size(1),
           value.sym_size(3)},
          query)
          .transpose(1, 2),
      at::empty_symint(
          {query.sym_size(0), query.sym_size(2), query.sym_size(1)},
          query.options().dtype(sum_dtype))
          .transpose(1, 2)};
}

Three flash_attention_backward(
    const Tensor&, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor&, const Tensor&, double, bool, const MaybeTensor&,
    std::optional<double>) {
  return {like(query), like(key), like(value)};
}

// The fused kernel, which keeps no matrix of scores, wherever one exists; by
// itself the meta device takes the plain formula.
Tensor attention(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const MaybeTensor& mask, double dropout, bool causal,
    std::optional<double> scale, bool grouped) {
  const bool fused = query.dim() == 4 && key.dim() == 4 && value.dim() == 4 &&
                     query.size(3) == value.size(3) &&
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
      like_if(mask[0], x),
      mask[1] ? at::empty(normalized, x.options()) : Tensor()};
}

template <class Function>
void add(torch::Library& library, const char* name, Function* function) {
  const auto op = c10::Dispatcher::singleton().findSchema(
      torch::jit::parseName(std::string("aten::") + name));
  if (op && !op->hasKernelForDispatchKey(c10::DispatchKey::Meta)) {
    library.impl(name, function);
  }
}

}  // namespace

void detail::need_meta_kernels() {}

}  // namespace echelon

TORCH_LIBRARY_IMPL(aten, Meta, library) {
  using namespace echelon;
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
  add(library, "mse_loss_backward", &mse_loss_backward);
  add(library, "flip", &flip);
  add(library, "logical_not", &logical_not);
  add(library, "relu", &same);
  add(library, "relu_", &same_in_place);
  add(library, "log_sigmoid_forward", &log_sigmoid);
  add(library, "log_sigmoid_backward", &log_sigmoid_backward);
  add(library, "_adaptive_avg_pool2d", &adaptive_average_pool);
  add(library, "_adaptive_avg_pool2d_backward", &second_like);
  add(library, "_adaptive_avg_pool3d", &adaptive_average_pool);
  add(library, "_adaptive_avg_pool3d_backward", &second_like);
  add(library, "_prelu_kernel", &prelu);
  add(library, "_prelu_kernel_backward", &prelu_backward);
  add(library, "hardtanh", &clamp);
  add(library, "hardtanh_", &clamp_in_place);
  add(library, "hardtanh_backward", &clamp_backward);
  for (const char* name :
       {"reflection_pad1d", "reflection_pad2d", "reflection_pad3d",
        "replication_pad1d", "replication_pad2d", "replication_pad3d"}) {
    add(library, name, &pad);
    add(library, (std::string(name) + "_backward").c_str(), &pad_backward);
  }
  add(library, "glu_backward", &gated_backward);
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
  library.impl("scaled_dot_product_attention", &echelon::attention);
}
