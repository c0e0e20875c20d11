// Weights on moto's S3 server.
#include <gmock/gmock.h>

#include <filesystem>

#include "echelon/architecture/weights_source.h"
#include "tests/checkpoint/files/small_save.h"
#include "tests/support/error_text.h"
#include "tests/support/s3_server.h"
#include "tests/support/temp_folder.h"

namespace echelon::s3_weights_test {

using testing::AllOf;
using testing::HasSubstr;
using testing_support::S3Server;

class S3Weights : public testing::Test {
 protected:
  void SetUp() override {
    ECHELON_NEED_S3();
    S3Server::get()->set_environment(folder_.path("cache"));
  }

  TempFolder folder_;
};

TEST_F(S3Weights, AreThoseOfTheFile) {
  const std::vector<float> values = {3, 1, 4};
  const std::string path = folder_.path("start.safetensors");
  safetensors::write(
      path, {{"layer.weight", "F32", {3}, std::as_bytes(std::span(values))}});
  storage::ObjectStore("models", S3Server::get()->settings())
      .upload_file(path, "weights/start.safetensors");
  const std::string url = "s3://models/weights/start.safetensors";
  const WeightsSource source(url);
  EXPECT_EQ(source.path(), url);
  const auto* tensor = source.find("layer.weight");
  ASSERT_NE(tensor, nullptr);
  std::vector<float> read(3);
  tensor->read({0, 3}, reinterpret_cast<std::byte*>(read.data()));
  EXPECT_EQ(read, values);
}

// As Hugging Face's: one file, or several with an index.
TEST_F(S3Weights, AreThoseOfAFolder) {
  storage::ObjectStore store("models", S3Server::get()->settings());
  for (const auto& [name, values] :
       std::vector<std::pair<std::string, std::vector<float>>>{
           {"single/model", {1}}, {"shards/one", {2}}, {"shards/two", {3}}}) {
    const std::string path = folder_.path("file");
    safetensors::write(
        path, {{name.substr(name.find('/') + 1),
                "F32",
                {1},
                std::as_bytes(std::span(values))}});
    store.upload_file(path, "weights/" + name + ".safetensors");
  }
  store.put(
      "weights/shards/model.safetensors.index.json",
      R"({"weight_map": {"one": "one.safetensors",)"
      R"( "two": "two.safetensors"}})");
  const auto value = [](const WeightsSource& source, const char* name) {
    float read = 0;
    source.tensors().at(name).read({0, 1}, reinterpret_cast<std::byte*>(&read));
    return read;
  };
  EXPECT_EQ(value(WeightsSource("s3://models/weights/single"), "model"), 1);
  const WeightsSource shards("s3://models/weights/shards");
  EXPECT_EQ(value(shards, "one"), 2);
  EXPECT_EQ(value(shards, "two"), 3);
  store.remove("weights/shards/two.safetensors");
  EXPECT_THAT(
      error_text([] { WeightsSource{"s3://models/weights/shards"}; }),
      AllOf(
          HasSubstr("s3://models/weights/shards/two.safetensors: is missing"),
          HasSubstr("has \"two\"")));
}

// The newest checkpoint of a run, whose address is that of its
// checkpoint.remote.
TEST_F(S3Weights, AreThoseOfARun) {
  const auto saved = save_small(folder_.path("checkpoints"), 7);
  storage::ObjectStore store("models", S3Server::get()->settings());
  for (const auto& entry : std::filesystem::directory_iterator(saved)) {
    store.upload_file(
        entry.path(),
        "runs/a/checkpoints/step-00000007/" + entry.path().filename().string());
  }
  const WeightsSource source("s3://models/runs/a");
  std::vector<float> bias(5);
  source.tensors().at("fc.bias").read(
      {0, 5}, reinterpret_cast<std::byte*>(bias.data()));
  for (int64_t i = 0; i < 5; ++i) {
    EXPECT_EQ(bias[static_cast<size_t>(i)], -small_value(7, i));
  }
}

TEST_F(S3Weights, WhatCannotBeReadSaysSo) {
  const auto refused = [](const std::string& url) {
    return error_text([&] { WeightsSource{url}; });
  };
  EXPECT_THAT(
      refused("s3://models/weights/none.safetensors"),
      AllOf(HasSubstr("none.safetensors"), HasSubstr("no such object")));
  EXPECT_THAT(
      refused("s3://models/nothing"),
      AllOf(
          HasSubstr("s3://models/nothing: there is no checkpoint"),
          HasSubstr("a Hugging Face folder")));
}

}  // namespace echelon::s3_weights_test
