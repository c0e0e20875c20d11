#include "echelon/kernels/norm.h"

#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <bit>
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
using MaybeTensor = std::optional<Tensor>;
using NormResults = std::tuple<Tensor, Tensor, Tensor>;
using NormGradients = std::tuple<Tensor, Tensor>;

// Blocks that fill a GPU of 132 multiprocessors, whose sums stay small beside
// the rows.
constexpr int64_t kNormBlocks = 264;
constexpr int64_t kNormBlocksOfThreads = 4;  // times as many of fewer threads
static_assert(
    kNormBlocks * kNormBlocksOfThreads <= kNormGroup * (kNormCounters - 1));

const void* address_of(const MaybeTensor& x) {
  return x ? x->const_data_ptr() : nullptr;
}

template <size_t N>
void launch_norm(
    const std::string& name, const Tensor& on, int64_t blocks, int64_t threads,
    std::array<void*, N> arguments) {
  const c10::DeviceGuard guard(on.device());
  launch_kernel(
      norm_source().text, name, blocks, static_cast<int>(threads),
      arguments.data());
}

// Threads of a block, and the end of the kernels' names.
struct NormLaunch {
  int64_t threads;
  std::string suffix;
};

NormLaunch
norm_launch(const Tensor& x, std::initializer_list<MaybeTensor> tensors) {
  const bool packets = x.size(-1) % packet_of(x) == 0 &&
                       std::ranges::all_of(tensors, [](const MaybeTensor& one) {
                         return !one || begins_a_packet(*one);
                       });
  const int64_t values = packets ? kNormValues : kSingleNormValues;
  const auto threads =
      static_cast<uint64_t>((x.size(-1) + values - 1) / values);
  return {
      std::clamp<int64_t>(
          static_cast<int64_t>(std::bit_ceil(threads)), 32, kNormThreads),
      number_suffix(x.scalar_type()) + (packets ? "_packets" : "")};
}

// As kernels read it: contiguous and, in rows too wide for single accesses,
// beginning with a packet.
Tensor for_norm(const Tensor& x) {
  auto all = x.contiguous();
  const bool wide = x.size(-1) > kNormThreads * kSingleNormValues;
  return wide && !begins_a_packet(all) ? all.clone() : all;
}
MaybeTensor for_norm(const MaybeTensor& x) {
  return x ? MaybeTensor(for_norm(*x)) : std::nullopt;
}

int64_t norm_rows(const Tensor& x) {
  return x.size(-1) == 0 ? 0 : x.numel() / x.size(-1);
}

Tensor norm_statistics(const Tensor& x, bool with_mean) {
  return torch::empty(
      {with_mean ? 2 : 1, norm_rows(x) + kNormCounters},
      x.options().dtype(torch::kFloat32));
}

NormResults norm_outputs(const Tensor& x, bool adds, bool with_mean) {
  const auto like = [&] { return torch::empty(x.sizes(), x.options()); };
  return {like(), adds ? like() : Tensor(), norm_statistics(x, with_mean)};
}

NormResults norm_on_gpu(
    const Tensor& given, const MaybeTensor& given_added,
    const Tensor& given_weight, const MaybeTensor& given_bias, double eps) {
  const auto x = for_norm(given), weight = for_norm(given_weight);
  const auto added = for_norm(given_added), bias = for_norm(given_bias);
  auto results = norm_outputs(x, added.has_value(), bias.has_value());
  auto& [out, sum, statistics] = results;
  if (x.numel() == 0) return results;
  const auto [threads, suffix] =
      norm_launch(x, {x, added, weight, bias, out, if_defined(sum)});
  const void* from = x.const_data_ptr();
  const void* more = address_of(added);
  const void* weights = weight.const_data_ptr();
  const void* biases = address_of(bias);
  void* to_sum = added ? sum.mutable_data_ptr() : nullptr;
  void* to = out.mutable_data_ptr();
  void* to_statistics = statistics.mutable_data_ptr();
  int64_t rows = norm_rows(x), width = x.size(-1);
  auto epsilon = static_cast<float>(eps);
  launch_norm(
      (bias ? "layer_norm" : "rms_norm") + suffix, x, rows, threads,
      std::array<void*, 10>{
          &from, &more, &weights, &biases, &to_sum, &to, &to_statistics, &rows,
          &width, &epsilon});
  return results;
}

Tensor norm_parameters_like(
    const Tensor& weight, const Tensor& statistics, bool want) {
  if (!want) return {};
  return torch::empty({statistics.size(0), weight.numel()}, weight.options());
}

