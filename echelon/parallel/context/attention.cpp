// One autograd function serves all ways: it attends to the blocks of keys that
// a way brings, one for each rank, and each block's gradients go back the same
// way. Keys and values travel together, as one tensor [2, batch, kv_heads,
// tokens, size].
//
// In the ring, rank r has the block of rank r - s in step s:
//
//   forward   | attend to block s        | attend to block s + 1
//             | blocks move on           | …
//   backward  | gradients from block s   | gradients from block s + 1
//             | blocks move on           | … and the sums for block s move on
//
// so that after the last step the sums for a rank's keys are one message away.
// What a rank computes for its own keys, in step 0, stays and is added to them.
#include "echelon/parallel/context/attention.h"

#include <torch/autograd.h>
#include <torch/types.h>

#include <algorithm>
#include <utility>

#include "echelon/comm/differentiable.h"
#include "echelon/error.h"
#include "echelon/layers/low_precision.h"
#include "echelon/parallel/context/block_attention.h"
#include "echelon/profiling/operator_scope.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

using detail::BlockAttention;
using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Call : torch::CustomClassHolder {
  ContextAttentionCall options;
  ContextParallel context;
};

// [2, batch, kv_heads, tokens, size]
Tensor packed(const Tensor& key, const Tensor& value) {
  return at::stack({key.transpose(1, 2), value.transpose(1, 2)}).contiguous();
}

// A buffer for the block of another rank.
Tensor room_for(const Tensor& block, int64_t tokens) {
  auto sizes = block.sizes().vec();
  sizes[3] = tokens;
  return at::empty(sizes, block.options());
}

// A message to the next rank, and one of another size from the previous rank.
struct Passing {
  Work work;
  Tensor arriving;
};

Passing pass_on(
    const Call& call, const Tensor& block, int64_t arriving_tokens, int tag,
    const char* what) {
  const auto& group = call.context.group;
  const int size = group.size();
  const Tensor sent = block.contiguous();
  Passing passing{.arriving = room_for(sent, arriving_tokens)};
  passing.work = group.batch_send_recv(
      {{.send = true,
        .tensor = sent,
        .peer = (group.rank() + 1) % size,
        .tag = tag},
       {.send = false,
        .tensor = passing.arriving,
        .peer = (group.rank() + size - 1) % size,
        .tag = tag}},
      {.label = call.options.label + what, .async = true});
  return passing;
}

// The rank whose block is here in a step.
int owner_of(const ContextParallel& context, int step) {
  return (context.rank() + context.size() - step) % context.size();
}

int64_t length_in_step(const Call& call, int step) {
  return call.context.length_of(
      call.options.sequence, owner_of(call.context, step));
}

// Calls visit(owner, block) for the blocks of all ranks, this rank's first.
template <class Visit>
void visit_ring(const Call& call, Tensor block, const Visit& visit) {
  const int steps = call.context.size();
  for (int step = 0; step < steps; ++step) {
    Passing next;
    if (step + 1 < steps) {
      next = pass_on(call, block, length_in_step(call, step + 1), 0, " keys");
    }
    visit(owner_of(call.context, step), block);
    if (step + 1 == steps) return;
    next.work.wait();
    block = next.arriving;
  }
}

// The same, where visit() returns the gradient of the block's keys and values.
// Returns the sum for this rank's block.
template <class Visit>
Tensor visit_ring_backward(const Call& call, Tensor block, const Visit& visit) {
  const int steps = call.context.size();
  Tensor own;
  Passing sums;
  for (int step = 0; step < steps; ++step) {
    Passing next;
    if (step + 1 < steps) {
      next = pass_on(call, block, length_in_step(call, step + 1), 0, " keys");
    }
    Tensor sum = visit(owner_of(call.context, step), block);
    if (step == 0) {
      own = sum;
    } else {
      if (step > 1) {
        sums.work.wait();
        sum = sums.arriving.add_(sum);
      }
      // The last message brings the sum for this rank's own block.
      const int after = step + 1 < steps ? step + 1 : 0;
      sums =
          pass_on(call, sum, length_in_step(call, after), 1, " key gradients");
    }
    if (step + 1 == steps) break;
    next.work.wait();
    block = next.arriving;
  }
  sums.work.wait();
  return sums.arriving.add_(own);
}

