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
  Group group = Group::alone("cp");  // that has the keys and values
  bool passes = false;               // round the group; else they are gathered
  SequenceCut cut;                   // over the group

  int rank() const { return group.rank(); }
  int size() const { return group.size(); }
  bool is_used() const { return size() > 1; }
  std::vector<IndexRange> pieces_of(int owner) const {
    return cut.pieces_of(options.sequence, owner);
  }
  std::vector<int64_t> lengths() const {
    return cut.lengths_of(options.sequence);
  }
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
  const auto& group = call.group;
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
int owner_of(const Call& call, int step) {
  return (call.rank() + call.size() - step) % call.size();
}

int64_t length_in_step(const Call& call, int step) {
  return call.cut.length_of(call.options.sequence, owner_of(call, step));
}

// Calls visit(owner, block) for the blocks of all ranks, this rank's first.
template <class Visit>
void visit_ring(const Call& call, Tensor block, const Visit& visit) {
  const int steps = call.size();
  for (int step = 0; step < steps; ++step) {
    Passing next;
    if (step + 1 < steps) {
      next = pass_on(call, block, length_in_step(call, step + 1), 0, " keys");
    }
    visit(owner_of(call, step), block);
    if (step + 1 == steps) return;
    next.work.wait();
    block = next.arriving;
  }
}

// The same, where visit() returns the gradient of the block's keys and values.
// Returns the sum for this rank's block.
template <class Visit>
Tensor visit_ring_backward(const Call& call, Tensor block, const Visit& visit) {
  const int steps = call.size();
  Tensor own;
  Passing sums;
  for (int step = 0; step < steps; ++step) {
    Passing next;
    if (step + 1 < steps) {
      next = pass_on(call, block, length_in_step(call, step + 1), 0, " keys");
    }
    Tensor sum = visit(owner_of(call, step), block);
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
      block, call.group, 3, call.lengths(), call.options.label + " keys");
}

