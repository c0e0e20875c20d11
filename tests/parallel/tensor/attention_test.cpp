#include "echelon/parallel/tensor/attention.h"

#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <map>
#include <mutex>

#include "echelon/counting/meta_mode.h"
#include "echelon/layers/computing_device.h"
#include "echelon/parallel/tensor/dropout.h"
#include "echelon/parallel/tensor/shared_gradients.h"
#include "tests/parallel/tensor/parts.h"
#include "tests/support/error_text.h"

namespace echelon::attention_test {

using testing::HasSubstr;
using torch::Tensor;

constexpr int64_t kBatch = 3;
constexpr int64_t kSequence = 7;
constexpr uint64_t kSeed = 11;

struct Case {
  const char* name;
  AttentionOptions options;
};

AttentionOptions gpt(int64_t hidden, int64_t heads) {
  return {.shape = {.hidden = hidden, .heads = heads}};
}

AttentionOptions llama(int64_t hidden, int64_t heads, int64_t kv_heads) {
  return {
      .shape = {.hidden = hidden, .heads = heads, .kv_heads = kv_heads},
      .fused = false,
      .bias = false,
      .rotary = RotaryOptions{.theta = 100}};
}

AttentionOptions with_dropout(AttentionOptions options) {
  options.dropout = 0.3;
  return options;
}

Tensor test_documents() {
  return torch::tensor(
      {{0, 0, 0, 1, 1, 1, 1}, {5, 5, 6, 7, 7, 7, 8}, {2, 2, 2, 2, 2, 2, 2}},
      torch::kInt64);
}

AttentionFrame frame_of(const Tensor& x, const Tensor& documents) {
  AttentionFrame frame{
      .batch = kBatch,
      .sequence = kSequence,
      .keys = torch::tensor({21, 22, 23}, torch::kInt64)};
  if (documents.defined()) {
    frame.mask = document_mask(documents, x.scalar_type());
  }
  return frame;
}

Tensor input_of(const AttentionOptions& options) {
  return parity::random({kBatch, kSequence, options.shape.hidden}, 7);
}

// The reference on one device.
struct Whole {
  explicit Whole(const AttentionOptions& options, const Tensor& documents)
      : layer(options, {}, "attn"),
        x(input_of(options).requires_grad_()),
        weights(parity::random(x.sizes(), 8)) {
    parity::give_parts(layer, kSeed);
    output = layer.forward(x, frame_of(x, documents));
    (output * weights).sum().backward();
    for (const auto& item : layer.named_parameters()) {
      parameters[item.key()] = item.value();
    }
  }
  ParallelAttention layer;
  Tensor x, weights, output;
  parity::NamedTensors parameters;
};

void expect_one_device(
    const AttentionOptions& options, const Whole& whole,
    const Tensor& documents, const TensorParallel& parallel, bool joined) {
  ParallelAttention layer(options, parallel, "attn");
  parity::give_parts(layer, kSeed);
  if (joined) parity::join_parameters(layer);
  const auto x = parity::part_of_tokens(whole.x.detach(), parallel)
                     .clone()
                     .requires_grad_();
  const auto y = layer.forward(x, frame_of(x, documents));
  (y * parity::part_of_tokens(whole.weights, parallel)).sum().backward();
  SharedGradients(layer, parallel).finish();
  parity::expect_tensor(
      "output", parity::part_of_tokens(whole.output, parallel), y);
  parity::expect_tensor(
      "gradient of the input", parity::part_of_tokens(whole.x.grad(), parallel),
      x.grad());
  parity::expect_parts(layer, whole.parameters);
  if (options.fused || options.latent) return;
  EXPECT_EQ(
      parity::were_joined(layer, "q_proj.weight", "v_proj.weight"), joined);
}

// ------------------------------------------------ by the formula, head by head

struct Weights {
  Tensor q, k, v, o;                      // [out, in]
  Tensor q_bias, k_bias, v_bias, o_bias;  // or undefined
};

Weights
weights_of(const AttentionOptions& options, const parity::NamedTensors& all) {
  const auto& shape = options.shape;
  const int64_t size = shape.size_of_head();
  const int64_t kv = shape.num_kv_heads() * size;
  const int64_t q = shape.heads * size;
  if (!options.fused) {
    return {
        all.at("q_proj.weight"), all.at("k_proj.weight"),
        all.at("v_proj.weight"), all.at("o_proj.weight")};
  }
  const auto in = all.at("c_attn.weight").t().split_with_sizes({q, kv, kv});
  const auto bias = all.at("c_attn.bias").split_with_sizes({q, kv, kv});
  return {in[0],   in[1],   in[2],   all.at("c_proj.weight").t(),
          bias[0], bias[1], bias[2], all.at("c_proj.bias")};
}

// One head's [sequence, size], turned position by position as complex numbers.
Tensor turned(const Tensor& x, double theta) {
  const int64_t half = x.size(1) / 2;
  auto y = torch::empty_like(x);
  for (int64_t p = 0; p < x.size(0); ++p) {
    for (int64_t i = 0; i < half; ++i) {
      const double angle = p * std::pow(theta, -2.0 * i / x.size(1));
      const double a = x[p][i].item<double>();
      const double b = x[p][i + half].item<double>();
      y[p][i] = a * std::cos(angle) - b * std::sin(angle);
      y[p][i + half] = b * std::cos(angle) + a * std::sin(angle);
    }
  }
  return y;
}

Tensor by_formula(
    const AttentionOptions& options, const Weights& w, const Tensor& x,
    const Tensor& documents) {
  const auto& shape = options.shape;
  const int64_t size = shape.size_of_head();
  const auto q = at::linear(x, w.q, w.q_bias);
  const auto k = at::linear(x, w.k, w.k_bias);
  const auto v = at::linear(x, w.v, w.v_bias);
  auto all = torch::zeros_like(q);
  for (int64_t b = 0; b < kBatch; ++b) {
    auto allowed = torch::ones({kSequence, kSequence}, torch::kBool).tril();
    if (documents.defined()) {
      allowed &= documents[b].unsqueeze(0) == documents[b].unsqueeze(1);
    }
    for (int64_t h = 0; h < shape.heads; ++h) {
      const int64_t kv = h * shape.num_kv_heads() / shape.heads;
      auto query = q[b].narrow(1, h * size, size);
      auto key = k[b].narrow(1, kv * size, size);
      if (options.rotary) {
        query = turned(query, options.rotary->theta);
        key = turned(key, options.rotary->theta);
      }
      const auto scores =
          (query.mm(key.t()) / std::sqrt(static_cast<double>(size)))
              .masked_fill(~allowed, -std::numeric_limits<double>::infinity());
      all[b]
          .narrow(1, h * size, size)
          .copy_(scores.softmax(1).mm(v[b].narrow(1, kv * size, size)));
    }
  }
  return at::linear(all, w.o, w.o_bias);
}

void expect_formula(const AttentionOptions& options, const Tensor& documents) {
  const torch::NoGradGuard no_grad;
  const auto x = input_of(options);
  ParallelAttention layer(options, {}, "attn");
  const auto weights = weights_of(options, parity::give_parts(layer, kSeed));
  const auto got = layer.forward(x, frame_of(x, documents));
  const auto expected = by_formula(options, weights, x, documents);
  // The frequencies of rotary embedding are float32, as Hugging Face's.
  const double tolerance = options.rotary ? 1e-5 : 1e-12;
  EXPECT_LT((got - expected).abs().max().item<double>(), tolerance);
}

TEST(Attention, MatchesTheFormula) {
  for (const auto& documents : {Tensor(), test_documents()}) {
    expect_formula(gpt(12, 3), documents);
    expect_formula(llama(24, 4, 4), documents);
    expect_formula(llama(24, 6, 2), documents);
    expect_formula(llama(24, 4, 1), documents);
  }
}

// The formula, with the probabilities of each head dropped as dropout.h says.
TEST(Attention, DropoutDropsProbabilities) {
  const torch::NoGradGuard no_grad;
  const auto options = gpt(4, 2);
  const auto dropping = with_dropout(options);
  ParallelAttention layer(dropping, {}, "attn");
  const auto weights = weights_of(options, parity::give_parts(layer, kSeed));
  const auto x = input_of(options);
  const auto frame = frame_of(x, {});
  const auto in = at::linear(x, weights.q, weights.q_bias);
  const auto heads = [](const Tensor& all) {
    return all.view({kBatch, kSequence, 2, 2}).transpose(1, 2);
  };
  const auto scores =
      heads(in).matmul(
          heads(at::linear(x, weights.k, weights.k_bias)).transpose(2, 3)) /
      std::sqrt(2.0);
  const auto allowed = torch::ones({kSequence, kSequence}, torch::kBool).tril();
  const auto shares =
      scores.masked_fill(~allowed, -std::numeric_limits<double>::infinity())
          .softmax(3);
  const auto kept = detail::keep_mask(
      shares, frame.keys, {0.3, dropout_stream("attn.attn_dropout")}, {});
  const auto out = (shares * kept / 0.7)
                       .matmul(heads(at::linear(x, weights.v, weights.v_bias)))
                       .transpose(1, 2)
                       .flatten(2);
  const auto expected = at::linear(out, weights.o, weights.o_bias);
  EXPECT_TRUE(torch::allclose(layer.forward(x, frame), expected, 1e-12, 1e-13));
  layer.eval();
  EXPECT_FALSE(torch::allclose(layer.forward(x, frame), expected));
}

class AttentionParity : public testing::TestWithParam<parity::Way> {};
INSTANTIATE_TEST_SUITE_P(
    Ways, AttentionParity, testing::ValuesIn(parity::ways()),
    testing::PrintToStringParamName());

const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {"gpt, heads that divide", gpt(24, 12)},
      {"gpt, uneven heads", gpt(20, 5)},
      {"llama, as many", llama(24, 6, 6)},
      {"llama, one head of keys", llama(20, 5, 1)},
      {"llama, fewer heads of keys than ranks", llama(24, 6, 2)},
      {"llama, cut within a group", llama(48, 12, 4)},
      {"llama, other size of head",
       {.shape = {.hidden = 10, .heads = 4, .kv_heads = 2, .head_size = 6},
        .fused = false,
        .rotary = RotaryOptions{}}},
      {"gpt, dropout", with_dropout(gpt(20, 5))},
      {"llama, dropout", with_dropout(llama(24, 6, 2))},
      {"fused, grouped", {.shape = {.hidden = 20, .heads = 10, .kv_heads = 2}}},
  };
  return all;
}