// All blocks as one tensor, in the order of the ranks.
Tensor gathered(const Call& call, const Tensor& block) {
  return all_gather(
      block, call.context.group, 3,
      call.context.lengths_of(call.options.sequence),
      call.options.label + " keys");
}

// Calls visit(owner, block) for the blocks of `all`, this rank's first.
template <class Visit>
void visit_all(const Call& call, const Tensor& all, const Visit& visit) {
  const auto lengths = call.context.lengths_of(call.options.sequence);
  for (int step = 0; step < call.context.size(); ++step) {
    const int owner = owner_of(call.context, step);
    int64_t begin = 0;
    for (int i = 0; i < owner; ++i) begin += lengths[static_cast<size_t>(i)];
    visit(
        owner, all.narrow(3, begin, lengths[static_cast<size_t>(owner)]),
        IndexRange{begin, begin + lengths[static_cast<size_t>(owner)]});
  }
}

bool passes_blocks(const ContextParallel& context) {
  return context.is_used() && context.options.way == ContextWay::ring;
}

class Attention : public torch::autograd::Function<Attention> {
 public:
  static Tensor forward(
      AutogradContext* context, const Tensor& query, const Tensor& key,
      const Tensor& value, const c10::intrusive_ptr<Call>& call) {
    const auto results = profiling::as_one_operator(
        "echelon::context_attention",
        [&] { return attend(query, packed(key, value), *call); });
    context->save_for_backward({query, key, value, results[0], results[1]});
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    return results[0];
  }

  static variable_list
  backward(AutogradContext* context, const variable_list& gradients) {
    if (torch::GradMode::is_enabled()) {
      throw Error(
          "[context parallel] the backward of attention cannot be "
          "differentiated again; call backward without create_graph");
    }
    const auto capsule = context->saved_data["call"].toCapsule();
    const auto& call = static_cast<const Call&>(*capsule);
    const auto saved = context->get_saved_variables();
    auto results = differentiate(gradients[0], saved, call);
    results.emplace_back();
    return results;
  }

 private:
  // The result, and the log-sum-exp of all scores.
  static variable_list
  attend(const Tensor& query, const Tensor& own, const Call& call) {
    const ContextAttentionCall& options = call.options;
    const ContextParallel& context = call.context;
    const BlockAttention attention(options, own.size(2), query);
    const auto q = query.transpose(1, 2);
    const auto positions = context.pieces_of(options.sequence);
    detail::MergedAttention merged(q.size(2));
    const auto visit = [&](int owner, const Tensor& block) {
      const auto keys = context.pieces_of(options.sequence, owner);
      for (const auto& one : attention.blocks_of(positions, keys)) {
        merged.add(one.rows, attention.forward(q, block[0], block[1], one));
      }
    };
    if (passes_blocks(context)) {
      visit_ring(call, own, visit);
    } else {
      visit_all(
          call, context.is_used() ? gathered(call, own) : own,
          [&](int owner, const Tensor& block, const IndexRange&) {
            visit(owner, block);
          });
    }
    return {
        merged.out().transpose(1, 2).to(query.scalar_type()).contiguous(),
        merged.lse()};
  }

