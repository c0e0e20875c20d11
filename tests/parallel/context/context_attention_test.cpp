// Attention over cut sequences against the formula on one device, in float64.
#include "echelon/parallel/context/attention.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "echelon/comm/mesh_groups.h"
#include "echelon/comm/trace/record.h"
#include "echelon/comm/world.h"
#include "echelon/error.h"
#include "tests/parallel/context/block_cases.h"
#include "tests/support/error_text.h"
#include "tests/support/parity.h"

namespace echelon::context_attention_test {

using testing::HasSubstr;
using torch::Tensor;

constexpr int64_t kBatch = 2;
constexpr int64_t kSize = 4;

struct Case {
  const char* name = "";
  int64_t sequence = 13;
  std::vector<int64_t> kv_of_query = {0, 1, 2, 3};
  bool documents = false;
  double dropout = 0;
  int64_t window = 0;
  double scale = 0.5;
  double softcap = 0;
};

void PrintTo(const Case& one, std::ostream* out) {
  *out << one.name;
}

// Some borders that no cut is at, in one sample alone.
Tensor documents_of(const Case& one) {
  if (!one.documents) return {};
  auto documents = torch::zeros({kBatch, one.sequence}, torch::kInt64);
  documents[0].narrow(0, 3, one.sequence - 3).fill_(1);
  documents[0].narrow(0, one.sequence - 2, 2).fill_(2);
  return documents;
}

// A mask that depends on positions alone: [heads, sequence, sequence].
Tensor kept_of(const Case& one) {
  const auto heads = static_cast<int64_t>(one.kv_of_query.size());
  return parity::random({heads, one.sequence, one.sequence}, 77).gt(-0.5);
}

struct Whole {
  explicit Whole(const Case& one)
      : query(input(one, static_cast<int64_t>(one.kv_of_query.size()), 1)),
        key(input(one, one.kv_of_query.back() + 1, 2)),
        value(input(one, one.kv_of_query.back() + 1, 3)),
        weights(parity::random(query.sizes(), 4)) {
    const auto heads = torch::tensor(one.kv_of_query, torch::kInt64);
    const auto q = query.transpose(1, 2);
    const auto k = key.transpose(1, 2).index_select(1, heads);
    const auto v = value.transpose(1, 2).index_select(1, heads);
    auto hidden =
        torch::ones({one.sequence, one.sequence}, torch::kBool).triu(1);
    if (const auto documents = documents_of(one); documents.defined()) {
      hidden = hidden |
               documents.unsqueeze(2).ne(documents.unsqueeze(1)).unsqueeze(1);
    }
    if (one.window > 0) {
      hidden = hidden | torch::ones({one.sequence, one.sequence}, torch::kBool)
                            .tril(-one.window);
    }
    auto scores = torch::matmul(q, k.transpose(2, 3)) * one.scale;
    if (one.softcap > 0) {
      scores = one.softcap * (scores / one.softcap).tanh();
    }
    auto shares =
        scores.masked_fill(hidden, -std::numeric_limits<double>::infinity())
            .softmax(-1);
    if (one.dropout > 0) shares = shares * kept_of(one) / (1 - one.dropout);
    out = torch::matmul(shares, v).transpose(1, 2);
    (out * weights).sum().backward();
  }

  static Tensor input(const Case& one, int64_t heads, uint64_t seed) {
    return parity::random({kBatch, one.sequence, heads, kSize}, seed)
        .requires_grad_();
  }

