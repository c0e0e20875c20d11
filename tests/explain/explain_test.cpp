// Runs made to have one fault each, and one that has none.
#include "echelon/explain/explain.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cstdlib>

#include "echelon/cluster/catalogue.h"
#include "echelon/cost/model_shape.h"
#include "echelon/explain/findings.h"
#include "echelon/schedule/options.h"
#include "tests/explain/made_run.h"
#include "tests/support/temp_folder.h"

namespace echelon::explain::explain_test {

using made::DataParallel;
using made::RankStep;
using made::timeline_of;
using testing::AllOf;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

// A job whose model is simulated in milliseconds, without its data.
Job job_of_words(const std::string& layout) {
  Job job = made::job_of(layout);
  job.model.name = "gpt";
  job.model.layers = 4;
  job.model.hidden_size = 512;
  job.model.heads = 8;
  job.model.max_positions = 128;
  job.data = {};
  job.data.name = DataKind::text;
  job.data.sequence = 128;
  return job;
}

class Explain : public testing::Test {
 protected:
  RunExplanation explain(const Job& job, const timeline::Timeline& timeline) {
    made::write_run(folder_.path("run"), job, timeline);
    return explain_run(
        folder_.path("run"), {.cluster = cluster::find_cluster(cluster_)});
  }

  // The only finding, which is of this fault; else one with a failure.
  RunFinding
  only(Fault fault, const Job& job, const timeline::Timeline& timeline) {
    const RunExplanation run = explain(job, timeline);
    EXPECT_EQ(run.findings.size(), 1u);
    for (const auto& found : run.findings) {
      EXPECT_EQ(found.fault, fault);
      EXPECT_FALSE(found.reason.diagnosis.empty());
      EXPECT_FALSE(found.reason.fix.empty());
      EXPECT_FALSE(found.reason.why.empty());
      if (run.findings.size() > 1) {
        ADD_FAILURE() << to_string(found.fault) << " " << found.axis << " "
                      << found.share << ": " << found.reason.diagnosis;
      }
    }
    return run.findings.empty() ? RunFinding{} : run.findings.front();
  }

  // The same of digits on as many ranks as the run has.
  RunExplanation explain(const DataParallel& run) {
    return explain(job_of(run), timeline_of(run));
  }
  RunFinding only(Fault fault, const DataParallel& run) {
    return only(fault, job_of(run), timeline_of(run));
  }

  TempFolder folder_;
  std::string cluster_ = "h100-sxm:1x8";

