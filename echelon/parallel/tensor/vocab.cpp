// For the loss each rank reduces its shard of a row of logits to three numbers:
// the largest logit m, the sum s of exp(x - m), and the target's logit t (0 if
// another rank has it). The numbers of all ranks give those of the row:
//
//   M = max m_r
//   logsumexp = M + log(sum of s_r exp(m_r - M))
//   t = sum of t_r
#include "echelon/parallel/tensor/vocab.h"

#include <torch/autograd.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "echelon/error.h"
#include "echelon/kernels/embedding.h"
#include "echelon/kernels/vocab_loss.h"
#include "echelon/layers/low_precision.h"
#include "echelon/layers/parameter_owner.h"
#include "echelon/parallel/tensor/autograd_support.h"
#include "echelon/parallel/tensor/linear.h"
#include "echelon/parallel/tensor/token_rows.h"
#include "echelon/profiling/operator_scope.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// ---------------------------------------------------------------- token ids

// True for each id in `range`.
Tensor in_range(const Tensor& ids, const IndexRange& range) {
  return ids.ge(range.begin).bitwise_and_(ids.lt(range.end));
}

// Throws DataError for the first of `ids` that is not in [0, vocabulary) and
// not `ignored`: "[place] token 7 of sample 2 is 50300, …" for ids [batch,
// sequence], else by index. On a GPU it is an assertion on the device, without
// waiting.
void check_ids(
    const Tensor& ids, int64_t vocabulary, const std::string& place,
    std::optional<int64_t> ignored = std::nullopt) {
  if (ids.is_meta() || ids.numel() == 0) return;
  const torch::NoGradGuard no_grad;
  if (ids.is_cpu() && !ignored) {
    const auto [least, largest] = ids.aminmax();
    if (least.item<int64_t>() >= 0 && largest.item<int64_t>() < vocabulary) {
      return;
    }
  }
  auto right = in_range(ids, {0, vocabulary});
  if (ignored) right.bitwise_or_(ids.eq(*ignored));
  if (!ids.is_cpu()) {
    at::_assert_async(
        right.all(), "[" + place + "] a token id is outside of the vocabulary");
    return;
  }
  if (right.all().item<bool>()) return;
  const int64_t first =
      right.flatten().to(torch::kUInt8).argmin().item<int64_t>();
  throw DataError(format(
      "[{}] {} is {}, but the vocabulary has ids 0 to {}; use the tokenizer "
      "that belongs to the model, or a larger vocabulary",
      place,
      ids.dim() == 2 ? format(
                           "token {} of sample {}", first % ids.size(1),
                           first / ids.size(1))
                     : format("token {}", first),
      ids.flatten()[first].item<int64_t>(), vocabulary - 1));
}

// Rows of the ids in a table of `range`; `otherwise` for ids outside of it.
Tensor
local_ids(const Tensor& ids, const IndexRange& range, int64_t otherwise) {
  const auto local = ids - range.begin;
  return local.masked_fill_(in_range(ids, range).bitwise_not(), otherwise);
}

// ---------------------------------------------------------------- embedding

struct Lookup : torch::CustomClassHolder {
  int64_t vocabulary = 0;
  TensorParallel parallel;
  std::string label;
};

// The gradient of a table of `rows` rows. CPUs add the tokens' gradients in
// their own dtype, where the sum of a frequent token would stagnate in low
// precision.
Tensor gradient_of_rows(
    const Tensor& gradient, const Tensor& ids, int64_t rows,
    int64_t padding = -1) {
  if (kernels::takes_embedding(gradient)) {
    return kernels::embedding_gradient(gradient, ids, rows, padding);
  }
  return at::embedding_dense_backward(
             for_sums(gradient), ids, rows, padding,
             /*scale_grad_by_freq=*/false)
      .to(gradient.scalar_type());
}