  Tensor query, key, value, weights, out;
};

ContextAttentionCall call_of(const Case& one) {
  ContextAttentionCall call{
      .sequence = one.sequence,
      .kv_of_query = one.kv_of_query,
      .documents = documents_of(one),
      .window = one.window,
      .scale = one.scale == 0.5 ? 0 : one.scale,  // 0.5: the usual
      .softcap = one.softcap,
      .dropout = one.dropout,
      .label = "attn"};
  if (one.dropout > 0) {
    call.kept = [kept = kept_of(one)](
                    const Tensor& like, int64_t head, const IndexRange& queries,
                    const IndexRange& keys) {
      return kept.narrow(0, head, like.size(1))
          .narrow(1, queries.begin, queries.size())
          .narrow(2, keys.begin, keys.size())
          .expand(like.sizes());
    };
  }
  return call;
}

void expect_close(const char* what, const Tensor& expected, const Tensor& got) {
  ASSERT_EQ(expected.sizes(), got.sizes()) << what;
  EXPECT_LE((expected - got).abs().max().item<double>(), 1e-12) << what;
}

void expect_one_device(
    const Case& one, const Whole& whole, const ContextParallel& context) {
  const auto part = [&](const Tensor& x) {
    return context.cut(x.detach(), 1).clone().requires_grad_();
  };
  const auto q = part(whole.query), k = part(whole.key), v = part(whole.value);
  const auto out = context_attention(q, k, v, context, call_of(one));
  (out * context.cut(whole.weights, 1)).sum().backward();
  expect_close("output", context.cut(whole.out.detach(), 1), out.detach());
  expect_close("query", context.cut(whole.query.grad(), 1), q.grad());
  expect_close("key", context.cut(whole.key.grad(), 1), k.grad());
  expect_close("value", context.cut(whole.value.grad(), 1), v.grad());
}

ContextParallel context_of(World& world, const ContextParallelOptions& how) {
  const MeshGroups groups(
      world, {.cp = world.size()}, head_ranks(how, world.size()));
  return {
      groups.along(Axis::cp), how, groups.context_heads(),
      groups.context_keys()};
}

class ContextAttention : public testing::TestWithParam<Case> {};

TEST_P(ContextAttention, EqualsOneDevice) {
  const Case one = GetParam();
  const Whole whole(one);
  const auto heads = static_cast<int64_t>(one.kv_of_query.size());
  const auto expect_same = [&](int ranks, const ContextParallelOptions& how) {
    if (head_ranks(how, ranks) > heads) return;
    SCOPED_TRACE(to_string(how.way) + " on " + std::to_string(ranks));
    run_ranks(ranks, [&](World& world) {
      at::set_num_threads(1);
      expect_one_device(one, whole, context_of(world, how));
    });
  };
  for (const auto way :
       {ContextWay::ring, ContextWay::all_gather, ContextWay::ulysses}) {
    for (const int ranks : {1, 2, 3, 4}) expect_same(ranks, {way});
  }
  if (one.sequence < 6) return;
  expect_same(4, {ContextWay::ulysses_ring, 2});
  expect_same(6, {ContextWay::ulysses_ring, 2});
  expect_same(6, {ContextWay::ulysses_ring, 3});
}

INSTANTIATE_TEST_SUITE_P(
    Cases, ContextAttention,
    testing::Values(
        Case{.name = "plain"}, Case{.name = "divides", .sequence = 16},
        Case{.name = "a_token_each", .sequence = 4},
        Case{.name = "grouped", .kv_of_query = {0, 0, 1, 1}},
        Case{.name = "unevenly_grouped", .kv_of_query = {0, 0, 0, 1}},
        Case{.name = "few_heads", .kv_of_query = {0, 0}},
        Case{.name = "documents", .documents = true},
        Case{.name = "dropout", .dropout = 0.3},
        Case{.name = "window", .sequence = 16, .window = 4},
        Case{.name = "scale", .scale = 1.7},
        Case{.name = "softcap", .softcap = 0.4},
        Case{
            .name = "softcap_and_all",
            .kv_of_query = {0, 0, 1, 1},
            .documents = true,
            .dropout = 0.3,
            .window = 5,
            .scale = 1.7,
            .softcap = 0.4},
        Case{.name = "window_of_one", .window = 1},
        Case{.name = "window_of_all_but_one", .window = 12},
        Case{.name = "window_of_all", .window = 13},
        Case{
            .name = "window_and_all",
            .sequence = 17,
            .kv_of_query = {0, 0, 1, 1, 1},
            .documents = true,
            .dropout = 0.3,
            .window = 5},
        Case{
            .name = "all",
            .sequence = 17,
            .kv_of_query = {0, 0, 1, 1, 1},
            .documents = true,
            .dropout = 0.3}),
    [](const auto& one) { return std::string(one.param.name); });

TEST(ContextAttentionBlocks, MergeToTheWhole) {
  expect_merged_blocks(torch::kCPU, torch::kFloat64, 1e-12);
  expect_merged_blocks(torch::kCPU, torch::kFloat32, 1e-5);
}

// Every rank has as many scores to compute, but for a token.
TEST(ContextParallel, ZigZagCutsBalanceTheWork) {
  for (const int ranks : {2, 3, 4, 8}) {
    const int64_t sequence = 2 * ranks * 16;
    const ContextParallel context{Group::silent("cp", 0, ranks), {}};
    std::vector<bool> seen(static_cast<size_t>(sequence), false);
    int64_t first_work = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      int64_t work = 0;
      for (const auto& piece : context.pieces_of(sequence, rank)) {
        for (int64_t at = piece.begin; at < piece.end; ++at) {
          EXPECT_FALSE(seen[static_cast<size_t>(at)]);
          seen[static_cast<size_t>(at)] = true;
          work += at + 1;
        }
      }
      if (rank == 0) first_work = work;
      EXPECT_EQ(work, first_work);
    }
  }
}

