// Embeddings, losses and accuracy over a sharded vocabulary.
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <limits>
#include <optional>

#include "echelon/counting/meta_mode.h"
#include "echelon/error.h"
#include "echelon/parallel/tensor/vocab.h"
#include "echelon/profiling/operator_scope.h"
#include "tests/parallel/tensor/parts.h"
#include "tests/support/error_text.h"

namespace echelon::vocab_test {

using parity::on_ranks;
using parity::random;
using testing::HasSubstr;
using torch::Tensor;

constexpr int64_t kVocabulary = 11;  // uneven over 2, 3 and 4 ranks

Tensor ids() {
  return torch::tensor({{0, 10, 3, 3, 5}, {6, 7, 10, 0, 2}}, torch::kInt64);
}

// This rank's part of the last dimension.
Tensor here(const Tensor& whole, const TensorParallel& tp) {
  const auto mine = tp.part_of(whole.size(-1));
  return whole.narrow(-1, mine.begin, mine.size());
}

class VocabParity : public testing::TestWithParam<parity::Way> {};

TEST_P(VocabParity, Embedding) {
  on_ranks(GetParam(), [](const TensorParallel& tp) {
    for (const int64_t vocabulary : {kVocabulary, int64_t{3}}) {
      VocabParallelEmbedding layer(vocabulary, 6, tp, "wte");
      const auto tokens = ids().remainder(vocabulary);
      const auto whole = parity::give_parts(layer, 1);
      const auto cotangent = random({2, 5, 6}, 2);
      const auto y = at::embedding(whole.at("weight"), tokens);
      y.backward(cotangent);
      const auto own = layer.forward(tokens);
      parity::expect_tensor(
          "y", parity::part_of_tokens(y.detach(), tp), own, parity::kExact);
      own.backward(parity::part_of_tokens(cotangent, tp));
      parity::expect_parts(layer, whole);
    }
  });
}

TEST_P(VocabParity, Positions) {
  on_ranks(GetParam(), [](const TensorParallel& tp) {
    PositionEmbedding layer(7, 6, tp);
    const auto whole = parity::give_parts(layer, 1);
    parity::expect_layer(
        layer, tp, whole,
        {.x = random({2, 5, 6}, 2), .cotangent = random({2, 5, 6}, 3)},
        [&](const Tensor& x) { return x + whole.at("weight").narrow(0, 0, 5); },
        [&](const Tensor& x) { return layer.forward(x, ids()); },
        parity::kExact);
  });
}

// A loss whose gradient is `gradient`, as the loss on a GPU makes it: nobody
// else has its memory, and there is something behind each of its rows.
class GradientWithRoom : public torch::autograd::Function<GradientWithRoom> {
 public:
  static Tensor forward(
      torch::autograd::AutogradContext* context, const Tensor& rows,
      const Tensor& gradient, int64_t room) {
    context->saved_data["gradient"] = gradient;
    context->saved_data["room"] = room;
    return rows.sum();
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      const torch::autograd::variable_list&) {
    const auto gradient = context->saved_data["gradient"].toTensor();
    const int64_t width = gradient.size(1);
    const auto whole = torch::full(
        {gradient.size(0), width + context->saved_data["room"].toInt()},
        std::numeric_limits<double>::quiet_NaN(), gradient.options());
    const auto rows = whole.narrow(1, 0, width).copy_(gradient);
    detail::allow_widening(rows);
    return {rows, Tensor(), Tensor()};
  }
};

// How often an operator runs while it lives.
class Calls : public profiling::OperatorHandler {
 public:
  explicit Calls(std::string name) : name_(std::move(name)), scope_(*this) {}
  void run(profiling::OperatorCall& call) override {
    count += call.name() == name_;
    call.run();
  }
  int count = 0;

