#include "echelon/kernels/elementwise.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

#include "echelon/comm/nccl/accelerator.h"
#include "echelon/kernels/numbers.h"
#include "echelon/layers/computing_device.h"

namespace echelon::kernels {

namespace sources {
extern const std::string_view numbers_cu;
extern const std::string_view elementwise_cu;
}  // namespace sources

namespace {

using torch::Tensor;
using Pair = std::tuple<Tensor, Tensor>;

constexpr int kElementwiseThreads = 256;

template <size_t N>
void launch_elementwise(
    const std::string& name, const Tensor& on, int64_t blocks, int threads,
    std::array<void*, N> arguments) {
  static const std::string source =
      std::string(sources::numbers_cu).append(sources::elementwise_cu);
  if (blocks == 0) return;
  const c10::DeviceGuard guard(on.device());
  launch_kernel(source, name, blocks, threads, arguments.data());
}

int64_t blocks_for(int64_t threads) {
  return (threads + kElementwiseThreads - 1) / kElementwiseThreads;
}

// Launches a kernel over the elements of contiguous tensors, in packets where
// all begin with one and a whole number of them fits. Bools have packets of as
// many elements as `like`.
template <size_t N>
void launch_flat(
    const char* kernel, const Tensor& like,
    std::initializer_list<const Tensor*> tensors,
    std::array<void*, N> arguments) {
  const int64_t packet = packet_of(like);
  const int64_t n = like.numel();
  const bool packets =
      n % packet == 0 && std::ranges::all_of(tensors, [](const Tensor* x) {
        return begins_a_packet(*x);
      });
  launch_elementwise(
      kernel + number_suffix(like.scalar_type()) + (packets ? "_packets" : ""),
      like, blocks_for(packets ? n / packet : n), kElementwiseThreads,
      arguments);
}

Tensor rotate_on_gpu(
    const Tensor& given, const Tensor& cosine, const Tensor& sine, double sign,
    bool neighbours) {
  const auto x = given.stride(-1) == 1 ? given : given.contiguous();
  auto out = torch::empty(x.sizes(), x.options());
  const auto cosines = cosine.contiguous(), sines = sine.contiguous();
  const void* from = x.const_data_ptr();
  const void* c = cosines.const_data_ptr();
  const void* s = sines.const_data_ptr();
  void* to = out.mutable_data_ptr();
  int64_t positions = x.size(1), heads = x.size(2), half = x.size(3) / 2;
  std::array<int64_t, 3> strides = {x.stride(0), x.stride(1), x.stride(2)};
  auto factor = static_cast<float>(sign);
  int of_neighbours = neighbours ? 1 : 0;
  const int64_t packet = packet_of(x);
  const bool packets =
      !neighbours && half % packet == 0 && begins_a_packet(x) &&
      std::ranges::all_of(
          strides, [&](int64_t stride) { return stride % packet == 0; });
  const int64_t items = heads * (packets ? half / packet : half);
  launch_elementwise(
      "rotate" + number_suffix(x.scalar_type()) + (packets ? "_packets" : ""),
      x, x.numel() == 0 ? 0 : x.size(0) * positions,
      items <= 64    ? 64
      : items <= 128 ? 128
                     : kElementwiseThreads,
      std::array<void*, 12>{
          &from, &c, &s, &to, &positions, &heads, &half, &strides[0],
          &strides[1], &strides[2], &factor, &of_neighbours});
  return out;
}

Tensor swiglu_on_gpu(const Tensor& gate, const Tensor& up) {
  const auto g = gate.contiguous(), u = up.contiguous();
  auto out = torch::empty(g.sizes(), g.options());
  const void* gates = g.const_data_ptr();
  const void* ups = u.const_data_ptr();
  void* to = out.mutable_data_ptr();
  int64_t n = g.numel();
  launch_flat(
      "swiglu", g, {&g, &u, &out}, std::array<void*, 4>{&gates, &ups, &to, &n});
  return out;
}

Pair swiglu_gradient_on_gpu(
    const Tensor& gradient, const Tensor& gate, const Tensor& up) {
  const auto d = gradient.contiguous(), g = gate.contiguous(),
             u = up.contiguous();
  auto to_gate = torch::empty(g.sizes(), g.options());
  auto to_up = torch::empty(g.sizes(), g.options());
  const void* gradients = d.const_data_ptr();
  const void* gates = g.const_data_ptr();
  const void* ups = u.const_data_ptr();
  void* of_gate = to_gate.mutable_data_ptr();
  void* of_up = to_up.mutable_data_ptr();
  int64_t n = g.numel();
  launch_flat(
      "swiglu_gradient", g, {&d, &g, &u, &to_gate, &to_up},
      std::array<void*, 6>{&gradients, &gates, &ups, &of_gate, &of_up, &n});
  return {to_gate, to_up};
}

Tensor mask_like(const Tensor& first, int64_t width) {
  return torch::empty(
      {first.size(0), width}, first.options().dtype(torch::kBool));
}

Tensor dropout_mask_on_gpu(
    const Tensor& first, const Tensor& sample_key, int64_t width,
    int64_t stream, int64_t threshold) {
  auto mask = mask_like(first, width);
  const auto firsts = first.contiguous(), keys = sample_key.contiguous();
  const void* begins = firsts.const_data_ptr();
  const void* of_samples = keys.const_data_ptr();
  void* to = mask.mutable_data_ptr();
  int64_t rows = mask.size(0);
  int64_t counters = (width + 3) / 4 + 1;
  auto least = static_cast<uint32_t>(threshold);
  launch_elementwise(
      "dropout_mask", mask, mask.numel() == 0 ? 0 : blocks_for(rows * counters),
      kElementwiseThreads,
      std::array<void*, 8>{
          &begins, &of_samples, &to, &rows, &width, &counters, &stream,
          &least});
  return mask;
}

Tensor dropout_on_gpu(const Tensor& x, const Tensor& keep, double scale) {
  const auto in = x.contiguous(), mask = keep.contiguous();
  auto out = torch::empty(in.sizes(), in.options());
  const void* from = in.const_data_ptr();
  const void* kept = mask.const_data_ptr();
  void* to = out.mutable_data_ptr();
  int64_t n = in.numel();
  auto factor = static_cast<float>(scale);
  launch_flat(
      "dropout", in, {&in, &mask, &out},
      std::array<void*, 5>{&from, &kept, &to, &n, &factor});
  return out;
}

Tensor contiguous_like(const Tensor& x) {
  return torch::empty(x.sizes(), x.options());
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(echelon, library) {
  library.def(
      "rotate(Tensor x, Tensor cosine, Tensor sine, float sign, bool "
      "neighbours) -> Tensor");
  library.def("swiglu(Tensor gate, Tensor up) -> Tensor");
  library.def(
      "swiglu_gradient(Tensor gradient, Tensor gate, Tensor up) -> (Tensor, "
      "Tensor)");
  library.def(
      "dropout_mask(Tensor first, Tensor sample_key, int width, int stream, "
      "int threshold) -> Tensor");
  library.def("dropout(Tensor x, Tensor keep, float scale) -> Tensor");
}
TORCH_LIBRARY_IMPL(echelon, CUDA, library) {
  library.impl("rotate", rotate_on_gpu);
  library.impl("swiglu", swiglu_on_gpu);
  library.impl("swiglu_gradient", swiglu_gradient_on_gpu);
  library.impl("dropout_mask", dropout_mask_on_gpu);
  library.impl("dropout", dropout_on_gpu);
}
TORCH_LIBRARY_IMPL(echelon, Meta, library) {
  library.impl(
      "rotate", [](const Tensor& x, const Tensor&, const Tensor&, double,
                   bool) { return contiguous_like(x); });
  library.impl("swiglu", [](const Tensor& gate, const Tensor&) {
    return contiguous_like(gate);
  });
  library.impl(
      "swiglu_gradient", [](const Tensor&, const Tensor& gate, const Tensor&) {
        return Pair{contiguous_like(gate), contiguous_like(gate)};
      });
  library.impl(
      "dropout_mask", [](const Tensor& first, const Tensor&, int64_t width,
                         int64_t, int64_t) { return mask_like(first, width); });
  library.impl("dropout", [](const Tensor& x, const Tensor&, double) {
    return contiguous_like(x);
  });
}

namespace {

template <class Signature>
auto operator_named(const char* name) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, "")
      .template typed<Signature>();
}

}  // namespace

bool takes_elementwise(const Tensor& x) {
  return computing_device(x) == torch::kCUDA &&
         is_kernel_number(x.scalar_type());
}

Tensor rotate(
    const Tensor& x, const Tensor& cosine, const Tensor& sine, double sign,
    bool neighbours) {
  static const auto op = operator_named<Tensor(
      const Tensor&, const Tensor&, const Tensor&, double, bool)>(
      "echelon::rotate");
  return op.call(x, cosine, sine, sign, neighbours);
}

Tensor swiglu(const Tensor& gate, const Tensor& up) {
  static const auto op =
      operator_named<Tensor(const Tensor&, const Tensor&)>("echelon::swiglu");
  return op.call(gate, up);
}

Pair swiglu_gradient(
    const Tensor& gradient, const Tensor& gate, const Tensor& up) {
  static const auto op =
      operator_named<Pair(const Tensor&, const Tensor&, const Tensor&)>(
          "echelon::swiglu_gradient");
  return op.call(gradient, gate, up);
}

Tensor dropout_mask(
    const Tensor& first, const Tensor& sample_key, int64_t width,
    uint64_t stream, uint32_t threshold) {
  static const auto op = operator_named<Tensor(
      const Tensor&, const Tensor&, int64_t, int64_t, int64_t)>(
      "echelon::dropout_mask");
  return op.call(
      first, sample_key, width, static_cast<int64_t>(stream),
      int64_t{threshold});
}

Tensor dropout(const Tensor& x, const Tensor& keep, double scale) {
  static const auto op =
      operator_named<Tensor(const Tensor&, const Tensor&, double)>(
          "echelon::dropout");
  return op.call(x, keep, scale);
}

}  // namespace echelon::kernels