// Neighbours that bring their tokens together have two pieces, too, and as much
// work as other neighbours.
TEST(ContextParallel, NeighboursHaveTwoPieces) {
  const SequenceCut ranks{12, 1}, groups{12, 3};
  for (const int64_t sequence : {12, 13, 50, 96}) {
    for (int64_t group = 0; group < groups.parts(); ++group) {
      const auto pieces = groups.pieces_of(sequence, group);
      ASSERT_EQ(pieces.size(), 2U);
      int64_t length = 0;
      for (int64_t rank = 3 * group; rank < 3 * group + 3; ++rank) {
        const auto parts = ranks.pieces_of(sequence, rank);
        for (size_t i = 0; i < 2; ++i) {
          EXPECT_LE(pieces[i].begin, parts[i].begin);
          EXPECT_GE(pieces[i].end, parts[i].end);
          length += parts[i].size();
        }
      }
      EXPECT_EQ(groups.length_of(sequence, group), length);
    }
  }
}

// A block of a ring step is one rectangle, and only a rank's own is causal.
TEST(ContextParallel, RectanglesOfARingStep) {
  const ContextParallel context{Group::silent("cp", 0, 4), {}};
  int64_t scores = 0;
  for (int rank = 0; rank < 4; ++rank) {
    for (int owner = 0; owner < 4; ++owner) {
      const auto blocks = detail::score_blocks(
          context.pieces_of(64, rank), context.pieces_of(64, owner), true);
      ASSERT_EQ(blocks.size(), 1U);
      EXPECT_EQ(blocks[0].causal, rank == owner);
      const int64_t area = blocks[0].rows.size() * blocks[0].columns.size();
      scores += blocks[0].causal ? 16 * 17 / 2 : area;
    }
  }
  EXPECT_EQ(scores, 64 * 65 / 2);
}

// With a window as long as a piece, the queries of a piece see keys of it and
// of the one before: all other steps of a ring compute nothing.
TEST(ContextParallel, StepsOutsideOfAWindowAreSkipped) {
  constexpr int64_t kWindow = 8;
  const ContextParallel context{Group::silent("cp", 0, 4), {}};
  const ContextAttentionCall call{
      .sequence = 64, .kv_of_query = {0}, .window = kWindow};
  const detail::BlockAttention attention(call, 1, torch::zeros({1, 1, 1, 4}));
  int64_t scores = 0;
  for (int rank = 0; rank < 4; ++rank) {
    for (int owner = 0; owner < 4; ++owner) {
      const auto blocks = attention.blocks_of(
          context.pieces_of(64, rank), context.pieces_of(64, owner));
      EXPECT_EQ(blocks.empty(), std::abs(rank - owner) > 1) << rank << owner;
      for (const auto& one : blocks) {
        scores += one.rows.size() * one.columns.size();
      }
    }
  }
  EXPECT_EQ(scores, 64 * kWindow + 7 * kWindow * (kWindow - 1));
}

// As doc/context_parallel.md says: keys and values go to all other ranks in
// forward and again in backward, where their gradients come back.
TEST(ContextParallel, MessagesOfARing) {
  const Case one;
  for (const int ranks : {2, 3, 4}) {
    run_ranks(ranks, [&](World& world) {
      const ContextParallel ring{world.group(), {ContextWay::ring}};
      const auto part = [&](uint64_t seed) {
        return ring.cut(Whole::input(one, 4, seed).detach(), 1)
            .clone()
            .requires_grad_();
      };
      const auto before = world.history().count();
      const auto out =
          context_attention(part(1), part(2), part(3), ring, call_of(one));
      // A message is recorded where it is sent and where it is received.
      const auto others = static_cast<uint64_t>(2 * (ranks - 1));
      EXPECT_EQ(world.history().count() - before, others);
      out.sum().backward();
      EXPECT_EQ(world.history().count() - before, 3 * others);
    });
  }
}

TEST(ContextParallel, RefusesWhatCannotBeCut) {
  run_ranks(3, [](World& world) {
    const ContextParallel ring{world.group(), {}};
    EXPECT_THAT(
        error_text<ConfigError>([&] {
          ring.cut(torch::zeros({1, 2, 4}), 1);
        }),
        HasSubstr("[layout] cp=3, but a sequence has 2 tokens"));
    const Case one{.kv_of_query = {0, 0}};
    const Whole whole(one);
    const ContextParallel heads{world.group(), {ContextWay::ulysses}};
    EXPECT_THAT(
        error_text<ConfigError>([&] { expect_one_device(one, whole, heads); }),
        HasSubstr("set context = \"ring\" or \"all_gather\", or exchange"));
  });
}

}  // namespace echelon::context_attention_test