// at::embedding, with the gradient above.
class Rows : public torch::autograd::Function<Rows> {
 public:
  static Tensor
  forward(AutogradContext* context, const Tensor& weight, const Tensor& ids) {
    context->save_for_backward({ids});
    context->saved_data["rows"] = weight.size(0);
    return at::embedding(weight, ids);
  }

  static variable_list
  backward(AutogradContext* context, const variable_list& gradients) {
    detail::refuse_second_derivative("the embedding of tokens");
    return {
        gradient_of_rows(
            gradients[0], context->get_saved_variables()[0],
            context->saved_data["rows"].toInt()),
        Tensor()};
  }
};

Tensor rows_of_table(const Tensor& weight, const Tensor& ids) {
  return is_low_precision(weight.scalar_type()) ||
                 kernels::takes_embedding(weight)
             ? Rows::apply(weight, ids)
             : at::embedding(weight, ids);
}

// Looks up the ids of this rank, with zeros for others, and sums over the
// ranks.
class ShardedLookup : public torch::autograd::Function<ShardedLookup> {
 public:
  static Tensor forward(
      AutogradContext* context, const Tensor& weight, const Tensor& ids,
      const c10::intrusive_ptr<Lookup>& lookup) {
    const auto& parallel = lookup->parallel;
    const auto range = parallel.part_of(lookup->vocabulary);
    context->save_for_backward({ids});
    context->saved_data["lookup"] = c10::IValue::make_capsule(lookup);
    context->saved_data["rows"] = weight.size(0);
    const auto sum =
        profiling::as_one_operator("echelon::vocab_embedding", [&] {
          auto all = rows_of(weight, ids, range);
          if (parallel.splits_tokens()) {
            all = detail::scatter_tokens(
                all, parallel, lookup->label + " scatter");
          } else {
            parallel.group.all_reduce(
                all, ReduceOp::sum, {.label = lookup->label + " sum"});
          }
          return variable_list{all};
        })[0];
    return parallel.splits_tokens()
               ? sum
               : sum.view({ids.size(0), ids.size(1), weight.size(1)});
  }

  static variable_list
  backward(AutogradContext* context, const variable_list& gradients) {
    detail::refuse_second_derivative("the embedding of tokens");
    const auto capsule = context->saved_data["lookup"].toCapsule();
    const auto& lookup = static_cast<const Lookup&>(*capsule);
    const int64_t rows = context->saved_data["rows"].toInt();
    const auto ids = context->get_saved_variables()[0];
    const auto range = lookup.parallel.part_of(lookup.vocabulary);
    auto gradient = gradients[0];
    if (lookup.parallel.splits_tokens()) {
      gradient = detail::gather_tokens(
          gradient, ids.numel(), lookup.parallel, lookup.label + " gather");
    }
    // One more row takes the ids of other ranks.
    const auto all = gradient_of_rows(
        gradient.reshape({ids.numel(), gradient.size(-1)}),
        local_ids(ids, range, rows).flatten(), rows + 1,
        /*padding=*/rows);
    return {all.narrow(0, 0, rows), Tensor(), Tensor()};
  }

 private:
  static Tensor
  rows_of(const Tensor& weight, const Tensor& ids, const IndexRange& range) {
    if (weight.size(0) == 0) {
      return torch::zeros({ids.numel(), weight.size(1)}, weight.options());
    }
    const auto rows = at::embedding(weight, local_ids(ids, range, 0).flatten());
    const auto elsewhere = in_range(ids, range).bitwise_not().view({-1, 1});
    return rows.masked_fill_(elsewhere, 0);
  }
};

// ------------------------------------------------------------------- logits

// The memory of gradients that may be widened in place: nobody else sees what
// is behind their rows. The use count of the memory does not tell, because a
// view keeps its base.
class WidenableGradients {
 public:
  void add(const Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    std::erase_if(memory_, [](const auto& one) { return one.expired(); });
    memory_.push_back(tensor.storage().getWeakStorageImpl());
  }
  bool has(const Tensor& tensor) {
    const auto* memory = tensor.storage().unsafeGetStorageImpl();
    const std::lock_guard lock(mutex_);
    return std::ranges::any_of(memory_, [&](const auto& one) {
      return !one.expired() && one._unsafe_get_target() == memory;
    });
  }

