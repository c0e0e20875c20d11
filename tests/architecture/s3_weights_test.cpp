// Weights on moto's S3 server.
#include <gmock/gmock.h>

#include "echelon/architecture/weights_source.h"
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

TEST_F(S3Weights, WhatCannotBeReadSaysSo) {
  const auto refused = [](const std::string& url) {
    return error_text([&] { WeightsSource{url}; });
  };
  EXPECT_THAT(
      refused("s3://models/weights/none.safetensors"),
      AllOf(HasSubstr("none.safetensors"), HasSubstr("no such object")));
  EXPECT_THAT(
      refused("s3://models/weights"),
      AllOf(HasSubstr("s3://models/weights:"), HasSubstr("one .safetensors")));
}

}  // namespace echelon::s3_weights_test
