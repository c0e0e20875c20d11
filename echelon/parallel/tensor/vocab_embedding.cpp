#include "echelon/parallel/tensor/vocab_embedding.h"

#include <torch/autograd.h>
#include <torch/types.h>

#include <utility>

#include "echelon/error.h"
#include "echelon/layers/low_precision.h"
#include "echelon/parallel/tensor/autograd_support.h"
#include "echelon/parallel/tensor/token_ids.h"
#include "echelon/parallel/tensor/token_rows.h"
#include "echelon/profiling/operator_scope.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

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
  return is_low_precision(weight.scalar_type()) ? Rows::apply(weight, ids)
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
    const auto sum = as_one_operator("echelon::vocab_embedding", [&] {
      auto all = rows_of(weight, ids, range);
      if (parallel.cuts_tokens()) {
        all = detail::scatter_tokens(all, parallel, lookup->label + " scatter");
      } else {
        parallel.group.all_reduce(
            all, ReduceOp::sum, {.label = lookup->label + " sum"});
      }
      return variable_list{all};
    })[0];
    return parallel.cuts_tokens()
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
    if (lookup.parallel.cuts_tokens()) {
      gradient = detail::gather_tokens(
          gradient, ids.numel(), lookup.parallel, lookup.label + " gather");
    }
    // One more row takes the ids of other ranks.
    const auto all = gradient_of_rows(
        gradient.reshape({ids.numel(), gradient.size(-1)}),
        detail::local_ids(ids, range, rows).flatten(), rows + 1,
        /*padding=*/rows);
    return {all.narrow(0, 0, rows), Tensor(), Tensor()};
  }

 private:
  static Tensor
  rows_of(const Tensor& weight, const Tensor& ids, const IndexRange& range) {
    if (weight.size(0) == 0) {
      return torch::zeros({ids.numel(), weight.size(1)}, weight.options());
    }
    const auto rows =
        at::embedding(weight, detail::local_ids(ids, range, 0).flatten());
    const auto elsewhere =
        detail::in_range(ids, range).bitwise_not().view({-1, 1});
    return rows.masked_fill_(elsewhere, 0);
  }
};

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
  detail::check_ids(ids, vocabulary_, label_);
  if (parallel_.size() == 1) return rows_of_table(weight, ids);
  auto lookup = c10::make_intrusive<Lookup>();
  lookup->vocabulary = vocabulary_;
  lookup->parallel = parallel_;
  lookup->label = label_;
  return ShardedLookup::apply(weight, ids, lookup);
}

PositionEmbedding::PositionEmbedding(
    int64_t positions, int64_t hidden, TensorParallel parallel)
    : weight(register_shard(
          "weight", {replicated({positions, hidden}, parallel.rank()),
                     parallel.cuts_tokens(), InitialValue::normal_of(1)})),
      parallel_(std::move(parallel)) {}

Tensor PositionEmbedding::forward(const Tensor& x, const Tensor& like) {
  const int64_t sequence = like.size(1);
  if (sequence > weight.size(0)) {
    throw ConfigError(format(
        "[model] a sequence of {} tokens is longer than positions={}; shorten "
        "data.sequence or give the model more positions",
        sequence, weight.size(0)));
  }
  if (!parallel_.cuts_tokens()) return x + weight.narrow(0, 0, sequence);
  const auto mine = parallel_.part_of(like.size(0) * sequence);
  const auto positions =
      torch::arange(mine.begin, mine.end, like.options().dtype(torch::kInt64));
  return x + rows_of_table(weight, positions.remainder_(sequence));
}

}  // namespace echelon
