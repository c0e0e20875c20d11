// Data sets, losses and metrics that are not as they should be: the error says
// what, no rank waits for another, and the state that was saved stays.
#include "tests/train/own/own_parts.h"

#include <gmock/gmock.h>

#include <atomic>

#include "echelon/checkpoint/files/folder.h"
#include "tests/support/error_text.h"
#include "tests/train/trained_runs.h"

namespace echelon::own_errors_test {

using testing::HasSubstr;

class OwnErrors : public TrainedRuns {
 protected:
  /// What each rank throws; parts_of(rank) are what it brings.
  std::vector<std::string> errors(
      const Job& job, const std::function<OwnParts(int)>& parts_of,
      const std::string& name = "run") {
    const auto folder = folder_.make_folder(name);
    std::vector<std::string> texts(
        static_cast<size_t>(job.layout.num_ranks()), "no error");
    try {
      run_ranks(static_cast<int>(job.layout.num_ranks()), [&](World& world) {
        try {
          train(job, world, folder, parts_of(world.rank()));
        } catch (const Error& error) {
          texts[static_cast<size_t>(world.rank())] = error.what();
          throw;
        }
      });
    } catch (const std::exception&) {
      // texts have it
    }
    return texts;
  }
};

class Shrinking : public OwnDataset {
 public:
  int64_t size() const override { return loads_ < 150 ? kOwnSamples : 45; }
  Sample sample(int64_t index, const SampleContext& context) const override {
    ++loads_;
    return OwnDataset::sample(index, context);
  }

