#include "echelon/train/verify.h"

#include <gmock/gmock.h>

namespace echelon::verify_test {

using testing::HasSubstr;

Job job_of(const std::string& model, int64_t ranks) {
  Job job;
  job.model.name = model;
  job.layout.dp_replicate = ranks;
  job.train.steps = 5;
  job.train.batch = 24;
  job.optimizer.clip_norm = 1.0;
  return job;
}

VerifyResult result_of(const Job& job, int ranks, VerifyOptions options = {}) {
  VerifyResult result;
  run_ranks(ranks, [&](World& world) {
    const VerifyResult mine = verify(job, world, options);
    EXPECT_EQ(mine.passed, verify(job, world, options).passed);
    if (world.rank() == 0) result = mine;
  });
  return result;
}

TEST(Verify, DataParallelEqualsOneDevice) {
  for (int ranks : {1, 2, 3, 4}) {
    for (const char* model : {"simple_cnn", "mlp"}) {
      const auto result = result_of(job_of(model, ranks), ranks);
      EXPECT_TRUE(result.passed)
          << model << " " << ranks << ": " << to_text(result, {});
      EXPECT_GE(result.num_compared, 3 * (1 + 2 * 6));
    }
  }
}

TEST(Verify, AccumulationAndUnevenBatchesEqualOneDevice) {
  Job job = job_of("simple_cnn", 2);
  job.train.accumulate = 3;
  EXPECT_TRUE(result_of(job, 2).passed);
  job.train.accumulate = 1;
  job.train.rank_batch = {19, 5};
  EXPECT_TRUE(result_of(job, 2).passed);
}

TEST(Verify, SynchronisedBatchNormEqualsOneDevice) {
  Job job = job_of("resnet18", 2);
  job.data.name = DataKind::dummy;
  job.data.samples = 64;
  job.data.shape = {3, 16, 16};
  job.train.batch = 8;
  job.model.sync_batch_norm = true;
  const VerifyOptions options{.steps = 2};
  const auto synchronised = result_of(job, 2, options);
  EXPECT_TRUE(synchronised.passed) << to_text(synchronised, options);

  job.model.sync_batch_norm = false;
  const auto local = result_of(job, 2, {.steps = 1});
  EXPECT_FALSE(local.passed);
  EXPECT_THAT(local.hint, HasSubstr("sync_batch_norm = true"));
}

TEST(Verify, FindsAPlantedFactorOfTwoAndSaysWhere) {
  const VerifyOptions options{.plant_error = "conv2.weight"};
  const auto result = result_of(job_of("simple_cnn", 2), 2, options);
  EXPECT_FALSE(result.passed);
  bool gradient_found = false;
  for (const auto& difference : result.worst) {
    if (difference.step == 1 && difference.what == "gradient conv2.weight") {
      EXPECT_NEAR(difference.relative, 1.0, 1e-6);
      gradient_found = true;
    }
    EXPECT_FALSE(
        difference.step == 1 && difference.what == "gradient conv1.weight");
  }
  EXPECT_TRUE(gradient_found) << to_text(result, options);
  EXPECT_THAT(to_text(result, options), HasSubstr("DIFFERENT"));
  EXPECT_THAT(to_json(result, options), HasSubstr("\"passed\":false"));
}

TEST(Verify, CompressionIsToldApart) {
  Job job = job_of("simple_cnn", 2);
  job.train.compress = Compression::bf16;
  const auto result = result_of(job, 2);
  EXPECT_FALSE(result.passed);
  EXPECT_THAT(result.hint, HasSubstr("compress"));
}

}  // namespace echelon::verify_test
