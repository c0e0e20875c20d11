#include "echelon/train/sample.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <cmath>
#include <map>

#include "echelon/data/tokenizer/tokenizer.h"
#include "echelon/models/make_network.h"
#include "echelon/models/weights.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace echelon::sample_test {

using testing::HasSubstr;
using testing::StartsWith;

TEST(ChooseToken, TemperatureZeroTakesTheLikeliest) {
  const auto scores = torch::tensor({0.1, 3.0, 3.0, -1.0});
  EXPECT_EQ(choose_token(scores, {.temperature = 0}, 0.99), 1);
}

TEST(ChooseToken, DrawsInProportion) {
  const auto scores = torch::log(torch::tensor({0.1, 0.6, 0.3}));
  std::map<int64_t, int> seen;
  for (int i = 0; i < 1000; ++i) {
    ++seen[choose_token(scores, {.temperature = 1}, (i + 0.5) / 1000)];
  }
  EXPECT_NEAR(seen[0], 100, 1);
  EXPECT_NEAR(seen[1], 600, 1);
  EXPECT_NEAR(seen[2], 300, 1);
  seen.clear();
  // At half the temperature the probabilities are squared: 1 : 36 : 9.
  for (int i = 0; i < 1000; ++i) {
    ++seen[choose_token(scores, {.temperature = 0.5}, (i + 0.5) / 1000)];
  }
  EXPECT_NEAR(seen[1], 1000.0 * 36 / 46, 1);
  EXPECT_NEAR(seen[2], 1000.0 * 9 / 46, 1);
}

TEST(ChooseToken, TopKAndTopPDropTheTail) {
  const auto scores = torch::log(torch::tensor({0.1, 0.5, 0.3, 0.1}));
  const auto seen = [&](SampleOptions options) {
    options.temperature = 1;
    std::map<int64_t, int> counts;
    for (int i = 0; i < 800; ++i) {
      ++counts[choose_token(scores, options, (i + 0.5) / 800)];
    }
    return counts;
  };
  auto counts = seen({.top_k = 2});
  EXPECT_EQ(counts.size(), 2);
  EXPECT_NEAR(counts[1], 500, 1);
  EXPECT_NEAR(counts[2], 300, 1);
  EXPECT_EQ(seen({.top_k = 1}).size(), 1);
  EXPECT_EQ(seen({.top_k = 9}).size(), 4);
  EXPECT_EQ(seen({.top_p = 0.4}).size(), 1);
  EXPECT_EQ(seen({.top_p = 0.75}).size(), 2);
  EXPECT_EQ(seen({.top_p = 0.85}).size(), 3);
}

TEST(ChooseToken, RefusesImpossibleValues) {
  const auto scores = torch::tensor({0.0, 1.0});
  const auto refused = [&](const SampleOptions& options) {
    return error_text<ConfigError>([&] { choose_token(scores, options, 0); });
  };
  EXPECT_THAT(refused({.tokens = 0}), HasSubstr("--tokens must be 1"));
  EXPECT_THAT(refused({.temperature = -1}), HasSubstr("--temperature"));
  EXPECT_THAT(refused({.top_k = -1}), HasSubstr("--top-k"));
  EXPECT_THAT(refused({.top_p = 0}), HasSubstr("--top-p"));
  EXPECT_THROW(
      choose_token(torch::tensor({0.0, std::nan("")}), {}, 0), NumericError);
}

class Sample : public testing::Test {
 protected:
  void SetUp() override {
    job_.model.name = "gpt";
    job_.model.layers = 2;
    job_.model.hidden_size = 16;
    job_.model.heads = 2;
    job_.model.max_positions = 8;
    job_.model.dropout = 0.1;  // of training alone
    job_.data.name = DataKind::text;
    job_.data.sources = {"a.txt"};
    job_.data.sequence = 8;
    network_ = make_network(job_.model, {8}, 257, 3);
    // Scores that differ clearly.
    const torch::NoGradGuard no_gradients;
    for (auto& parameter : network_->parameters()) parameter.mul_(8);
    save();
  }
  void save() { save_weights(*network_, weights()); }
  std::string weights() const { return folder_.path("last.safetensors"); }