 private:
  mutable std::atomic<int> loads_ = 0;
};

TEST_F(OwnErrors, ADataSetWhoseLengthChanges) {
  OwnParts own = own_parts();
  own.dataset = std::make_shared<Shrinking>();
  Job job = own_job("dp=2", 30);
  job.checkpoint.every_steps = 1;
  const auto texts = errors(job, [&](int) { return own; });
  EXPECT_THAT(
      texts, testing::Contains(HasAll(
                 "had 50 samples when it was opened and has 45 now",
                 "must not change while a run uses it")));
  // What was trained before is there, and training goes on from it.
  const auto kept = list_checkpoints(folder_.path("run") + "/checkpoints");
  ASSERT_FALSE(kept.empty());
  own.dataset = std::make_shared<OwnDataset>();
  job.train.steps = kept.front().step + 2;
  run(job, "run", own);
  EXPECT_EQ(
      timeline::read_metrics(folder_.path("run") + "/metrics.jsonl")
          .steps.back()
          .step,
      job.train.steps);
}

class Fewer : public OwnDataset {
 public:
  int64_t size() const override { return 40; }
};

TEST_F(OwnErrors, RanksWithDifferentData) {
  const auto texts = errors(own_job("dp=2"), [](int rank) {
    OwnParts own = own_parts();
    if (rank == 1) own.dataset = std::make_shared<Fewer>();
    return own;
  });
  for (const auto& text : texts) {
    EXPECT_THAT(
        text, HasAll(
                  "the data set of rank 1 has 40 samples of [6]",
                  "rank 0 50 samples", "every rank has to have the same"));
  }
}

// A resumed run would not see the samples that are left.
TEST_F(OwnErrors, ResumingWithOtherData) {
  OwnParts own = own_parts();
  run(own_job("dp=1", 2), "run", own);
  own.dataset = std::make_shared<Fewer>();
  EXPECT_THAT(
      error_text<CheckpointError>([&] { run(own_job("dp=1", 4), "run", own); }),
      HasAll("samples: was 40, now 32", "checkpoint.force = true"));
}

TEST_F(OwnErrors, AStreamThatEndsEarlyOnOneRank) {
  for (const char* layout : {"dp=2", "fsdp=3", "pp=2", "tp=2"}) {
    for (const int64_t fewer : {3, 20}) {  // in the last batch, and before it
      Job job = own_job(layout);
      job.checkpoint.every_steps = 1;
      const std::string name = layout + std::to_string(fewer);
      const auto texts = errors(
          job,
          [&](int rank) {
            OwnParts own = own_parts();
            own.dataset =
                std::make_shared<OwnStreams>(true, rank == 1 ? fewer : 0);
            return own;
          },
          name);
      for (const auto& text : texts) {
        EXPECT_THAT(
            text, HasAll(
                      "epoch 0: the data's stream", "on rank 1", "on rank 0",
                      "every rank has to read the same samples"))
            << name;
      }
      const auto kept = list_checkpoints(folder_.path(name) + "/checkpoints");
      EXPECT_TRUE(fewer != 3 || !kept.empty()) << name;
    }
  }
}

class Elsewhere : public OwnStreams {
 public:
  std::unique_ptr<SampleStream>
  open(const SampleContext& context) const override {
    SampleContext other = context;
    other.seed += 1;
    auto stream = OwnStreams::open(other);
    stream->skip(1);
    return stream;
  }
};

TEST_F(OwnErrors, StreamsOfRanksAtDifferentPlaces) {
  const auto texts = errors(own_job("dp=2"), [](int rank) {
    OwnParts own = own_parts();
    own.dataset = rank == 1 ? std::make_shared<Elsewhere>()
                            : std::make_shared<OwnStreams>();
    return own;
  });
  for (const auto& text : texts) {
    EXPECT_THAT(text, HasAll("at another position on rank 1 than on rank 0"));
  }
}

class Broken : public OwnStreams {
 public:
  class Stream : public SampleStream {
   public:
    std::optional<Sample> next() override {
      if (++at_ > 15) throw std::runtime_error("the socket is closed");
      return own_sample(at_);
    }
    int64_t at_ = 0;
  };
  std::unique_ptr<SampleStream> open(const SampleContext&) const override {
    return std::make_unique<Stream>();
  }
};

TEST_F(OwnErrors, AStreamThatFailsOnOneRank) {
  const auto texts = errors(own_job("dp=2"), [](int rank) {
    OwnParts own = own_parts();
    own.dataset = rank == 1 ? std::make_shared<Broken>()
                            : std::make_shared<OwnStreams>(false);
    return own;
  });
  EXPECT_THAT(texts[0], HasSubstr("the data's stream failed on rank 1"));
  EXPECT_THAT(texts[1], HasAll("of the data's stream: the socket is closed"));
}

TEST_F(OwnErrors, AStreamWithoutSamplesOrLength) {
  OwnParts own = own_parts();
  own.dataset = std::make_shared<OwnStreams>(true, 40);
  EXPECT_THAT(
      error_text<DataError>([&] { run(own_job(), "a", own); }),
      HasSubstr("epoch 0 of the data's stream has no batch at all"));
  own.dataset = std::make_shared<OwnStreams>();
  Job job = own_job();
  job.train.steps = 0;
  job.train.epochs = 2;
  EXPECT_THAT(
      error_text<ConfigError>([&] { run(job, "b", own); }),
      HasAll("[train] epochs=2", "does not know its size", "set steps"));
}

class OtherShape : public OwnDataset {
 public:
  explicit OtherShape(int what) : what_(what) {}
  Sample sample(int64_t index, const SampleContext&) const override {
    Sample one = own_sample(index);
    if (index != 7) return one;
    if (what_ == 0) one.input = torch::zeros({kInputs + 1});
    if (what_ == 1) one.target = torch::zeros({kNumbers}, torch::kInt64);
    if (what_ == 2) one.more_targets.pop_back();
    if (what_ == 3) one.target = torch::Tensor();
    if (what_ == 4) throw std::out_of_range("no such row");
    return one;
  }

