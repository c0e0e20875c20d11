// Shapes from a Hugging Face config.json: each family, and files that are
// wrong.
#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "echelon/cost/model_catalogue.h"
#include "tests/support/error_text.h"

namespace echelon::cost::hugging_face_shape_test {

using nlohmann::json;
using namespace nlohmann::literals;
using ::testing::HasSubstr;

ModelShape parse(const json& value) {
  return parse_hugging_face_config(value.dump(), "config.json");
}

std::string error_of(const std::string& text) {
  return error_text<DataError>(
      [&] { parse_hugging_face_config(text, "config.json"); });
}

json llama(
    const char* type, int64_t layers, int64_t hidden, int64_t heads,
    int64_t kv_heads, int64_t ffn, int64_t vocab) {
  return {
      {"model_type", type},
      {"num_hidden_layers", layers},
      {"hidden_size", hidden},
      {"num_attention_heads", heads},
      {"num_key_value_heads", kv_heads},
      {"intermediate_size", ffn},
      {"vocab_size", vocab},
      {"max_position_embeddings", 4096}};
}

json with(json value, const json& more) {
  value.update(more);
  return value;
}

void expect_is(const json& value, const char* name, bool seq_len = true) {
  ModelShape read = parse(value);
  ModelShape known = find_model(name);
  for (ModelShape* model : {&read, &known}) {
    model->transformer->ffn = model->transformer->ffn_size();
  }
  EXPECT_TRUE(read.transformer == known.transformer) << name;
  EXPECT_EQ(read.num_parameters(), known.num_parameters()) << name;
  if (seq_len) {
    EXPECT_EQ(read.seq_len, known.seq_len) << name;
  }
}

const json kLatent = R"({"kv_lora_rank": 512, "qk_rope_head_dim": 64,
                         "qk_nope_head_dim": 128, "v_head_dim": 128})"_json;

TEST(HuggingFaceShape, IsTheCataloguesOfEachFamily) {
  expect_is(llama("llama", 32, 4096, 32, 32, 11008, 32000), "llama2-7b");
  expect_is(
      with(
          llama("llama", 80, 8192, 64, 8, 28672, 128256),
          {{"max_position_embeddings", 131072}, {"attention_bias", false}}),
      "llama3.1-70b");
  expect_is(
      with(
          llama("mistral", 32, 4096, 32, 8, 14336, 32000),
          {{"sliding_window", 4096}, {"max_position_embeddings", 32768}}),
      "mistral-7b");
  expect_is(
      with(
          llama("mixtral", 32, 4096, 32, 8, 14336, 32000),
          R"({"num_local_experts": 8, "num_experts_per_tok": 2,
              "sliding_window": null})"_json),
      "mixtral-8x7b");
  expect_is(llama("qwen2", 28, 3584, 28, 4, 18944, 152064), "qwen2.5-7b");
  expect_is(
      with(llama("qwen3", 36, 4096, 32, 8, 12288, 151936), {{"head_dim", 128}}),
      "qwen3-8b");
  expect_is(
      with(
          llama("qwen3_moe", 48, 2048, 32, 4, 6144, 151936),
          R"({"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
              "moe_intermediate_size": 768, "mlp_only_layers": []})"_json),
      "qwen3-30b-a3b");
}

TEST(HuggingFaceShape, IsTheCataloguesOfLatentAttention) {
  expect_is(
      with(
          with(
              llama("deepseek_v3", 61, 7168, 128, 128, 18432, 129280), kLatent),
          R"({"q_lora_rank": 1536, "n_routed_experts": 256,
              "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
              "n_shared_experts": 1, "first_k_dense_replace": 3})"_json),
      "deepseek-v3");
  const json lite = with(
      with(llama("deepseek_v2", 27, 2048, 16, 16, 10944, 102400), kLatent),
      R"({"q_lora_rank": null, "n_routed_experts": 64,
          "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
          "n_shared_experts": 2, "first_k_dense_replace": 1})"_json);
  expect_is(lite, "deepseek-v2-lite");
}

TEST(HuggingFaceShape, IsTheCataloguesOfWindows) {
  json types = json::array();
  for (int i = 0; i < 12; ++i) {
    types.push_back("sliding_attention");
    types.push_back("full_attention");
  }
  const json value = with(
      llama("gpt_oss", 24, 2880, 64, 8, 2880, 201088),
      {{"head_dim", 64},
       {"num_local_experts", 32},
       {"sliding_window", 128},
       {"num_experts_per_tok", 4},
       {"attention_bias", true},
       {"layer_types", types}});
  expect_is(value, "gpt-oss-20b");
  json wrong = value;
  wrong["layer_types"][0] = "linear_attention";
  EXPECT_THAT(
      error_of(wrong.dump()), HasSubstr("\"layer_types\": [\"linear_att"));
  // As many windows, in other places.
  std::swap(types[0], types[1]);
  wrong["layer_types"] = types;
  EXPECT_THAT(
      error_of(wrong.dump()),
      HasSubstr("full_attention in the last of each group"));
}

