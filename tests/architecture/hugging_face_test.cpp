#include "echelon/architecture/hugging_face.h"

#include <gmock/gmock.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "echelon/architecture/hugging_face_config.h"
#include "echelon/architecture/weights_source.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace echelon::hugging_face::hugging_face_test {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Pair;

const char* const kLlama = R"({
  "architectures": ["LlamaForCausalLM"], "hidden_size": 24,
  "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
  "intermediate_size": 37, "vocab_size": 51, "max_position_embeddings": 40,
  "rms_norm_eps": 1e-06, "rope_theta": 20000.0, "hidden_act": "silu",
  "tie_word_embeddings": true})";

const char* const kGpt = R"({
  "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_embd": 12,
  "n_head": 3, "n_positions": 20, "vocab_size": 50, "resid_pdrop": 0.25,
  "attn_pdrop": 0.25, "embd_pdrop": 0.25})";

const char* const kMistral = R"({
  "architectures": ["MistralForCausalLM"], "hidden_size": 24,
  "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
  "head_dim": 10, "intermediate_size": 37, "vocab_size": 51,
  "max_position_embeddings": 40, "sliding_window": 7})";

const char* const kQwen2 = R"({
  "architectures": ["Qwen2ForCausalLM"], "hidden_size": 24,
  "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
  "intermediate_size": 37, "vocab_size": 51, "max_position_embeddings": 40,
  "sliding_window": 4096})";

const char* const kQwen3 = R"({
  "architectures": ["Qwen3ForCausalLM"], "hidden_size": 24,
  "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
  "head_dim": 10, "intermediate_size": 37, "vocab_size": 51,
  "max_position_embeddings": 40})";

const char* const kMixtral = R"({
  "architectures": ["MixtralForCausalLM"], "hidden_size": 24,
  "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
  "intermediate_size": 37, "vocab_size": 51, "max_position_embeddings": 40})";

const char* const kQwen3Moe = R"({
  "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 24,
  "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
  "head_dim": 10, "intermediate_size": 99, "moe_intermediate_size": 37,
  "num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": true,
  "vocab_size": 51, "max_position_embeddings": 40})";

const char* const kDeepseek = R"({
  "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 24,
  "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 6,
  "intermediate_size": 37, "moe_intermediate_size": 13, "n_routed_experts": 6,
  "num_experts_per_tok": 3, "n_group": 3, "topk_group": 2,
  "n_shared_experts": 2, "first_k_dense_replace": 1,
  "routed_scaling_factor": 1.5, "q_lora_rank": 11, "kv_lora_rank": 9,
  "qk_nope_head_dim": 7, "qk_rope_head_dim": 4, "v_head_dim": 5,
  "vocab_size": 51, "max_position_embeddings": 40})";

const char* const kGemma = R"({
  "architectures": ["GemmaForCausalLM"], "hidden_size": 24,
  "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
  "head_dim": 10, "intermediate_size": 37, "vocab_size": 51,
  "max_position_embeddings": 40, "hidden_act": "gelu_pytorch_tanh"})";

const char* const kGemma3 = R"({
  "architectures": ["Gemma3ForCausalLM"], "hidden_size": 24,
  "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
  "head_dim": 10, "intermediate_size": 37, "vocab_size": 51,
  "max_position_embeddings": 40, "sliding_window": 16,
  "rope_scaling": {"rope_type": "linear", "factor": 8.0}})";

ModelOptions read(const std::string& text) {
  const TempFolder folder;
  return read_config(folder.write("config.json", text));
}

// The error for a configuration with one field changed.
std::string
refused(const char* base, const std::string& field, const json& value) {
  json config = json::parse(base);
  config[field] = value;
  return error_text<DataError>([&] { read(config.dump()); });
}

std::vector<int64_t> numbers_of(const ModelOptions& options) {
  return {options.layers,       options.hidden_size,       options.heads,
          options.kv_heads,     options.intermediate_size, options.vocab_size,
          options.max_positions};
}