 private:
  std::mutex mutex_;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> memory_;
};

WidenableGradients& widenable_gradients() {
  static auto* const all =
      new WidenableGradients;  // outlives threads that compute
  return *all;
}

// The first columns of a matrix: a view. The gradient that the loss returns has
// room behind each of its rows, as the matrix has, so that it becomes that of
// all columns without a copy.
class FirstColumns : public torch::autograd::Function<FirstColumns> {
 public:
  static Tensor
  forward(AutogradContext* context, const Tensor& x, int64_t columns) {
    context->saved_data["columns"] = x.size(-1);
    return x.narrow(-1, 0, columns);
  }

  static variable_list
  backward(AutogradContext* context, const variable_list& gradients) {
    detail::refuse_second_derivative("vocab_logits");
    const int64_t columns = context->saved_data["columns"].toInt();
    const int64_t padding = columns - gradients[0].size(-1);
    auto all = widened_in_place(gradients[0], columns);
    if (all.defined()) {
      all.narrow(-1, columns - padding, padding).zero_();
    } else {
      all = at::constant_pad_nd(gradients[0], {0, padding});
    }
    return {all, Tensor()};
  }

 private:
  // The memory of `x` as rows of so many columns; undefined where the rows are
  // not that far apart, or where somebody may use what is between them.
  static Tensor widened_in_place(const Tensor& x, int64_t columns) {
    auto sizes = x.sizes().vec();
    sizes.back() = columns;
    int64_t stride = 1;
    for (size_t i = sizes.size(); i-- > 0;) {
      if (x.size(static_cast<int64_t>(i)) > 1 &&
          x.stride(static_cast<int64_t>(i)) != stride) {
        return {};
      }
      stride *= sizes[i];
    }
    const auto bytes = static_cast<size_t>(stride) * x.element_size();
    // A meta tensor has nothing in between.
    const bool widenable = x.is_meta() || widenable_gradients().has(x);
    if (x.storage_offset() != 0 || x.storage().nbytes() < bytes || !widenable) {
      return {};
    }
    return x.as_strided(sizes, c10::contiguous_strides(sizes));
  }
};

// A matrix with the rows of zeros that lie behind it in memory.
class WithZeroRows : public torch::autograd::Function<WithZeroRows> {
 public:
  static Tensor forward(
      AutogradContext* context, const Tensor& matrix, const Tensor& padded) {
    context->saved_data["rows"] = matrix.size(0);
    Tensor result = padded.alias();
    // Autograd notices a change of the matrix in place.
    torch::autograd::impl::set_version_counter(
        result, torch::autograd::impl::version_counter(matrix));
    return result;
  }

  static variable_list
  backward(AutogradContext* context, const variable_list& gradients) {
    return {
        gradients[0].narrow(0, 0, context->saved_data["rows"].toInt()),
        Tensor()};
  }
};

// Logits keep the dtype of their matrices: they decide the loss.
TensorParallel of_logits(TensorParallel parallel) {
  parallel.fp8 = false;
  return parallel;
}

// The first columns of x times the rows of a matrix.
Tensor first_logits(
    const Tensor& x, const Tensor& matrix, int64_t columns,
    const TensorParallel& parallel, int64_t tokens, const std::string& label) {
  const auto all = column_linear(
      x, {{matrix, {}}}, WeightLayout::out_in, of_logits(parallel), tokens,
      label)[0];
  return FirstColumns::apply(all, columns);
}

// --------------------------------------------------------------------- loss

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Loss : torch::CustomClassHolder {
  int64_t vocabulary = 0;
  int64_t ignore_index = -100;
  TensorParallel parallel;
  std::string label;
};