TEST_P(AttentionParity, GradientsMatchOneDevice) {
  for (const auto& [name, options] : cases()) {
    for (const auto& documents : {Tensor(), test_documents()}) {
      SCOPED_TRACE(name);
      const Whole whole(options, documents);
      parity::on_ranks(GetParam(), [&](const TensorParallel& parallel) {
        for (const bool joined : {false, true}) {
          expect_one_device(options, whole, documents, parallel, joined);
        }
      });
    }
  }
}

// Every index of every parameter is owned by one rank.
TEST_P(AttentionParity, EachElementHasOneOwner) {
  for (const auto& [name, options] : cases()) {
    std::map<std::string, Tensor> owners;
    std::mutex mutex;
    parity::on_ranks(GetParam(), [&](const TensorParallel& parallel) {
      ParallelAttention module(options, parallel, "attn");
      for (const auto& [parameter, shard] : shards_of(module)) {
        const std::lock_guard lock(mutex);
        auto& count = owners[parameter];
        if (!count.defined()) count = torch::zeros(shard.shard.shape);
        for (const auto& range : shard.shard.owned) {
          count.narrow(shard.shard.dim, range.begin, range.size()).add_(1);
        }
      }
    });
    for (const auto& [parameter, count] : owners) {
      EXPECT_TRUE(count.equal(torch::ones_like(count))) << name << parameter;
    }
  }
}

