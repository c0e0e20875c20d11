// Each rank reduces its shard of a row of logits to three numbers: the largest
// logit m, the sum s of exp(x - m), and the target's logit t (0 if another rank
// has it). The numbers of all ranks give those of the row:
//
//   M = max m_r
//   logsumexp = M + log(sum of s_r exp(m_r - M))
//   t = sum of t_r
#include "echelon/parallel/tensor/vocab_cross_entropy.h"

#include <torch/autograd.h>
#include <torch/types.h>

#include <limits>

#include "echelon/error.h"
#include "echelon/parallel/tensor/autograd_support.h"
#include "echelon/parallel/tensor/token_ids.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Loss : torch::CustomClassHolder {
  int64_t vocabulary = 0;
  int64_t ignore_index = -100;
  TensorParallel parallel;
  std::string label;
};

torch::Dtype sum_dtype(const Tensor& logits) {
  return logits.scalar_type() == torch::kFloat64 ? torch::kFloat64
                                                 : torch::kFloat32;
}

// [3, rows]: largest logit, sum of exponentials and target's logit of this
// shard.
Tensor
local_sums(const Tensor& rows, const Tensor& targets, const IndexRange& range) {
  const auto dtype = sum_dtype(rows);
  auto sums = torch::empty({3, rows.size(0)}, rows.options().dtype(dtype));
  if (rows.size(1) == 0) {
    sums.zero_();
    sums[0].fill_(-kInfinity);
    return sums;
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
  const auto index = detail::local_ids(targets, range, 0).unsqueeze(1);
  const auto here = detail::in_range(targets, range);
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
    auto result = torch::empty(rows.sizes(), rows.options());
    const auto scale = gradients[0]
                           .flatten()
                           .masked_fill(ids.eq(loss.ignore_index), 0)
                           .unsqueeze(1);
    const auto total = saved[2].unsqueeze(1);
    const auto index = detail::local_ids(ids, range, 0).unsqueeze(1);
    const auto at_target = detail::in_range(ids, range)
                               .to(total.scalar_type())
                               .neg_()
                               .unsqueeze(1);
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
  detail::check_ids(targets, vocabulary, label + " targets", ignore_index);
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