TEST(HuggingFaceConfig, IsReadFieldByField) {
  const auto gpt = read(kGpt);
  EXPECT_EQ(gpt.name, "gpt");
  EXPECT_THAT(numbers_of(gpt), ElementsAre(2, 12, 3, 0, 48, 50, 20));
  EXPECT_EQ(gpt.norm_eps, 1e-5);
  EXPECT_EQ(gpt.dropout, 0.25);
  const auto llama = read(kLlama);
  EXPECT_EQ(llama.name, "llama");
  EXPECT_THAT(numbers_of(llama), ElementsAre(3, 24, 6, 2, 37, 51, 40));
  EXPECT_EQ(llama.norm_eps, 1e-6);
  EXPECT_EQ(llama.rope.theta, 20000);
  EXPECT_EQ(llama.rope.factor, 0);
  EXPECT_TRUE(llama.tie_embeddings);
  auto unnamed = json::parse(kLlama);
  unnamed.erase("architectures");
  unnamed["model_type"] = "llama";
  EXPECT_EQ(read(unnamed.dump()).hidden_size, 24);
  // Missing fields have the defaults of transformers.
  const auto whole = read(R"({"architectures": ["GPT2LMHeadModel"]})");
  EXPECT_THAT(
      numbers_of(whole), ElementsAre(12, 768, 12, 0, 3072, 50257, 1024));
  EXPECT_EQ(whole.dropout, 0.1);
  EXPECT_THAT(
      numbers_of(read(R"({"model_type": "llama"})")),
      ElementsAre(32, 4096, 32, 32, 11008, 32000, 2048));
}

TEST(HuggingFaceConfig, WhatTellsLlamasKindApartIsRead) {
  auto options = read(kMistral);
  EXPECT_EQ(options.name, "mistral");
  EXPECT_EQ(options.head_size, 10);
  EXPECT_EQ(options.window, 7);
  auto config = json::parse(kMistral);
  config["sliding_window"] = nullptr;
  EXPECT_EQ(read(config.dump()).window, 0);
  config.erase("sliding_window");
  EXPECT_EQ(read(config.dump()).window, 4096);

  options = read(kQwen2);
  EXPECT_EQ(options.name, "qwen2");
  EXPECT_EQ(options.head_size, 0);
  EXPECT_EQ(options.window, 0);
  EXPECT_EQ(read(kQwen3).name, "qwen3");
  EXPECT_EQ(read(R"({"model_type": "qwen3"})").head_size, 0);
  config = json::parse(kQwen3);
  config.erase("head_dim");
  EXPECT_EQ(read(config.dump()).head_size, 128);

  options = read(kMixtral);
  EXPECT_EQ(options.name, "mixtral");
  EXPECT_EQ(options.experts, 8);
  EXPECT_EQ(options.experts_per_token, 2);
  EXPECT_EQ(options.rope.theta, 1e6);
  EXPECT_EQ(options.norm_eps, 1e-5);
  EXPECT_EQ(options.intermediate_size, 37);
  options = read(kQwen3Moe);
  EXPECT_EQ(options.name, "qwen3-moe");
  EXPECT_EQ(options.experts, 5);
  EXPECT_EQ(options.intermediate_size, 37);
  EXPECT_TRUE(options.normalize_routing);
  config = json::parse(kQwen3Moe);
  config.erase("norm_topk_prob");
  EXPECT_FALSE(read(config.dump()).normalize_routing);

  options = read(kGemma);
  EXPECT_EQ(options.name, "gemma");
  EXPECT_EQ(options.head_size, 10);
  EXPECT_TRUE(options.tie_embeddings);
  config = json::parse(kGemma);
  config["hidden_act"] = "gelu";  // what the first files say
  EXPECT_EQ(read(config.dump()).name, "gemma");
}

