#include "echelon/architecture/trained_parameters.h"

#include <gmock/gmock.h>

#include "tests/support/error_text.h"

namespace echelon::trained_parameters_test {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

std::vector<ParameterInfo> gpt() {
  return list_parameters(
      {.name = "gpt",
       .layers = 1,
       .hidden_size = 4,
       .heads = 2,
       .max_positions = 8},
      {8}, 10);
}

std::set<std::string> frozen(
    const std::vector<std::string>& patterns,
    const std::vector<ParameterInfo>& list = gpt()) {
  return frozen_parameters({.freeze = patterns}, list);
}

std::string error_of(const std::vector<std::string>& patterns) {
  return error_text<ConfigError>([&] { frozen(patterns); });
}

TEST(TrainedParameters, PatternsMatchWholeNames) {
  EXPECT_THAT(frozen({}), IsEmpty());
  EXPECT_THAT(
      frozen({"*.ln_[12].bias", "transformer.wpe.weight"}),
      ElementsAre(
          "transformer.h.0.ln_1.bias", "transformer.h.0.ln_2.bias",
          "transformer.wpe.weight"));
}

// One tensor cannot train under one of its names.
TEST(TrainedParameters, ATiedParameterIsFrozenUnderAllItsNames) {
  for (const char* pattern : {"lm_head.*", "transformer.wte.*"}) {
    EXPECT_THAT(
        frozen({pattern}),
        ElementsAre("lm_head.weight", "transformer.wte.weight"));
  }
}

TEST(TrainedParameters, BuffersAreNoParameters) {
  const auto list = list_parameters({.name = "resnet18"}, {3, 32, 32}, 10);
  EXPECT_THAT(frozen({"bn1.*"}, list), ElementsAre("bn1.bias", "bn1.weight"));
  EXPECT_THAT(
      error_text<ConfigError>([&] { frozen({"bn1.running_mean"}, list); }),
      HasSubstr("matches none of the 62 parameters"));
}

TEST(TrainedParameters, APatternThatMatchesNothingIsNamedWithTheNearest) {
  EXPECT_EQ(
      error_of({"lm_head.*", "transformer.wtf.*"}),
      "[model] freeze has \"transformer.wtf.*\", which matches none of the 17 "
      "parameters; did you mean \"transformer.wte.*\"?");
  EXPECT_THAT(
      error_of({"h.0.mlp.c_fc.bias"}),
      HasSubstr("did you mean \"transformer.h.0.mlp.c_fc.bias\"?"));
  EXPECT_THAT(
      error_of({"qqqqqqqqqqqqqqqqq"}),
      HasSubstr("; the first is \"transformer.wte.weight\", the last "
                "\"lm_head.weight\""));
}

ModelOptions
adapted(const std::string& name, const std::vector<std::string>& targets) {
  return {
      .name = name,
      .lora = {.rank = 2, .targets = targets},
      .layers = 2,
      .hidden_size = 4,
      .heads = 2,
      .kv_heads = name == "gpt" ? 0 : 1,
      .intermediate_size = 6,
      .experts = name == "mixtral" ? 3 : 0,
      .experts_per_token = name == "mixtral" ? 1 : 0,
      .max_positions = 8};
}

std::vector<std::string> adapters_of(const ModelOptions& options) {
  std::vector<std::string> all;
  for (const auto& info : list_parameters(options, {8}, 10)) {
    if (!is_adapter(info.name)) continue;
    all.push_back(
        info.name + " " + std::to_string(info.shape[0]) + "x" +
        std::to_string(info.shape[1]));
  }
  return all;
}

TEST(Adapters, HaveTheSizesOfTheirLayers) {
  EXPECT_THAT(
      adapters_of(adapted("llama", {"1.self_attn.k_proj", "0.mlp.down_proj"})),
      ElementsAre(
          "model.layers.0.mlp.down_proj.lora_A.weight 2x6",
          "model.layers.0.mlp.down_proj.lora_B.weight 4x2",
          "model.layers.1.self_attn.k_proj.lora_A.weight 2x4",
          "model.layers.1.self_attn.k_proj.lora_B.weight 2x2"));
  EXPECT_THAT(
      adapters_of(adapted("gpt", {"transformer.h.0.*.c_fc", "1.attn.c_attn"})),
      ElementsAre(
          "transformer.h.0.mlp.c_fc.lora_A.weight 2x4",
          "transformer.h.0.mlp.c_fc.lora_B.weight 6x2",
          "transformer.h.1.attn.c_attn.lora_A.weight 2x4",
          "transformer.h.1.attn.c_attn.lora_B.weight 12x2"));
  EXPECT_THAT(
      adapters_of(adapted("mixtral", {"0.block_sparse_moe.experts.2.w2"})),
      ElementsAre(
          "model.layers.0.block_sparse_moe.experts.2.w2.lora_A.weight 2x6",
          "model.layers.0.block_sparse_moe.experts.2.w2.lora_B.weight 4x2"));
  EXPECT_EQ(adapters_of(adapted("mixtral", {"w1"})).size(), 2 * 3 * 2);
  for (const auto& info :
       list_parameters(adapted("llama", {"q_proj"}), {8}, 10)) {
    if (info.name.ends_with(kAdapterA)) {
      EXPECT_EQ(info.initial, InitialValue::normal_of(0.5));
    }
    if (info.name.ends_with(kAdapterB)) {
      EXPECT_EQ(info.initial, InitialValue::constant_of(0));
    }
  }
}

TEST(Adapters, TrainAlone) {
  auto options = adapted("llama", {"q_proj"});
  const auto list = list_parameters(options, {8}, 10);
  const auto frozen = frozen_parameters(options, list);
  for (const auto& info : list) {
    EXPECT_NE(frozen.contains(info.name), is_adapter(info.name)) << info.name;
  }
  options.freeze = {"*.lora_A.*"};
  EXPECT_EQ(frozen_parameters(options, list).size(), frozen.size() + 2);
  options.freeze = {"*.lora_*"};
  EXPECT_THAT(
      error_text<ConfigError>([&] { frozen_parameters(options, list); }),
      HasSubstr("freeze matches all adapters"));
}

TEST(Adapters, TargetsThatNameNothingAreRefusedWithTheNearest) {
  const auto error = [](const std::string& model,
                        const std::vector<std::string>& targets) {
    return error_text<ConfigError>(
        [&] { list_parameters(adapted(model, targets), {8}, 10); });
  };
  EXPECT_THAT(
      error("llama", {"q_proj", "o_poj"}),
      testing::AllOf(
          HasSubstr("[lora] targets has \"o_poj\""),
          HasSubstr("did you mean \"o_proj\"?"),
          HasSubstr("there are down_proj, gate_proj, k_proj")));
  for (const char* other : {"lm_head", "embed_tokens", "input_layernorm"}) {
    EXPECT_THAT(error("llama", {other}), HasSubstr("names no linear layer"));
  }
  EXPECT_THAT(
      error("mixtral", {"gate"}),
      HasSubstr("names no linear layer"));  // the router
  auto latent = adapted("deepseek-v3", {"q_b_proj"});
  latent.kv_heads = 0;
  latent.experts = 2;
  latent.experts_per_token = 1;
  latent.expert_size = 6;
  latent.key_value_rank = 3;
  latent.query_rank = 3;
  latent.nope_size = 2;
  latent.rope_size = 2;
  latent.value_size = 2;
  EXPECT_THAT(
      error_text<ConfigError>([&] { list_parameters(latent, {8}, 10); }),
      HasSubstr("names no linear layer"));
  latent.lora.targets = {"o_proj"};
  EXPECT_NO_THROW(list_parameters(latent, {8}, 10));
  EXPECT_THAT(error("gpt", {}), HasSubstr("rank=2 without targets"));
  EXPECT_THAT(
      error_text<ConfigError>([] {
        list_parameters({.name = "mlp", .lora = {.rank = 1}}, {8}, 10);
      }),
      HasSubstr("use a language model, or [model] freeze"));
}

TEST(TrainedParameters, SomethingMustTrain) {
  EXPECT_THAT(
      error_of({"lm_head.*", "*"}),
      HasSubstr("freeze matches all 17 parameters, so nothing would train"));
}

}  // namespace echelon::trained_parameters_test
