#include "echelon/architecture/weights_source.h"

#include <gmock/gmock.h>

#include <span>

#include "echelon/architecture/check_weights.h"
#include "echelon/checkpoint/format/hashes.h"
#include "tests/checkpoint/files/small_save.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace echelon::weights_source_test {

using testing::ElementsAre;
using testing::HasSubstr;

// Tensors of two floats each; the first is `value`.
void write_floats(
    const std::string& path, const std::vector<std::string>& names,
    float value = 1) {
  const float numbers[2] = {value, 2};
  std::vector<safetensors::TensorBytes> list;
  for (const auto& name : names) {
    list.push_back({name, "F32", {2}, std::as_bytes(std::span(numbers))});
  }
  safetensors::write(path, list);
}

float first_of(const WeightsSource& source, const std::string& name) {
  const auto* tensor = source.find(name);
  if (tensor == nullptr) return -1;
  float value = 0;
  tensor->read({0, 1}, reinterpret_cast<std::byte*>(&value));
  return value;
}

std::vector<std::string> names_of(const WeightsSource& source) {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : source.tensors()) names.push_back(name);
  return names;
}

std::string refused(const std::string& path, const std::string& prefix = "") {
  return error_text<CheckpointError>([&] { WeightsSource(path, prefix); });
}

// A folder with "a" in the first shard, "b" and "c" in the second.
struct Sharded {
  Sharded() {
    write_floats(folder.path("one.safetensors"), {"a"}, 5);
    write_floats(folder.path("two.safetensors"), {"b", "c"}, 7);
    write_index(R"({"metadata": {"total_size": 24}, "weight_map": {)"
                R"("a": "one.safetensors", "b": "two.safetensors", )"
                R"("c": "two.safetensors"}})");
  }
  void write_index(const std::string& text) const {
    folder.write("model.safetensors.index.json", text);
  }
  TempFolder folder;
};

TEST(WeightsSource, ReadsAFileOrAFolderOrItsShards) {
  const Sharded sharded;
  const auto& folder = sharded.folder;
  const WeightsSource shards(folder.path());
  EXPECT_THAT(names_of(shards), ElementsAre("a", "b", "c"));
  EXPECT_EQ(first_of(shards, "a"), 5);
  EXPECT_EQ(first_of(shards, "c"), 7);
  EXPECT_EQ(shards.find("d"), nullptr);

  EXPECT_THAT(
      names_of(WeightsSource(folder.path("two.safetensors"))),
      ElementsAre("b", "c"));
  folder.make_folder("single");
  write_floats(folder.path("single/model.safetensors"), {"x"}, 9);
  const WeightsSource single(folder.path("single"));
  EXPECT_EQ(first_of(single, "x"), 9);
}

TEST(WeightsSource, ReadsACheckpointARunOrItsLastWeights) {
  const TempFolder folder;
  folder.make_folder("run/checkpoints");
  const auto checkpoints = folder.path("run/checkpoints");
  write_floats(folder.path("run/checkpoints/last.safetensors"), {"x"}, 9);
  EXPECT_EQ(
      last_weights(folder.path("run")), checkpoints + "/last.safetensors");
  EXPECT_EQ(first_of(WeightsSource(folder.path("run")), "x"), 9);
  save_small(checkpoints, 100);
  save_small(checkpoints, 200);
  EXPECT_EQ(last_weights(folder.path("run")), "");
  for (const auto& [place, step] :
       {std::pair(folder.path("run"), 200), std::pair(checkpoints, 200),
        std::pair(checkpoints + "/step-00000100", 100)}) {
    SCOPED_TRACE(place);
    const WeightsSource source(place);
    EXPECT_THAT(names_of(source), ElementsAre("fc.bias", "fc.weight"));
    const auto* weight = source.find("fc.weight");
    EXPECT_EQ(weight->facts, (TensorFacts{"fc.weight", "F32", {4, 3}}));
    // Tensors of both ranks that wrote the checkpoint.
    std::vector<float> values(5);
    weight->read({4, 9}, reinterpret_cast<std::byte*>(values.data()));
    for (int64_t i = 0; i < 5; ++i) {
      EXPECT_EQ(values[static_cast<size_t>(i)], small_value(step, 4 + i));
    }
  }
}

TEST(WeightsSource, ADamagedCheckpointIsRefused) {
  const TempFolder folder;
  save_small(folder.path(), 100);
  const auto newest = save_small(folder.path(), 200).string();
  auto bytes = read_file(newest + "/rank-00001.safetensors");
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  folder.write("step-00000200/rank-00001.safetensors", bytes);
  const WeightsSource source(folder.path());
  std::vector<std::byte> values(12 * sizeof(float));
  EXPECT_THAT(
      error_text<CheckpointError>([&] {
        source.find("fc.weight")->read({0, 12}, values.data());
      }),
      HasAll(
          "rank-00001.safetensors: ", "it is damaged", "\"fc.weight\"",
          "the one before it is " + folder.path("step-00000100")));
  folder.write("step-00000200/rank-00001.safetensors", "");
  EXPECT_THAT(refused(folder.path()), HasSubstr("rank-00001.safetensors"));
  const TempFolder empty;
  EXPECT_THAT(
      refused(empty.path()),
      HasAll(
          "has no checkpoint",
          "a .safetensors file, a Hugging Face folder with"));
}