  std::string sampled(const SampleOptions& options) {
    std::string text;
    sample_text(job_, weights(), options, [&](std::string_view part) {
      EXPECT_EQ(valid_utf8(part), part);
      text += part;
    });
    return text;
  }
  std::string refused(const SampleOptions& options) {
    return error_text<ConfigError>([&] { sampled(options); });
  }

  TempFolder folder_;
  Job job_;
  std::shared_ptr<Network> network_;
};

TEST_F(Sample, ContinuesWithTheLikeliestTokensOfItsWindow) {
  std::string expected = "It was";
  network_->eval();
  const torch::NoGradGuard no_gradients;
  for (int i = 0; i < 30; ++i) {
    std::vector<int64_t> ids;
    for (const char c :
         expected.substr(expected.size() > 8 ? expected.size() - 8 : 0)) {
      ids.push_back(static_cast<uint8_t>(c));
    }
    const auto input = torch::tensor(ids, torch::kInt64).unsqueeze(0);
    const auto scores = network_->forward(Tensors{input})[0][0][-1];
    const auto next = scores.argmax().item<int64_t>();
    if (next == 256) break;
    expected += static_cast<char>(next);
  }
  EXPECT_EQ(
      sampled({.prompt = "It was", .tokens = 30, .temperature = 0}),
      valid_utf8(expected));
  EXPECT_GT(expected.size(), 8) << "the window moves";
}

TEST_F(Sample, TheSeedDecides) {
  SampleOptions options{
      .prompt = "x", .tokens = 40, .temperature = 5, .seed = 1};
  const auto first = sampled(options);
  EXPECT_THAT(first, StartsWith("x"));
  EXPECT_EQ(sampled(options), first);
  options.seed = 2;
  EXPECT_NE(sampled(options), first);
}

TEST_F(Sample, StopsAtTheEndOfText) {
  // Every score is 0 but that of one token, which the last norm's bias makes.
  const torch::NoGradGuard no_gradients;
  for (auto& item : network_->named_parameters()) item.value().zero_();
  auto words = network_->named_parameters()["transformer.wte.weight"];
  network_->named_parameters()["transformer.ln_f.bias"].fill_(1);
  words[256].fill_(5);
  save();
  EXPECT_EQ(sampled({.prompt = "ab", .temperature = 0}), "ab");
  words[256].fill_(0);
  words['z'].fill_(5);
  save();
  EXPECT_EQ(
      sampled({.prompt = "ab", .tokens = 5, .temperature = 0}), "abzzzzz");
  // Half a character at the end is held back, then shown as what it is.
  words['z'].fill_(0);
  words[0xc3].fill_(5);
  save();
  EXPECT_EQ(
      sampled({.prompt = "a", .tokens = 2, .temperature = 0}),
      "a\xef\xbf\xbd\xef\xbf\xbd");
}

TEST_F(Sample, SaysWhatIsWrong) {
  EXPECT_THAT(refused({.prompt = ""}), HasSubstr("has no tokens"));
  job_.data.sources = {"a.bin"};
  EXPECT_THAT(
      refused({.prompt = "a"}),
      HasSubstr("[data] tokenizer is not set, and a.bin has tokens"));
  job_.data.tokenizer = folder_.write(
      "t.json", R"({"model": {"vocab": {"a": 0, "b": 300}, "merges": []}})");
  EXPECT_THAT(
      refused({.prompt = "ab"}),
      HasSubstr("token 300 of the prompt, but the model has 257"));
  job_.model.name = "simple_cnn";
  EXPECT_THAT(
      refused({.prompt = "a"}),
      HasSubstr("the run's model is simple_cnn, which is no language model"));
}

}  // namespace echelon::sample_test
