// Language models compared with their formulas, on one rank and sharded over
// several: logits, loss and every gradient, in float64.
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <cmath>

#include "echelon/layers/sharded_module.h"
#include "echelon/models/make_network.h"
#include "echelon/models/weights.h"
#include "echelon/parallel/tensor/shared_gradients.h"
#include "tests/models/language_case.h"
#include "tests/parallel/tensor/parts.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace echelon::language_network_test {

using namespace language_case;
using testing::HasSubstr;
using torch::Tensor;

Tensor norm_of(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  const auto mean = x.mean(-1, true);
  const auto variance = (x - mean).square().mean(-1, true);
  return (x - mean) / (variance + 1e-5).sqrt() * weight + bias;
}

Tensor rms_of(const Tensor& x, const Tensor& weight, double eps = 1e-5) {
  return x / (x.square().mean(-1, true) + eps).sqrt() * weight;
}

// [batch, sequence, heads * size] -> [batch, heads, sequence, size]
Tensor heads_of(const Tensor& x, int64_t heads) {
  return x.view({kBatch, kSequence, heads, -1}).transpose(1, 2);
}

Tensor attention_of(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& documents, int64_t window = 0, int64_t scalar = 0,
    double cap = 0) {
  const double scale =
      1 / std::sqrt(static_cast<double>(scalar > 0 ? scalar : query.size(-1)));
  auto allowed = torch::ones({kSequence, kSequence}, torch::kBool).tril();
  if (window > 0) allowed = allowed.triu(1 - window);
  if (documents.defined()) {
    allowed = allowed.logical_and(
        (documents.unsqueeze(1) == documents.unsqueeze(2)).unsqueeze(1));
  }
  auto scores = query.matmul(key.transpose(2, 3)) * scale;
  if (cap > 0) scores = cap * at::tanh(scores / cap);
  scores = scores.masked_fill(allowed.logical_not(), -INFINITY);
  return scores.softmax(-1).matmul(value).transpose(1, 2).flatten(2);
}

