// Data on moto's S3 server are the same samples as on the disk.
#include <gmock/gmock.h>

#include <cstdlib>

#include "echelon/checkpoint/format/safetensors.h"
#include "echelon/data/sources/inspect.h"
#include "echelon/data/sources/text.h"
#include "tests/data/sources/make_tokens.h"
#include "tests/support/error_text.h"
#include "tests/support/s3_server.h"
#include "tests/support/temp_folder.h"

namespace echelon::s3_data_test {

using testing::AllOf;
using testing::HasSubstr;
using testing_support::S3Server;

class S3Data : public testing::Test {
 protected:
  void SetUp() override {
    ECHELON_NEED_S3();
    S3Server::get()->set_environment(folder_.path("cache"));
  }
  /// Puts an object; returns its address.
  std::string put(const std::string& name, const std::string& content) {
    storage::ObjectStore("models", S3Server::get()->settings())
        .put("data/" + name, content);
    return "s3://models/data/" + name;
  }

  TempFolder folder_;
};

std::vector<int64_t> all_tokens(const TextCorpus& corpus) {
  std::vector<int64_t> all;
  const auto size = static_cast<size_t>(corpus.sequence());
  std::vector<int64_t> inputs(size), targets(size);
  for (int64_t i = 0; i < corpus.num_samples(); ++i) {
    corpus.read(i, inputs.data(), targets.data(), nullptr);
    all.insert(all.end(), inputs.begin(), inputs.end());
    all.insert(all.end(), targets.begin(), targets.end());
  }
  return all;
}

TEST_F(S3Data, TokensAndTextAreTheSame) {
  std::vector<uint16_t> ids;
  for (int i = 0; i < 500; ++i)
    ids.push_back(static_cast<uint16_t>(i * i % 61));
  const std::string text = "a text of some words, again and again. ";
  constexpr int kUint16 = 8;
  put("pair.idx", make_index(kUint16, {200, 300}, {0, 400}, {0, 1, 2}));
  folder_.write(
      "pair.idx", make_index(kUint16, {200, 300}, {0, 400}, {0, 1, 2}));
  for (const auto& [name, content] :
       {std::pair("flat.bin", raw_bytes(ids)),
        std::pair("pair.bin", raw_bytes(ids)),
        std::pair("words.txt", text + text + text)}) {
    const std::string address = put(name, content);
    DataOptions options{.name = DataKind::text};
    options.sequence = 11;
    options.sources = {folder_.write(name, content)};
    const TextCorpus here(options);
    options.sources = {address};
    const TextCorpus there(options);
    EXPECT_EQ(all_tokens(there), all_tokens(here));
    ASSERT_EQ(there.fingerprints().size(), 1u);
    EXPECT_EQ(there.fingerprints()[0].first, address);
    EXPECT_EQ(there.fingerprints()[0].second, here.fingerprints()[0].second);
    EXPECT_EQ(inspect_data(options).num_samples, here.num_samples());
  }
}

TEST_F(S3Data, AFileOfTensors) {
  const std::vector<float> inputs(12, 0.5F);
  const std::vector<int64_t> targets = {0, 1, 2};
  const std::string path = folder_.path("d.safetensors");
  safetensors::write(
      path, {{"inputs", "F32", {3, 4}, std::as_bytes(std::span(inputs))},
             {"targets", "I64", {3}, std::as_bytes(std::span(targets))}});
  DataOptions options{.name = DataKind::tensors};
  options.path = put("d.safetensors", read_file(path));
  const auto facts = inspect_data(options);
  EXPECT_EQ(facts.num_samples, 3);
  EXPECT_EQ(facts.classes, 3);
}

TEST_F(S3Data, WhatCannotBeReadSaysSo) {
  DataOptions options{.name = DataKind::tensors};
  options.path = "s3://models/data/none.safetensors";
  const auto refused = [&] {
    return error_text([&] { inspect_data(options); });
  };
  EXPECT_THAT(
      refused(), AllOf(HasSubstr(options.path), HasSubstr("no such object")));
  options.path = "s3://missing/none.safetensors";
  EXPECT_THAT(refused(), HasSubstr("404 NoSuchBucket"));
  options.name = DataKind::images;
  EXPECT_THAT(refused(), HasSubstr("images are read from a folder"));
  ::setenv("AWS_SECRET_ACCESS_KEY", "wrong", 1);
  options.name = DataKind::tensors;
  options.path = "s3://models/data/d.safetensors";
  EXPECT_THAT(refused(), HasSubstr("403"));
}

}  // namespace echelon::s3_data_test
