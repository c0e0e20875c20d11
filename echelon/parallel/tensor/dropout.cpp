// Three implementations give the same mask. On a CPU the tensor is split into
// runs of consecutive elements of one sample, and each run computes Philox
// blocks in a loop that the compiler vectorises, also for AVX2. GPUs have a
// kernel (kernels/elementwise.h). Elsewhere LibTorch's operators compute the
// words, with 32-bit products in int64. Backward multiplies by the same mask,
// which is saved as bools.
#include "echelon/parallel/tensor/dropout.h"

#include <torch/autograd.h>
#include <torch/types.h>

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "echelon/error.h"
#include "echelon/kernels/elementwise.h"
#include "echelon/layers/philox.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// An element is dropped when its word is less than this.
uint32_t threshold_of(double probability) {
  return static_cast<uint32_t>(
      std::min(std::nearbyint(probability * 0x1p32), 0x1p32 - 1));
}

// Elements that are consecutive in their sample and in the tensor.
struct Run {
  uint64_t key = 0;   // of the sample
  int64_t first = 0;  // in the sample
  int64_t begin = 0;  // in the tensor
  int64_t count = 0;
};

constexpr int64_t kLongestRun = int64_t{1} << 14;

// Rows of a sample that follow each other both in the sample and here.
struct Rows {
  int64_t first = 0;  // in the sample
  int64_t count = 0;
};

// From row `here` of those of a sample that are here.
Rows rows_from(const DropoutPlace& place, int64_t here) {
  if (place.rows.empty()) return {here, place.rows_per_sample - here};
  for (const auto& piece : place.rows) {
    if (here < piece.size()) return {piece.begin + here, piece.size() - here};
    here -= piece.size();
  }
  throw InternalError("dropout: a row is not among those of its sample");
}

std::vector<Run>
runs_of(const Tensor& x, const Tensor& keys, const DropoutPlace& place) {
  std::vector<Run> runs;
  if (x.numel() == 0) return runs;
  const int64_t rows = x.size(0);
  const int64_t row_size = x.numel() / rows;
  const bool whole_rows = place.row_elements == 0;
  const int64_t row_elements = whole_rows ? row_size : place.row_elements;
  const auto* key = keys.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < rows;) {
    const int64_t sample = (place.first_row + row) / place.rows_per_sample;
    const auto here =
        rows_from(place, (place.first_row + row) % place.rows_per_sample);
    const int64_t next =
        std::min(rows, row + (whole_rows ? here.count : int64_t{1}));
    for (int64_t at = row * row_size; at < next * row_size; at += kLongestRun) {
      runs.push_back(
          {static_cast<uint64_t>(key[sample]),
           place.first_element + here.first * row_elements + at -
               row * row_size,
           at, std::min(kLongestRun, next * row_size - at)});
    }
    row = next;
  }
  return runs;
}

[[gnu::always_inline]] inline void keep_block(
    uint64_t stream, uint64_t key, uint64_t block, uint32_t threshold,
    uint8_t* keep) {
  PhiloxWords words;
  philox(stream, key, block * kPhiloxCounters, words);
  for (int i = 0; i < kPhiloxCounters; ++i) {
    keep[4 * i] = words.a[i] >= threshold;
    keep[4 * i + 1] = words.b[i] >= threshold;
    keep[4 * i + 2] = words.c[i] >= threshold;
    keep[4 * i + 3] = words.d[i] >= threshold;
  }
}

[[gnu::always_inline]] inline void
keep_run(uint64_t stream, const Run& run, uint32_t threshold, bool* out) {
  uint8_t keep[kPhiloxBlock];
  const int64_t end = run.first + run.count;
  for (int64_t at = run.first; at < end;) {
    const int64_t block = at / kPhiloxBlock;
    const int64_t base = block * kPhiloxBlock;
    const int64_t stop = std::min(end, base + kPhiloxBlock);
    keep_block(stream, run.key, static_cast<uint64_t>(block), threshold, keep);
    for (; at < stop; ++at) out[at - run.first] = keep[at - base] != 0;
  }
}

void keep_any(uint64_t stream, const Run& run, uint32_t threshold, bool* out) {
  keep_run(stream, run, threshold, out);
}

#if defined(__x86_64__)
[[gnu::target("avx2")]] void
keep_avx2(uint64_t stream, const Run& run, uint32_t threshold, bool* out) {
  keep_run(stream, run, threshold, out);
}

auto run_keeper() {
  return __builtin_cpu_supports("avx2") ? keep_avx2 : keep_any;
}
#else
auto run_keeper() {
  return keep_any;
}
#endif