Tensor gelu_of(const Tensor& x) {
  return 0.5 * x *
         (1 + at::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

// [batch, heads, sequence, size]
Tensor rotated(const Tensor& x, double theta = 10000) {
  const int64_t half = x.size(-1) / 2;
  const auto powers =
      torch::arange(half, torch::kFloat64) / static_cast<double>(half);
  // Hugging Face has frequencies and angles in float32.
  const auto frequencies =
      1.0 / at::pow(at::Scalar(theta), powers.to(torch::kFloat32));
  const auto angles =
      torch::arange(kSequence, torch::kFloat32).unsqueeze(1) * frequencies;
  const auto cosine = angles.cos().to(torch::kFloat64);
  const auto sine = angles.sin().to(torch::kFloat64);
  const auto a = x.narrow(-1, 0, half);
  const auto b = x.narrow(-1, half, half);
  return torch::cat({a * cosine - b * sine, b * cosine + a * sine}, -1);
}

Tensor gpt_by_formula(const parity::NamedTensors& p, const Inputs& inputs) {
  const auto at = [&](const std::string& name) { return p.at(name); };
  const auto embedding = at("transformer.wte.weight");
  auto x = at::embedding(embedding, inputs.tokens) +
           at("transformer.wpe.weight").narrow(0, 0, kSequence);
  for (int i = 0; i < 2; ++i) {
    const auto block = "transformer.h." + std::to_string(i) + ".";
    const auto linear = [&](const Tensor& y, const std::string& name) {
      return y.matmul(at(block + name + ".weight")) +
             at(block + name + ".bias");
    };
    const auto norm = [&](const std::string& name) {
      return norm_of(
          x, at(block + name + ".weight"), at(block + name + ".bias"));
    };
    const auto qkv = linear(norm("ln_1"), "attn.c_attn").chunk(3, -1);
    x = x + linear(
                attention_of(
                    heads_of(qkv[0], 5), heads_of(qkv[1], 5),
                    heads_of(qkv[2], 5), inputs.documents),
                "attn.c_proj");
    x = x + linear(gelu_of(linear(norm("ln_2"), "mlp.c_fc")), "mlp.c_proj");
  }
  x = norm_of(x, at("transformer.ln_f.weight"), at("transformer.ln_f.bias"));
  return x.matmul(embedding.t());
}

struct Formula {
  Tensor logits;
  Tensor losses;  // [batch] of the mixtures; undefined: none
};

// Every expert computes every token; the choice is a mask of weights.
Tensor mixture_by_formula(
    const parity::NamedTensors& p, const ModelOptions& options,
    const std::string& block, const Tensor& x, Tensor& losses) {
  const bool mixtral = options.name == "mixtral";
  const auto module = block + (mixtral ? "block_sparse_moe." : "mlp.");
  const auto scores = x.matmul(p.at(module + "gate.weight").t());
  const auto shares = scores.softmax(-1);
  const auto kth = std::get<0>(shares.detach().sort(-1, /*descending=*/true))
                       .narrow(-1, options.experts_per_token - 1, 1);
  const auto chosen = shares.detach().ge(kth).to(torch::kFloat64);
  auto weights = shares * chosen;
  if (options.normalize_routing) weights = weights / weights.sum(-1, true);
  auto y = torch::zeros_like(x);
  for (int64_t e = 0; e < options.experts; ++e) {
    const auto expert = module + "experts." + std::to_string(e) + ".";
    const auto linear = [&](const Tensor& z, const char* own,
                            const char* qwen) {
      const std::string name = mixtral ? own : qwen;
      return z.matmul(p.at(expert + name + ".weight").t());
    };
    const auto gate = linear(x, "w1", "gate_proj");
    const auto inner = gate * at::sigmoid(gate) * linear(x, "w3", "up_proj");
    y = y +
        weights.select(-1, e).unsqueeze(-1) * linear(inner, "w2", "down_proj");
  }
  const double experts = static_cast<double>(options.experts);
  const double choices = static_cast<double>(options.experts_per_token);
  const auto load = chosen.mean(1) * (experts / choices);
  const auto own = options.aux_loss * (load * shares.mean(1)).sum(-1) +
                   options.z_loss * at::logsumexp(scores, -1).square().mean(1);
  losses = losses.defined() ? losses + own : own;
  return y;
}

// DeepSeek's: groups by the sum of their two highest, a bias for the choice.
Tensor biased_mixture_by_formula(
    const parity::NamedTensors& p, const ModelOptions& options,
    const std::string& block, const Tensor& x, Tensor& losses) {
  const auto module = block + "mlp.";
  const auto shares = x.matmul(p.at(module + "gate.weight").t()).sigmoid();
  auto values = shares.detach() + p.at(module + "gate.e_score_correction_bias");
  const auto in_group =
      values.view({kBatch, kSequence, options.expert_groups, -1});
  const auto of_group = std::get<0>(in_group.topk(2)).sum(-1, true);
  const auto lowest = std::get<0>(of_group.sort(-2, /*descending=*/true))
                          .narrow(-2, options.groups_per_token - 1, 1);
  values = at::where(of_group.ge(lowest), in_group, -INFINITY).flatten(-2);
  const auto kth = std::get<0>(values.topk(options.experts_per_token))
                       .narrow(-1, options.experts_per_token - 1, 1);
  const auto chosen = values.ge(kth).to(torch::kFloat64);
  EXPECT_TRUE(chosen.sum(-1).eq(options.experts_per_token).all().item<bool>());
  auto weights = shares * chosen;
  if (options.normalize_routing) weights = weights / weights.sum(-1, true);
  weights = weights * options.routing_scale;
  const auto mlp = [&](const std::string& name) {
    const auto linear = [&](const Tensor& z, const std::string& matrix) {
      return z.matmul(p.at(module + name + matrix + ".weight").t());
    };
    const auto gate = linear(x, "gate_proj");
    return linear(gate * at::sigmoid(gate) * linear(x, "up_proj"), "down_proj");
  };
  auto y = mlp("shared_experts.");
  for (int64_t e = 0; e < options.experts; ++e) {
    y = y + weights.select(-1, e).unsqueeze(-1) *
                mlp("experts." + std::to_string(e) + ".");
  }
  const double experts = static_cast<double>(options.experts);
  const double choices = static_cast<double>(options.experts_per_token);
  const auto load = chosen.mean(1) * (experts / choices);
  const auto own = options.aux_loss *
                   (load * (shares / shares.sum(-1, true)).mean(1)).sum(-1);
  losses = losses.defined() ? losses + own : own;
  return y;
}

// Before the last matrix.
Tensor latent_attention_by_formula(
    const parity::NamedTensors& p, const ModelOptions& options,
    const std::string& attention, const Tensor& x, const Tensor& documents) {
  const auto at = [&](const std::string& name) {
    return p.at(attention + name + ".weight");
  };
  const auto linear = [&](const Tensor& y, const std::string& name) {
    return y.matmul(at(name).t());
  };
  const int64_t rope = options.rope_size, nope = options.nope_size;
  // Neighbours are pairs. Their order in the results does not matter, since
  // queries and keys have the same.
  const auto turned = [&](const Tensor& y) {
    return rotated(
        torch::cat({y.slice(-1, 0, rope, 2), y.slice(-1, 1, rope, 2)}, -1));
  };
  const auto query = heads_of(
      options.query_rank == 0
          ? linear(x, "q_proj")
          : linear(
                rms_of(linear(x, "q_a_proj"), at("q_a_layernorm"), 1e-6),
                "q_b_proj"),
      options.heads);
  const auto low = linear(x, "kv_a_proj_with_mqa");
  const auto key_value = heads_of(
      linear(
          rms_of(
              low.narrow(-1, 0, options.key_value_rank), at("kv_a_layernorm"),
              1e-6),
          "kv_b_proj"),
      options.heads);
  const auto shared =
      turned(heads_of(low.narrow(-1, options.key_value_rank, rope), 1));
  return attention_of(
      torch::cat(
          {query.narrow(-1, 0, nope), turned(query.narrow(-1, nope, rope))},
          -1),
      torch::cat(
          {key_value.narrow(-1, 0, nope),
           shared.expand({-1, options.heads, -1, -1})},
          -1),
      key_value.narrow(-1, nope, options.value_size), documents);
}

Formula llama_by_formula(
    const parity::NamedTensors& p, const ModelOptions& options,
    const Inputs& inputs) {
  const auto at = [&](const std::string& name) { return p.at(name); };
  const auto embedding = at("model.embed_tokens.weight");
  Formula result;
  const bool gemma = options.name.starts_with("gemma");
  const bool post_norms = options.name == "gemma2" || options.name == "gemma3";
  const auto norm = [&](const Tensor& y, const std::string& name) {
    const auto weight = at(name + ".weight");
    return rms_of(y, gemma ? 1 + weight : weight);
  };
  auto x = at::embedding(embedding, inputs.tokens);
  if (gemma) x = x * std::sqrt(24.0);
  for (int i = 0; i < 2; ++i) {
    const auto block = "model.layers." + std::to_string(i) + ".";
    const auto linear = [&](const Tensor& y, const std::string& name) {
      const auto product = y.matmul(at(block + name + ".weight").t());
      const auto bias = p.find(block + name + ".bias");
      return bias == p.end() ? product : product + bias->second;
    };
    const auto y = norm(x, block + "input_layernorm");
    const auto heads = [&](const std::string& name, int64_t count) {
      auto own = heads_of(linear(y, "self_attn." + name + "_proj"), count);
      const auto weight = p.find(block + "self_attn." + name + "_norm.weight");
      if (weight == p.end()) return own;
      return rms_of(own, gemma ? 1 + weight->second : weight->second);
    };
    // Every second block of gemma2 and gemma3 sees all tokens.
    const bool global = post_norms && i == 1;
    const auto turned = [&](const Tensor& own) {
      return rotated(
          own, options.name == "gemma3" && !global ? options.rope_local_theta
                                                   : 10000);
    };
    const auto after = [&](const Tensor& own, const std::string& name) {
      return post_norms ? norm(own, block + name) : own;
    };
    const auto shared = [&](const Tensor& own) {
      return own.repeat_interleave(3, 1);
    };
    const bool latent = options.key_value_rank > 0;
    const auto attended = linear(
        latent ? latent_attention_by_formula(
                     p, options, block + "self_attn.", y, inputs.documents)
               : attention_of(
                     turned(heads("q", 6)), shared(turned(heads("k", 2))),
                     shared(heads("v", 2)), inputs.documents,
                     global ? 0 : options.window, options.query_pre_attn_scalar,
                     options.attention_softcap),
        "self_attn.o_proj");
    x = x + after(attended, "post_attention_layernorm");
    const auto z = norm(
        x, block + (post_norms ? "pre_feedforward_layernorm"
                               : "post_attention_layernorm"));
    if (options.expert_size > 0 && i >= options.dense_layers) {
      x = x + biased_mixture_by_formula(p, options, block, z, result.losses);
      continue;
    }
    if (options.experts > 0 && options.expert_size == 0) {
      x = x + mixture_by_formula(p, options, block, z, result.losses);
      continue;
    }
    const auto gate = linear(z, "mlp.gate_proj");
    x = x + after(
                linear(
                    (gemma ? gelu_of(gate) : gate * at::sigmoid(gate)) *
                        linear(z, "mlp.up_proj"),
                    "mlp.down_proj"),
                "post_feedforward_layernorm");
  }
  x = norm(x, "model.norm");
  const auto head = p.find("lm_head.weight");
  result.logits = x.matmul((head == p.end() ? embedding : head->second).t());
  if (const double cap = options.logit_softcap; cap > 0) {
    result.logits = cap * at::tanh(result.logits / cap);
  }
  return result;
}

// This rank's shard of logits, or of their gradients.
Tensor part_of_words(const Tensor& whole, const TensorParallel& parallel) {
  const auto mine = parallel.part_of(kVocabulary);
  return whole.narrow(-1, mine.begin, mine.size());
}

class LanguageNetwork : public testing::TestWithParam<parity::Way> {};
INSTANTIATE_TEST_SUITE_P(
    Ways, LanguageNetwork, testing::ValuesIn(parity::ways()),
    testing::PrintToStringParamName());

void expect_formula(
    const ModelOptions& options, const Inputs& inputs,
    const TensorParallel& parallel) {
  const auto network = build(options, parallel);
  auto whole = parity::give_parts(*network, 11);
  for (auto& item : network->named_buffers()) {  // biases of experts
    const torch::NoGradGuard no_grad;
    item.value().copy_(parity::random({item.value().size(0)}, 12));
    whole[item.key()] = item.value().clone();
  }
  const auto [expected, losses] =
      options.name == "gpt" ? Formula{gpt_by_formula(whole, inputs), {}}
                            : llama_by_formula(whole, options, inputs);
  const bool with_losses = options.aux_loss > 0 || options.z_loss > 0;
  auto loss_of_whole =
      at::cross_entropy_loss(expected.flatten(0, 1), inputs.targets.flatten());
  if (with_losses) loss_of_whole = loss_of_whole + losses.mean();
  loss_of_whole.backward();

  Tensors given = {inputs.tokens};
  if (inputs.documents.defined()) given.push_back(inputs.documents);
  const auto outputs = network->forward(given);
  ASSERT_EQ(outputs.size(), with_losses ? 2u : 1u);
  parity::expect_tensor(
      "logits", part_of_words(expected, parallel), outputs[0], 1e-10);
  auto loss = mean_loss(outputs[0], inputs, parallel);
  if (with_losses) loss = loss + outputs[1].mean();
  EXPECT_NEAR(loss.item<double>(), loss_of_whole.item<double>(), 1e-10);
  loss.backward();
  SharedGradients(*network, parallel).finish();
  parity::expect_parts(*network, whole, 1e-10);
}

TEST_P(LanguageNetwork, ComputesItsFormula) {
  auto tied = options_of("llama");
  tied.tie_embeddings = true;
  parity::on_ranks(GetParam(), [&](const TensorParallel& parallel) {
    auto inputs = make_inputs();
    inputs.documents = Tensor();
    expect_formula(options_of("gpt"), inputs, parallel);
    expect_formula(options_of("llama"), inputs, parallel);
    expect_formula(tied, inputs, parallel);
  });
}

TEST_P(LanguageNetwork, ArchitecturesComputeTheirFormulas) {
  parity::on_ranks(GetParam(), [&](const TensorParallel& parallel) {
    const auto inputs = make_inputs();
    for (const char* name :
         {"mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "mixtral",
          "qwen3-moe", "deepseek-v3"}) {
      SCOPED_TRACE(name);
      auto plain = inputs;
      plain.documents = Tensor();
      expect_formula(options_of(name), plain, parallel);
      expect_formula(options_of(name), inputs, parallel);
    }
    auto options = options_of("qwen3-moe");
    options.normalize_routing = false;
    expect_formula(options, inputs, parallel);
    options = options_of("mixtral");
    options.aux_loss = 0.3;
    expect_formula(options, inputs, parallel);
    options.z_loss = 0.2;
    expect_formula(options, inputs, parallel);
    options = options_of("deepseek-v3");
    options.query_rank = 0;
    options.value_size = 13;  // wider than queries
    options.normalize_routing = false;
    options.aux_loss = 0.3;
    expect_formula(options, inputs, parallel);
  });
}

TEST_P(LanguageNetwork, RespectsTheBordersOfDocuments) {
  parity::on_ranks(GetParam(), [&](const TensorParallel& parallel) {
    const auto inputs = make_inputs();
    expect_formula(options_of("gpt"), inputs, parallel);
    expect_formula(options_of("llama"), inputs, parallel);
    // Then without documents, by the same network.
    const auto network = build(options_of("gpt"), parallel);
    const auto with = network->forward({inputs.tokens, inputs.documents})[0];
    const auto without = network->forward(Tensors{inputs.tokens})[0];
    const auto again = network->forward({inputs.tokens, inputs.documents})[0];
    EXPECT_FALSE(without.allclose(with));
    EXPECT_TRUE(again.equal(with));
  });
}

// Initial values, dropout and the parameters after a step equal those of one
// rank.
TEST_P(LanguageNetwork, WithDropoutEqualsOneRank) {
  for (const char* name : {"gpt", "llama", "mixtral", "deepseek-v3"}) {
    auto options = options_of(name);
    options.dropout = 0.25;
    const auto inputs = make_inputs();
    const Tensors given = {inputs.tokens, inputs.documents, inputs.keys};
    const auto alone = build(options);
    const auto expected = alone->forward(given)[0];
    mean_loss(expected, inputs, {}).backward();
    alone->eval();
    EXPECT_FALSE(alone->forward(given)[0].allclose(expected));
    parity::on_ranks(GetParam(), [&](const TensorParallel& parallel) {
      const auto network = build(options, parallel);
      const auto parts = parity::parts_of(*network);
      const auto whole = alone->named_parameters();
      ASSERT_EQ(whole.size(), parts.size());
      for (const auto& item : network->named_parameters()) {
        const auto& shard = parts.at(item.key());
        EXPECT_TRUE(item.value().equal(slice_of(whole[item.key()], shard)))
            << item.key();
      }
      const auto logits = network->forward(given)[0];
      parity::expect_tensor(
          "logits", part_of_words(expected, parallel), logits, 1e-10);
      mean_loss(logits, inputs, parallel).backward();
      SharedGradients(*network, parallel).finish();
      for (const auto& item : network->named_parameters()) {
        parity::expect_tensor(
            item.key(),
            slice_of(whole[item.key()].grad(), parts.at(item.key())),
            item.value().grad(), 1e-10);
      }
    });
  }
}

// Dropout has a formula of its own for attention, which stores the scores.
TEST(LanguageLayers, DropoutThatDropsNothingChangesNothing) {
  for (const char* name : {"gpt", "llama", "mistral", "deepseek-v3"}) {
    auto options = options_of(name);
    options.dropout = 1e-14;
    const auto inputs = make_inputs();
    const auto network = build(options);
    parity::give_parts(*network, 11);  // scores that are far from even
    const Tensors given = {inputs.tokens, inputs.documents, inputs.keys};
    const auto dropping = network->forward(given)[0];
    network->eval();
    parity::expect_tensor(name, network->forward(given)[0], dropping, 1e-10);
  }
}

// Between any two layers the tuple carries all that the later ones need.
TEST_P(LanguageNetwork, SlicesEqualTheWholeModel) {
  for (const char* name : {"gpt", "llama", "qwen3-moe", "deepseek-v3"}) {
    auto options = options_of(name);
    options.dropout = 0.25;
    options.tie_embeddings = true;
    if (options.experts > 0) options.aux_loss = 0.1;
    parity::on_ranks(GetParam(), [&](const TensorParallel& parallel) {
      const auto inputs = make_inputs();
      const auto layers =
          model_layers(options, {kSequence}, kVocabulary, parallel);
      const auto whole = build_network(layers, 0, layers.size(), 5);
      const Tensors given = {inputs.tokens, inputs.keys};
      const auto expected = whole->forward(given)[0];
      Tensors values = given;
      for (size_t i = 0; i < layers.size(); ++i) {
        const auto slice = build_network(layers, i, i + 1, 5);
        values = slice->forward(values);
        // The copies stand for tensors from another process.
        for (auto& value : values) value = value.detach().clone();
      }
      ASSERT_EQ(values.size(), options.aux_loss > 0 ? 2u : 1u);
      EXPECT_TRUE(values[0].equal(expected)) << name;
    });
  }
}

TEST(LanguageLayers, NameTheInputsThatTheyTake) {
  const auto inputs = make_inputs();
  const auto network = build(options_of("gpt"));
  EXPECT_THAT(
      error_text<ConfigError>([&] {
        network->forward({inputs.tokens, inputs.keys, inputs.documents});
      }),
      HasSubstr(
          "layer \"transformer.wte\" is given int64 [3, 7], int64 [3] and "
          "int64 [3, 7]; it takes tokens, then documents"));
  auto options = options_of("llama");
  options.dropout = 0.5;
  const auto dropping = build(options);
  EXPECT_THAT(
      error_text<ConfigError>(
          [&] { dropping->forward(Tensors{inputs.tokens}); }),
      HasSubstr("draws from the samples' keys"));
  dropping->eval();
  EXPECT_EQ(dropping->forward(Tensors{inputs.tokens}).size(), 1u);
  EXPECT_THAT(
      error_text<ConfigError>(
          [] { model_layers(options_of("gpt"), {10}, kVocabulary); }),
      HasSubstr("a sample has 10 tokens, but max_positions=9"));
  EXPECT_THAT(
      error_text<ConfigError>(
          [] { model_layers(options_of("resnet19"), {10}, kVocabulary); }),
      HasSubstr("is not a model"));
}

// The full weights, in one file or several, load into each rank's shards.
TEST_P(LanguageNetwork, LoadsItsShardsFromAFile) {
  const TempFolder folder;
  const auto path = folder.path("model.safetensors");
  for (const char* name : {"gpt", "llama", "qwen3", "mixtral", "deepseek-v3"}) {
    const auto options = options_of(name);
    const auto alone = build(options);
    save_weights(*alone, path);
    const auto whole = alone->named_parameters();
    parity::on_ranks(GetParam(), [&](const TensorParallel& parallel) {
      const auto layers =
          model_layers(options, {kSequence}, kVocabulary, parallel);
      const auto network = build_network(layers, 0, layers.size(), 77);
      load_weights(*network, folder.path());
      const auto parts = parity::parts_of(*network);
      for (const auto& item : network->named_parameters()) {
        EXPECT_TRUE(item.value().equal(
            slice_of(whole[item.key()], parts.at(item.key()))))
            << item.key();
      }
    });
  }
}

}  // namespace echelon::language_network_test
