#include "echelon/parallel/tensor/rotary.h"

#include <torch/autograd.h>
#include <torch/types.h>

#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <numbers>
#include <string>
#include <tuple>
#include <utility>

#include "echelon/error.h"
#include "echelon/kernels/elementwise.h"
#include "echelon/layers/low_precision.h"
#include "echelon/parallel/tensor/autograd_support.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// As Llama 3: slows down long waves and keeps short ones; between the two
// wavelengths the share of the slowed frequency falls linearly.
Tensor
scaled_by_waves(const Tensor& frequencies, const RotaryOptions& options) {
  const double length = static_cast<double>(options.original_positions);
  const auto waves = 2 * std::numbers::pi / frequencies;
  const auto slowed = frequencies / options.factor;
  const auto kept = (length / waves - options.low_freq_factor) /
                    (options.high_freq_factor - options.low_freq_factor);
  const auto mixed = (1 - kept) * slowed + kept * frequencies;
  const auto longer = waves > length / options.low_freq_factor;
  const auto shorter = waves < length / options.high_freq_factor;
  return at::where(longer, slowed, at::where(shorter, frequencies, mixed));
}

// As YaRN: the share of the slowed frequency rises linearly with the number of
// the pair, from the pair that turns beta_fast times within original_positions
// to that of beta_slow turns.
Tensor
scaled_by_pairs(const Tensor& frequencies, const RotaryOptions& options) {
  const auto pairs = static_cast<double>(frequencies.size(0));
  const auto length = static_cast<double>(options.original_positions);
  const auto pair_of = [&](double turns) {
    return pairs * std::log(length / (turns * 2 * std::numbers::pi)) /
           std::log(options.theta);
  };
  const double first = std::max(std::floor(pair_of(options.beta_fast)), 0.0);
  double last = std::min(std::ceil(pair_of(options.beta_slow)), 2 * pairs - 1);
  if (last == first) last += 0.001;
  const auto slowed =
      ((torch::arange(frequencies.size(0), torch::kFloat32) - first) /
       (last - first))
          .clamp(0, 1);
  return frequencies / options.factor * slowed + frequencies * (1 - slowed);
}

Tensor scaled(const Tensor& frequencies, const RotaryOptions& options) {
  switch (options.scaling) {
    case RopeScaling::llama3:
      return scaled_by_waves(frequencies, options);
    case RopeScaling::yarn:
      return scaled_by_pairs(frequencies, options);
    case RopeScaling::linear:
      return frequencies / options.factor;
  }
  return frequencies;
}

// The host computes it, so that it has the same bits on every device: cosines
// of float32 angles differ from one device to another.
RotaryTable make_table(
    const RotaryOptions& options, int64_t head_size, int64_t count,
    const torch::TensorOptions& like) {
  const torch::NoGradGuard no_grad;
  const c10::InferenceMode no_inference(false);
  const auto positions = torch::arange(count, torch::kFloat32).unsqueeze(1);
  const auto angles = positions * rotary_frequencies(options, head_size);
  const auto dtype = sum_dtype(c10::typeMetaToScalarType(like.dtype()));
  const double scale = options.attention_scale();
  return {
      angles.cos().mul_(scale).to(like.device(), dtype),
      angles.sin().mul_(scale).to(like.device(), dtype)};
}

using Key = std::tuple<RotaryOptions, int64_t, std::string, torch::ScalarType>;

struct Tables {
  std::mutex mutex;
  std::map<Key, RotaryTable> by_key;
};

Tables& tables() {
  static auto* all = new Tables;  // outlives threads that still compute
  return *all;
}

RotaryTable rows(const RotaryTable& table, int64_t first, int64_t count) {
  return {
      table.cosine.narrow(0, first, count), table.sine.narrow(0, first, count)};
}

// out = a cos + b sin * sign, where out, a and b may have low precision.
void rotate_half(
    Tensor out, const Tensor& a, const Tensor& b, const Tensor& cos,
    const Tensor& sin, int sign) {
  if (is_low_precision(a.scalar_type())) {
    out.copy_(at::mul(a, cos).addcmul_(for_sums(b), sin, sign));
  } else {
    at::mul_out(out, a, cos);
    out.addcmul_(b, sin, sign);
  }
}

// The first or the second feature of each pair, a view.
Tensor of_pairs(const Tensor& x, RotaryPairs pairs, int64_t which) {
  const int64_t half = x.size(-1) / 2;
  return pairs == RotaryPairs::halves
             ? x.narrow(-1, which * half, half)
             : x.slice(-1, which, x.size(-1), /*step=*/2);
}

// result = x rotated, both [batch, positions, heads, size].
void rotate_into(
    const Tensor& result, const Tensor& x, const RotaryTable& table, int sign,
    RotaryPairs pairs) {
  const auto cos = table.cosine.unsqueeze(1);  // [positions, 1, half]
  const auto sin = table.sine.unsqueeze(1);
  const auto a = of_pairs(x, pairs, 0);
  const auto b = of_pairs(x, pairs, 1);
  rotate_half(of_pairs(result, pairs, 0), a, b, cos, sin, -sign);
  rotate_half(of_pairs(result, pairs, 1), b, a, cos, sin, sign);
}

// (a, b) -> (a cos - b sin, b cos + a sin), in few passes. `sign` -1 rotates
// back.
Tensor rotated(
    const Tensor& x, const RotaryTable& table, int sign, RotaryPairs pairs) {
  if (kernels::takes_elementwise(x)) {
    return kernels::rotate(
        x, {}, {}, table.cosine, table.sine, sign,
        pairs == RotaryPairs::neighbours);
  }
  auto result = at::empty(x.sizes(), x.options());
  rotate_into(result, x, table, sign, pairs);
  return result;
}

