#include "echelon/architecture/hugging_face.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "echelon/architecture/hugging_face_config.h"
#include "echelon/architecture/weights_source.h"
#include "echelon/error.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace echelon::hugging_face {
namespace hugging_face_test {

using nlohmann::json;
using testing::AllOf;
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

TEST(HuggingFaceConfig, IsReadFieldByField) {
  const auto gpt = read(kGpt);
  EXPECT_EQ(gpt.name, "gpt");
  EXPECT_EQ(gpt.layers, 2);
  EXPECT_EQ(gpt.hidden_size, 12);
  EXPECT_EQ(gpt.heads, 3);
  EXPECT_EQ(gpt.intermediate_size, 48);
  EXPECT_EQ(gpt.max_positions, 20);
  EXPECT_EQ(gpt.vocab_size, 50);
  EXPECT_EQ(gpt.norm_eps, 1e-5);
  EXPECT_EQ(gpt.dropout, 0.25);
  const auto llama = read(kLlama);
  EXPECT_EQ(llama.name, "llama");
  EXPECT_EQ(llama.kv_heads, 2);
  EXPECT_EQ(llama.intermediate_size, 37);
  EXPECT_EQ(llama.norm_eps, 1e-6);
  EXPECT_EQ(llama.rope_theta, 20000);
  EXPECT_EQ(llama.rope_factor, 0);
  EXPECT_TRUE(llama.tie_embeddings);
  auto unnamed = json::parse(kLlama);
  unnamed.erase("architectures");
  unnamed["model_type"] = "llama";
  EXPECT_EQ(read(unnamed.dump()).hidden_size, 24);
  // Missing fields have the defaults of transformers.
  const auto whole = read(R"({"architectures": ["GPT2LMHeadModel"]})");
  EXPECT_EQ(whole.layers, 12);
  EXPECT_EQ(whole.vocab_size, 50257);
  EXPECT_EQ(whole.dropout, 0.1);
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
  EXPECT_EQ(options.rope_factor, 32);
  EXPECT_EQ(options.rope_theta, 20000);
  config = json::parse(kLlama);
  config.erase("rope_theta");
  config["rope_parameters"] = {
      {"rope_type", "default"}, {"rope_theta", 500000.0}};
  options = read(config.dump());
  EXPECT_EQ(options.rope_theta, 500000);
  EXPECT_EQ(options.rope_factor, 0);
  EXPECT_THAT(
      refused(kLlama, "rope_scaling", {{"rope_type", "yarn"}, {"factor", 2}}),
      HasSubstr("config.json: \"rope_scaling\": \"rope_type\": \"yarn\"; known "
                "are default and llama3"));
}

TEST(HuggingFaceConfig, UnsupportedSettingsAreRefused) {
  EXPECT_THAT(
      refused(kGpt, "architectures", {"MambaForCausalLM"}),
      HasSubstr("\"architectures\": [\"MambaForCausalLM\"]; known are "
                "GPT2LMHeadModel and LlamaForCausalLM"));
  EXPECT_THAT(
      refused(kGpt, "architectures", nullptr), HasSubstr("does not name one"));
  EXPECT_THAT(
      refused(kGpt, "activation_function", "relu"),
      HasSubstr("\"activation_function\": \"relu\"; known is gelu_new"));
  EXPECT_THAT(
      refused(kGpt, "attn_pdrop", 0.1),
      HasSubstr("must be that of resid_pdrop"));
  EXPECT_THAT(
      refused(kGpt, "scale_attn_by_inverse_layer_idx", true),
      HasSubstr("computes such models with false alone"));
  EXPECT_THAT(
      refused(kGpt, "tie_word_embeddings", false),
      HasSubstr("computes such models with true alone"));
  EXPECT_THAT(
      refused(kLlama, "hidden_act", "gelu"), HasSubstr("known is silu"));
  EXPECT_THAT(
      refused(kLlama, "attention_bias", true),
      HasSubstr("\"attention_bias\": true; Echelon computes"));
  EXPECT_THAT(refused(kLlama, "mlp_bias", true), HasSubstr("\"mlp_bias\""));
  EXPECT_THAT(
      refused(kLlama, "head_dim", 8),
      HasSubstr("must be hidden_size / num_attention_heads = 4"));
  EXPECT_THAT(
      refused(kLlama, "attention_dropout", 0.1),
      HasSubstr("dropout of attention alone"));
  EXPECT_THAT(
      refused(kLlama, "quantization_config", {{"bits", 4}}),
      HasSubstr("quantised weights are not read"));
  EXPECT_THAT(
      refused(kLlama, "num_key_value_heads", 4),
      HasSubstr("heads=6 is not a multiple of kv_heads=4"));
  EXPECT_THAT(
      refused(kLlama, "hidden_size", "24"),
      HasSubstr("\"hidden_size\": \"24\"; must be a whole number"));
  EXPECT_THAT(
      error_text<DataError>([] { read("{\"architectures\": ["); }),
      HasSubstr("config.json: is no JSON object, or cut off"));
  EXPECT_THAT(
      error_text<DataError>([] { read_config("no/config.json"); }),
      HasSubstr("no/config.json: cannot be read"));
}

TEST(HuggingFaceConfig, WrittenAndReadIsEqual) {
  for (const char* text : {kGpt, kLlama}) {
    auto options = read(text);
    if (options.name == "llama") {
      options.rope_factor = 8;
      options.rope_original_positions = 64;
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

}  // namespace hugging_face_test
}  // namespace echelon::hugging_face
