#include "echelon/predict/counted_layers.h"

#include <gmock/gmock.h>

#include "echelon/cluster/cluster_file.h"
#include "echelon/cost/model_shape.h"
#include "echelon/error.h"
#include "echelon/explain/explain.h"
#include "echelon/explain/findings.h"
#include "echelon/predict/predict_run.h"
#include "tests/explain/made_run.h"
#include "tests/support/error_text.h"
#include "tests/support/measured_desk.h"
#include "tests/support/temp_folder.h"

namespace echelon::predict::counted_layers_test {

using testing::Contains;
using testing::Each;
using testing::HasSubstr;
using testing::IsEmpty;

// Four layers, far from what formulas say of simple_cnn.
cost::ModelShape counted() {
  cost::ModelShape model{.name = "simple_cnn"};
  for (int i = 0; i < 4; ++i) {
    cost::CountedLayer layer{
        .name = "layer " + std::to_string(i),
        .forward_flops = 2e7,
        .backward_flops = 4e7,
        .parameters = 1000,
        .output_elements = 100,
        .counted_samples = 32,
        .stage = i / 2};
    layer.forward.push_back(
        {.name = "mm",
         .product = cluster::ProductKind::product,
         .count = 1,
         .m = 3200,
         .n = 100,
         .k = 1000});
    layer.backward.push_back({.name = "add", .bytes = 1e6});
    model.layers.push_back(layer);
  }
  return model;
}

class CountedLayers : public testing::Test {
 protected:
  explain::RunExplanation explain(const std::string& layers) {
    if (!layers.empty()) folder_.write("run/layers.json", layers);
    return explain::explain_run(run_, {.cluster = desk_});
  }

  void SetUp() override {
    explain::made::write_run(
        run_, explain::made::job_of("dp=2"),
        timeline_of(explain::made::DataParallel{}));
  }

  TempFolder folder_;
  const std::string run_ = folder_.path("run");
  const cluster::Cluster desk_ =
      cluster::parse_cluster(kMeasuredDesk, "desk.toml");
};

TEST_F(CountedLayers, ArePredictedWhereARunHasThem) {
  const Job job = explain::made::job_of("dp=2");
  const explain::RunExplanation run =
      explain(cost::counted_model_json(counted()));
  EXPECT_THAT(run.notes, IsEmpty());
  EXPECT_TRUE(run.counted_layers);
  EXPECT_EQ(
      run.predicted_seconds,
      predict_step({counted(), configured_strategy(job)}, desk_).step_seconds);

  std::filesystem::remove(run_ + "/layers.json");
  const explain::RunExplanation older = explain("");
  EXPECT_FALSE(older.counted_layers);
  EXPECT_GT(older.predicted_seconds, 0);
  EXPECT_LT(older.predicted_seconds, 0.5 * run.predicted_seconds);
}

TEST_F(CountedLayers, ABrokenFileIsSaidAndLeavesFormulas) {
  const std::string text = cost::counted_model_json(counted());
  const double by_formulas = explain("").predicted_seconds;
  for (const std::string& broken :
       {std::string("garbage"), std::string("{}"),
        text.substr(0, text.size() / 2)}) {
    const explain::RunExplanation run = explain(broken);
    EXPECT_FALSE(run.counted_layers);
    EXPECT_EQ(run.predicted_seconds, by_formulas);
    EXPECT_THAT(run.notes, Contains(HasSubstr("layers.json"))) << broken;
  }
}

TEST_F(CountedLayers, FixesAreSimulatedOfThemAsWell) {
  folder_.write("run/layers.json", cost::counted_model_json(counted()));
  const explain::RunRecord record = explain::read_run(run_);
  const explain::WhatIf what_if(record, desk_);
  ASSERT_TRUE(what_if.base()) << what_if.why();
  EXPECT_EQ(what_if.base()->configured.model.layers, counted().layers);
  const auto twice = what_if.with({"train.batch=128"});
  ASSERT_TRUE(twice);
  EXPECT_EQ(twice->configured.model.layers, counted().layers);
  // It computes no fewer samples a second, and less than twice as many.
  EXPECT_GT(what_if.gain(*twice), -0.01);
  EXPECT_LT(what_if.gain(*twice), 0.5);
  // These settings change the layers, and the changed ones were not counted.
  EXPECT_FALSE(what_if.with({"precision.compute=\"bf16\""}));
  EXPECT_FALSE(what_if.with({"layout.tp=2", "layout.dp=1"}));
}

TEST_F(CountedLayers, OtherStagesAreCutAnew) {
  Job two = explain::made::job_of("pp=2"), four = explain::made::job_of("pp=4");
  for (Job* job : {&two, &four}) job->pipeline.microbatches = 4;
  const auto stages_of = [](const Configured& what) {
    std::vector<int64_t> stages;
    for (const auto& layer : what.model.layers) stages.push_back(layer.stage);
    return stages;
  };
  EXPECT_THAT(
      stages_of(configured_as_counted(counted(), two, two)),
      testing::ElementsAre(0, 0, 1, 1));
  EXPECT_THAT(stages_of(configured_as_counted(counted(), two, four)), Each(-1));
  EXPECT_THAT(
      error_text<ConfigError>([&] {
        Job other = two;
        other.model.name = "mlp";
        configured_as_counted(counted(), two, other);
      }),
      HasSubstr("[model]"));
}

TEST(CountsLayers, OfAProcessorAndOfPrograms) {
  EXPECT_TRUE(counts_layers({.pp = 2}, true, false));
  EXPECT_FALSE(counts_layers({.pp = 2}, false, false));
  EXPECT_TRUE(counts_layers({.pp = 2}, false, true));
  EXPECT_FALSE(counts_layers({.tp = 2}, true, false));
  EXPECT_FALSE(counts_layers({.cp = 2}, true, false));
}

}  // namespace echelon::predict::counted_layers_test