TEST(HuggingFaceShape, IsTheCataloguesOfGpts) {
  expect_is(
      R"({"model_type": "gpt2", "n_layer": 48, "n_embd": 1600, "n_head": 25,
          "vocab_size": 50257, "n_positions": 1024})"_json,
      "gpt2-xl");
  expect_is(
      R"({"model_type": "bloom", "n_layer": 70, "hidden_size": 14336,
          "num_attention_heads": 112, "vocab_size": 250880})"_json,
      "bloom-176b");
  expect_is(
      R"({"model_type": "mpt", "n_layers": 48, "d_model": 7168, "n_heads": 56,
          "vocab_size": 50368, "max_seq_len": 2048})"_json,
      "mpt-30b");
}

// Counts of the weights' files, of models that the catalogue does not have.
TEST(HuggingFaceShape, HasTheParametersOfTheWeights) {
  const json mpt_7b = R"({
      "model_type": "mpt", "n_layers": 32, "d_model": 4096, "n_heads": 32,
      "vocab_size": 50432, "no_bias": true, "attn_config": {"alibi": true}
  })"_json;
  EXPECT_EQ(parse(mpt_7b).num_parameters(), 6649286656);
  const json neox_20b = R"({
      "architectures": ["GPTNeoXForCausalLM"], "num_hidden_layers": 44,
      "hidden_size": 6144, "num_attention_heads": 64,
      "intermediate_size": 24576, "vocab_size": 50432})"_json;
  EXPECT_EQ(parse(neox_20b).num_parameters(), 20554567680);
  const json opt_125m = R"({
      "model_type": "opt", "num_hidden_layers": 12, "hidden_size": 768,
      "num_attention_heads": 12, "ffn_dim": 3072, "vocab_size": 50272,
      "max_position_embeddings": 2048, "word_embed_proj_dim": 768})"_json;
  EXPECT_EQ(parse(opt_125m).num_parameters(), 125239296);
}

TEST(HuggingFaceShape, IsReadFromAFolderToo) {
  const auto folder =
      std::filesystem::path(testing::TempDir()) / "shape_folder";
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "config.json")
      << llama("llama", 32, 4096, 32, 32, 11008, 32000);
  EXPECT_EQ(find_model(folder.string()).num_parameters(), 6738415616);
  EXPECT_EQ(find_model((folder / "config.json").string()).seq_len, 4096);
  std::filesystem::remove(folder / "config.json");
  EXPECT_THROW(find_model(folder.string()), DataError);
  std::ofstream(folder / "config.json");
  EXPECT_THROW(find_model(folder.string()), DataError);
}

TEST(HuggingFaceShape, WrongFilesNameKeyValueAndRule) {
  const json good = llama("llama", 32, 4096, 32, 8, 11008, 32000);
  const auto error_with = [&](const char* key, const json& value) {
    return error_of(with(good, {{key, value}}).dump());
  };
  EXPECT_EQ(error_of(good.dump()), "no error");
  EXPECT_THAT(
      error_with("hidden_size", "4096"),
      HasSubstr("config.json: \"hidden_size\": \"4096\"; must be a whole"));
  for (const json& bad :
       {json(0), json(-1), json(1e30), json(4096.5), json(true),
        json(int64_t{1} << 40), json(UINT64_MAX), json(nullptr),
        json::array({1}), json::object()}) {
    EXPECT_THAT(error_with("hidden_size", bad), HasSubstr("\"hidden_size\": "))
        << bad;
  }
  EXPECT_THAT(
      error_with("num_key_value_heads", 7), HasSubstr("32 heads share 7"));
  EXPECT_THAT(error_with("mlp_bias", true), HasSubstr("known is false alone"));
  EXPECT_THAT(error_with("tie_word_embeddings", 1), HasSubstr("true or false"));
  EXPECT_THAT(
      error_with("model_type", "lama"), HasSubstr("did you mean \"llama\""));
  EXPECT_THAT(error_with("model_type", 3), HasSubstr("must be a string"));
  json missing = good;
  missing.erase("vocab_size");
  EXPECT_THAT(
      error_of(missing.dump()), HasSubstr("\"vocab_size\": is missing"));
  const auto long_value = error_with("hidden_size", std::string(100000, 'x'));
  EXPECT_LT(long_value.size(), 200u);
}

TEST(HuggingFaceShape, WhatIsNoConfigurationIsRefused) {
  for (const std::string text :
       {"", "{", "[]", "null", "\xff\xfe", "{\"model_type\": ", "{}",
        "{\"architectures\": []}", "{\"architectures\": \"Llama\"}",
        "{\"architectures\": [1]}", "{\"model_type\": null}"}) {
    EXPECT_THAT(error_of(text), HasSubstr("config.json: ")) << text;
  }
  EXPECT_THAT(error_of(std::string(5 << 20, ' ')), HasSubstr("bytes"));
  EXPECT_THAT(error_of(std::string(3 << 20, '[')), HasSubstr("no JSON object"));
  const std::string deep =
      "{\"a\":" + std::string(1 << 20, '[') + std::string(1 << 20, ']') + "}";
  EXPECT_THAT(error_of(deep), HasSubstr("model_type"));
}

}  // namespace echelon::cost::hugging_face_shape_test