// Queries and keys rotated, and values, side by side in one tensor.
Tensor
all_rotated(const variable_list& parts, const RotaryTable& table, int sign) {
  if (kernels::takes_elementwise(parts[0])) {
    return kernels::rotate(
        parts[0], parts[1], parts[2], table.cosine, table.sine, sign,
        /*neighbours=*/false);
  }
  auto sizes = parts[0].sizes().vec();
  sizes[2] += parts[1].size(2) + parts[2].size(2);
  auto result = at::empty(sizes, parts[0].options());
  auto to = result.split_with_sizes(
      {parts[0].size(2), parts[1].size(2), parts[2].size(2)}, 2);
  rotate_into(to[0], parts[0], table, sign, RotaryPairs::halves);
  rotate_into(to[1], parts[1], table, sign, RotaryPairs::halves);
  to[2].copy_(parts[2]);
  return result;
}

class Rotate : public torch::autograd::Function<Rotate> {
 public:
  static Tensor forward(
      AutogradContext* context, const Tensor& x, const Tensor& cosine,
      const Tensor& sine, int64_t sign, int64_t pairs) {
    context->save_for_backward({cosine, sine});
    context->saved_data["sign"] = sign;
    context->saved_data["pairs"] = pairs;
    return rotated(
        x, {cosine, sine}, static_cast<int>(sign),
        static_cast<RotaryPairs>(pairs));
  }

  static variable_list
  backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const int64_t sign = context->saved_data["sign"].toInt();
    const int64_t pairs = context->saved_data["pairs"].toInt();
    return {
        Rotate::apply(gradients[0], saved[0], saved[1], -sign, pairs), Tensor(),
        Tensor(), Tensor(), Tensor()};
  }
};

// Rotates queries and keys of one tensor, and copies its values, so that the
// matmul's own result can be freed.
class RotateAll : public torch::autograd::Function<RotateAll> {
 public:
  static variable_list forward(
      AutogradContext* context, const Tensor& all, const Tensor& cosine,
      const Tensor& sine, const std::vector<int64_t>& heads) {
    context->save_for_backward({cosine, sine});
    return detail::parts_of(
        all_rotated(all.split_with_sizes(heads, 2), {cosine, sine}, 1), heads,
        2);
  }

  static variable_list
  backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const RotaryTable table{saved[0], saved[1]};
    Tensor all;
    if (torch::GradMode::is_enabled()) {
      const auto back = [&](const Tensor& gradient) {
        return Rotate::apply(
            gradient, table.cosine, table.sine, int64_t{-1},
            static_cast<int64_t>(RotaryPairs::halves));
      };
      all = at::cat({back(gradients[0]), back(gradients[1]), gradients[2]}, 2);
    } else {
      all = all_rotated(gradients, table, -1);
    }
    return {all, Tensor(), Tensor(), Tensor()};
  }
};

}  // namespace

Tensor rotary_frequencies(const RotaryOptions& options, int64_t head_size) {
  if (head_size < 2 || head_size % 2 != 0) {
    throw ConfigError(format(
        "rotary embedding turns pairs of features, but a head has {}; choose "
        "hidden_size / heads to be even",
        head_size));
  }
  const auto exponents =
      torch::arange(0, head_size, 2, torch::kInt64).to(torch::kFloat32) /
      head_size;
  const auto frequencies = 1.0 / at::pow(at::Scalar(options.theta), exponents);
  return options.factor > 0 ? scaled(frequencies, options) : frequencies;
}

RotaryTable rotary_table(
    const RotaryOptions& options, int64_t head_size, int64_t first,
    int64_t count, const torch::TensorOptions& like) {
  if (like.device().is_meta()) {
    const auto table = at::empty(
        {count, head_size / 2},
        like.dtype(sum_dtype(c10::typeMetaToScalarType(like.dtype()))));
    return {table, at::empty_like(table)};
  }
  const Key key{
      options, head_size, like.device().str(),
      c10::typeMetaToScalarType(like.dtype())};
  const auto length = [](const RotaryTable& table) {
    return table.cosine.defined() ? table.cosine.size(0) : 0;
  };
  RotaryTable table;
  {
    const std::lock_guard lock(tables().mutex);
    table = tables().by_key[key];
  }
  if (const int64_t have = length(table); have < first + count) {
    // Without the lock: the copy to a device may wait for a collective, and so
    // for ranks of this process that wait for the lock.
    table =
        make_table(options, head_size, std::max(first + count, 2 * have), like);
    const std::lock_guard lock(tables().mutex);
    RotaryTable& kept = tables().by_key[key];
    if (length(kept) < length(table)) kept = table;
  }
  return rows(table, first, count);
}

RotaryTable rotary_table(
    const RotaryOptions& options, int64_t head_size,
    const std::vector<IndexRange>& positions,
    const torch::TensorOptions& like) {
  const torch::NoGradGuard no_grad;
  std::vector<Tensor> cosines, sines;
  for (const auto& range : positions) {
    const auto part =
        rotary_table(options, head_size, range.begin, range.size(), like);
    cosines.push_back(part.cosine);
    sines.push_back(part.sine);
  }
  if (positions.size() == 1) return {cosines[0], sines[0]};
  return {at::cat(cosines), at::cat(sines)};
}

Tensor rotate(const Tensor& x, const RotaryTable& table, RotaryPairs pairs) {
  return Rotate::apply(
      x, table.cosine, table.sine, int64_t{1}, static_cast<int64_t>(pairs));
}

std::vector<Tensor> rotate_queries_and_keys(
    const Tensor& all, int64_t queries, int64_t keys,
    const RotaryTable& table) {
  return RotateAll::apply(
      all, table.cosine, table.sine,
      std::vector<int64_t>{queries, keys, all.size(2) - queries - keys});
}

}  // namespace echelon