 private:
  int what_;
};

TEST_F(OwnErrors, ASampleOfTheWrongShape) {
  const std::vector<std::vector<std::string>> expected = {
      {"the input of sample 7 is Float [7]", "says Double [6]"},
      {"the target of sample 7 is Long [2]", "says Double [2]"},
      {"sample 7 has 1 further target", "says 2"},
      {"the target of sample 7 is nothing", "says Double [2]"},
      {"sample 7 of the data set: no such row"}};
  for (size_t what = 0; what < expected.size(); ++what) {
    OwnParts own = own_parts();
    own.dataset = std::make_shared<OtherShape>(static_cast<int>(what));
    Job job = own_job("dp=2", 8);
    job.data.holdout = 0;
    const auto texts = errors(
        job, [&](int) { return own; }, std::to_string(what));
    for (const auto& part : expected[what]) {
      EXPECT_THAT(texts, testing::Contains(HasSubstr(part)));
    }
  }
}

// Training is worth more than one number of an evaluation.
TEST_F(OwnErrors, AMetricThatThrows) {
  for (const char* layout : {"dp=2", "pp=2"}) {
    OwnParts own = own_parts();
    own.metrics.push_back(
        {.name = "broken", .sums = [](const Tensors&, const Tensors& targets) {
           // One rank's samples alone have the largest.
           if (targets[1].eq(2).any().item<bool>()) {
             throw std::runtime_error("no such column");
           }
           return torch::ones({1});
         }});
    own.metrics.push_back(
        {.name = "numbers", .sums = [](const Tensors&, const Tensors&) {
           return torch::ones({3});
         }});
    own.metrics.push_back(
        {.name = "value",
         .sums = [](const Tensors&,
                    const Tensors&) { return torch::ones({2}); },
         .numbers = 2,
         .value =
             [](const std::vector<double>& sums, int64_t samples) {
               return sums[0] + static_cast<double>(samples) / 100;
             }});
    testing::internal::CaptureStderr();
    const auto folder = run(own_job(layout), layout, own);
    const std::string text = testing::internal::GetCapturedStderr();
    EXPECT_THAT(
        text, HasAll(
                  "metric \"broken\" has no value in this evaluation: no such "
                  "column",
                  "metric \"numbers\"",
                  "its sums are 3 numbers, and it says "
                  "numbers = 1"));
    const auto metrics = timeline::read_metrics(folder / "metrics.jsonl");
    EXPECT_EQ(metrics.steps.size(), 9U);
    const auto& last = metrics.evaluations.back().own;
    ASSERT_EQ(last.size(), 2U) << layout;  // those that have a value
    EXPECT_EQ(last[0].first, "mae");
    EXPECT_EQ(last[1].first, "value");
    const double passes = std::string(layout) == "dp=2" ? 2 : 3;
    EXPECT_NEAR(last[1].second, passes + 0.1, 1e-12) << layout;
  }
}

class NoScalar : public OwnObjective {
 public:
  torch::Tensor loss_sum(
      const Tensors& outputs, const Tensors&,
      const BatchRanks&) const override {
    return outputs[0].sum(1);
  }
};

TEST_F(OwnErrors, ALossThatIsNoScalar) {
  OwnParts own = own_parts();
  own.objective = std::make_shared<NoScalar>();
  EXPECT_THAT(
      error_text<ConfigError>([&] { run(own_job(), "run", own); }),
      HasAll("loss_sum() returns float64 [12]", "a floating-point scalar"));
}

TEST_F(OwnErrors, SamplesByNothing) {
  class Empty : public OwnDataset {
    int64_t size() const override { return 0; }
  };
  OwnParts own = own_parts();
  own.dataset = std::make_shared<Empty>();
  EXPECT_THAT(
      error_text<ConfigError>([&] { run(own_job(), "a", own); }),
      HasSubstr("the data set has 0 samples"));
  own.dataset = nullptr;
  own.holdout = std::make_shared<OwnDataset>();
  EXPECT_THAT(
      error_text<ConfigError>([&] { run(own_job(), "b", own); }),
      HasSubstr("needs a data set of its own too"));
}

}  // namespace echelon::own_errors_test
