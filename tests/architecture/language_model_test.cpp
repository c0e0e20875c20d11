#include "echelon/architecture/language_model.h"

#include <gmock/gmock.h>

#include <cmath>
#include <map>

#include "tests/support/error_text.h"

namespace echelon::language_model_test {

using testing::ElementsAre;
using testing::HasSubstr;

ModelOptions named(const std::string& name) {
  return {.name = name};
}

ModelOptions small_gpt() {
  ModelOptions options = named("gpt");
  options.layers = 2;
  options.hidden_size = 12;
  options.heads = 3;
  options.max_positions = 20;
  return options;
}

ModelOptions small_llama() {
  ModelOptions options = named("llama");
  options.layers = 2;
  options.hidden_size = 24;
  options.heads = 6;
  options.kv_heads = 2;
  options.intermediate_size = 37;
  options.max_positions = 20;
  return options;
}

std::map<std::string, ParameterInfo>
by_name(const std::vector<ParameterInfo>& list) {
  std::map<std::string, ParameterInfo> all;
  for (const auto& info : list) all[info.name] = info;
  EXPECT_EQ(all.size(), list.size());
  return all;
}

void expect_shapes(
    const std::vector<ParameterInfo>& list,
    const std::map<std::string, std::vector<int64_t>>& shapes) {
  const auto all = by_name(list);
  for (const auto& [name, shape] : shapes) {
    EXPECT_EQ(all.at(name).shape, shape) << name;
  }
}

std::string refused(const ModelOptions& options) {
  return error_text<ConfigError>([&] { language_model_shape(options, 10); });
}

TEST(LanguageModel, SizesHaveThePublishedNumberOfParameters) {
  const std::map<std::string, int64_t> published = {
      {"gpt2", 124439808},       {"gpt2-medium", 354823168},
      {"gpt2-large", 774030080}, {"gpt2-xl", 1557611200},
      {"llama-160m", 162417408}, {"llama-1b", 1235814400},
      {"llama-8b", 8030261248},  {"llama-70b", 70553706496}};
  for (const auto& [name, count] : published) {
    const auto options = named(name);
    const auto list = list_parameters(options, {1024}, vocabulary(options, 0));
    EXPECT_EQ(num_parameters(list), count) << name;
    EXPECT_TRUE(is_language_model(options));
  }
  EXPECT_FALSE(is_language_model(named("resnet18")));
}

TEST(LanguageModel, GptHasTheNamesAndLayoutsOfHuggingFace) {
  const auto list = list_parameters(small_gpt(), {20}, 50);
  ASSERT_EQ(list.size(), 2 + 2 * 12 + 2 + 1u);
  expect_shapes(
      list, {{"transformer.wte.weight", {50, 12}},
             {"transformer.wpe.weight", {20, 12}},
             {"transformer.h.1.attn.c_attn.weight", {12, 36}},
             {"transformer.h.1.attn.c_attn.bias", {36}},
             {"transformer.h.1.attn.c_proj.weight", {12, 12}},
             {"transformer.h.1.mlp.c_fc.weight", {12, 48}},
             {"transformer.h.1.mlp.c_proj.weight", {48, 12}},
             {"transformer.h.1.ln_2.bias", {12}},
             {"transformer.ln_f.weight", {12}}});
  EXPECT_EQ(list.back().name, "lm_head.weight");
  EXPECT_EQ(list.back().tied_to, "transformer.wte.weight");
  EXPECT_THAT(
      list_layers(small_gpt()),
      ElementsAre(
          "transformer.wte", "transformer.wpe", "transformer.h.0",
          "transformer.h.1", "transformer.ln_f", "lm_head"));
}

TEST(LanguageModel, LlamaHasTheNamesAndLayoutsOfHuggingFace) {
  const auto list = list_parameters(small_llama(), {20}, 50);
  ASSERT_EQ(list.size(), 1 + 2 * 9 + 1 + 1u);
  const auto all = by_name(list);
  expect_shapes(
      list, {{"model.embed_tokens.weight", {50, 24}},
             {"model.layers.0.self_attn.q_proj.weight", {24, 24}},
             {"model.layers.0.self_attn.k_proj.weight", {8, 24}},
             {"model.layers.0.self_attn.v_proj.weight", {8, 24}},
             {"model.layers.0.mlp.gate_proj.weight", {37, 24}},
             {"model.layers.0.mlp.down_proj.weight", {24, 37}}});
  EXPECT_EQ(all.count("model.layers.0.self_attn.q_proj.bias"), 0u);
  EXPECT_EQ(all.at("lm_head.weight").tied_to, "");
  EXPECT_THAT(
      list_layers(small_llama()),
      ElementsAre(
          "model.embed_tokens", "model.layers.0", "model.layers.1",
          "model.norm", "lm_head"));
  auto tied = small_llama();
  tied.tie_embeddings = true;
  EXPECT_EQ(
      num_parameters(list) - num_parameters(list_parameters(tied, {20}, 50)),
      50 * 24);
}

TEST(LanguageModel, OtherArchitecturesAreLlamasWithSomethingMore) {
  auto options = small_llama();
  options.head_size = 10;
  const auto names_of = [](const ModelOptions& one) {
    return by_name(list_parameters(one, {20}, 50));
  };
  options.name = "qwen2";
  auto all = names_of(options);
  EXPECT_EQ(all.at("model.layers.0.self_attn.q_proj.bias").shape[0], 60);
  EXPECT_EQ(all.at("model.layers.0.self_attn.k_proj.bias").shape[0], 20);
  EXPECT_EQ(all.count("model.layers.0.self_attn.o_proj.bias"), 0u);
  options.name = "qwen3";
  all = names_of(options);
  EXPECT_EQ(all.at("model.layers.1.self_attn.k_norm.weight").shape[0], 10);
  EXPECT_EQ(all.count("model.layers.0.self_attn.q_proj.bias"), 0u);
  const auto o_proj = all.at("model.layers.0.self_attn.o_proj.weight").shape;
  EXPECT_THAT(o_proj, ElementsAre(24, 60));

  options.experts = 3;
  options.experts_per_token = 2;
  options.name = "mixtral";
  const std::string moe = "model.layers.0.block_sparse_moe.";
  expect_shapes(
      list_parameters(options, {20}, 50),
      {{moe + "gate.weight", {3, 24}},
       {moe + "experts.2.w1.weight", {37, 24}},
       {moe + "experts.2.w3.weight", {37, 24}},
       {moe + "experts.2.w2.weight", {24, 37}}});
  options.name = "qwen3-moe";
  all = names_of(options);
  EXPECT_EQ(all.count("model.layers.0.mlp.experts.2.up_proj.weight"), 1u);
  EXPECT_EQ(all.count("model.layers.0.mlp.experts.3.up_proj.weight"), 0u);
  EXPECT_EQ(all.count("model.layers.0.self_attn.q_norm.weight"), 1u);

  EXPECT_EQ(expert_of(moe + "experts.12.w1.weight"), 12);
  EXPECT_EQ(expert_of(moe + "gate.weight"), std::nullopt);
  EXPECT_EQ(expert_of("experts.w1.12.weight"), std::nullopt);
}

TEST(LanguageModel, NumbersOfOtherArchitecturesAreRefused) {
  auto options = small_llama();
  options.window = 4;
  EXPECT_THAT(
      refused(options),
      HasSubstr(
          "window=4, but attention reaches all tokens there; leave window "
          "out, or use name=\"mistral\", \"mixtral\", \"gemma2\" or "
          "\"gemma3\""));
  options = small_llama();
  options.experts = 4;
  EXPECT_THAT(
      refused(options),
      HasSubstr("experts=4 and experts_per_token=0, but its blocks have one "
                "MLP; leave them out, or use name=\"mixtral\", "
                "\"qwen3-moe\" or \"deepseek-v3\""));
  options.name = "mixtral";
  EXPECT_THAT(
      refused(options), HasSubstr("has no numbers of its own: set "
                                  "experts_per_token"));
  options.experts_per_token = 5;
  EXPECT_THAT(
      refused(options),
      HasSubstr("experts_per_token=5, but there are experts=4; a token goes to "
                "each at most once, so set 4 or fewer"));
  options.experts_per_token = 4;
  options.normalize_routing = false;
  EXPECT_THAT(
      refused(options),
      HasSubstr("always sum to 1; leave it out, or use name=\"qwen3-moe\""));
  options = small_gpt();
  options.head_size = 5;
  EXPECT_THAT(
      refused(options),
      HasSubstr("head_size=5, but the 3 heads of a gpt share hidden_size=12"));
  options = small_llama();
  options.head_size = 5;
  EXPECT_THAT(refused(options), HasSubstr("head_size=5, but rotary positions"));
}

TEST(LanguageModel, InitialValuesAreThoseOfHuggingFace) {
  using Kind = InitialValue::Kind;
  const auto gpt = by_name(list_parameters(small_gpt(), {20}, 50));
  const InitialValue usual{Kind::normal, 0.02};
  const InitialValue residual{Kind::normal, 0.02 / std::sqrt(4.0)};
  const InitialValue zero{Kind::constant, 0}, one{Kind::constant, 1};
  for (const auto& [name, initial] :
       {std::pair("wte.weight", usual), std::pair("wpe.weight", usual),
        std::pair("h.0.attn.c_attn.weight", usual),
        std::pair("h.0.attn.c_proj.weight", residual),
        std::pair("h.0.mlp.c_fc.weight", usual),
        std::pair("h.0.mlp.c_proj.weight", residual),
        std::pair("h.0.attn.c_attn.bias", zero),
        std::pair("ln_f.weight", one)}) {
    EXPECT_EQ(gpt.at(std::string("transformer.") + name).initial, initial)
        << name;
  }
  for (const auto& [name, info] :
       by_name(list_parameters(small_llama(), {20}, 50))) {
    const bool norm = name.find("norm") != std::string::npos;
    EXPECT_EQ(info.initial, norm ? one : usual) << name;
  }
}

TEST(LanguageModel, NumbersOverrideTheSize) {
  auto options = named("gpt2");
  options.layers = 3;
  options.hidden_size = 96;
  options.norm_eps = 1e-6;
  auto shape = language_model_shape(options, vocabulary(options, 256));
  EXPECT_EQ(shape.layers, 3);
  EXPECT_EQ(shape.intermediate_size, 4 * 96);
  EXPECT_EQ(shape.heads, 12);
  EXPECT_EQ(shape.vocab_size, 50257);
  EXPECT_EQ(shape.norm_eps, 1e-6);
  options.heads = 4;
  options.vocab_size = 300;
  shape = language_model_shape(options, vocabulary(options, 256));
  EXPECT_EQ(shape.kv_heads, 4);
  EXPECT_EQ(shape.vocab_size, 300);

  shape = language_model_shape(named("llama-1b"), 128256);
  EXPECT_TRUE(shape.tie_embeddings);
  EXPECT_EQ(shape.kv_heads, 8);
  EXPECT_EQ(shape.rope.theta, 500000.0);
  options = named("llama-8b");
  options.rope.theta = 1e6;
  options.kv_heads = 16;
  shape = language_model_shape(options, 128256);
  EXPECT_EQ(shape.rope.theta, 1e6);
  EXPECT_EQ(shape.kv_heads, 16);
  EXPECT_FALSE(shape.tie_embeddings);
  EXPECT_EQ(language_model_shape(small_llama(), 9).rope.theta, 10000.0);
}

TEST(LanguageModel, TheVocabularyIsThatOfTheModelOrTheData) {
  EXPECT_EQ(vocabulary(small_gpt(), 256), 256);
  EXPECT_EQ(vocabulary(named("gpt2"), 256), 50257);
  auto options = named("gpt2");
  options.vocab_size = 255;
  EXPECT_THAT(
      error_text<ConfigError>([&] { vocabulary(options, 256); }),
      HasSubstr("vocab_size=255, but the data has 256 tokens; set "
                "vocab_size=256 or more"));
  EXPECT_THAT(
      error_text<ConfigError>([&] { vocabulary(small_gpt(), 0); }),
      HasSubstr("neither vocab_size nor the data gives"));
}

TEST(LanguageModel, MissingNumbersAreNamedTogether) {
  EXPECT_THAT(
      refused(named("gpt")),
      HasSubstr("[model] name=\"gpt\" has no numbers of its own: set layers, "
                "hidden_size, heads, max_positions, or name a size, as in "
                "name=\"gpt2\""));
  EXPECT_THAT(
      refused(named("llama")),
      HasSubstr("set layers, hidden_size, heads, intermediate_size, "
                "max_positions, or"));
  auto options = small_llama();
  options.intermediate_size = 0;
  EXPECT_THAT(refused(options), HasSubstr("set intermediate_size, or"));
}

TEST(LanguageModel, HeadsMustFit) {
  auto options = small_gpt();
  options.heads = 5;
  EXPECT_THAT(
      refused(options),
      HasSubstr("hidden_size=12 does not divide by heads=5; 10 or 15 does"));
  options = small_gpt();
  options.kv_heads = 1;
  EXPECT_THAT(refused(options), HasSubstr("kv_heads=1, but each of a gpt's"));
  options = small_llama();
  options.kv_heads = 4;
  EXPECT_THAT(
      refused(options), HasSubstr("heads=6 is not a multiple of kv_heads=4"));
  options.kv_heads = 12;
  EXPECT_THAT(refused(options), HasSubstr("kv_heads=12"));
  options = small_llama();
  options.heads = options.kv_heads = 8;
  EXPECT_THAT(
      refused(options),
      HasSubstr("hidden_size=24 / heads=8 = 3, but rotary positions"));
  EXPECT_THAT(refused(named("mlp")), HasSubstr("is not a language model"));
}

TEST(LanguageModel, MustFitTheDataAndTheRanks) {
  const auto refused = [](int64_t vocabulary, int64_t sequence, int64_t tp) {
    return error_text<ConfigError>(
        [&] { check_language_model(small_llama(), vocabulary, sequence, tp); });
  };
  check_language_model(small_llama(), 50, 20, 6);
  EXPECT_THAT(
      refused(50, 21, 1),
      HasSubstr("a sample has 21 tokens, but max_positions=20; set [data] "
                "sequence=20 or less, or max_positions=21"));
  EXPECT_THAT(
      refused(50, 20, 7),
      HasSubstr("[layout] tp=7, but there are 6 heads to share out; tp may be "
                "6 at most"));
  EXPECT_THAT(
      refused(5, 20, 6), HasSubstr("5 tokens of the vocabulary (vocab_size)"));
  EXPECT_THAT(
      error_text<ConfigError>([] {
        list_parameters(small_gpt(), {3, 8, 8}, 50);
      }),
      HasSubstr("takes sequences of tokens, but a sample is 3x8x8"));
  EXPECT_THAT(
      error_text<ConfigError>([] { list_parameters(small_gpt(), {21}, 50); }),
      HasSubstr("a sample has 21 tokens"));
}

TEST(LanguageModel, SizesThatOverflowAreRefused) {
  auto options = small_gpt();
  options.max_positions = int64_t{1} << 56;
  EXPECT_THAT(
      error_text<ConfigError>([&] { list_parameters(options, {5}, 50); }),
      HasSubstr("\"transformer.wpe.weight\" would have more elements"));
}

}  // namespace echelon::language_model_test