NormGradients norm_gradient_on_gpu(
    const Tensor& given_gradient, const MaybeTensor& given_passed,
    const Tensor& given_x, const Tensor& given_weight, const Tensor& statistics,
    bool for_parameters) {
  const auto x = for_norm(given_x), weight = for_norm(given_weight),
             gradient = for_norm(given_gradient);
  const auto passed = for_norm(given_passed);
  auto to_sum = torch::empty(x.sizes(), x.options());
  auto parameters = norm_parameters_like(weight, statistics, for_parameters);
  if (x.numel() == 0) {
    if (for_parameters) parameters.zero_();
    return {to_sum, parameters};
  }
  const bool with_mean = statistics.size(0) == 2;
  const auto [threads, suffix] =
      norm_launch(x, {gradient, passed, x, weight, to_sum});
  int64_t rows = norm_rows(x), width = x.size(-1);
  int64_t blocks = std::min(
      rows,
      kNormBlocks * std::min(kNormBlocksOfThreads, kNormThreads / threads));
  const auto partial = for_parameters ? torch::empty(
                                            {statistics.size(0), blocks, width},
                                            statistics.options())
                                      : Tensor();
  const void* from = gradient.const_data_ptr();
  const void* more = address_of(passed);
  const void* values = x.const_data_ptr();
  const void* weights = weight.const_data_ptr();
  void* numbers = statistics.mutable_data_ptr();
  void* to = to_sum.mutable_data_ptr();
  void* sums = for_parameters ? partial.mutable_data_ptr() : nullptr;
  void* to_parameters =
      for_parameters ? parameters.mutable_data_ptr() : nullptr;
  launch_norm(
      (with_mean ? "layer_norm_gradient" : "rms_norm_gradient") + suffix, x,
      blocks, threads,
      std::array<void*, 11>{
          &from, &more, &values, &weights, &numbers, &to, &sums, &to_parameters,
          &rows, &width, &blocks});
  return {to_sum, parameters};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(echelon, library) {
  library.def(
      "residual_norm(Tensor x, Tensor? added, Tensor weight, Tensor? bias, "
      "float eps) -> (Tensor, Tensor, Tensor)");
  library.def(
      "residual_norm_gradient(Tensor gradient, Tensor? passed, Tensor x, "
      "Tensor weight, Tensor statistics, bool for_parameters) -> (Tensor, "
      "Tensor)");
}
TORCH_LIBRARY_IMPL(echelon, CUDA, library) {
  library.impl("residual_norm", norm_on_gpu);
  library.impl("residual_norm_gradient", norm_gradient_on_gpu);
}
TORCH_LIBRARY_IMPL(echelon, Meta, library) {
  library.impl(
      "residual_norm", [](const Tensor& x, const MaybeTensor& added,
                          const Tensor&, const MaybeTensor& bias, double) {
        return norm_outputs(x, added.has_value(), bias.has_value());
      });
  library.impl(
      "residual_norm_gradient",
      [](const Tensor&, const MaybeTensor&, const Tensor& x,
         const Tensor& weight, const Tensor& statistics, bool for_parameters) {
        return NormGradients{
            torch::empty(x.sizes(), x.options()),
            norm_parameters_like(weight, statistics, for_parameters)};
      });
}

bool takes_norm(const Tensor& x, const Tensor& weight) {
  if (x.dim() == 0 || !is_kernel_number(x.scalar_type()) ||
      weight.scalar_type() != x.scalar_type() || weight.numel() != x.size(-1) ||
      x.size(-1) == 0) {
    return false;
  }
  const bool packets = x.size(-1) % packet_of(x) == 0;
  return x.size(-1) <=
             kNormThreads * (packets ? kNormValues : kSingleNormValues) &&
         uses_kernels(norm_source(), x);
}

ResidualNorm residual_norm(
    const Tensor& x, const Tensor& added, const Tensor& weight,
    const Tensor& bias, double eps) {
  static const auto op = operator_named<NormResults(
      const Tensor&, const MaybeTensor&, const Tensor&, const MaybeTensor&,
      double)>("echelon::residual_norm");
  auto [norm, sum, statistics] =
      op.call(x, if_defined(added), weight, if_defined(bias), eps);
  return {norm, sum, statistics};
}

ResidualNormGradient residual_norm_gradient(
    const Tensor& gradient, const Tensor& passed, const Tensor& x,
    const Tensor& weight, const Tensor& statistics, bool for_parameters) {
  static const auto op = operator_named<NormGradients(
      const Tensor&, const MaybeTensor&, const Tensor&, const Tensor&,
      const Tensor&, bool)>("echelon::residual_norm_gradient");
  auto [sum, parameters] = op.call(
      gradient, if_defined(passed), x, weight, statistics, for_parameters);
  return {sum, parameters};
}

}  // namespace echelon::kernels
