#include "echelon/train/sample.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <cmath>
#include <map>
#include <mutex>

#include "echelon/comm/world.h"
#include "echelon/data/tokenizer/tokenizer.h"
#include "echelon/job/check_job.h"
#include "echelon/layout/layout.h"
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

// A model in float64 on one device and on the ranks of a layout.
class SampleOnRanks : public testing::Test {
 protected:
  static Job job_of(const std::string& model) {
    Job job;
    job.model.name = model;
    job.model.layers = 2;
    job.model.hidden_size = 32;
    job.model.heads = 8;
    job.model.intermediate_size = 45;
    job.model.vocab_size = 67;
    job.model.max_positions = 24;
    job.model.dtype = ModelDtype::float64;
    job.model.dropout = 0.1;  // of training alone
    job.data.name = DataKind::text;
    job.data.sources = {"a.txt"};
    job.data.sequence = 23;
    return job;
  }
  static Job llama() {
    Job job = job_of("llama");
    job.model.kv_heads = 4;
    return job;
  }
  static std::vector<int64_t> text(int64_t length, int64_t vocabulary) {
    std::vector<int64_t> ids;
    for (int64_t i = 0; i < length; ++i) {
      ids.push_back((i * i * 7 + 3 * i + length) % vocabulary);
    }
    return ids;
  }

  /// Writes weights whose scores differ clearly.
  void save(const Job& job) {
    const auto network =
        make_network(job.model, {job.data.sequence}, job.model.vocab_size, 3);
    const torch::NoGradGuard no_gradients;
    for (auto& parameter : network->parameters()) {
      parameter.mul_(4);
      if (parameter.any().item<bool>()) continue;
      parameter.copy_(torch::linspace(-0.3, 0.3, parameter.numel())
                          .view(parameter.sizes()));
    }
    save_weights(*network, weights());
  }
  std::string weights() const { return folder_.path("last.safetensors"); }

  void expect_scores_of_one_device(
      Job job, const std::string& layout,
      const ContextParallelOptions& context = {}) {
    SCOPED_TRACE(job.model.name + " " + layout + " " + to_string(context.way));
    save(job);
    TextModel one(job, weights());
    // Of one token, of fewer than ranks, of lengths that no number of ranks
    // divides, and of more than the model sees.
    const std::vector<int64_t> lengths = {1, 3, 4, 7, 12, 31};
    std::map<int64_t, torch::Tensor> expected;
    for (const int64_t length : lengths) {
      expected[length] = one.scores(text(length, job.model.vocab_size));
      ASSERT_EQ(expected[length].sizes(), job.model.vocab_size);
      ASSERT_GT(expected[length].std().item<double>(), 0.1);
    }
    job.layout = parse_layout(layout);
    job.context = context;
    std::map<int64_t, std::vector<torch::Tensor>> found;
    std::mutex mutex;
    run_ranks(static_cast<int>(job.layout.num_ranks()), [&](World& world) {
      TextModel model(job, weights(), world);
      for (const int64_t length : lengths) {
        const auto scores = model.scores(text(length, job.model.vocab_size));
        const std::lock_guard lock(mutex);
        found[length].push_back(scores.clone());
      }
    });
    for (const int64_t length : lengths) {
      ASSERT_EQ(std::ssize(found[length]), job.layout.num_ranks());
      for (const auto& scores : found[length]) {
        ASSERT_EQ(scores.sizes(), expected[length].sizes());
        const auto difference =
            (scores - expected[length]).abs().max().item<double>();
        EXPECT_LE(difference, 1e-10) << length << " tokens";
        EXPECT_TRUE(torch::equal(scores, found[length][0]))
            << "ranks would choose different tokens";
      }
    }
  }

  TempFolder folder_;
};

TEST_F(SampleOnRanks, ScoresAreThoseOfOneDeviceInAllWays) {
  for (const char* layout : {"cp=2", "cp=3", "cp=4"}) {
    for (const auto way :
         {ContextWay::automatic, ContextWay::ring, ContextWay::all_gather,
          ContextWay::ulysses}) {
      expect_scores_of_one_device(llama(), layout, {way});
    }
    expect_scores_of_one_device(job_of("gpt"), layout);
  }
  expect_scores_of_one_device(llama(), "cp=4", {ContextWay::ulysses_ring, 2});
}

