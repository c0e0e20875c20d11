// Users of the library choose what to compute again by recompute_costs() of a
// list of layers, the trainer by that of a job's counted model: they must be
// the same.
#include <gtest/gtest.h>

#include "echelon/memory/layer_memory.h"
#include "echelon/train/strategies/count_job.h"
#include "tests/train/small_run.h"

namespace echelon::recompute_costs_test {

void expect_same(Job job) {
  SCOPED_TRACE(job.model.name);
  job.model.dtype = ModelDtype::float32;
  const auto data = open_data(job.data, 0);
  const auto source = model_source(job, data.train->spec());
  const auto inputs = input_specs(job, source, job.train.batch);
  const auto of_list = recompute_costs(source.layers, inputs);
  const auto of_job = memory_plan::recompute_costs(count_memory(job, source));
  ASSERT_EQ(of_list.size(), of_job.size());
  int64_t kept_bytes = 0;
  for (size_t i = 0; i < of_list.size(); ++i) {
    SCOPED_TRACE(of_list[i].name);
    EXPECT_EQ(of_list[i].name, of_job[i].name);
    EXPECT_EQ(of_list[i].kept_bytes, of_job[i].kept_bytes);
    EXPECT_EQ(of_list[i].again_flops, of_job[i].again_flops);
    kept_bytes += of_list[i].kept(cost::Recompute::none);
  }
  EXPECT_GT(kept_bytes, 0);
}

TEST(RecomputeCosts, OfAListAndOfAJobAreTheSame) {
  TempFolder folder;
  Job text = small_gpt(write_tokens(folder));
  expect_same(text);
  text.model.name = "llama";
  text.model.hidden_size = 24;
  text.model.heads = 6;
  text.model.kv_heads = 2;
  expect_same(text);
  expect_same(small_mlp());
  Job images = small_mlp();
  images.model.name = "simple_cnn";
  images.model.hidden.clear();
  expect_same(images);
}

}  // namespace echelon::recompute_costs_test