  // The gradients of query, key and value.
  static variable_list differentiate(
      const Tensor& gradient, const variable_list& saved, const Call& call) {
    const ContextAttentionCall& options = call.options;
    const ContextParallel& context = call.context;
    const Tensor own = packed(saved[1], saved[2]);
    const BlockAttention attention(options, own.size(2), saved[0]);
    BlockAttention::Saved all{
        .gradient = gradient.contiguous().transpose(1, 2),
        .query = saved[0].transpose(1, 2),
        .out = saved[3].transpose(1, 2),
        .lse = saved[4]};
    if (!attention.fused()) {
      all.delta = (for_sums(all.gradient) * for_sums(all.out)).sum(-1);
    }
    const auto positions = context.pieces_of(options.sequence);
    Tensor for_query;
    // Adds the gradients from one block to `sums`, for keys and values.
    const auto add = [&](int owner, const Tensor& block, const Tensor& sums) {
      const auto keys = context.pieces_of(options.sequence, owner);
      for (const auto& one : attention.blocks_of(positions, keys)) {
        const auto part = attention.backward(all, block[0], block[1], one);
        add_rows(for_query, part.query, one.rows, all.query.size(2));
        sums[0].narrow(2, one.columns.begin, one.columns.size()).add_(part.key);
        sums[1]
            .narrow(2, one.columns.begin, one.columns.size())
            .add_(part.value);
      }
    };
    const auto wide = own.options().dtype(sum_dtype(own.scalar_type()));
    Tensor for_own;
    if (passes_blocks(context)) {
      for_own =
          visit_ring_backward(call, own, [&](int owner, const Tensor& block) {
            auto sums = at::zeros(block.sizes(), wide);
            add(owner, block, sums);
            return sums;
          });
    } else {
      const Tensor blocks = context.is_used() ? gathered(call, own) : own;
      const auto sums = at::zeros(blocks.sizes(), wide);
      visit_all(
          call, blocks,
          [&](int owner, const Tensor& block, const IndexRange& place) {
            add(owner, block, sums.narrow(3, place.begin, place.size()));
          });
      for_own = !context.is_used() ? sums
                                   : reduce_scatter(
                                         sums, context.group, 3,
                                         context.lengths_of(options.sequence),
                                         options.label + " key gradients");
    }
    const auto dtype = own.scalar_type();
    return {
        for_query.transpose(1, 2).to(dtype),
        for_own[0].transpose(1, 2).to(dtype),
        for_own[1].transpose(1, 2).to(dtype)};
  }

  static void add_rows(
      Tensor& sum, const Tensor& part, const IndexRange& rows, int64_t all) {
    if (!sum.defined() && rows.size() == all) {
      sum = part;
      return;
    }
    if (!sum.defined()) {
      auto sizes = part.sizes().vec();
      sizes[2] = all;
      sum = at::zeros(sizes, part.options());
    }
    sum.narrow(2, rows.begin, rows.size()).add_(part);
  }
};

Tensor attend_to_blocks(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const ContextParallel& context, const ContextAttentionCall& options) {
  auto call = c10::make_intrusive<Call>();
  call->options = options;
  call->context = context;
  return Attention::apply(query, key, value, call);
}

// ------------------------------------------------------------------ ulysses

// x [batch, tokens_r, heads, size] -> [batch, sequence, heads of this rank,
// size]; `heads` are those of each rank and may overlap.
Tensor exchange_tokens(
    const Tensor& x, const std::vector<IndexRange>& heads,
    const ContextParallel& context, int64_t sequence,
    const std::string& label) {
  const int64_t batch = x.size(0);
  const int64_t width = x.size(3);
  const auto lengths = context.lengths_of(sequence);
  const int64_t own = heads[static_cast<size_t>(context.rank())].size();
  std::vector<Tensor> parts;
  std::vector<int64_t> sent, received;
  for (size_t rank = 0; rank < heads.size(); ++rank) {
    parts.push_back(x.narrow(2, heads[rank].begin, heads[rank].size())
                        .reshape({-1, width}));
    sent.push_back(parts.back().size(0));
    received.push_back(batch * lengths[rank] * own);
  }
  const auto all =
      all_to_all(at::cat(parts), context.group, sent, received, label)
          .split_with_sizes(received);
  // Piece p of the sequence is the first of rank p, or the second of the rank
  // that has as many pieces behind it.
  const int ranks = context.size();
  std::vector<Tensor> pieces;
  for (int piece = 0; piece < 2 * ranks; ++piece) {
    const int rank = std::min(piece, 2 * ranks - 1 - piece);
    const auto own_pieces = context.pieces_of(sequence, rank);
    const bool second = piece >= ranks;
    pieces.push_back(
        all[static_cast<size_t>(rank)]
            .view({batch, lengths[static_cast<size_t>(rank)], own, width})
            .narrow(
                1, second ? own_pieces[0].size() : 0,
                own_pieces[second ? 1 : 0].size()));
  }
  return at::cat(pieces, 1);
}