// x * scale where kept, else 0; plus `residual`, unless it is undefined.
Tensor kept(
    const Tensor& x, const Tensor& mask, double scale, const Tensor& residual) {
  if (kernels::takes_elementwise(x)) {
    return kernels::dropout(x, mask, scale, residual);
  }
  if (!x.is_cpu()) {
    const auto y = at::where(mask, x * scale, at::zeros({}, x.options()));
    return residual.defined() ? residual + y : y;
  }
  const auto in = x.contiguous();
  const auto more = residual.defined() ? residual.contiguous() : residual;
  auto out = at::empty(in.sizes(), in.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kBFloat16, at::kHalf, in.scalar_type(), "dropout", [&] {
        const auto* from = in.const_data_ptr<scalar_t>();
        const auto* keep = mask.const_data_ptr<bool>();
        const auto* added =
            more.defined() ? more.const_data_ptr<scalar_t>() : nullptr;
        auto* to = out.data_ptr<scalar_t>();
        using Wide = at::opmath_type<scalar_t>;
        const auto factor = static_cast<Wide>(scale);
        at::parallel_for(
            0, in.numel(), int64_t{1} << 15, [&](int64_t begin, int64_t end) {
              for (int64_t i = begin; i < end; ++i) {
                Wide x = keep[i] ? static_cast<Wide>(from[i]) * factor : 0;
                if (added != nullptr) x += static_cast<Wide>(added[i]);
                to[i] = static_cast<scalar_t>(x);
              }
            });
      });
  return out;
}

class Kept : public torch::autograd::Function<Kept> {
 public:
  using MaybeTensor = std::optional<Tensor>;

  static Tensor forward(
      AutogradContext* context, const Tensor& x, const Tensor& mask,
      double scale, const MaybeTensor& residual) {
    context->save_for_backward({mask});
    context->saved_data["scale"] = scale;
    context->saved_data["adds"] = residual.has_value();
    return kept(x, mask, scale, residual.value_or(Tensor()));
  }

  static variable_list
  backward(AutogradContext* context, variable_list gradients) {
    return {
        Kept::apply(
            gradients[0], context->get_saved_variables()[0],
            context->saved_data["scale"].toDouble(), MaybeTensor()),
        Tensor(), Tensor(),
        context->saved_data["adds"].toBool() ? gradients[0] : Tensor()};
  }
};

// Where each row begins in its sample's stream, and its sample's key: [rows].
struct RowStarts {
  Tensor first, sample_key;
};

RowStarts
row_starts(const Tensor& x, const Tensor& keys, const DropoutPlace& place) {
  const auto integers = x.options().dtype(torch::kInt64);
  if (x.is_meta()) {
    return {at::empty({x.size(0)}, integers), at::empty({x.size(0)}, integers)};
  }
  const int64_t row_size = x.numel() / std::max<int64_t>(x.size(0), 1);
  const auto rows =
      torch::arange(place.first_row, place.first_row + x.size(0), integers);
  const auto sample = rows.div(place.rows_per_sample, "floor");
  auto in_sample = rows - sample * place.rows_per_sample;
  if (!place.rows.empty()) {
    std::vector<Tensor> all;
    for (const auto& piece : place.rows) {
      all.push_back(torch::arange(piece.begin, piece.end, integers));
    }
    in_sample = at::cat(all).index_select(0, in_sample);
  }
  const int64_t row_elements =
      place.row_elements == 0 ? row_size : place.row_elements;
  return {
      in_sample * row_elements + place.first_element,
      keys.to(x.device()).index_select(0, sample)};
}

Tensor mask_by_kernel(
    const Tensor& x, const Tensor& keys, const DropoutSource& source,
    const DropoutPlace& place) {
  const auto starts = row_starts(x, keys, place);
  const int64_t row_size = x.numel() / std::max<int64_t>(x.size(0), 1);
  return kernels::dropout_mask(
             starts.first, starts.sample_key, row_size, source.stream,
             threshold_of(source.probability))
      .view(x.sizes());
}

// ------------------------------------------------------------- by operators

constexpr int64_t kWord = 0xFFFFFFFF;

struct Product {
  Tensor high, low;
};

// Multiplies words, stored as int64 in [0, 2^32). The product may wrap; its
// bits are right.
Product product(const Tensor& words, int64_t factor) {
  const auto all = words * factor;
  return {
      at::bitwise_and(at::bitwise_right_shift(all, 32), kWord),
      at::bitwise_and(all, kWord)};
}

Tensor high_word(const Tensor& x) {
  return at::bitwise_and(at::bitwise_right_shift(x, 32), kWord);
}

// Four words of each counter: [..., 4].
Tensor words_by_operators(
    uint64_t key, const Tensor& subsequence, const Tensor& counter) {
  auto a = at::bitwise_and(counter, kWord);
  auto b = high_word(counter);
  auto c = at::bitwise_and(subsequence, kWord).expand_as(counter);
  auto d = high_word(subsequence).expand_as(counter);
  uint32_t key_low = static_cast<uint32_t>(key);
  uint32_t key_high = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const auto p = product(a, 0xD2511F53);
    const auto q = product(c, 0xCD9E8D57);
    a = q.high.bitwise_xor(b).bitwise_xor_(int64_t{key_low});
    c = p.high.bitwise_xor(d).bitwise_xor_(int64_t{key_high});
    b = q.low;
    d = p.low;
    key_low += 0x9E3779B9;
    key_high += 0xBB67AE85;
  }
  return at::stack({a, b, c, d}, -1);
}