 private:
  static Job job_of(const DataParallel& run) {
    return made::job_of("dp=" + std::to_string(run.ranks));
  }
};

constexpr StageCost kLight{.forward = 0.01, .backward = 0.02};
constexpr StageCost kHeavy{.forward = 0.02, .backward = 0.04};

timeline::Timeline two_stages(
    int32_t microbatches, const StageCost& first, const StageCost& second,
    int64_t steps = 8) {
  return timeline_of(
      make_schedule(
          {.kind = ScheduleKind::one_f_one_b,
           .ranks = 2,
           .microbatches = microbatches}),
      {first, second}, steps);
}

// A job with a network large enough to matter and data that need no folder.
Job image_job(const std::string& layout) {
  Job job = made::job_of(layout);
  job.model.name = "resnet50";
  job.data.name = DataKind::dummy;
  job.data.holdout = 0;
  return job;
}

Job pipeline_job(int64_t microbatches) {
  Job job = image_job("pp=2");
  job.train.batch = 256;
  job.pipeline.microbatches = microbatches;
  return job;
}

TEST_F(Explain, NothingHoldsAHealthyRunBack) {
  const RunExplanation run = explain(DataParallel{});
  EXPECT_TRUE(run.findings.empty())
      << to_string(run.findings.front().fault) << " "
      << run.findings.front().reason.diagnosis;
  EXPECT_EQ(run.recorded_steps, 10);
  EXPECT_EQ(run.ranks, 2);
  EXPECT_NEAR(run.step_seconds, 0.096, 1e-9);
  EXPECT_NEAR(run.compute_share, 94 / 96.0, 1e-6);
}

// Together the waits are 13 % of the step, but no cause is 10 %.
TEST_F(Explain, TheLargestWaitIsToldWhereNothingIsFound) {
  const RunExplanation run = explain(DataParallel{
      .times =
          [](int rank, int64_t step) {
            const bool late = (rank + step) % 2 == 0;
            return RankStep{.backward = late ? 74.0 : 60.0};
          },
      .transfer = 8});
  ASSERT_TRUE(run.findings.empty()) << run.findings.front().reason.diagnosis;
  EXPECT_THAT(
      run.largest_wait,
      AllOf(
          HasSubstr("The largest wait is communication that nothing hides, 13 "
                    "% of the step: "),
          HasSubstr(" % along dp, "), HasSubstr(" for ranks that came later"),
          HasSubstr("Less than 10 % for one cause is no finding")));
  EXPECT_EQ(findings_for_page(run).largest_wait, run.largest_wait);
  // With a finding nothing is left to say.
  EXPECT_EQ(
      explain(DataParallel{.buckets = 1, .transfer = 60}).largest_wait, "");
}

TEST_F(Explain, ASlowLoader) {
  const RunFinding found =
      only(Fault::data_loading, DataParallel{.times = [](int, int64_t) {
             return RankStep{.data = 94.5};
           }});
  EXPECT_NEAR(found.share, 94.5 / 190, 1e-6);
  EXPECT_THAT(found.settings, ElementsAre("data.workers=4", "data.prefetch=4"));
  // With twice the threads a batch comes each 95 ms, and the work takes 95.5
  // ms.
  EXPECT_NEAR(found.gain, 94.5 / 190, 1e-6);
  EXPECT_EQ(found.gain_source, GainSource::measured);
  EXPECT_TRUE(found.ranks.empty());
}

// A network of some microseconds loads its batches itself: threads take longer.
TEST_F(Explain, ALoaderThatThreadsWouldNotHelp) {
  for (const auto& [data, found] :
       {std::pair(0.045, false), std::pair(0.055, true)}) {
    const DataParallel quick{
        .times =
            [data = data](int, int64_t) {
              return RankStep{
                  .data = data,
                  .forward = 0.05,
                  .backward = 0.05,
                  .optimizer = 0.01};
            },
        .transfer = 0.001};
    const auto run = explain(quick);
    EXPECT_EQ(
        std::ranges::any_of(
            run.findings,
            [](const RunFinding& one) {
              return one.fault == Fault::data_loading;
            }),
        found)
        << data;
  }
}

// Eight times the threads is the most that is advised, and all that is
// promised.
TEST_F(Explain, ALoaderThatIsFarTooSlow) {
  const RunFinding found =
      only(Fault::data_loading, DataParallel{.times = [](int, int64_t) {
             return RankStep{.data = 2000};
           }});
  EXPECT_GT(found.share, 0.95);
  EXPECT_THAT(found.settings, testing::Contains("data.workers=16"));
  EXPECT_NEAR(found.gain, 7.0 / 8, 1e-9);
}

TEST_F(Explain, ALoaderThatIsALittleSlow) {
  const DataParallel slow{
      .times = [](int, int64_t) { return RankStep{.data = 15}; }};
  Job job = made::job_of("dp=2");
  job.data.prefetch = 64;
  const RunFinding found = only(Fault::data_loading, job, timeline_of(slow));
  EXPECT_THAT(found.settings, ElementsAre("data.workers=4"));
}

TEST_F(Explain, ALoaderThatIsSlowOnOneRank) {
  const RunFinding found =
      only(Fault::data_loading, DataParallel{.times = [](int rank, int64_t) {
             return RankStep{.data = rank == 1 ? 60.0 : 0.5};
           }});
  EXPECT_THAT(found.ranks, ElementsAre(1));
}

TEST_F(Explain, GradientsThatLeaveWhenBackwardHasEnded) {
  const RunFinding found = only(
      Fault::exposed_communication, DataParallel{.buckets = 1, .transfer = 60});
  EXPECT_EQ(found.axis, "dp");
  EXPECT_NEAR(found.share, 60 / 154.5, 1e-6);
  EXPECT_THAT(found.settings, ElementsAre("train.bucket_bytes=1048576"));
  EXPECT_GT(found.gain, 0.25);
  EXPECT_LT(found.gain, found.share);
}

TEST_F(Explain, SlowLinksBesideManyBuckets) {
  const RunFinding found =
      only(Fault::exposed_communication, DataParallel{.transfer = 40});
  EXPECT_THAT(found.reason.diagnosis, HasSubstr("8 MiB in 4 calls"));
  // The gradients are in buckets already.
  EXPECT_THAT(
      found.settings,
      testing::Not(testing::Contains(testing::StartsWith("train.bucket"))));
}

TEST_F(Explain, CommunicationThatTakesALittle) {
  const RunFinding found = only(
      Fault::exposed_communication, DataParallel{.buckets = 1, .transfer = 17});
  EXPECT_NEAR(found.share, 17 / 111.5, 1e-6);
}

TEST_F(Explain, TheLargestFaultComesFirst) {
  const RunExplanation run = explain(DataParallel{
      .times = [](int, int64_t) { return RankStep{.data = 20}; },
      .buckets = 1,
      .transfer = 60});
  ASSERT_EQ(run.findings.size(), 2u);
  EXPECT_EQ(run.findings[0].fault, Fault::exposed_communication);
  EXPECT_EQ(run.findings[1].fault, Fault::data_loading);
}

TEST_F(Explain, TimeOfWhichNothingWasRecordedIsNoted) {
  timeline::Timeline timeline = timeline_of(DataParallel{});
  EXPECT_THAT(
      explain(made::job_of("dp=2"), timeline).notes, testing::IsEmpty());
  std::erase_if(timeline.spans, [](const timeline::Span& span) {
    return span.kind == timeline::SpanKind::forward;
  });
  EXPECT_THAT(
      explain(made::job_of("dp=2"), timeline).notes,
      testing::Contains(HasSubstr("of the step nothing was recorded")));
}

// Without rates of this machine fixes are compared, and no step is predicted.
TEST_F(Explain, RatesThatAreGuessesAreSaid) {
  ::setenv("XDG_CONFIG_HOME", folder_.path().c_str(), 1);
  made::write_run(
      folder_.path("run"), pipeline_job(2), two_stages(2, kLight, kLight));
  const RunExplanation guessed = explain_run(folder_.path("run"));
  ::unsetenv("XDG_CONFIG_HOME");
  EXPECT_EQ(guessed.predicted_seconds, 0);
  EXPECT_EQ(guessed.cluster, "this machine, rates guessed");
  EXPECT_THAT(
      guessed.notes, testing::Contains(HasSubstr("rates that are guesses")));
  // The rates of another machine are known, and predict another time.
  const RunExplanation known = explain_run(
      folder_.path("run"), {.cluster = cluster::find_cluster(cluster_)});
  EXPECT_GT(known.predicted_seconds, 0);
  EXPECT_THAT(
      known.notes,
      testing::Contains(HasSubstr("the simulator is far from this run")));
}

// A run whose computing takes `factor` times as long as it is predicted to.
DataParallel slower(const RunExplanation& predicted, double factor) {
  RankStep times{.data = 0, .forward = 0, .backward = 0, .optimizer = 0};
  for (const auto& part : predicted.parts) {
    const double milliseconds = 1e3 * factor * part.predicted;
    if (part.name == "forward") times.forward = milliseconds;
    if (part.name == "backward") times.backward = milliseconds;
    if (part.name == "optimizer") times.optimizer = milliseconds;
  }
  return {
      .times = [=](int, int64_t) { return times; },
      .buckets = 1,
      .transfer = 1e-3};
}

TEST_F(Explain, EverythingSlowerThanPredictedIsTheMachine) {
  // Formulas may be as far off; the run's own counts are not.
  cost::CountedLayer layer{
      .name = "fc",
      .forward_flops = 1e12,
      .backward_flops = 2e12,
      .parameters = 1000,
      .output_elements = 100,
      .counted_samples = 32};
  for (auto* operators : {&layer.forward, &layer.backward}) {
    operators->push_back(
        {.name = "mm",
         .product = cluster::ProductKind::product,
         .count = 1,
         .m = 8000,
         .n = 8000,
         .k = 8000});
  }
  folder_.write(
      "run/layers.json",
      cost::counted_model_json({.name = "simple_cnn", .layers = {layer}}));
  const RunExplanation predicted = explain({});
  ASSERT_TRUE(predicted.counted_layers);
  ASSERT_GT(predicted.predicted_seconds, 0);
  const auto faults_at = [&](double factor) {
    std::vector<Fault> faults;
    for (const auto& found : explain(slower(predicted, factor)).findings) {
      faults.push_back(found.fault);
    }
    return faults;
  };
  EXPECT_THAT(faults_at(3), testing::Contains(Fault::slow_machine));
  for (const double factor : {1.0, 1.4, 30.0}) {
    EXPECT_THAT(faults_at(factor), Not(Contains(Fault::slow_machine)))
        << factor;
  }
  // Too slow for other work on the machine: no finding, but not in silence.
  const auto strange = explain(slower(predicted, 30));
  EXPECT_TRUE(strange.findings.empty());
  EXPECT_THAT(
      strange.notes, Contains(AllOf(
                         HasSubstr("times the predicted"),
                         HasSubstr("nothing that was found explains it"))));
  const auto run = explain(slower(predicted, 3));
  const auto& found =
      *std::ranges::find(run.findings, Fault::slow_machine, &RunFinding::fault);
  EXPECT_THAT(
      found.reason.diagnosis,
      AllOf(HasSubstr("forward 3.0, backward 3.0"), HasSubstr("times the")));
  EXPECT_THAT(found.reason.fix, HasSubstr("`uptime`"));
  EXPECT_GT(found.share, 0.5);
  EXPECT_THAT(
      findings_for_page(run).findings,
      Contains(testing::Field(
          &report::ReportFinding::title,
          HasSubstr("everything slower than predicted, "))));
}

TEST_F(Explain, PageHasWhatTheTerminalSays) {
  RunFinding found{
      .fault = Fault::exposed_communication,
      .axis = "dp",
      .share = 0.25,
      .gain = 0.25,
      .gain_source = GainSource::measured,
      .settings = {"train.batch=8"}};
  found.reason = {.diagnosis = "a", .fix = "b", .why = "c"};
  const auto page =
      findings_for_page({.findings = {found}, .notes = {"a note"}});
  ASSERT_EQ(page.findings.size(), 1u);
  EXPECT_EQ(
      page.findings[0].title,
      "communication not overlapped (dp), 25 % of the step");
  EXPECT_EQ(page.findings[0].settings, "[train]\nbatch = 8\n");
  EXPECT_EQ(page.findings[0].gain, "25 % of the step, from the recorded times");
  EXPECT_EQ(page.notes, std::vector<std::string>{"a note"});
  found.gain_source = GainSource::none;
  EXPECT_EQ(gain_text(found), "");
}

// A step that stood still, and sent much, is in no mean.
TEST_F(Explain, TrafficIsThatOfTypicalSteps) {
  timeline::Timeline timeline = timeline_of(DataParallel{
      .times =
          [](int, int64_t step) {
            return RankStep{.forward = step == 4 ? 900.0 : 30.0};
          },
      .transfer = 40});
  const timeline::Span odd =
      *std::ranges::find_if(timeline.spans, [](const timeline::Span& span) {
        return span.step == 4 && span.axis == "dp_replicate";
      });
  timeline.spans.insert(timeline.spans.end(), 500, odd);
  EXPECT_THAT(
      only(Fault::exposed_communication, made::job_of("dp=2"), timeline)
          .reason.diagnosis,
      HasSubstr("8 MiB in 4 calls"));
}

// Along which axis is told; and the fix is one of that axis.
TEST_F(Explain, SlowLinksOfOtherAxes) {
  cluster_ = "rtx-4090:1x2";  // no link but PCIe
  Job job = image_job("fsdp=2");
  DataParallel slow{.transfer = 40, .axis = "dp_shard"};
  const auto fsdp = only(Fault::exposed_communication, job, timeline_of(slow));
  EXPECT_EQ(fsdp.axis, "fsdp");
  ASSERT_FALSE(fsdp.settings.empty());
  EXPECT_THAT(
      fsdp.settings.front(), testing::AnyOf(
                                 HasSubstr("shard."), HasSubstr("layout.fsdp"),
                                 HasSubstr("train.batch")));
  EXPECT_EQ(fsdp.gain_source, GainSource::simulated);
  // Ranks of cp sum gradients in a group of this name.
  slow.axis = "dp";
  const auto dp =
      only(Fault::exposed_communication, image_job("dp=2"), timeline_of(slow));
  EXPECT_EQ(dp.axis, "dp");
  EXPECT_THAT(dp.reason.diagnosis, HasSubstr("8 MiB in 4 calls"));
  slow.axis = "tp";
  job = job_of_words("tp=2");
  job.data.sources = {folder_.write("text.txt", std::string(20000, 'x'))};
  job.data.tokenizer = "bytes";
  EXPECT_THAT(
      only(Fault::exposed_communication, job, timeline_of(slow)).settings,
      ElementsAre("layout.overlap_chunks=4"));
  // By itself the trainer takes chunks on GPUs, where they pay.
  const auto on_gpus = [](timeline::Timeline timeline) {
    for (auto& name : timeline.rank_names) name = "rank (cuda)";
    return timeline;
  };
  const auto chosen =
      only(Fault::exposed_communication, job, on_gpus(timeline_of(slow)));
  EXPECT_NE(chosen.gain_source, GainSource::measured);
  job.tensor.overlap_chunks = 4;
  const auto tp = only(Fault::exposed_communication, job, timeline_of(slow));
  EXPECT_EQ(tp.axis, "tp");
  ASSERT_FALSE(tp.settings.empty());
  EXPECT_THAT(tp.settings.front(), HasSubstr("layout."));
  EXPECT_EQ(tp.gain_source, GainSource::simulated);
}

// A machine with thousands of ranks would be simulated for minutes.
TEST_F(Explain, WhatThereIsNoTimeForIsLeftOutAndSaid) {
  cluster_ = "rtx-4090:1x2";
  Job job = image_job("fsdp=2");
  made::write_run(
      folder_.path("run"), job,
      timeline_of(DataParallel{.transfer = 40, .axis = "dp_shard"}));
  const RunExplanation run = explain_run(
      folder_.path("run"),
      {.cluster = cluster::find_cluster(cluster_), .simulation_seconds = 0});
  ASSERT_EQ(run.findings.size(), 1u);
  EXPECT_THAT(run.findings[0].settings, testing::IsEmpty());
  EXPECT_THAT(
      run.findings[0].reason.why, HasSubstr("that there was time to simulate"));
  EXPECT_THAT(
      run.notes, testing::Contains(HasSubstr("settings were not simulated")));
  EXPECT_GT(run.predicted_seconds, 0);
}

// The traffic of an evaluation is not part of a step.
TEST_F(Explain, AnEvaluationAfterAStep) {
  timeline::Timeline timeline = timeline_of(DataParallel{.transfer = 40});
  const auto findings = [&] {
    return explain(made::job_of("dp=2"), timeline).findings;
  };
  const auto before = findings();
  ASSERT_EQ(before.size(), 1u);
  for (int64_t step : {3, 7}) {
    for (int rank : {0, 1}) {
      int64_t end = 0;
      for (const timeline::Span& span : timeline.spans) {
        if (span.step == step) end = std::max(end, span.end_ns);
      }
      const auto add = [&](const char* track, const char* name,
                           timeline::SpanKind kind, int64_t begin,
                           int64_t length, const char* axis) {
        timeline.spans.push_back(
            {rank, track, name, kind, end + begin, end + begin + length, step,
             1 << 20, axis});
      };
      add("compute", "evaluation", timeline::SpanKind::evaluation, 0,
          90'000'000, "");
      add("comm", "all_reduce score", timeline::SpanKind::communication,
          10'000'000, 50'000'000, "dp_replicate");
      add("compute", "wait for all_reduce score",
          timeline::SpanKind::communication, 10'000'000, 50'000'000, "");
    }
  }
  const auto after = findings();
  ASSERT_EQ(after.size(), 1u);
  EXPECT_EQ(after[0].reason.diagnosis, before[0].reason.diagnosis);
  EXPECT_EQ(after[0].share, before[0].share);
}

TEST_F(Explain, AStraggler) {
  const RunFinding found = only(
      Fault::straggler,
      DataParallel{.ranks = 4, .times = [](int rank, int64_t) {
                     const double factor = rank == 2 ? 1.5 : 1;
                     return RankStep{
                         .forward = 30 * factor, .backward = 60 * factor};
                   }});
  EXPECT_THAT(found.ranks, ElementsAre(2));
  EXPECT_NEAR(found.share, 45 / 141.0, 1e-6);
  EXPECT_THAT(found.reason.diagnosis, HasSubstr("Rank 2 takes 50 % longer"));
  // Of 64 samples at 90/16 ms each, and 135/16 ms on rank 2.
  EXPECT_THAT(
      found.settings,
      ElementsAre(testing::StartsWith("train.rank_batch=[18, ")));
  EXPECT_NEAR(found.gain, (135 - 18 * 90 / 16.0) / 141, 1e-6);
  EXPECT_THAT(
      found.reason.fix,
      HasSubstr(
          "slowest rank computes for 101 ms of a step instead of 135 ms"));
}

// Where the batch would be divided anew, nobody has to be told how.
TEST_F(Explain, AStragglerOfARunThatDividesItsBatch) {
  const auto slow = DataParallel{.times = [](int rank, int64_t) {
    return rank == 0 ? RankStep{} : RankStep{.forward = 60, .backward = 120};
  }};
  Job job = made::job_of("dp=2");
  job.train.rebalance_every = 20;
  EXPECT_TRUE(only(Fault::straggler, job, timeline_of(slow)).settings.empty());
  // Nor where each rank normalizes by its own samples.
  job = made::job_of("dp=2");
  job.model.name = "resnet18";
  EXPECT_TRUE(only(Fault::straggler, job, timeline_of(slow)).settings.empty());
  job.model.sync_batch_norm = true;
  EXPECT_THAT(
      only(Fault::straggler, job, timeline_of(slow)).settings,
      ElementsAre("train.rank_batch=[43, 21]"));
}

// A rank that computes longer because it has more samples is no straggler.
TEST_F(Explain, StepsAfterTheBatchWasDividedAnew) {
  const DataParallel uneven{.times = [](int rank, int64_t) {
    const double samples = rank == 0 ? 43 : 21;
    return RankStep{.forward = samples, .backward = 2 * samples};
  }};
  Job job = made::job_of("dp=2");
  job.train.rebalance_every = 5;
  made::write_run(folder_.path("run"), job, timeline_of(uneven));
  timeline::MetricsWriter(folder_.path("run/metrics.jsonl"))
      .append(timeline::Rebalance{
          .step = 0,
          .before = {32, 32},
          .seconds = {0.064, 0.128},
          .after = {43, 21}});
  const auto run = explain_run(folder_.path("run"));
  for (const auto& found : run.findings) {
    EXPECT_NE(found.fault, Fault::straggler) << found.reason.diagnosis;
    EXPECT_TRUE(found.settings.empty());
  }
  EXPECT_THAT(
      run.notes,
      testing::Contains(
          "the batch was divided anew after step 0: ranks work 64 ms, 128 ms "
          "for 32, 32 samples; from now on they take 43, 21, with which the "
          "slowest should work 86 ms instead of 128 ms"));
}

TEST_F(Explain, AStragglerThatIsSlowMostOfTheTime) {
  const RunFinding found = only(
      Fault::straggler,
      DataParallel{.ranks = 4, .times = [](int rank, int64_t step) {
                     const double factor = rank == 2 && step % 5 != 0 ? 1.3 : 1;
                     return RankStep{
                         .forward = 30 * factor, .backward = 60 * factor};
                   }});
  EXPECT_THAT(found.ranks, ElementsAre(2));
  EXPECT_THAT(found.reason.diagnosis, HasSubstr("in 80 % of the steps"));
}

// The rank's samples take long, but it has few, so nobody waits for it.
TEST_F(Explain, ASlowRankWithFewSamplesIsNoStraggler) {
  Job job = made::job_of("dp=2");
  job.train.rank_batch = {60, 4};
  const DataParallel few{.times = [](int rank, int64_t) {
    return rank == 0 ? RankStep{} : RankStep{.forward = 26, .backward = 52};
  }};
  for (const auto& found : explain(job, timeline_of(few)).findings) {
    EXPECT_NE(found.fault, Fault::straggler) << found.reason.diagnosis;
  }
}

TEST_F(Explain, RanksThatAreSlowInTurns) {
  const RunFinding found = only(
      Fault::rank_imbalance,
      DataParallel{.ranks = 4, .times = [](int rank, int64_t step) {
                     const double factor = rank == step % 4 ? 1.5 : 1;
                     return RankStep{
                         .forward = 30 * factor, .backward = 60 * factor};
                   }});
  EXPECT_TRUE(found.settings.empty());
}

TEST_F(Explain, RanksWithDifferentNumbersOfSamples) {
  const DataParallel uneven{.times = [](int rank, int64_t) {
    // The fixed time of a pass makes each of a few samples take longer.
    const double samples = rank == 0 ? 48 : 16;
    return RankStep{.forward = 4 + samples, .backward = 8 + 2 * samples};
  }};
  Job job = made::job_of("dp=2");
  job.train.rank_batch = {48, 16};
  const auto found = only(Fault::rank_imbalance, job, timeline_of(uneven));
  EXPECT_THAT(found.settings, ElementsAre("train.rank_batch=[]"));
  EXPECT_NEAR(found.gain, 48 / 162.0, 1e-6);  // of 156, 108 are left
}

// A few steps in which a machine did something else are no fault.
TEST_F(Explain, AStepThatStoodStillIsNoFault) {
  const DataParallel once{.times = [](int rank, int64_t step) {
    return RankStep{.forward = rank == 1 && step == 4 ? 900.0 : 30.0};
  }};
  EXPECT_TRUE(explain(once).findings.empty());
}

TEST_F(Explain, AShortPipeline) {
  const RunFinding found =
      only(Fault::bubble, pipeline_job(2), two_stages(2, kLight, kLight));
  EXPECT_NEAR(found.share, 30 / 91.0, 1e-6);  // a third of 90 ms
  ASSERT_FALSE(found.settings.empty());
  EXPECT_EQ(found.gain_source, GainSource::simulated);
  EXPECT_GT(found.gain, 0.1);
  EXPECT_LT(found.gain, 0.34);
}

TEST_F(Explain, APipelineThatIsALittleShort) {
  Job job = pipeline_job(6);
  job.train.batch = 384;
  const auto found = only(Fault::bubble, job, two_stages(6, kLight, kLight));
  EXPECT_NEAR(found.share, 30 / 211.0, 1e-6);  // a seventh
}

TEST_F(Explain, StagesThatAreALittleUneven) {
  Job job = pipeline_job(16);
  const StageCost heavy{.forward = 0.012, .backward = 0.024};
  const RunFinding found =
      only(Fault::stage_imbalance, job, two_stages(16, kLight, heavy));
  EXPECT_NEAR(found.share, 0.08, 0.01);
  EXPECT_THAT(found.settings, ElementsAre("model.balance=\"measured\""));
}

// Now one stage takes longer, now the other: on average they are even.
TEST_F(Explain, PassesThatTakeLongerAtTimes) {
  timeline::Timeline timeline;
  for (int64_t step = 0; step < 8; ++step) {
    const bool first = step % 2 == 0;
    timeline::Timeline one =
        two_stages(16, first ? kHeavy : kLight, first ? kLight : kHeavy, 1);
    for (timeline::Span& span : one.spans) {
      span.step = step;
      span.begin_ns += step * 2'000'000'000;
      span.end_ns += step * 2'000'000'000;
      timeline.spans.push_back(span);
    }
    timeline.rank_names = one.rank_names;
  }
  const auto found = only(Fault::rank_imbalance, pipeline_job(16), timeline);
  EXPECT_EQ(found.gain_source, GainSource::replayed);
  EXPECT_NEAR(found.share, 0.24, 0.03);
}

TEST_F(Explain, NamesSomeOfManyRanks) {
  const timeline::Timeline one = two_stages(16, kLight, kHeavy);
  timeline::Timeline all;
  for (int32_t replica = 0; replica < 16; ++replica) {
    for (timeline::Span span : one.spans) {
      span.rank = 16 * span.rank + replica;
      all.spans.push_back(span);
    }
  }
  Job job = pipeline_job(16);
  job.layout = {.dp_replicate = 16, .pp = 2};
  cluster_ = "h100-sxm:4x8";
  const RunFinding found = only(Fault::stage_imbalance, job, all);
  EXPECT_EQ(found.ranks.size(), 16u);
  EXPECT_THAT(
      found.reason.diagnosis,
      HasSubstr("(ranks 16, 17, 18, 19, 20, 21, 22, 23 and 8 more)"));
}

TEST_F(Explain, ALongPipelineWithEvenStagesHasNoFault) {
  const auto run = explain(pipeline_job(16), two_stages(16, kLight, kLight));
  EXPECT_TRUE(run.findings.empty()) << run.findings.front().reason.diagnosis;
}

TEST_F(Explain, UnevenStages) {
  Job job = pipeline_job(16);
  job.model.partition_at = {"layer4.0"};
  const RunFinding found =
      only(Fault::stage_imbalance, job, two_stages(16, kLight, kHeavy));
  EXPECT_THAT(found.ranks, ElementsAre(1));
  EXPECT_NEAR(found.share, 0.23, 0.03);  // of 60 ms a microbatch, 45 are needed
  EXPECT_THAT(
      found.settings,
      ElementsAre("model.cut=[]", "model.balance=\"measured\""));
  EXPECT_EQ(found.gain_source, GainSource::replayed);
}

constexpr int64_t kGiB = int64_t{1} << 30;

TEST_F(Explain, MemoryNearItsLimit) {
  Job job = image_job("dp=2");
  job.precision.compute = ComputeDtype::same;  // the timeline's, on GPUs too
  timeline::Timeline timeline = timeline_of(DataParallel{});
  made::add_memory(timeline, 39 * kGiB / 4, 10 * kGiB);
  const RunFinding found = only(Fault::memory_pressure, job, timeline);
  EXPECT_THAT(found.reason.diagnosis, HasSubstr("97.5 % of the 10 GiB"));
  // Recompute would leave room as well, but costs more.
  EXPECT_THAT(found.settings, ElementsAre("train.accumulate=2"));
  EXPECT_EQ(found.gain_source, GainSource::simulated);
}

TEST_F(Explain, MemoryThatNoSettingSaves) {
  Job job = image_job("dp=2");
  timeline::Timeline timeline = timeline_of(DataParallel{});
  made::add_memory(timeline, 79 * kGiB, 80 * kGiB);  // most is not the model's
  const RunFinding found = only(Fault::memory_pressure, job, timeline);
  EXPECT_THAT(found.settings, testing::IsEmpty());
  EXPECT_THAT(found.reason.why, HasSubstr("No single setting"));
}

TEST_F(Explain, TheRankThatIsNearestToItsLimitIsNamed) {
  Job job = image_job("dp=2");
  timeline::Timeline timeline = timeline_of(DataParallel{});
  made::add_memory(timeline, 39 * kGiB / 4, 10 * kGiB);
  for (auto& sample : timeline.memory[0].samples) {
    sample.memory[timeline::MemoryKind::activations] /= 2;
  }
  EXPECT_THAT(
      only(Fault::memory_pressure, job, timeline).ranks, ElementsAre(1));
}

TEST_F(Explain, RecomputeThoughThereIsRoom) {
  Job job = image_job("dp=2");
  job.memory.recompute = Recompute::all;
  const DataParallel run{
      .times = [](int, int64_t) { return RankStep{.backward = 90}; }};
  timeline::Timeline timeline = timeline_of(run);
  made::add_memory(timeline, 2 * kGiB, 80 * kGiB);
  const RunFinding found = only(Fault::recompute, job, timeline);
  EXPECT_NEAR(found.share, 30 / 126.0, 1e-6);
  EXPECT_THAT(found.settings, ElementsAre("memory.recompute=\"none\""));
  EXPECT_GT(found.gain, 0.05);
  timeline.memory.clear();
  made::add_memory(timeline, 9 * kGiB, 11 * kGiB);
  EXPECT_TRUE(explain(job, timeline).findings.empty()) << "there is no room";
}

TEST_F(Explain, TinyBatches) {
  Job job = made::job_of("dp=1");
  job.train.batch = 2;
  const DataParallel run{
      .ranks = 1, .times = [](int, int64_t) {
        return RankStep{
            .data = 0.01, .forward = 0.4, .backward = 0.6, .optimizer = 0.5};
      }};
  const RunFinding found = only(Fault::small_batch, job, timeline_of(run));
  EXPECT_GT(found.share, 0.35);  // updating is 0.33, the rest the simulator's
  EXPECT_LT(found.share, 1.5 / 1.51);
  EXPECT_THAT(found.settings, ElementsAre("train.batch=16"));
  EXPECT_GT(found.gain, 0.5);
  EXPECT_EQ(found.gain_source, GainSource::simulated);
}

// Time of which nothing was recorded is also the same for any batch.
TEST_F(Explain, TinyBatchesOfAHostThatIsSlow) {
  Job job = made::job_of("dp=1");
  job.train.batch = 2;
  const DataParallel run{
      .ranks = 1, .times = [](int, int64_t) {
        return RankStep{
            .data = 0.01, .forward = 0.4, .backward = 0.1, .optimizer = 0.1};
      }};
  timeline::Timeline timeline = timeline_of(run);
  std::erase_if(timeline.spans, [](const timeline::Span& span) {
    return span.kind == timeline::SpanKind::forward;
  });
  const RunFinding found = only(Fault::small_batch, job, timeline);
  EXPECT_GT(found.share, 0.5 / 0.61 - 1e-9);
}

// A planned model was simulated; its data is the user's, and not there yet.
TEST_F(Explain, ASimulatedRunOfWordsNeedsNoneOfThem) {
  Job job = job_of_words("dp=2");
  job.model.vocab_size = 1000;
  made::write_run(folder_.path("run"), job, timeline_of(DataParallel{}));
  RunRecord record = read_run(folder_.path("run"));
  EXPECT_FALSE(WhatIf(record, cluster::find_cluster("rtx-4090:1x2")).base());
  record.simulated = true;
  const WhatIf what_if(record, cluster::find_cluster("rtx-4090:1x2"));
  ASSERT_TRUE(what_if.base()) << what_if.why();
  EXPECT_GT(what_if.base()->step.step_seconds, 0);
}

TEST_F(Explain, AFixThatDoesNotFitIsNone) {
  Job job = image_job("dp=1");
  made::write_run(
      folder_.path("run"), job, timeline_of(DataParallel{.ranks = 1}));
  const RunRecord record = read_run(folder_.path("run"));
  const WhatIf what_if(record, cluster::find_cluster("rtx-4090"));
  const Settings large = {"train.batch=4096"};
  const auto step = what_if.with(large);
  ASSERT_TRUE(step) << what_if.why();
  EXPECT_FALSE(step->step.fits);
  EXPECT_FALSE(what_if.best_of({large}, -1));
  EXPECT_TRUE(what_if.best_of({{"train.batch=128"}}, -1));
}

// Updating takes long, but larger batches are no faster.
TEST_F(Explain, LargeBatchesAreNotSmall) {
  Job job = image_job("dp=1");
  job.train.batch = 1024;
  const DataParallel run{.ranks = 1, .times = [](int, int64_t) {
                           return RankStep{.optimizer = 60};
                         }};
  const RunExplanation told = explain(job, timeline_of(run));
  EXPECT_FALSE(told.cluster.empty());
  EXPECT_TRUE(told.findings.empty()) << told.findings.front().reason.diagnosis;
}

TEST(Settings, AreTablesWithTheirKeysTogether) {
  EXPECT_EQ(
      to_tables({"model.cut=[]", "layout.pp=2", "model.balance=\"measured\""}),
      "[model]\ncut = []\nbalance = \"measured\"\n\n[layout]\npp = 2\n");
}

}  // namespace echelon::explain::explain_test