 private:
  std::string name_;
  profiling::OperatorScope scope_;
};

// The matmuls of the logits are wider than the vocabulary. A gradient with room
// for their columns is taken as it is; another one is copied.
TEST_P(VocabParity, LogitsOfPaddedMatmuls) {
  on_ranks(GetParam(), [](const TensorParallel& tp) {
    const auto x = random({2, 5, 6}, 1);
    const auto weight = random({kVocabulary, 6}, 2);
    const auto cotangent = random({10, kVocabulary}, 3);
    const auto mine = tp.part_of(kVocabulary);
    const auto exact_x = x.clone().requires_grad_();
    const auto exact_weight = weight.clone().requires_grad_();
    const auto exact = at::linear(exact_x, exact_weight).flatten(0, 1);
    exact.backward(cotangent);
    for (const int64_t room : {0, 3, 5}) {
      const auto own_x = parity::part_of_tokens(x, tp).clone().requires_grad_();
      const auto own_weight =
          weight.narrow(0, mine.begin, mine.size()).clone().requires_grad_();
      const auto logits = detail::padded_logits(
          own_x, own_weight, /*padding=*/5, tp, /*tokens=*/10, "head");
      const auto rows = logits.reshape({10, mine.size()});
      parity::expect_tensor("logits", here(exact.detach(), tp), rows, 1e-14);
      const auto loss =
          GradientWithRoom::apply(rows, here(cotangent, tp).contiguous(), room);
      const Calls pads("aten::constant_pad_nd");
      loss.backward();
      // The weight's gradient is one, with negative padding.
      EXPECT_EQ(pads.count, room == 5 ? 1 : 2) << room;
      parity::expect_tensor(
          "x", parity::part_of_tokens(exact_x.grad(), tp), own_x.grad(), 1e-14);
      parity::expect_tensor(
          "weight", exact_weight.grad().narrow(0, mine.begin, mine.size()),
          own_weight.grad(), 1e-14);
    }
  });
}

TEST(VocabLogits, AGradientWhoseMemoryOthersSeeIsCopied) {
  const auto x = random({3, 4}, 1).requires_grad_();
  const auto weight = random({6, 4}, 2).requires_grad_();
  const auto whole = torch::ones({3, 8}, x.options().requires_grad(false));
  detail::padded_logits(x, weight, 2, {}, 3, "head")
      .backward(whole.narrow(1, 0, 6));
  EXPECT_TRUE(whole.eq(1).all().item<bool>());
  EXPECT_TRUE(torch::allclose(
      x.grad(), torch::ones({3, 6}, whole.options()).mm(weight.detach())));
}

TEST_P(VocabParity, CrossEntropy) {
  on_ranks(GetParam(), [](const TensorParallel& tp) {
    for (const int64_t vocabulary : {kVocabulary, int64_t{3}}) {
      auto whole = (random({2, 5, vocabulary}, 1) * 30).requires_grad_();
      auto targets = ids().remainder(vocabulary);
      targets[0][2] = -100;
      targets[1][4] = -100;
      const auto weights = random({2, 5}, 2);
      const auto expected =
          at::cross_entropy_loss(
              whole.flatten(0, 1), targets.flatten(), {}, at::Reduction::None)
              .view({2, 5});
      expected.backward(weights);

      auto logits = here(whole, tp).detach().clone().requires_grad_();
      const auto losses = vocab_cross_entropy(logits, targets, vocabulary, tp);
      parity::expect_tensor("losses", expected.detach(), losses);
      EXPECT_EQ(losses[0][2].item<double>(), 0);
      losses.backward(weights);
      parity::expect_tensor("gradient", here(whole.grad(), tp), logits.grad());
    }
  });
}

TEST_P(VocabParity, CrossEntropyOfLargeLogits) {
  on_ranks(GetParam(), [](const TensorParallel& tp) {
    const double infinity = std::numeric_limits<double>::infinity();
    auto whole = torch::tensor(
        {{1e4, -1e4, 0.0, 5.0},
         {-infinity, 2.0, -infinity, 1.0},
         {900.0, 901.0, -3.0, 7.0}},
        torch::kFloat64);
    whole = whole.requires_grad_();
    const auto targets = torch::tensor({0, 3, -7}, torch::kInt64);
    const auto expected = at::cross_entropy_loss(
        whole, targets, {}, at::Reduction::None, /*ignore_index=*/-7);
    expected.sum().backward();
    auto logits = here(whole, tp).detach().clone().requires_grad_();
    const auto losses = vocab_cross_entropy(logits, targets, 4, tp, -7);
    parity::expect_tensor("losses", expected.detach(), losses);
    losses.sum().backward();
    parity::expect_tensor("gradient", here(whole.grad(), tp), logits.grad());
  });
}

TEST_P(VocabParity, Argmax) {
  on_ranks(GetParam(), [](const TensorParallel& tp) {
    auto whole = random({2, 5, kVocabulary}, 1);
    whole[0][1].fill_(2.5);  // all equal: the first
    whole[1][2][4] = 50;
    whole[1][2][9] = 50;
    for (const auto dtype : {torch::kFloat64, torch::kBFloat16}) {
      const auto logits = whole.to(dtype);
      const auto best = vocab_argmax(here(logits, tp), kVocabulary, tp);
      EXPECT_TRUE(best.equal(logits.argmax(-1))) << best;
      EXPECT_EQ(best.scalar_type(), torch::kInt64);
    }
    EXPECT_EQ(
        vocab_argmax(here(whole, tp), kVocabulary, tp)[1][2].item<int64_t>(),
        4);
  });
}

TEST_P(VocabParity, MetaTensors) {
  on_ranks(GetParam(), [](const TensorParallel& tp) {
    const auto meta = torch::TensorOptions(torch::kMeta);
    std::optional<counting::detail::MetaMode> without_memory(std::in_place);
    VocabParallelEmbedding embedding(kVocabulary, 6, tp, "wte");
    PositionEmbedding positions(7, 6, tp);
    without_memory.reset();
    const auto tokens = torch::empty({2, 5}, meta.dtype(torch::kInt64));
    const auto x = positions.forward(embedding.forward(tokens), tokens);
    EXPECT_EQ(
        x.sizes(), parity::part_of_tokens(torch::empty({2, 5, 6}), tp).sizes());
    x.sum().backward();
    EXPECT_EQ(embedding.weight.grad().sizes(), embedding.weight.sizes());

    const auto logits = torch::empty(
        {2, 5, tp.part_of(kVocabulary).size()}, meta.requires_grad(true));
    const auto loss = vocab_cross_entropy(logits, tokens, kVocabulary, tp);
    EXPECT_EQ(loss.sizes(), tokens.sizes());
    loss.sum().backward();
    EXPECT_EQ(logits.grad().sizes(), logits.sizes());
    EXPECT_EQ(vocab_argmax(logits, kVocabulary, tp).sizes(), tokens.sizes());
  });
}

INSTANTIATE_TEST_SUITE_P(
    Ways, VocabParity, testing::ValuesIn(parity::ways()),
    testing::PrintToStringParamName());

TEST(VocabCrossEntropy, LowPrecisionIsSummedInFloat32) {
  for (const auto dtype : {torch::kFloat32, torch::kBFloat16, torch::kHalf}) {
    const auto exact = (random({70, 1000}, 1) * 4).to(dtype);
    const auto targets = torch::arange(70).mul(13);
    auto whole = exact.to(torch::kFloat64).requires_grad_();
    const auto expected =
        at::cross_entropy_loss(whole, targets, {}, at::Reduction::None);
    expected.sum().backward();
    auto logits = exact.detach().clone().requires_grad_();
    const auto losses = vocab_cross_entropy(logits, targets, 1000, {});
    EXPECT_EQ(losses.scalar_type(), torch::kFloat32);
    parity::expect_tensor("losses", expected, losses, 1e-6);
    losses.sum().backward();
    EXPECT_EQ(logits.grad().scalar_type(), dtype);
    parity::expect_tensor(
        "gradient", whole.grad(), logits.grad(),
        dtype == torch::kFloat32 ? 1e-5 : 0.004);
  }
}

TEST(VocabCrossEntropy, BackwardTwiceWhenTheGraphIsKept) {
  auto logits = random({3, 5}, 1).requires_grad_();
  const auto loss = vocab_cross_entropy(logits, torch::arange(3), 5, {}).sum();
  loss.backward({}, /*retain_graph=*/true);
  const auto once = logits.grad().clone();
  loss.backward();
  parity::expect_tensor("gradient", once * 2, logits.grad());
}

TEST(VocabErrors, NamePositionAndValue) {
  on_ranks({2}, [](const TensorParallel& tp) {
    VocabParallelEmbedding embedding(kVocabulary, 6, tp, "transformer.wte");
    auto wrong = ids();
    wrong[1][3] = 11;
    EXPECT_THAT(
        error_text<DataError>([&] { embedding.forward(wrong); }),
        HasSubstr("[transformer.wte] token 3 of sample 1 is 11, but the "
                  "vocabulary has ids 0 to 10"));
    wrong[1][3] = -1;
    EXPECT_THAT(
        error_text<DataError>([&] { embedding.forward(wrong); }),
        HasSubstr("token 3 of sample 1 is -1"));
    EXPECT_THAT(
        error_text<ConfigError>([&] { embedding.forward(wrong[0]); }),
        HasSubstr("[batch, sequence]"));

    const auto logits = random({2, 5, tp.part_of(kVocabulary).size()}, 1);
    EXPECT_THAT(
        error_text<DataError>(
            [&] { vocab_cross_entropy(logits, wrong, kVocabulary, tp); }),
        HasSubstr("[lm_head targets] token 3 of sample 1 is -1"));
    EXPECT_THAT(
        error_text<ConfigError>(
            [&] { vocab_cross_entropy(logits, wrong, 40, tp); }),
        HasSubstr("has 20 of the vocabulary's 40"));
    EXPECT_THAT(
        error_text<ConfigError>(
            [&] { vocab_cross_entropy(logits, wrong[0], kVocabulary, tp); }),
        HasSubstr("5 targets for 10 rows"));

    PositionEmbedding positions(4, 6, tp);
    EXPECT_THAT(
        error_text<ConfigError>([&] {
          positions.forward(torch::zeros({2, 5, 6}), ids());
        }),
        HasSubstr("a sequence of 5 tokens is longer than positions=4"));
  });
}

}  // namespace echelon::vocab_test