TEST(WeightsSource, ATensorThatDiffersFromItsChecksumIsRefused) {
  const TempFolder folder;
  const std::string path = folder.path("x.safetensors");
  const float numbers[2] = {1, 2};
  const auto bytes = std::as_bytes(std::span(numbers));
  safetensors::write(
      path, {{"a", "F32", {2}, bytes}, {"b", "F32", {2}, bytes}},
      {{safetensors::checksum_key("a"), checksum(bytes.data(), bytes.size())},
       {safetensors::checksum_key("b"), checksum(bytes.data(), 1)}});
  const WeightsSource source(path);
  EXPECT_EQ(first_of(source, "a"), 1);
  EXPECT_THAT(
      error_text<CheckpointError>([&] { first_of(source, "b"); }),
      HasSubstr(path + ": tensor \"b\" is damaged"));
  MappedTensors mapped{WeightsSource(path)};
  std::vector<std::byte> to(bytes.size());
  mapped.read({{0, {0, 2}, to.data()}});
  EXPECT_THAT(
      error_text<CheckpointError>([&] {
        mapped.read({{1, {0, 2}, to.data()}});
      }),
      HasSubstr(path + ": tensor \"b\" is damaged"));
}

TEST(WeightsSource, NamesOfTheBaseModelGetItsPrefix) {
  EXPECT_EQ(base_prefix({"transformer.wte", "lm_head"}), "transformer.");
  EXPECT_EQ(
      base_prefix({"model.embed_tokens.weight", "lm_head.weight"}), "model.");
  EXPECT_EQ(base_prefix({"conv1.weight", "fc.bias"}), "");
  EXPECT_EQ(base_prefix({}), "");
  const TempFolder folder;
  const std::string path = folder.path("gpt.safetensors");
  write_floats(
      path,
      {"wte.weight", "h.0.attn.bias", "h.0.attn.masked_bias",
       "h.0.attn.c_attn.bias", "transformer.ln_f.weight", "lm_head.weight"});
  EXPECT_THAT(
      names_of(WeightsSource(path, "transformer.")),
      ElementsAre(
          "lm_head.weight", "transformer.h.0.attn.c_attn.bias",
          "transformer.ln_f.weight", "transformer.wte.weight"));
  EXPECT_EQ(names_of(WeightsSource(path)).size(), 6u);
  write_floats(path, {"norm.weight", "layers.0.self_attn.rotary_emb.inv_freq"});
  EXPECT_THAT(
      names_of(WeightsSource(path, "model.")),
      ElementsAre("model.norm.weight"));
  write_floats(path, {"norm.weight", "model.norm.weight"});
  EXPECT_THAT(
      refused(path, "model."), HasSubstr("has \"model.norm.weight\" twice"));
}

TEST(WeightsSource, ErrorsOfAFolderAreNamed) {
  const Sharded sharded;
  const auto& folder = sharded.folder;
  std::filesystem::remove(folder.path("two.safetensors"));
  EXPECT_THAT(
      refused(folder.path()),
      HasAll(
          folder.path("two.safetensors") + ": is missing, but",
          "says that it has \"b\"; copy or download all files"));
  write_floats(folder.path("two.safetensors"), {"b"});
  EXPECT_THAT(
      refused(folder.path()), HasSubstr("two.safetensors: has no \"c\", but"));
  const auto whole = read_file(folder.path("one.safetensors"));
  folder.write("one.safetensors", whole.substr(0, whole.size() - 3));
  EXPECT_THAT(
      refused(folder.path()), HasSubstr("one.safetensors: tensor \"a\""));

  for (const auto& [index, said] :
       {std::pair(
            "{\"weight_map\": {\"a\": ",
            "model.safetensors.index.json: is not JSON, or cut off; an index "
            "is"),
        std::pair("[1, 2]", "has no weight_map"),
        std::pair("{\"weight_map\": {\"a\": 3}}", "\"a\" has no file"),
        std::pair(
            "{\"weight_map\": {\"a\": \"../one.safetensors\"}}",
            "\"a\" lies in \"../one.safetensors\", outside")}) {
    sharded.write_index(index);
    EXPECT_THAT(refused(folder.path()), HasSubstr(said));
  }

  const TempFolder empty;
  empty.write("pytorch_model.bin", "");
  EXPECT_THAT(
      refused(empty.path()),
      HasSubstr("pytorch_model.bin is a pickle of torch.save"));
}

TEST(CheckWeights, OneOfSeveralTiedParametersSuffices) {
  const std::vector<ParameterInfo> tied = {
      {.name = "transformer.wte.weight", .shape = {2}, .dtype = "float32"},
      {.name = "transformer.ln_f.weight", .shape = {2}, .dtype = "float32"},
      {.name = "lm_head.weight",
       .shape = {2},
       .dtype = "float32",
       .tied_to = "transformer.wte.weight"}};
  const TempFolder folder;
  const std::string path = folder.path("w.safetensors");
  const auto check = [&] {
    return error_text<DataError>([&] { check_weights(path, tied, "here"); });
  };
  for (const std::vector<std::string>& names :
       {std::vector<std::string>{"wte.weight", "ln_f.weight"},
        {"transformer.wte.weight", "transformer.ln_f.weight"},
        {"wte.weight", "lm_head.weight", "ln_f.weight", "h.0.attn.bias"},
        {"lm_head.weight", "transformer.ln_f.weight"}}) {
    write_floats(path, names);
    EXPECT_EQ(check(), "no error") << names[0];
  }
  write_floats(path, {"ln_f.weight"});
  EXPECT_THAT(
      check(), HasSubstr("does not fit the model in 1 place:\n  "
                         "\"transformer.wte.weight\" is missing"));
  auto untied = tied;
  untied.back().tied_to = "";
  write_floats(path, {"wte.weight", "ln_f.weight"});
  EXPECT_THAT(
      error_text<DataError>([&] { check_weights(path, untied, "here"); }),
      HasSubstr("\"lm_head.weight\" is missing"));
}

}  // namespace echelon::weights_source_test
