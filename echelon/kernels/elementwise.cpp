#include "echelon/kernels/elementwise.h"

#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <tuple>

#include "echelon/comm/nccl/accelerator.h"
#include "echelon/kernels/dispatcher.h"
#include "echelon/kernels/kernel_source.h"
#include "echelon/kernels/numbers.h"

namespace echelon::kernels {

namespace {

using torch::Tensor;

constexpr int kElementwiseThreads = 256;

template <size_t N>
void launch_elementwise(
    const std::string& name, const Tensor& on, int64_t blocks, int threads,
    std::array<void*, N> arguments) {
  if (blocks == 0) return;
  const c10::DeviceGuard guard(on.device());
  launch_kernel(
      elementwise_source().text, name, blocks, threads, arguments.data());
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

// The arguments of a kernel for one tensor of heads (elementwise.cu).
struct Heads {
  const void* x = nullptr;
  int64_t of_batch = 0;
  int64_t of_position = 0;
  int64_t of_head = 0;
  int64_t count = 0;
};

// Features of a head adjacent.
Tensor with_adjacent_features(const Tensor& x) {
  return !x.defined() || x.stride(-1) == 1 ? x : x.contiguous();
}

Heads heads_of(const Tensor& x) {
  if (!x.defined()) return {};
  return {x.const_data_ptr(), x.stride(0), x.stride(1), x.stride(2), x.size(2)};
}

Tensor
rotated_like(const Tensor& queries, const Tensor& keys, const Tensor& values) {
  auto sizes = queries.sizes().vec();
  for (const auto* more : {&keys, &values}) {
    if (more->defined()) sizes[2] += more->size(2);
  }
  return torch::empty(sizes, queries.options());
}

Tensor rotate_on_gpu(
    const Tensor& queries, const std::optional<Tensor>& keys,
    const std::optional<Tensor>& values, const Tensor& cosine,
    const Tensor& sine, double sign, bool neighbours) {
  const std::array<Tensor, 3> all = {
      with_adjacent_features(queries),
      with_adjacent_features(keys.value_or(Tensor())),
      with_adjacent_features(values.value_or(Tensor()))};
  auto out = rotated_like(all[0], all[1], all[2]);
  const auto cosines = cosine.contiguous(), sines = sine.contiguous();
  std::array<Heads, 3> heads = {
      heads_of(all[0]), heads_of(all[1]), heads_of(all[2])};
  const void* c = cosines.const_data_ptr();
  const void* s = sines.const_data_ptr();
  void* to = out.mutable_data_ptr();
  int64_t positions = out.size(1), half = out.size(3) / 2;
  auto factor = static_cast<float>(sign);
  int of_neighbours = neighbours ? 1 : 0;
  const int64_t packet = packet_of(out);
  const bool packets =
      !neighbours && half % packet == 0 &&
      std::ranges::all_of(all, [&](const Tensor& x) {
        return !x.defined() ||
               (begins_a_packet(x) && x.stride(0) % packet == 0 &&
                x.stride(1) % packet == 0 && x.stride(2) % packet == 0);
      });
  const int64_t items = out.size(2) * (packets ? half / packet : half);
  launch_elementwise(
      "rotate" + number_suffix(out.scalar_type()) + (packets ? "_packets" : ""),
      out, out.numel() == 0 ? 0 : out.size(0) * positions,
      items <= 64    ? 64
      : items <= 128 ? 128
                     : kElementwiseThreads,
      std::array<void*, 10>{
          &heads[0], &heads[1], &heads[2], &c, &s, &to, &positions, &half,
          &factor, &of_neighbours});
  return out;
}

// Gate and up as [rows, width], `stride` elements from row to row in both.
struct GateAndUp {
  Tensor gate;
  Tensor up;
  int64_t rows = 0;
  int64_t width = 0;
  int64_t stride = 0;
};

GateAndUp rows_of(const Tensor& gate, const Tensor& up) {
  const int64_t width = gate.dim() > 0 ? gate.size(-1) : 1;
  const bool as_they_are = has_rows(gate) && has_rows(up) &&
                           gate.stride(-2) == up.stride(-2) && width > 0;
  GateAndUp both{.gate = gate, .up = up, .width = width, .stride = width};
  if (as_they_are) {
    both.stride = gate.stride(-2);
  } else {
    both.gate = gate.contiguous();
    both.up = up.contiguous();
  }
  both.rows = width == 0 ? 0 : gate.numel() / width;
  return both;
}

template <size_t N>
void launch_rows(
    const char* kernel, const GateAndUp& both,
    std::initializer_list<const Tensor*> tensors,
    std::array<void*, N> arguments) {
  const auto& like = both.gate;
  const int64_t packet = packet_of(like);
  const bool packets = both.width % packet == 0 && both.stride % packet == 0 &&
                       std::ranges::all_of(tensors, [](const Tensor* x) {
                         return begins_a_packet(*x);
                       });
  auto pieces = static_cast<uint32_t>(
      blocks_for(packets ? both.width / packet : both.width));
  arguments.back() = &pieces;
  launch_elementwise(
      kernel + number_suffix(like.scalar_type()) + (packets ? "_packets" : ""),
      like, both.rows * pieces, kElementwiseThreads, arguments);
}

Tensor swiglu_on_gpu(const Tensor& gate, const Tensor& up) {
  auto both = rows_of(gate, up);
  auto out = torch::empty(gate.sizes(), gate.options());
  const void* gates = both.gate.const_data_ptr();
  const void* ups = both.up.const_data_ptr();
  void* to = out.mutable_data_ptr();
  launch_rows(
      "swiglu", both, {&both.gate, &both.up, &out},
      std::array<void*, 6>{
          &gates, &ups, &to, &both.width, &both.stride, nullptr});
  return out;
}

Tensor pair_like(const Tensor& gate) {
  auto sizes = gate.sizes().vec();
  sizes.back() *= 2;
  return torch::empty(sizes, gate.options());
}

Tensor swiglu_gradient_on_gpu(
    const Tensor& gradient, const Tensor& gate, const Tensor& up) {
  auto both = rows_of(gate, up);
  const auto d = gradient.contiguous();
  auto out = pair_like(gate);
  const void* gradients = d.const_data_ptr();
  const void* gates = both.gate.const_data_ptr();
  const void* ups = both.up.const_data_ptr();
  void* to = out.mutable_data_ptr();
  launch_rows(
      "swiglu_gradient", both, {&d, &both.gate, &both.up, &out},
      std::array<void*, 7>{
          &gradients, &gates, &ups, &to, &both.width, &both.stride, nullptr});
  return out;
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

Tensor dropout_on_gpu(
    const Tensor& x, const Tensor& keep, double scale,
    const std::optional<Tensor>& residual) {
  const auto in = x.contiguous(), mask = keep.contiguous();
  const auto more = residual ? residual->contiguous() : Tensor();
  auto out = torch::empty(in.sizes(), in.options());
  const void* from = in.const_data_ptr();
  const void* kept = mask.const_data_ptr();
  const void* added = residual ? more.const_data_ptr() : nullptr;
  void* to = out.mutable_data_ptr();
  int64_t n = in.numel();
  auto factor = static_cast<float>(scale);
  launch_flat(
      "dropout", in, {&in, &mask, residual ? &more : &in, &out},
      std::array<void*, 6>{&from, &kept, &added, &to, &n, &factor});
  return out;
}

Tensor contiguous_like(const Tensor& x) {
  return torch::empty(x.sizes(), x.options());
}

using Two = std::tuple<Tensor, Tensor>;

// Blocks that fill a GPU of 132 multiprocessors, and the threads of one in each
// of its rows: kGeluLanes of elementwise.cu.
constexpr int64_t kGeluBlocks = 660;
constexpr int64_t kGeluLanes = 32;

int64_t gelu_width(const Tensor& x) {
  return x.dim() > 0 ? x.size(-1) : 1;
}

// Tiles of columns, with as many elements of each thread.
int64_t gelu_tiles(const Tensor& x, int64_t packet) {
  const int64_t columns = kGeluLanes * packet;
  return (gelu_width(x) + columns - 1) / columns;
}

// Room for the counters of the gradient, whose accesses may be single ones.
Two gelu_outputs(const Tensor& x) {
  return {
      contiguous_like(x),
      torch::empty({gelu_tiles(x, 1)}, x.options().dtype(torch::kInt32))};
}

Two gelu_gradients_like(const Tensor& x) {
  return {contiguous_like(x), torch::empty({gelu_width(x)}, x.options())};
}

Two gelu_on_gpu(const Tensor& x) {
  const auto in = x.contiguous();
  auto results = gelu_outputs(x);
  auto& [out, counters] = results;
  const void* from = in.const_data_ptr();
  void* to = out.mutable_data_ptr();
  void* zeros = counters.mutable_data_ptr();
  int64_t n = in.numel();
  int tiles = static_cast<int>(counters.numel());
  launch_flat(
      "gelu", in, {&in, &out},
      std::array<void*, 5>{&from, &to, &zeros, &n, &tiles});
  return results;
}

Two gelu_gradient_on_gpu(
    const Tensor& gradient, const Tensor& x, const Tensor& counters) {
  const auto d = gradient.contiguous(), in = x.contiguous();
  auto results = gelu_gradients_like(x);
  auto& [out, for_bias] = results;
  if (in.numel() == 0) {
    for_bias.zero_();
    return results;
  }
  int64_t width = gelu_width(in), rows = in.numel() / width;
  const bool packets = width % packet_of(in) == 0 && begins_a_packet(d) &&
                       begins_a_packet(in) && begins_a_packet(out);
  const int64_t tiles = gelu_tiles(in, packets ? packet_of(in) : 1);
  // Each thread has some rows, so that few sums are left to add up.
  constexpr int64_t kRows = 4 * kElementwiseThreads / kGeluLanes;
  int parts = static_cast<int>(
      std::clamp<int64_t>(kGeluBlocks / tiles, 1, (rows + kRows - 1) / kRows));
  const auto partial =
      torch::empty({parts, width}, in.options().dtype(torch::kFloat32));
  const void* gradients = d.const_data_ptr();
  const void* from = in.const_data_ptr();
  void* to = out.mutable_data_ptr();
  void* sums = partial.mutable_data_ptr();
  void* to_bias = for_bias.mutable_data_ptr();
  void* arrived = counters.mutable_data_ptr();
  launch_elementwise(
      "gelu_gradient" + number_suffix(in.scalar_type()) +
          (packets ? "_packets" : ""),
      in, tiles * parts, kElementwiseThreads,
      std::array<void*, 9>{
          &gradients, &from, &to, &sums, &to_bias, &arrived, &rows, &width,
          &parts});
  return results;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(echelon, library) {
  library.def(
      "rotate(Tensor queries, Tensor? keys, Tensor? values, Tensor cosine, "
      "Tensor sine, float sign, bool neighbours) -> Tensor");
  library.def("swiglu(Tensor gate, Tensor up) -> Tensor");
  library.def(
      "swiglu_gradient(Tensor gradient, Tensor gate, Tensor up) -> Tensor");
  library.def("gelu(Tensor x) -> (Tensor, Tensor)");
  library.def(
      "gelu_gradient(Tensor gradient, Tensor x, Tensor counters) -> (Tensor, "
      "Tensor)");
  library.def(
      "dropout_mask(Tensor first, Tensor sample_key, int width, int stream, "
      "int threshold) -> Tensor");
  library.def(
      "dropout(Tensor x, Tensor keep, float scale, Tensor? residual) -> "
      "Tensor");
}
TORCH_LIBRARY_IMPL(echelon, CUDA, library) {
  library.impl("rotate", rotate_on_gpu);
  library.impl("swiglu", swiglu_on_gpu);
  library.impl("swiglu_gradient", swiglu_gradient_on_gpu);
  library.impl("gelu", gelu_on_gpu);
  library.impl("gelu_gradient", gelu_gradient_on_gpu);
  library.impl("dropout_mask", dropout_mask_on_gpu);
  library.impl("dropout", dropout_on_gpu);
}
TORCH_LIBRARY_IMPL(echelon, Meta, library) {
  library.impl(
      "rotate", [](const Tensor& queries, const std::optional<Tensor>& keys,
                   const std::optional<Tensor>& values, const Tensor&,
                   const Tensor&, double, bool) {
        return rotated_like(
            queries, keys.value_or(Tensor()), values.value_or(Tensor()));
      });
  library.impl("swiglu", [](const Tensor& gate, const Tensor&) {
    return contiguous_like(gate);
  });
  library.impl(
      "swiglu_gradient", [](const Tensor&, const Tensor& gate, const Tensor&) {
        return pair_like(gate);
      });
  library.impl("gelu", gelu_outputs);
  library.impl(
      "gelu_gradient", [](const Tensor&, const Tensor& x, const Tensor&) {
        return gelu_gradients_like(x);
      });
  library.impl(
      "dropout_mask", [](const Tensor& first, const Tensor&, int64_t width,
                         int64_t, int64_t) { return mask_like(first, width); });
  library.impl(
      "dropout",
      [](const Tensor& x, const Tensor&, double, const std::optional<Tensor>&) {
        return contiguous_like(x);
      });
}

bool takes_elementwise(const Tensor& x) {
  return is_kernel_number(x.scalar_type()) && takes_dropout_mask(x);
}

bool takes_dropout_mask(const Tensor& x) {
  return uses_kernels(elementwise_source(), x);
}

bool has_rows(const Tensor& x) {
  if (x.dim() < 2 || x.stride(-1) != 1) return false;
  for (int64_t d = x.dim() - 3; d >= 0; --d) {
    if (x.stride(d) != x.stride(d + 1) * x.size(d + 1)) return false;
  }
  return true;
}

Tensor rotate(
    const Tensor& queries, const Tensor& keys, const Tensor& values,
    const Tensor& cosine, const Tensor& sine, double sign, bool neighbours) {
  static const auto op = operator_named<Tensor(
      const Tensor&, const std::optional<Tensor>&, const std::optional<Tensor>&,
      const Tensor&, const Tensor&, double, bool)>("echelon::rotate");
  return op.call(
      queries, if_defined(keys), if_defined(values), cosine, sine, sign,
      neighbours);
}

Tensor swiglu(const Tensor& gate, const Tensor& up) {
  static const auto op =
      operator_named<Tensor(const Tensor&, const Tensor&)>("echelon::swiglu");
  return op.call(gate, up);
}

Tensor
swiglu_gradient(const Tensor& gradient, const Tensor& gate, const Tensor& up) {
  static const auto op =
      operator_named<Tensor(const Tensor&, const Tensor&, const Tensor&)>(
          "echelon::swiglu_gradient");
  return op.call(gradient, gate, up);
}

Gelu gelu(const Tensor& x) {
  static const auto op = operator_named<Two(const Tensor&)>("echelon::gelu");
  auto [out, counters] = op.call(x);
  return {out, counters};
}

GeluGradient
gelu_gradient(const Tensor& gradient, const Tensor& x, const Tensor& counters) {
  static const auto op =
      operator_named<Two(const Tensor&, const Tensor&, const Tensor&)>(
          "echelon::gelu_gradient");
  auto [to_x, to_bias] = op.call(gradient, x, counters);
  return {to_x, to_bias};
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

Tensor dropout(
    const Tensor& x, const Tensor& keep, double scale, const Tensor& residual) {
  static const auto op = operator_named<Tensor(
      const Tensor&, const Tensor&, double, const std::optional<Tensor>&)>(
      "echelon::dropout");
  return op.call(x, keep, scale, if_defined(residual));
}

}  // namespace echelon::kernels