TEST(Attention, TokenByTokenMatchesTheWhole) {
  const torch::NoGradGuard no_grad;
  for (const auto& [name, options] : cases()) {
    SCOPED_TRACE(name);
    ParallelAttention module(options, {}, "attn");
    module.eval();
    parity::give_parts(module, kSeed);
    const auto x = input_of(options);
    const auto whole =
        module.forward(x, {.batch = kBatch, .sequence = kSequence});
    KeyValueCache cache;
    std::vector<Tensor> parts;
    for (const int64_t count : {2, 1, 3, 1}) {
      const auto part = x.narrow(1, cache.length, count);
      parts.push_back(module.forward(
          part, {.batch = kBatch, .sequence = count, .cache = &cache}));
    }
    EXPECT_EQ(cache.length, kSequence);
    EXPECT_TRUE(torch::allclose(torch::cat(parts, 1), whole, 1e-12, 1e-13));
  }
}

TEST(Attention, NamesWrongShapes) {
  const auto error = [](const AttentionShape& shape, int64_t tp) {
    return error_text<ConfigError>([&] { check_attention(shape, tp); });
  };
  EXPECT_THAT(
      error({.hidden = 20, .heads = 5}, 8),
      HasAll("tp=8", "heads=5", "1 to 5"));
  EXPECT_THAT(
      error({.hidden = 20, .heads = 6}, 1),
      HasAll("hidden_size=20", "heads=6", "5 or 10"));
  EXPECT_THAT(
      error({.hidden = 24, .heads = 6, .kv_heads = 4}, 1),
      HasAll("kv_heads=4", "1, 2, 3 or 6"));
  EXPECT_THAT(error({.hidden = 24, .heads = 0}, 1), HasSubstr("heads=0"));
}