TEST(HuggingFaceConfig, GemmasWithAWindowAreReadFieldByField) {
  auto options = read(kGemma3);
  EXPECT_EQ(options.name, "gemma3");
  EXPECT_EQ(options.window, 16);
  EXPECT_EQ(options.global_every, 6);
  EXPECT_EQ(options.query_pre_attn_scalar, 256);
  EXPECT_EQ(options.attention_softcap, 0);
  EXPECT_EQ(options.logit_softcap, 0);
  EXPECT_EQ(options.rope.theta, 1e6);
  EXPECT_EQ(options.rope.factor, 8);
  EXPECT_EQ(options.rope.scaling, RopeScaling::linear);
  EXPECT_EQ(options.rope_local_theta, 1e4);
  const auto shape = language_model_shape(options, options.vocab_size);
  EXPECT_EQ(shape.window_of(4), 16);
  EXPECT_EQ(shape.window_of(5), 0);
  EXPECT_EQ(shape.rope_of(4), RotaryOptions{});
  EXPECT_EQ(shape.rope_of(5), options.rope);
  // The form of newer releases.
  auto config = json::parse(kGemma3);
  config.erase("rope_scaling");
  config["rope_parameters"] = {
      {"full_attention",
       {{"rope_type", "linear"}, {"factor", 8.0}, {"rope_theta", 2e6}}},
      {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", 3e4}}}};
  config["layer_types"] = json::array();
  for (int i = 0; i < 8; ++i) {
    config["layer_types"].push_back(
        i % 3 == 2 ? "full_attention" : "sliding_attention");
  }
  options = read(config.dump());
  EXPECT_EQ(options.rope.theta, 2e6);
  EXPECT_EQ(options.rope.factor, 8);
  EXPECT_EQ(options.rope_local_theta, 3e4);
  EXPECT_EQ(options.global_every, 3);
  // What transformers takes for missing fields.
  options = read(R"({"model_type": "gemma2"})");
  EXPECT_EQ(options.attention_softcap, 50);
  EXPECT_EQ(options.logit_softcap, 30);
  EXPECT_EQ(options.window, 4096);
  EXPECT_EQ(options.global_every, 2);
  const auto list = list_parameters(options, {4096}, options.vocab_size);
  EXPECT_EQ(num_parameters(list), 2614341888);  // gemma-2-2b
}

TEST(HuggingFaceConfig, YarnIsReadFieldByField) {
  auto config = json::parse(kLlama);
  config["rope_scaling"] = {
      {"type", "yarn"},
      {"factor", 4.0},
      {"original_max_position_embeddings", 32768}};
  auto options = read(config.dump());
  EXPECT_EQ(options.rope.scaling, RopeScaling::yarn);
  EXPECT_EQ(options.rope.factor, 4);
  EXPECT_EQ(options.rope.original_positions, 32768);
  EXPECT_EQ(options.rope.beta_fast, 32);
  EXPECT_EQ(options.rope.beta_slow, 1);
  EXPECT_NEAR(options.rope.attention_scale(), 1 + 0.1 * std::log(4.0), 1e-15);
  EXPECT_EQ(options.rope.score_scale(), 1);
  config = json::parse(kDeepseek);
  config["rope_scaling"] = {
      {"type", "yarn"},
      {"factor", 40},
      {"beta_fast", 16},
      {"beta_slow", 2},
      {"mscale", 1.0},
      {"mscale_all_dim", 1.0},
      {"original_max_position_embeddings", 4096}};
  options = read(config.dump());
  EXPECT_EQ(options.rope.beta_fast, 16);
  EXPECT_EQ(options.rope.beta_slow, 2);
  EXPECT_EQ(options.rope.attention_scale(), 1);
  EXPECT_NEAR(
      options.rope.score_scale(), std::pow(1 + 0.1 * std::log(40.0), 2), 1e-15);
}

TEST(HuggingFaceConfig, DeepseekIsReadFieldByField) {
  const auto options = read(kDeepseek);
  EXPECT_EQ(options.name, "deepseek-v3");
  EXPECT_THAT(numbers_of(options), ElementsAre(3, 24, 6, 6, 37, 51, 40));
  EXPECT_EQ(options.head_size, 0);
  EXPECT_THAT(
      (std::vector<int64_t>{
          options.experts, options.experts_per_token, options.expert_size,
          options.shared_experts, options.dense_layers, options.expert_groups,
          options.groups_per_token}),
      ElementsAre(6, 3, 13, 2, 1, 3, 2));
  EXPECT_THAT(
      (std::vector<int64_t>{
          options.query_rank, options.key_value_rank, options.nope_size,
          options.rope_size, options.value_size}),
      ElementsAre(11, 9, 7, 4, 5));
  EXPECT_EQ(options.routing_scale, 1.5);
  EXPECT_TRUE(options.normalize_routing);
  // Queries are not compressed where the field is null; where it is missing
  // they are.
  auto config = json::parse(kDeepseek);
  config["q_lora_rank"] = nullptr;
  EXPECT_EQ(read(config.dump()).query_rank, 0);
  // The model that the catalogue prices.
  const auto whole = read(R"({"model_type": "deepseek_v3"})");
  EXPECT_EQ(whole.query_rank, 1536);
  EXPECT_EQ(whole.routing_scale, 2.5);
  const auto list = list_parameters(whole, {4096}, whole.vocab_size);
  EXPECT_EQ(num_parameters(list), 671026404352);
}

TEST(HuggingFaceConfig, RotaryPositionsOfOldAndNewReleases) {
  auto config = json::parse(kLlama);
  config["rope_scaling"] = {
      {"type", "llama3"},
      {"factor", 32.0},
      {"low_freq_factor", 1.0},
      {"high_freq_factor", 4.0},
      {"original_max_position_embeddings", 8192}};
  auto options = read(config.dump());
  EXPECT_EQ(options.rope.factor, 32);
  EXPECT_EQ(options.rope.theta, 20000);
  config = json::parse(kLlama);
  config.erase("rope_theta");
  config["rope_parameters"] = {
      {"rope_type", "default"}, {"rope_theta", 500000.0}};
  options = read(config.dump());
  EXPECT_EQ(options.rope.theta, 500000);
  EXPECT_EQ(options.rope.factor, 0);
  EXPECT_THAT(
      refused(
          kLlama, "rope_scaling", {{"rope_type", "longrope"}, {"factor", 2}}),
      HasSubstr("config.json: \"rope_scaling\": \"rope_type\": \"longrope\"; "
                "known are default, linear, llama3 and yarn"));
}

TEST(HuggingFaceConfig, UnsupportedSettingsAreRefused) {
  const struct {
    const char* base;
    const char* field;
    json value;
    const char* said;
  } cases[] = {
      {kGpt, "architectures", json::array({"MambaForCausalLM"}),
       "\"architectures\": [\"MambaForCausalLM\"]; known are "
       "GPT2LMHeadModel, LlamaForCausalLM, MistralForCausalLM, "
       "Qwen2ForCausalLM, Qwen3ForCausalLM, MixtralForCausalLM, "
       "Qwen3MoeForCausalLM, DeepseekV3ForCausalLM, GemmaForCausalLM, "
       "Gemma2ForCausalLM and Gemma3ForCausalLM"},
      {kGpt, "architectures", nullptr, "does not name one"},
      {kGpt, "activation_function", "relu",
       "\"activation_function\": \"relu\"; known is gelu_new"},
      {kGpt, "attn_pdrop", 0.1, "must be that of resid_pdrop"},
      {kGpt, "scale_attn_by_inverse_layer_idx", true,
       "computes such models with false alone"},
      {kGpt, "tie_word_embeddings", false,
       "computes such models with true alone"},
      {kGpt, "add_cross_attention", true,
       "computes such models with false alone"},
      {kLlama, "hidden_act", "gelu", "known is silu"},
      {kLlama, "attention_bias", true,
       "\"attention_bias\": true; Echelon computes"},
      {kLlama, "mlp_bias", true, "\"mlp_bias\": true; Echelon computes"},
      {kLlama, "head_dim", 5, "head_size=5, but rotary positions"},
      {kLlama, "attention_dropout", 0.1, "dropout of attention alone"},
      {kLlama,
       "quantization_config",
       {{"bits", 4}},
       "quantised weights are not read"},
      {kLlama, "num_key_value_heads", 4,
       "heads=6 is not a multiple of kv_heads=4"},
      {kLlama, "hidden_size", "24",
       "\"hidden_size\": \"24\"; must be a whole number"},
      {kMistral, "layer_types",
       json::array({"sliding_attention", "full_attention"}),
       "computes such models with sliding_attention in each layer"},
      {kQwen2, "use_sliding_window", true,
       "\"use_sliding_window\": true; Echelon computes such models with false "
       "alone"},
      {kQwen2, "layer_types", json::array({"sliding_attention"}),
       "computes such models with full_attention in each layer"},
      {kQwen2,
       "rope_parameters",
       {{"partial_rotary_factor", 0.5}},
       "all of a head is rotated here"},
      {kQwen3, "attention_bias", true,
       "\"attention_bias\": true; Echelon computes"},
      {kMixtral, "router_jitter_noise", 0.1, "known is 0"},
      {kMixtral, "output_router_logits", true, "and [model] aux_loss"},
      {kMixtral, "num_experts_per_tok", 9,
       "experts_per_token=9, but there are experts=8"},
      {kQwen3Moe, "decoder_sparse_step", 2, "experts in each layer"},
      {kQwen3Moe, "mlp_only_layers", json::array({0}), "an empty list"},
      {kDeepseek, "rope_interleave", false,
       "\"rope_interleave\": false; Echelon computes such models with true "
       "alone"},
      {kDeepseek,
       "rope_scaling",
       {{"type", "yarn"}, {"factor", 40}, {"truncate", false}},
       "\"truncate\": false"},
      {kLlama,
       "rope_scaling",
       {{"type", "yarn"}, {"factor", 4}, {"beta_fast", 1}, {"beta_slow", 2}},
       "rope_beta_slow is not below rope_beta_fast"},
      {kDeepseek, "scoring_func", "softmax", "known is sigmoid"},
      {kDeepseek, "topk_method", "greedy", "known is noaux_tc"},
      {kDeepseek, "moe_layer_freq", 2, "experts in each later layer"},
      {kDeepseek, "attention_bias", true, "\"attention_bias\": true"},
      {kDeepseek, "num_key_value_heads", 2, "kv_heads=2, but latent attention"},
      {kDeepseek, "n_group", 4,
       "expert_groups=4 does not divide experts=6 into groups of two or more"},
      {kDeepseek, "topk_group", 1,
       "experts_per_token=3, but groups_per_token=1 groups have 2 experts"},
      {kDeepseek, "qk_rope_head_dim", 5, "rope_size=5, but rotary positions"},
      {kDeepseek, "head_dim", 24, "must be that of qk_rope_head_dim"},
      {kGemma, "hidden_act", "silu", "known is gelu_pytorch_tanh"},
      {kGemma, "use_bidirectional_attention", true, "with false alone"},
      {kGemma, "tie_word_embeddings", false, "with true alone"},
      {kGemma3, "sliding_window", nullptr, "must be a number of tokens"},
      {kGemma3, "hidden_activation", "silu", "known is gelu_pytorch_tanh"},
      {kGemma3, "layer_types",
       json::array({"sliding_attention", "full_attention"}),
       "for each layer, and full_attention in the last of each group"},
      {kGemma3,
       "rope_parameters",
       {{"full_attention", {{"rope_theta", 1e6}}},
        {"sliding_attention", {{"rope_type", "linear"}, {"factor", 2}}}},
       "known is default for layers with a window"}};
  for (const auto& [base, field, value, said] : cases) {
    EXPECT_THAT(refused(base, field, value), HasSubstr(said)) << field;
  }
  EXPECT_THAT(
      error_text<DataError>([] { read("{\"architectures\": ["); }),
      HasSubstr("config.json: is no JSON object, or cut off"));
  EXPECT_THAT(
      error_text<DataError>([] { read_config("no/config.json"); }),
      HasSubstr("no/config.json: cannot be read"));
}

TEST(HuggingFaceConfig, WrittenAndReadIsEqual) {
  for (const char* text :
       {kGpt, kLlama, kMistral, kQwen2, kQwen3, kMixtral, kQwen3Moe, kDeepseek,
        kGemma, kGemma3}) {
    auto options = read(text);
    if (options.name != "gpt" && options.rope.factor == 0) {
      options.rope.factor = 8;
      options.rope.original_positions = 64;
    }
    const auto shape = language_model_shape(options, options.vocab_size);
    const auto written = write_config(shape, {.end_of_text = 7});
    const auto again = read(written);
    EXPECT_EQ(language_model_shape(again, again.vocab_size), shape) << written;
    EXPECT_EQ(json::parse(written)["eos_token_id"], 7);
    EXPECT_TRUE(json::parse(write_config(shape))["eos_token_id"].is_null());
  }
}

TEST(HuggingFaceWeights, ArePackedInOrder) {
  EXPECT_THAT(
      pack_shards({4, 4, 4, 20, 1}, 9),
      ElementsAre(Pair(0, 2), Pair(2, 3), Pair(3, 4), Pair(4, 5)));
  EXPECT_THAT(pack_shards({4, 4}, 8), ElementsAre(Pair(0, 2)));
  EXPECT_THAT(pack_shards({}, 8), ElementsAre());
}

TEST(HuggingFaceWeights, ShardsAndTiedNamesComeBack) {
  const TempFolder folder;
  const float numbers[4] = {1, 2, 3, 4};
  const auto bytes = std::as_bytes(std::span(numbers));
  const auto path = folder.path("last.safetensors");
  const std::vector<ParameterInfo> parameters = {
      {.name = "transformer.wte.weight", .shape = {2, 2}, .dtype = "float32"},
      {.name = "transformer.ln_f.weight", .shape = {4}, .dtype = "float32"},
      {.name = "lm_head.weight",
       .shape = {2, 2},
       .dtype = "float32",
       .tied_to = "transformer.wte.weight"}};
  safetensors::write(
      path, {{"lm_head.weight", "F32", {2, 2}, bytes},
             {"transformer.ln_f.weight", "F32", {4}, bytes}});
  MappedTensors weights{WeightsSource(path)};
  const auto tensors = owned_tensors(weights, parameters);
  folder.make_folder("out");
  EXPECT_THAT(
      write_weights(weights, tensors, folder.path("out"), 16),
      ElementsAre(
          "model-00001-of-00002.safetensors",
          "model-00002-of-00002.safetensors", "model.safetensors.index.json"));
  const WeightsSource again(folder.path("out"));
  EXPECT_EQ(again.tensors().size(), 2u);
  EXPECT_NE(again.find("transformer.wte.weight"), nullptr);
  const auto index =
      json::parse(read_file(folder.path("out/model.safetensors.index.json")));
  EXPECT_EQ(index["metadata"]["total_size"], 32);

  // Two tensors of 8 bytes each in half of the dtype's width.
  folder.make_folder("half");
  EXPECT_THAT(
      write_weights(
          weights, owned_tensors(weights, parameters, "BF16"),
          folder.path("half"), 16),
      ElementsAre("model.safetensors"));
  const safetensors::File half(folder.path("half/model.safetensors"));
  const auto halves = half.bytes(half.at("transformer.wte.weight"));
  EXPECT_THAT(
      std::span(reinterpret_cast<const uint16_t*>(halves.data()), 4),
      ElementsAre(0x3f80, 0x4000, 0x4040, 0x4080));

  const float others[4] = {1, 2, 3, 5};
  safetensors::write(
      path, {{"lm_head.weight", "F32", {2, 2}, bytes},
             {"transformer.wte.weight",
              "F32",
              {2, 2},
              std::as_bytes(std::span(others))},
             {"transformer.ln_f.weight", "F32", {4}, bytes}});
  EXPECT_THAT(
      error_text<DataError>([&] {
        MappedTensors two{WeightsSource(path)};
        owned_tensors(two, parameters);
      }),
      HasSubstr("\"transformer.wte.weight\" and \"lm_head.weight\" differ, but "
                "are tied"));
}

}  // namespace echelon::hugging_face::hugging_face_test