TEST_F(SampleOnRanks, ScoresAreThoseOfOneDeviceWithTensorParallelism) {
  Job job = llama();
  for (const bool sequence_parallel : {false, true}) {
    job.tensor.sequence_parallel = sequence_parallel;
    for (const char* layout :
         {"tp=3", "cp=2,tp=2", "cp=3,tp=2", "cp=2,tp=3",
          "cp=2,tp=2,order=tp:cp"}) {
      expect_scores_of_one_device(job, layout, {ContextWay::ring});
    }
    expect_scores_of_one_device(
        job, "cp=4,tp=2", {ContextWay::ulysses_ring, 2});
  }
  expect_scores_of_one_device(job_of("gpt"), "cp=2,tp=2");
  Job adapted = job_of("gpt");
  adapted.model.lora.rank = 2;
  adapted.model.lora.targets = {"c_attn"};
  adapted.model.weights = weights();
  expect_scores_of_one_device(adapted, "cp=2,tp=2");
}

TEST_F(SampleOnRanks, ScoresAreThoseOfOneDeviceWithAWindowAndExperts) {
  Job windowed = job_of("mistral");
  windowed.model.window = 5;
  Job experts = job_of("mixtral");
  experts.model.experts = 4;
  experts.model.experts_per_token = 2;
  for (const Job& job : {windowed, experts}) {
    for (const char* layout : {"cp=2", "cp=3", "cp=2,tp=2"}) {
      expect_scores_of_one_device(job, layout, {ContextWay::ring});
    }
    expect_scores_of_one_device(job, "cp=2", {ContextWay::all_gather});
  }
}

TEST_F(SampleOnRanks, TheTextIsThatOfOneDevice) {
  Job job = llama();
  job.model.vocab_size = 257;
  save(job);
  for (const double temperature : {0.0, 2.0}) {
    const SampleOptions options{
        .prompt = "a", .tokens = 30, .temperature = temperature, .seed = 5};
    std::string expected;
    sample_text(job, weights(), options, [&](std::string_view part) {
      expected += part;
    });
    EXPECT_GT(expected.size(), 25u) << "the window moves";
    for (const char* layout : {"cp=2", "cp=3", "cp=2,tp=2"}) {
      Job cut = job;
      cut.layout = parse_layout(layout);
      std::string text;  // by one rank
      run_ranks(static_cast<int>(cut.layout.num_ranks()), [&](World& world) {
        sample_text(cut, weights(), world, options, [&](std::string_view part) {
          EXPECT_EQ(world.rank(), 0);
          text += part;
        });
      });
      EXPECT_EQ(text, expected) << layout << " " << temperature;
    }
  }
}

TEST_F(SampleOnRanks, SaysWhatIsWrong) {
  const auto refused = [](Job job, const std::string& layout) {
    job.layout = parse_layout(layout);
    return error_text<ConfigError>([&] { check_sampling(job); });
  };
  Job job = llama();
  for (const std::string axis : {"dp", "fsdp", "pp", "ep"}) {
    EXPECT_EQ(
        refused(job, axis + "=2,cp=2"),
        "[layout] " + axis +
            " = 2: ranks of cp and tp continue a text together, and those of " +
            axis + " have no part in that; set " + axis + " = 1");
  }
  EXPECT_THAT(
      refused(job, "cp=24"),
      HasSubstr("[layout] cp = 24: a sequence has 23 tokens, and each rank "
                "needs one; cp may be 23 at most"));
  EXPECT_THAT(refused(job, "tp=9"), HasSubstr("tp may be 8 at most"));
  job.context.way = ContextWay::ulysses;
  EXPECT_THAT(
      refused(job, "cp=3,tp=4"),
      HasSubstr("gives each of 3 ranks a head, but the model has heads=8, 2 "
                "for a rank of tp=4"));
  job.context = {ContextWay::ulysses_ring, 3};
  EXPECT_THAT(
      refused(job, "cp=4"), HasSubstr("does not divide into groups of 3"));
  // A program's ranks are told the same.
  job.layout = parse_layout("dp=2");
  EXPECT_THAT(
      error_text<ConfigError>([&] {
        run_ranks(2, [&](World& world) {
          sample_text(job, weights(), world, {.prompt = "a"}, {});
        });
      }),
      HasSubstr("set dp = 1"));
}

}  // namespace echelon::sample_test