TEST(Attention, NamesAnInputOfAnotherShape) {
  ParallelAttention module(gpt(12, 3), {}, "transformer.h.0.attn");
  EXPECT_THAT(
      error_text<ConfigError>([&] {
        module.forward(torch::zeros({2, 5, 12}), {.batch = 2, .sequence = 6});
      }),
      HasAll("transformer.h.0.attn", "[2, 5, 12]", "[2, 6, 12]"));
}

TEST(Attention, AnEmptyBatchIsEmpty) {
  for (const auto& [name, options] : cases()) {
    ParallelAttention module(options, {}, "attn");
    const auto y = module.forward(
        torch::zeros({0, 4, options.shape.hidden}),
        {.batch = 0, .sequence = 4, .keys = torch::zeros({0}, torch::kInt64)});
    EXPECT_EQ(y.sizes(), at::IntArrayRef({0, 4, options.shape.hidden}));
  }
}

// Heads of keys that reach CUDA's kernels, of a model with one for four of
// queries.
int64_t heads_of_keys_on_gpus(torch::Dtype dtype, bool documents) {
  const CountedFor gpu(torch::kCUDA);
  LayerList layers;
  layers.add(
      "attn",
      [dtype] {
        auto module = std::make_shared<ParallelAttention>(
            llama(16, 4, 1), TensorParallel{}, "attn");
        module->to(dtype);
        return module;
      },
      [](ParallelAttention& layer, const Tensor& x) {
        return layer.forward(x, {.batch = kBatch, .sequence = kSequence});
      });
  const auto module = std::dynamic_pointer_cast<ParallelAttention>(
      counting::build_on_meta(layers[0]).module);
  static thread_local int64_t heads;
  heads = 0;
  const auto callback = at::addThreadLocalCallback(
      at::RecordFunctionCallback(
          [](const at::RecordFunction& call)
              -> std::unique_ptr<at::ObserverContext> {
            if (std::string(call.name()) ==
                "aten::scaled_dot_product_attention") {
              heads = call.inputs()[1].toTensor().size(1);
            }
            return nullptr;
          })
          .needsInputs(true));
  const Tensor x = torch::empty(
      {kBatch, kSequence, 16}, torch::dtype(dtype).device(torch::kMeta));
  AttentionFrame frame{.batch = kBatch, .sequence = kSequence};
  if (documents) {
    frame.mask = document_mask(
        torch::empty(
            {kBatch, kSequence},
            torch::dtype(torch::kInt64).device(torch::kMeta)),
        dtype);
  }
  module->forward(x, frame);
  at::removeCallback(callback);
  return heads;
}

TEST(Attention, GpusShareHeadsOfKeysWhereTheirKernelDoes) {
  EXPECT_EQ(heads_of_keys_on_gpus(torch::kBFloat16, false), 1);
  EXPECT_EQ(heads_of_keys_on_gpus(torch::kHalf, false), 1);
  EXPECT_EQ(heads_of_keys_on_gpus(torch::kFloat32, false), 4);
  EXPECT_EQ(heads_of_keys_on_gpus(torch::kFloat64, false), 4);
  EXPECT_EQ(heads_of_keys_on_gpus(torch::kBFloat16, true), 4);
}

}  // namespace echelon::attention_test