// Calls visit(owner, block) for the blocks of `all`, this rank's first.
template <class Visit>
void visit_all(const Call& call, const Tensor& all, const Visit& visit) {
  const auto lengths = call.lengths();
  for (int step = 0; step < call.size(); ++step) {
    const int owner = owner_of(call, step);
    int64_t begin = 0;
    for (int i = 0; i < owner; ++i) begin += lengths[static_cast<size_t>(i)];
    visit(
        owner, all.narrow(3, begin, lengths[static_cast<size_t>(owner)]),
        IndexRange{begin, begin + lengths[static_cast<size_t>(owner)]});
  }
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
    const BlockAttention attention(call.options, own.size(2), query);
    const auto q = query.transpose(1, 2);
    const auto positions = call.pieces_of(call.rank());
    detail::MergedAttention merged(q.size(2));
    const auto visit = [&](int owner, const Tensor& block) {
      const auto keys = call.pieces_of(owner);
      for (const auto& one : attention.blocks_of(positions, keys)) {
        merged.add(one.rows, attention.forward(q, block[0], block[1], one));
      }
    };
    if (call.is_used() && call.passes) {
      visit_ring(call, own, visit);
    } else {
      visit_all(
          call, call.is_used() ? gathered(call, own) : own,
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
    const Tensor own = packed(saved[1], saved[2]);
    const BlockAttention attention(call.options, own.size(2), saved[0]);
    BlockAttention::Saved all{
        .gradient = gradient.contiguous().transpose(1, 2),
        .query = saved[0].transpose(1, 2),
        .out = saved[3].transpose(1, 2),
        .lse = saved[4]};
    if (!attention.fused()) {
      all.delta = (for_sums(all.gradient) * for_sums(all.out)).sum(-1);
    }
    const auto positions = call.pieces_of(call.rank());
    Tensor for_query;
    // Adds the gradients from one block to `sums`, for keys and values.
    const auto add = [&](int owner, const Tensor& block, const Tensor& sums) {
      const auto keys = call.pieces_of(owner);
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
    if (call.is_used() && call.passes) {
      for_own =
          visit_ring_backward(call, own, [&](int owner, const Tensor& block) {
            auto sums = at::zeros(block.sizes(), wide);
            add(owner, block, sums);
            return sums;
          });
    } else {
      const Tensor blocks = call.is_used() ? gathered(call, own) : own;
      const auto sums = at::zeros(blocks.sizes(), wide);
      visit_all(
          call, blocks,
          [&](int owner, const Tensor& block, const IndexRange& place) {
            add(owner, block, sums.narrow(3, place.begin, place.size()));
          });
      for_own = !call.is_used() ? sums
                                : reduce_scatter(
                                      sums, call.group, 3, call.lengths(),
                                      call.options.label + " key gradients");
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

// Between the ranks of context.keys, each of which has the tokens of its
// neighbours.
Tensor attend_to_blocks(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const ContextParallel& context, const ContextAttentionCall& options) {
  auto call = c10::make_intrusive<Call>();
  call->options = options;
  call->group = context.keys;
  call->passes = context.options.way != ContextWay::all_gather;
  call->cut = context.cut_of_groups();
  return Attention::apply(query, key, value, call);
}

// ---------------------------------------------------- heads for tokens,
// ulysses

// The neighbours that exchange heads for tokens, and which each has.
struct Exchange {
  Group group = Group::alone("cp");
  std::vector<IndexRange> queries;  // heads of each rank
  std::vector<IndexRange> kv;       // those that its queries use; may overlap
  /// The pieces of each rank within the tokens that the group has together.
  std::vector<std::vector<IndexRange>> places;

  size_t rank() const { return static_cast<size_t>(group.rank()); }
  size_t size() const { return static_cast<size_t>(group.size()); }
  int64_t tokens_of(size_t rank) const {
    return places[rank][0].size() + places[rank][1].size();
  }
};

Exchange
exchange_of(const ContextParallel& context, const ContextAttentionCall& call) {
  Exchange exchange{.group = context.heads};
  const int size = context.heads.size();
  const auto heads = static_cast<int64_t>(call.kv_of_query.size());
  if (heads < size) {
    throw ConfigError(format(
        "{}: context = \"{}\" gives each of {} ranks a head, but a rank has "
        "{} here; set context = \"ring\" or \"all_gather\", or exchange heads "
        "between fewer ranks by a lower cp, tp or context_ulysses",
        call.label, to_string(context.options.way), size, heads));
  }
  const int first = context.rank() - context.heads.rank();
  int64_t end = 0;
  for (int i = 0; i < size; ++i) {
    exchange.queries.push_back(even_range(heads, i, size));
    const auto& own = exchange.queries.back();
    exchange.kv.push_back(
        {call.kv_of_query[static_cast<size_t>(own.begin)],
         call.kv_of_query[static_cast<size_t>(own.end - 1)] + 1});
    const auto begin = std::exchange(
        end, end + context.pieces_of(call.sequence, first + i)[0].size());
    exchange.places.push_back({{begin, end}});
  }
  for (int i = size - 1; i >= 0; --i) {
    const auto begin = std::exchange(
        end, end + context.pieces_of(call.sequence, first + i)[1].size());
    exchange.places[static_cast<size_t>(i)].push_back({begin, end});
  }
  return exchange;
}

// x [batch, tokens_r, heads, size] -> [batch, tokens of the group, heads of
// this rank, size]; `heads` are those of each rank.
Tensor exchange_tokens(
    const Tensor& x, const std::vector<IndexRange>& heads,
    const Exchange& exchange, const std::string& label) {
  const int64_t batch = x.size(0);
  const int64_t width = x.size(3);
  const int64_t own = heads[exchange.rank()].size();
  std::vector<Tensor> parts;
  std::vector<int64_t> sent, received;
  for (size_t rank = 0; rank < exchange.size(); ++rank) {
    parts.push_back(x.narrow(2, heads[rank].begin, heads[rank].size())
                        .reshape({-1, width}));
    sent.push_back(parts.back().size(0));
    received.push_back(batch * exchange.tokens_of(rank) * own);
  }
  const auto all =
      all_to_all(at::cat(parts), exchange.group, sent, received, label)
          .split_with_sizes(received);
  std::vector<Tensor> pieces(2 * exchange.size());
  for (size_t rank = 0; rank < exchange.size(); ++rank) {
    const auto& places = exchange.places[rank];
    const auto both =
        all[rank]
            .view({batch, exchange.tokens_of(rank), own, width})
            .split_with_sizes({places[0].size(), places[1].size()}, 1);
    pieces[rank] = both[0];
    pieces[pieces.size() - 1 - rank] = both[1];
  }
  return at::cat(pieces, 1);
}

// The way back: x [batch, tokens of the group, heads of this rank, size] ->
// [batch, tokens_r, all heads, size].
Tensor exchange_heads(
    const Tensor& x, const Exchange& exchange, const std::string& label) {
  const int64_t batch = x.size(0);
  const int64_t width = x.size(3);
  const int64_t tokens = exchange.tokens_of(exchange.rank());
  std::vector<Tensor> parts;
  std::vector<int64_t> sent, received;
  for (size_t rank = 0; rank < exchange.size(); ++rank) {
    parts.push_back(rows_at(x, 1, exchange.places[rank]).reshape({-1, width}));
    sent.push_back(parts.back().size(0));
    received.push_back(batch * tokens * exchange.queries[rank].size());
  }
  const auto all =
      all_to_all(at::cat(parts), exchange.group, sent, received, label)
          .split_with_sizes(received);
  std::vector<Tensor> columns;
  for (const auto& one : all) {
    columns.push_back(
        one.view({batch, tokens, one.size(0) / (batch * tokens), width}));
  }
  return at::cat(columns, 2);
}

// Attention of this rank's heads over the tokens of its neighbours.
Tensor attend_by_heads(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const ContextParallel& context, const ContextAttentionCall& call) {
  const Exchange exchange = exchange_of(context, call);
  const auto mine = exchange.queries[exchange.rank()];
  const int64_t first_kv = exchange.kv[exchange.rank()].begin;
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
  const auto send = [&](const Tensor& x, const auto& heads, const char* what) {
    return exchange_tokens(x, heads, exchange, call.label + what);
  };
  const auto q = send(query, exchange.queries, " heads of queries");
  const auto k = send(key, exchange.kv, " heads of keys");
  const auto v = send(value, exchange.kv, " heads of values");
  return exchange_heads(
      attend_to_blocks(q, k, v, context, here), exchange,
      call.label + " heads of outputs");
}

}  // namespace

Tensor context_attention(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const ContextParallel& context, const ContextAttentionCall& call) {
  if (context.heads.size() > 1) {
    return attend_by_heads(query, key, value, context, call);
  }
  return attend_to_blocks(query, key, value, context, call);
}

}  // namespace echelon