void check(
    const Tensor& x, const Tensor& keys, const DropoutSource& source,
    const DropoutPlace& place) {
  if (!(source.probability >= 0 && source.probability < 1)) {
    throw ConfigError(format(
        "[model] dropout={:f}, but a probability of zeros is at least 0 and "
        "less than 1",
        source.probability));
  }
  if (!keys.defined() || keys.scalar_type() != torch::kInt64 ||
      keys.dim() != 1) {
    throw ConfigError(
        "dropout needs an int64 key for each sample, [batch], in training: its "
        "masks depend on nothing else");
  }
  const int64_t rows = place.first_row + x.size(0);
  const int64_t samples =
      (rows + place.rows_per_sample - 1) / place.rows_per_sample;
  if (x.numel() > 0 && keys.size(0) < samples) {
    throw ConfigError(format(
        "dropout of {} samples got {} keys; it needs one for each", samples,
        keys.size(0)));
  }
}

}  // namespace

uint64_t dropout_stream(std::string_view name) {
  return XXH3_64bits(name.data(), name.size());
}

DropoutPlace place_of_tokens(
    const TensorParallel& parallel, int64_t batch, int64_t sequence,
    int64_t total) {
  DropoutPlace place;
  if (parallel.splits_tokens()) {
    place.first_row = parallel.part_of(batch * sequence).begin;
    place.rows_per_sample = sequence;
  }
  if (parallel.context.is_used()) {
    place.rows_per_sample = sequence;
    place.rows = parallel.context.pieces_of(total);
  }
  return place;
}

DropoutPlace place_of_heads(int64_t first_head, int64_t queries, int64_t keys) {
  return {.first_element = first_head * queries * keys};
}

DropoutPlace place_of_scores(
    const IndexRange& heads, const IndexRange& queries, const IndexRange& keys,
    int64_t sequence) {
  DropoutPlace place{
      .rows_per_sample = heads.size() * queries.size(),
      .first_element = keys.begin,
      .row_elements = sequence};
  for (int64_t head = heads.begin; head < heads.end; ++head) {
    place.rows.push_back(
        {head * sequence + queries.begin, head * sequence + queries.end});
  }
  return place;
}

Tensor detail::keep_mask_by_operators(
    const Tensor& x, const Tensor& keys, const DropoutSource& source,
    const DropoutPlace& place) {
  const torch::NoGradGuard no_grad;
  const auto starts = row_starts(x, keys, place);
  const auto integers = starts.first.options();
  const int64_t row_size = x.numel() / std::max<int64_t>(x.size(0), 1);
  const int64_t row_elements =
      place.row_elements == 0 ? row_size : place.row_elements;
  // Four elements share a counter if rows are aligned; else each element has
  // its own counter.
  const bool aligned = row_size % 4 == 0 && row_elements % 4 == 0 &&
                       place.first_element % 4 == 0;
  const auto element = starts.first.unsqueeze(1) +
                       torch::arange(0, row_size, aligned ? 4 : 1, integers);
  auto words = words_by_operators(
      source.stream, starts.sample_key.unsqueeze(1),
      at::bitwise_right_shift(element, 2));
  if (!aligned) {
    words = words.gather(-1, at::bitwise_and(element, 3).unsqueeze(-1));
  }
  return words.reshape(x.sizes()) >= int64_t{threshold_of(source.probability)};
}

Tensor detail::keep_mask(
    const Tensor& x, const Tensor& keys, const DropoutSource& source,
    const DropoutPlace& place) {
  const auto mask_options = x.options().dtype(torch::kBool);
  if (kernels::takes_dropout_mask(x)) {
    return mask_by_kernel(x, keys, source, place);
  }
  if (x.is_meta()) return at::empty(x.sizes(), mask_options);
  if (!x.is_cpu()) return keep_mask_by_operators(x, keys, source, place);
  auto mask = at::empty(x.sizes(), mask_options);
  const auto on_host = keys.to(torch::kCPU).contiguous();
  const auto runs = runs_of(x, on_host, place);
  const auto threshold = threshold_of(source.probability);
  auto* out = mask.data_ptr<bool>();
  at::parallel_for(
      0, static_cast<int64_t>(runs.size()), 1, [&](int64_t begin, int64_t end) {
        const auto keep = run_keeper();
        for (int64_t i = begin; i < end; ++i) {
          const Run& run = runs[static_cast<size_t>(i)];
          keep(source.stream, run, threshold, out + run.begin);
        }
      });
  return mask;
}

Tensor dropout(
    const Tensor& x, const Tensor& keys, const DropoutSource& source,
    const DropoutPlace& place, const Tensor& residual) {
  const bool adds = residual.defined();
  if (source.probability == 0) return adds ? residual + x : x;
  check(x, keys, source, place);
  const bool alike = !adds || (residual.sizes() == x.sizes() &&
                               residual.scalar_type() == x.scalar_type());
  const auto y = Kept::apply(
      x, detail::keep_mask(x, keys, source, place),
      1 / (1 - source.probability),
      adds && alike ? std::optional(residual) : std::nullopt);
  return alike ? y : residual + y;
}

}  // namespace echelon