// The way back: x [batch, sequence, heads of this rank, size] -> [batch,
// tokens_r, all heads, size], for heads that do not overlap.
Tensor exchange_heads(
    const Tensor& x, const std::vector<IndexRange>& heads,
    const ContextParallel& context, const std::string& label) {
  const int64_t batch = x.size(0);
  const int64_t sequence = x.size(1);
  const int64_t width = x.size(3);
  const int64_t tokens = context.length_of(sequence);
  std::vector<Tensor> parts;
  std::vector<int64_t> sent, received;
  for (int rank = 0; rank < context.size(); ++rank) {
    parts.push_back(
        rows_at(x, 1, context.pieces_of(sequence, rank)).reshape({-1, width}));
    sent.push_back(parts.back().size(0));
    received.push_back(
        batch * tokens * heads[static_cast<size_t>(rank)].size());
  }
  const auto all =
      all_to_all(at::cat(parts), context.group, sent, received, label)
          .split_with_sizes(received);
  std::vector<Tensor> columns;
  for (const auto& one : all) {
    columns.push_back(
        one.view({batch, tokens, one.size(0) / (batch * tokens), width}));
  }
  return at::cat(columns, 2);
}

Tensor attend_by_heads(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const ContextParallel& context, const ContextAttentionCall& call) {
  const auto heads = static_cast<int64_t>(call.kv_of_query.size());
  if (heads < context.size()) {
    throw ConfigError(format(
        "{}: context = \"ulysses\" gives each of cp={} ranks a head, but a "
        "rank has {} here; set context = \"ring\" or \"all_gather\", or lower "
        "cp or tp",
        call.label, context.size(), heads));
  }
  std::vector<IndexRange> of_query, of_kv;
  for (int rank = 0; rank < context.size(); ++rank) {
    of_query.push_back(even_range(heads, rank, context.size()));
    const auto& own = of_query.back();
    of_kv.push_back(
        {call.kv_of_query[static_cast<size_t>(own.begin)],
         call.kv_of_query[static_cast<size_t>(own.end - 1)] + 1});
  }
  const auto mine = of_query[static_cast<size_t>(context.rank())];
  const int64_t first_kv = of_kv[static_cast<size_t>(context.rank())].begin;
  ContextAttentionCall here = call;
  here.kv_of_query.clear();
  for (int64_t head = mine.begin; head < mine.end; ++head) {
    here.kv_of_query.push_back(
        call.kv_of_query[static_cast<size_t>(head)] - first_kv);
  }
  if (call.kept) {
    here.kept = [kept = call.kept, begin = mine.begin](
                    const Tensor& like, int64_t first,
                    const IndexRange& queries, const IndexRange& keys) {
      return kept(like, begin + first, queries, keys);
    };
  }
  const auto send = [&](const Tensor& x, const auto& ranges, const char* what) {
    return exchange_tokens(
        x, ranges, context, call.sequence, call.label + what);
  };
  const auto q = send(query, of_query, " queries");
  const auto k = send(key, of_kv, " keys");
  const auto v = send(value, of_kv, " values");
  return exchange_heads(
      attend_to_blocks(q, k, v, {}, here), of_query, context,
      call.label + " outputs");
}

}  // namespace

Tensor context_attention(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const ContextParallel& context, const ContextAttentionCall& call) {
  if (context.is_used() && context.options.way == ContextWay::ulysses) {
    return attend_by_heads(query, key, value, context, call);
  }
  return attend_to_blocks(query, key, value, context, call);
}

}  // namespace echelon