// [3, rows]: largest logit, sum of exponentials and target's logit of this
// shard.
Tensor
local_sums(const Tensor& rows, const Tensor& targets, const IndexRange& range) {
  const auto dtype = sum_dtype(rows.scalar_type());
  auto sums = torch::empty({3, rows.size(0)}, rows.options().dtype(dtype));
  if (rows.size(1) == 0) {
    sums.zero_();
    sums[0].fill_(-kInfinity);
    return sums;
  }
  if (kernels::takes(rows)) {
    return kernels::vocab_sums(rows, targets - range.begin);
  }
  detail::for_row_chunks(rows, [&](int64_t begin, int64_t end) {
    const auto part = rows.slice(0, begin, end);
    auto most = part.amax({1}, true).to(dtype);
    sums[0].slice(0, begin, end).copy_(most.squeeze(1));
    // In a row of -infinity all exponentials are 0, not NaN.
    most.masked_fill_(most.eq(-kInfinity), 0);
    const auto parts = at::sub(part, most).exp_();
    auto sum = sums[1].slice(0, begin, end);
    at::sum_out(sum, parts, {1});
  });
  const auto index = local_ids(targets, range, 0).unsqueeze(1);
  const auto here = in_range(targets, range);
  sums[2].copy_(rows.gather(1, index).squeeze(1));
  sums[2].masked_fill_(here.bitwise_not(), 0);
  return sums;
}

// [n, rows] of each rank -> [ranks, n, rows].
Tensor of_all_ranks(
    const Tensor& mine, const TensorParallel& parallel,
    const std::string& label) {
  const auto all = torch::empty(
      {parallel.size(), mine.size(0), mine.size(1)}, mine.options());
  parallel.group.all_gather(all.view(-1), mine.view(-1), {.label = label});
  return all;
}

// [rows] logsumexp and the target's logit, over the whole vocabulary.
std::pair<Tensor, Tensor> over_ranks(const Tensor& sums, const Loss& loss) {
  const auto& parallel = loss.parallel;
  if (parallel.size() == 1) return {sums[0] + sums[1].log(), sums[2]};
  const auto all = of_all_ranks(sums, parallel, loss.label + " loss");
  const auto most = all.select(1, 0);
  const auto largest = most.amax({0});
  const auto scale =
      (most - largest.masked_fill(largest.eq(-kInfinity), 0)).exp_();
  const auto sum = scale.mul_(all.select(1, 1)).sum(0);
  return {largest + sum.log_(), all.select(1, 2).sum(0)};
}

class CrossEntropy : public torch::autograd::Function<CrossEntropy> {
 public:
  static Tensor forward(
      AutogradContext* context, const Tensor& logits, const Tensor& targets,
      const c10::intrusive_ptr<Loss>& loss) {
    const auto range = loss->parallel.part_of(loss->vocabulary);
    const auto rows = logits.reshape({targets.numel(), range.size()});
    const auto ids = targets.flatten();
    const auto [total, target] =
        over_ranks(local_sums(rows, ids, range), *loss);
    context->save_for_backward({logits, ids, total});
    context->saved_data["loss"] = c10::IValue::make_capsule(loss);
    return (total - target)
        .masked_fill_(ids.eq(loss->ignore_index), 0)
        .view(targets.sizes());
  }

