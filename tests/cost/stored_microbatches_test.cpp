// The formulas against the schedules themselves.
#include "echelon/cost/memory_estimate.h"

#include <gtest/gtest.h>

#include <numeric>

#include "echelon/cost/model_catalogue.h"
#include "echelon/cost/strategy.h"
#include "echelon/error.h"
#include "echelon/schedule/memory.h"
#include "echelon/schedule/options.h"

namespace echelon::cost::stored_microbatches_test {

TEST(StoredMicrobatches, AreThoseOfTheSchedule) {
  int compared = 0;
  for (const ScheduleKind kind : kScheduleKinds) {
    const int64_t usual = stages_per_rank_of(kind);
    const bool any = takes_any_stages(kind);
    for (const int64_t v :
         any ? std::vector<int64_t>{2, 3, 4} : std::vector{usual}) {
      for (const int64_t p : {2, 3, 4, 8}) {
        for (const int64_t m : {p, 2 * p, 3 * p, 8 * p}) {
          Schedule schedule;
          try {
            schedule = make_schedule(
                {.kind = kind,
                 .ranks = static_cast<int32_t>(p),
                 .microbatches = static_cast<int32_t>(m),
                 .stages_per_rank = static_cast<int32_t>(v)});
          } catch (const ConfigError&) {
            continue;  // dualpipev with few microbatches
          }
          const auto counted = stored_activations(schedule);
          const PipelineShape shape = {kind, p, v, m};
          for (int64_t rank = 0; rank < p; ++rank) {
            const auto own = schedule.stages_of(static_cast<int32_t>(rank));
            const auto stages = stages_of_rank(shape, rank);
            EXPECT_TRUE(std::equal(
                own.begin(), own.end(), stages.begin(), stages.end()));
            const auto stored = stored_microbatches(shape, rank);
            const double sum =
                std::accumulate(stored.begin(), stored.end(), 0.0);
            const double truth = counted.ranks[static_cast<size_t>(rank)];
            const bool full = kind != ScheduleKind::zb_v || m >= 2 * p;
            EXPECT_GE(sum, truth)
                << to_string(kind) << " " << p << " " << v << " " << m;
            if (full) {
              EXPECT_EQ(sum, truth)
                  << to_string(kind) << " " << p << " " << v << " " << m;
            }
            ++compared;
          }
        }
      }
    }
  }
  EXPECT_GT(compared, 500);
}

TEST(StageCut, SparesTheEndsOfThePipeline) {
  EXPECT_EQ(
      blocks_of_stages(30, 8), (std::vector<int64_t>{3, 4, 4, 4, 4, 4, 4, 3}));
  EXPECT_EQ(blocks_of_stages(4, 4), (std::vector<int64_t>{1, 1, 1, 1}));
  EXPECT_EQ(blocks_of_stages(5, 2), (std::vector<int64_t>{3, 2}));
}

TEST(StageCut, IsWhatTheStrategySays) {
  Strategy strategy{.layout = {.pp = 2}};
  const ModelShape gpt2 = find_model("gpt2");
  EXPECT_EQ(stage_layers(gpt2, strategy), (std::vector<int64_t>{6, 6}));
  strategy.stage_layers = {3, 9};
  EXPECT_EQ(stage_layers(gpt2, strategy), (std::vector<int64_t>{3, 9}));
}

TEST(StageCut, ALayersWeightIsAllThatItComputes) {
  ModelShape model;
  for (const double backward : {2.0, 2.0, 8.0}) {
    model.layers.push_back({.forward_flops = 1, .backward_flops = backward});
  }
  EXPECT_EQ(flops_of_layers(model), (std::vector<double>{3, 3, 9}));
}

TEST(StageCut, OfCountedLayersIsEvenAndLeavesNoneEmpty) {
  EXPECT_EQ(layers_of_stages({1, 1, 1, 1}, 2), (std::vector<int64_t>{2, 2}));
  EXPECT_EQ(layers_of_stages({1, 1, 1, 5}, 2), (std::vector<int64_t>{3, 1}));
  EXPECT_EQ(
      layers_of_stages({9, 0, 0, 0}, 4), (std::vector<int64_t>{1, 1, 1, 1}));
  EXPECT_EQ(layers_of_stages({0, 0, 0, 9}, 3), (std::vector<int64_t>{2, 1, 1}));
}

}  // namespace echelon::cost::stored_microbatches_test
