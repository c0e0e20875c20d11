// Ranks with different numbers of samples, and stages with different numbers of
// layers, compute what one device computes.
#include <gtest/gtest.h>

#include <vector>

#include "echelon/models/build.h"
#include "tests/train/small_run.h"
#include "tests/train/trained_runs.h"

namespace echelon::uneven_batches_test {

using Batches = std::vector<int64_t>;

Job text_job(TempFolder& folder, const Batches& batches, const char* layout) {
  Job job = small_gpt(write_tokens(folder));
  job.layout = parse_layout(layout);
  job.train.batch = 24;
  job.train.rank_batch = batches;
  // Plain steps: a wrong factor shows in every parameter.
  job.optimizer = {.name = OptimizerKind::sgd};
  job.optimizer.momentum = 0.9;
  job.optimizer.learning_rate = 0.1;
  job.optimizer.clip_norm = 0.5;
  return job;
}

TEST(UnevenBatches, OfReplicas) {
  TempFolder folder;
  expect_equal_to_one_device(text_job(folder, {18, 6}, "dp=2"));
  expect_equal_to_one_device(text_job(folder, {1, 20, 3}, "dp=3"));
  expect_equal_to_one_device(text_job(folder, {9, 1, 6, 8}, "dp=4"));
}

TEST(UnevenBatches, OfEveryStageOfSharding) {
  TempFolder folder;
  for (const int64_t stage : {1, 2, 3}) {
    for (const auto& [layout, batches] :
         {std::pair{"fsdp=2", Batches{18, 6}},
          std::pair{"fsdp=3", Batches{1, 20, 3}},
          std::pair{"dp=2,fsdp=2", Batches{4, 12, 2, 6}}}) {
      Job job = text_job(folder, batches, layout);
      job.shard.stage = stage;
      expect_equal_to_one_device(job);
    }
  }
}

TEST(UnevenBatches, InSeveralPasses) {
  TempFolder folder;
  for (const char* layout : {"dp=2", "fsdp=2"}) {
    for (const int64_t stage : {1, 2, 3}) {
      Job job = text_job(folder, {18, 6}, layout);
      job.shard.stage = stage;
      job.train.accumulate = 3;
      expect_equal_to_one_device(job);
    }
  }
}

// The stages have different numbers of layers as well.
TEST(UnevenBatches, OfPipelines) {
  TempFolder folder;
  for (const auto& [layout, batches] :
       {std::pair{"dp=2,pp=2", Batches{16, 8}},
        std::pair{"fsdp=2,pp=2", Batches{4, 20}},
        std::pair{"fsdp=2,tp=2,pp=2", Batches{16, 8}},
        std::pair{"dp=3,pp=2", Batches{4, 12, 8}}}) {
    Job job = text_job(folder, batches, layout);
    job.pipeline.microbatches = 4;
    job.model.partition_at = {"transformer.h.1"};
    expect_equal_to_one_device(job);
    job.pipeline.schedule = ScheduleKind::zb_h1;
    expect_equal_to_one_device(job);
  }
}

TEST(UnevenBatches, WithDropout) {
  TempFolder folder;
  Job job = text_job(folder, {17, 7}, "dp=2");
  job.model.dropout = 0.3;
  expect_equal_to_one_device(job);
  job.layout = parse_layout("fsdp=2");
  expect_equal_to_one_device(job);
}

// Statistics are those of all samples of a pass.
TEST(UnevenBatches, WithBatchNorms) {
  Job job;
  job.model = {.name = "resnet18", .sync_batch_norm = true};
  job.model.dtype = ModelDtype::float64;
  job.data.name = DataKind::dummy;
  job.data.samples = 32;
  job.data.shape = {3, 16, 16};
  job.train.batch = 8;
  job.train.steps = 2;
  const LayerFactory layers = [&](const TensorParallel& parallel) {
    return models::resnet_layers(
        {.blocks = {1, 1}}, 3, job.data.classes, parallel);
  };
  for (const auto& [layout, batches] :
       {std::pair{"dp=2", Batches{7, 1}}, std::pair{"fsdp=2", Batches{2, 6}},
        std::pair{"dp=3", Batches{1, 5, 2}}}) {
    job.layout = parse_layout(layout);
    job.train.rank_batch = batches;
    expect_equal_to_one_device(job, layers);
  }
}

}  // namespace echelon::uneven_batches_test