  // (softmax - one at the target) times the gradient of the token's loss.
  static variable_list
  backward(AutogradContext* context, const variable_list& gradients) {
    detail::refuse_second_derivative("vocab_cross_entropy");
    const auto capsule = context->saved_data["loss"].toCapsule();
    const auto& loss = static_cast<const Loss&>(*capsule);
    const auto saved = context->get_saved_variables();
    const auto& ids = saved[1];
    const auto range = loss.parallel.part_of(loss.vocabulary);
    const auto rows = saved[0].reshape({ids.numel(), range.size()});
    auto scale =
        gradients[0].flatten().masked_fill(ids.eq(loss.ignore_index), 0);
    if (kernels::takes(rows)) {
      const auto result =
          kernels::vocab_gradient(rows, ids - range.begin, saved[2], scale);
      detail::allow_widening(result);
      return {result.view(saved[0].sizes()), Tensor(), Tensor()};
    }
    auto result = torch::empty(rows.sizes(), rows.options());
    scale = scale.unsqueeze(1);
    const auto total = saved[2].unsqueeze(1);
    const auto index = local_ids(ids, range, 0).unsqueeze(1);
    const auto at_target =
        in_range(ids, range).to(total.scalar_type()).neg_().unsqueeze(1);
    if (range.size() > 0) {
      detail::for_row_chunks(rows, [&](int64_t begin, int64_t end) {
        const auto part = rows.slice(0, begin, end);
        auto out = result.slice(0, begin, end);
        const bool in_place = out.scalar_type() == total.scalar_type();
        auto work = in_place ? out : torch::empty_like(part, total.options());
        at::sub_out(work, part, total.slice(0, begin, end)).exp_();
        work.scatter_add_(
            1, index.slice(0, begin, end), at_target.slice(0, begin, end));
        at::mul_out(out, work, scale.slice(0, begin, end));
      });
    }
    return {result.view(saved[0].sizes()), Tensor(), Tensor()};
  }
};

void check_logits(
    const char* function, const Tensor& logits, int64_t vocabulary,
    const TensorParallel& parallel) {
  const int64_t here = parallel.part_of(vocabulary).size();
  if (logits.dim() > 0 && logits.size(-1) == here) return;
  throw ConfigError(format(
      "[{}] logits of {} ids, but rank {} of {} has {} of the vocabulary's {}",
      function, logits.dim() > 0 ? logits.size(-1) : 0, parallel.rank(),
      parallel.size(), here, vocabulary));
}

}  // namespace

VocabParallelEmbedding::VocabParallelEmbedding(
    int64_t vocabulary, int64_t hidden, TensorParallel parallel,
    std::string label)
    : weight(register_shard(
          "weight",
          {even_shard(
               {vocabulary, hidden}, 0, parallel.rank(), parallel.size()),
           false, InitialValue::normal_of(1)})),
      vocabulary_(vocabulary),
      parallel_(std::move(parallel)),
      label_(std::move(label)) {}

Tensor VocabParallelEmbedding::forward(const Tensor& ids) {
  if (ids.dim() != 2) {
    throw ConfigError(format(
        "[{}] token ids have {} dimensions; they are [batch, sequence]", label_,
        ids.dim()));
  }
  check_ids(ids, vocabulary_, label_);
  if (parallel_.size() == 1) return rows_of_table(weight, ids);
  auto lookup = c10::make_intrusive<Lookup>();
  lookup->vocabulary = vocabulary_;
  lookup->parallel = parallel_;
  lookup->label = label_;
  return ShardedLookup::apply(weight, ids, lookup);
}

void detail::allow_widening(const Tensor& gradient) {
  widenable_gradients().add(gradient);
}

Tensor detail::padded_logits(
    const Tensor& x, const Tensor& weight, int64_t padding,
    const TensorParallel& parallel, int64_t tokens, const std::string& label) {
  return first_logits(
      x, at::constant_pad_nd(weight, {0, 0, 0, padding}), weight.size(0),
      parallel, tokens, label);
}

Tensor vocab_logits(
    const Tensor& x, const Tensor& weight, const TensorParallel& parallel,
    int64_t tokens, const std::string& label) {
  const auto memory = parameter_owner_of(weight);
  const auto padded = memory ? memory->with_zero_rows(weight) : Tensor();
  if (padded.defined()) {
    return first_logits(
        x, WithZeroRows::apply(weight, padded), weight.size(0), parallel,
        tokens, label);
  }
  const int64_t beyond = weight.size(0) % kPaddedRows;
  if (beyond != 0 && computing_device(x) == torch::kCUDA &&
      weight.scalar_type() != torch::kFloat64) {
    return detail::padded_logits(
        x, weight, kPaddedRows - beyond, parallel, tokens, label);
  }
  return column_linear(
      x, {{weight, {}}}, WeightLayout::out_in, of_logits(parallel), tokens,
      label)[0];
}

PositionEmbedding::PositionEmbedding(
    int64_t positions, int64_t hidden, TensorParallel parallel)
    : weight(register_shard(
          "weight", {replicated({positions, hidden}, parallel.rank()),
                     parallel.splits_tokens(), InitialValue::normal_of(1)})),
      parallel_(std::move(parallel)) {}

Tensor PositionEmbedding::forward(const Tensor& x, const Tensor& like) {
  const int64_t sequence = like.size(1);
  if (sequence > weight.size(0)) {
    throw ConfigError(format(
        "[model] a sequence of {} tokens is longer than positions={}; shorten "
        "data.sequence or give the model more positions",
        sequence, weight.size(0)));
  }
  const auto& context = parallel_.context;
  const auto pieces = context.pieces_of(sequence);
  if (!parallel_.splits_tokens()) return x + rows_at(weight, 0, pieces);
  const int64_t length = context.length_of(sequence);
  const auto mine = parallel_.part_of(like.size(0) * length);
  const auto integers = like.options().dtype(torch::kInt64);
  auto positions =
      torch::arange(mine.begin, mine.end, integers).remainder_(length);
  if (context.is_used()) {
    const auto all = torch::arange(sequence, integers);
    positions = rows_at(all, 0, pieces).index_select(0, positions);
  }
  return x + rows_of_table(weight, positions);
}

Tensor vocab_cross_entropy(
    const Tensor& logits, const Tensor& targets, int64_t vocabulary,
    const TensorParallel& parallel, int64_t ignore_index,
    const std::string& label) {
  check_logits("vocab_cross_entropy", logits, vocabulary, parallel);
  if (targets.sizes() != logits.sizes().slice(0, logits.dim() - 1)) {
    throw ConfigError(format(
        "[vocab_cross_entropy] {} targets for {} rows of logits; their shapes "
        "must agree but for the vocabulary",
        targets.numel(),
        logits.numel() / std::max<int64_t>(1, logits.size(-1))));
  }
  check_ids(targets, vocabulary, label + " targets", ignore_index);
  auto loss = c10::make_intrusive<Loss>();
  loss->vocabulary = vocabulary;
  loss->ignore_index = ignore_index;
  loss->parallel = parallel;
  loss->label = label;
  return CrossEntropy::apply(logits, targets, loss);
}

Tensor vocab_argmax(
    const Tensor& logits, int64_t vocabulary, const TensorParallel& parallel,
    const std::string& label) {
  check_logits("vocab_argmax", logits, vocabulary, parallel);
  const torch::NoGradGuard no_grad;
  if (parallel.size() == 1) return logits.argmax(-1);
  // Both numbers fit into float64: float32 logits, and ids up to 2^53.
  auto shape = logits.sizes().vec();
  shape.back() = 1;
  auto value =
      torch::full(shape, -kInfinity, logits.options().dtype(torch::kFloat64));
  auto id = torch::zeros_like(value);
  const auto range = parallel.part_of(vocabulary);
  if (range.size() > 0) {
    const auto index = logits.argmax(-1, true);
    value.copy_(logits.gather(-1, index));
    id.copy_(index + range.begin);
  }
  const auto mine = torch::stack({value.flatten(), id.flatten()});
  const auto all = of_all_ranks(mine, parallel, label + " argmax");
  const auto best = all.select(1, 0).argmax(0, true);
  shape.pop_back();
  return all.select(1, 1).gather(0, best).to(torch::kInt64).view(shape);
}

}  // namespace echelon
