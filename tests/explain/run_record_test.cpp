// Runs on disk that are complete, truncated or not runs at all.
#include "echelon/explain/run_record.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <set>
#include <tuple>

#include "echelon/cluster/catalogue.h"
#include "echelon/error.h"
#include "echelon/explain/explain.h"
#include "echelon/text/text_file.h"
#include "echelon/timeline/chrome_trace.h"
#include "tests/explain/made_run.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace echelon::explain::run_record_test {

using testing::AllOf;
using testing::Contains;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

class RunRecordTest : public testing::Test {
 protected:
  void SetUp() override {
    made::write_run(
        run_, made::job_of("dp=2"), timeline_of(made::DataParallel{}));
  }

  std::set<int32_t> ranks(const RunRecord& record) const {
    std::set<int32_t> all;
    for (const timeline::Span& span : record.timeline.spans)
      all.insert(span.rank);
    return all;
  }
  std::string refused(const std::string& name) const {
    return error_text<DataError>([&] { read_run(folder_.path(name)); });
  }
  // Metrics of `steps` steps, each with the fields that `of_step` gives.
  static std::string
  metrics(int steps, const std::function<std::string(int step)>& of_step) {
    std::string lines;
    for (int step = 1; step <= steps; ++step) {
      lines += "{\"step\":" + std::to_string(step) + of_step(step) + "}\n";
    }
    return lines;
  }
  void remove(const std::string& name) const {
    std::filesystem::remove(run_ + "/" + name);
  }

  TempFolder folder_;
  const std::string run_ = folder_.path("run");
};

TEST_F(RunRecordTest, AWholeRun) {
  const RunRecord record = read_run(run_);
  EXPECT_EQ(record.title, "made");
  EXPECT_EQ(record.steps.size(), 10u);
  EXPECT_EQ(ranks(record).size(), 2u);
  ASSERT_TRUE(record.job);
  EXPECT_EQ(record.job->layout.dp_replicate, 2);
  EXPECT_THAT(record.notes, IsEmpty());
  EXPECT_EQ(read_run(run_ + "/timeline.json").steps.size(), 10u);
}

TEST_F(RunRecordTest, EveryCutOfATimelineIsReadOrRefused) {
  const std::string text = read_text_file(run_ + "/timeline.json");
  remove("metrics.jsonl");
  int read = 0;
  for (size_t size = 0; size < text.size(); size += 97) {
    folder_.write("run/timeline.json", text.substr(0, size));
    try {
      const RunExplanation run = explain_run(run_);
      ++read;
      EXPECT_THAT(run.findings, IsEmpty()) << size;
      EXPECT_THAT(
          run.notes,
          Contains(HasSubstr("the timeline is truncated in the spans of")))
          << size;
    } catch (const DataError& error) {
      EXPECT_THAT(error.what(), HasSubstr("timeline.json")) << size;
    }
  }
  EXPECT_GT(read, 100);
}

TEST_F(RunRecordTest, TheRankInWhichATimelineBreaksOffIsLeftOut) {
  const std::string text = read_text_file(run_ + "/timeline.json");
  folder_.write("run/timeline.json", text.substr(0, text.size() - 300));
  const RunRecord record = read_run(run_);
  EXPECT_EQ(ranks(record), std::set<int32_t>{0});
  EXPECT_THAT(record.notes, Contains(HasSubstr("rank 1")));
}

TEST_F(RunRecordTest, ARunThatTrainsIsExplainedByTheStepRecordedLast) {
  const timeline::Timeline whole = read_run(run_).timeline;
  remove("timeline.json");
  for (int32_t rank = 0; rank < 2; ++rank) {
    timeline::RankSpans last;
    for (const auto& span : whole.spans) {
      if (span.rank == rank && span.step == 1) last.spans.push_back(span);
    }
    folder_.write(
        "run/" + timeline::last_step_file(rank), timeline::to_bytes(last));
  }
  const RunExplanation run = explain_run(run_);
  EXPECT_EQ(run.recorded_steps, 1);
  EXPECT_EQ(run.ranks, 2);
  EXPECT_THAT(run.notes, Contains(HasSubstr("which may not be typical")));
  folder_.write("run/" + timeline::last_step_file(0), "x");
  const RunExplanation broken = explain_run(run_);
  EXPECT_EQ(broken.recorded_steps, 0);
  EXPECT_THAT(broken.notes, Contains(HasSubstr("spans of rank 0")));
}

TEST_F(RunRecordTest, ARunWithoutATimelineIsExplainedByItsMetrics) {
  remove("timeline.json");
  const RunExplanation run = explain_run(run_);
  EXPECT_EQ(run.recorded_steps, 0);
  EXPECT_NEAR(run.step_seconds, 0.1, 1e-9);
  EXPECT_THAT(run.findings, IsEmpty());
  EXPECT_THAT(run.notes, Contains(HasSubstr("there is no timeline.json")));

  const std::string slow = metrics(6, [](int) {
    return ",\"epoch\":0.1,\"loss\":1.0,\"samples_per_second\":640.0,\"step_"
           "seconds\":0.1,\"data_seconds\":0.06,\"learning_rate\":0.1,"
           "\"slowest_rank\":1";
  });
  folder_.write("run/metrics.jsonl", slow + "{\"step\":7,\"ep");
  const RunExplanation crashed = explain_run(run_);
  ASSERT_EQ(crashed.findings.size(), 1u);
  EXPECT_EQ(crashed.findings[0].fault, Fault::data_loading);
  EXPECT_NEAR(crashed.findings[0].share, 0.6, 1e-9);
  EXPECT_THAT(
      crashed.notes,
      AllOf(
          Contains(HasSubstr("the last line of metrics.jsonl is truncated")),
          Contains(HasSubstr("end at step 6 of 10"))));
}

// The first step waits for the first batch of all.
TEST_F(RunRecordTest, OfMetricsTheFirstStepSaysLittleOfTheLoader) {
  remove("timeline.json");
  folder_.write("run/metrics.jsonl", metrics(6, [](int step) {
                  return step == 1
                             ? ",\"step_seconds\":9.0,\"data_seconds\":8.9"
                             : ",\"step_seconds\":0.1,\"data_seconds\":0.001";
                }));
  EXPECT_THAT(explain_run(run_).findings, IsEmpty());
}

TEST_F(RunRecordTest, MetricsNameARankThatHasMostWork) {
  remove("timeline.json");
  folder_.write(
      "run/metrics.jsonl", metrics(10, [](int step) {
        return std::string(",\"step_seconds\":0.1,\"slowest_rank\":") +
               (step == 4 ? "0" : "1");
      }));
  const auto run =
      explain_run(run_, {.cluster = cluster::find_cluster("h100-sxm:2")});
  EXPECT_THAT(
      run.notes, Contains(HasSubstr("rank 1 had most work in 9 of 10 steps")));
  EXPECT_THAT(run.notes, Each(Not(HasSubstr("rank 0 had"))));
  EXPECT_GT(run.predicted_seconds, 0);
  EXPECT_THAT(run.parts, IsEmpty());  // nothing to compare them with
}

// Memory comes after all spans, which are then complete.
TEST_F(RunRecordTest, ATimelineThatBreaksOffInItsMemoryHasAllRanks) {
  timeline::Timeline timeline = timeline_of(made::DataParallel{});
  made::add_memory(timeline, 1 << 20, 1 << 30);
  const std::string text = timeline::to_chrome_trace(timeline);
  folder_.write("run/timeline.json", text.substr(0, text.size() - 40));
  const RunRecord record = read_run(run_);
  EXPECT_EQ(ranks(record).size(), 2u);
  EXPECT_FALSE(record.timeline.memory.empty());
  EXPECT_THAT(
      record.notes, Contains(HasSubstr("truncated in what it says of memory")));
}

// As a process leaves them that was killed while it wrote one.
TEST_F(RunRecordTest, ARunThatWasCutInAnyFileSaysWhatIsMissing) {
  timeline::Timeline timeline = timeline_of(made::DataParallel{});
  made::add_memory(timeline, 1 << 20, 1 << 30);
  timeline::write_chrome_trace(run_ + "/timeline.json", timeline);
  timeline::MetricsWriter writer(run_ + "/metrics.jsonl");
  for (int step = 1; step <= 10; ++step) {
    writer.append(timeline::StepMetrics{.step = step, .loss = 1.5});
  }
  writer.flush();
  EXPECT_THAT(read_run(run_).notes, Each(Not(HasSubstr("truncated"))));
  const std::pair<const char*, const char*> files[] = {
      {"timeline.json", "timeline"},
      {"metrics.jsonl", "metrics.jsonl"},
      {"config.toml", "config.toml"}};
  for (const auto& [name, said] : files) {
    const std::string path = run_ + "/" + name;
    const std::string whole = read_text_file(path);
    for (const double share : {0.0, 0.33, 0.66, 0.95}) {
      auto size =
          static_cast<size_t>(share * static_cast<double>(whole.size()));
      // Whole lines of a configuration would be one.
      if (const size_t key = whole.rfind(" = ", size); key < size) {
        size = std::min(size, key + 2);
      }
      folder_.write(std::string("run/") + name, whole.substr(0, size));
      const RunRecord record = read_run(run_);
      EXPECT_THAT(record.notes, Contains(HasSubstr(said))) << name << share;
      EXPECT_FALSE(record.steps.empty() && record.timeline.spans.empty());
    }
    std::filesystem::remove(path);
    EXPECT_THAT(
        read_run(run_).notes,
        Contains(HasSubstr(std::string("there is no ") + name)));
    folder_.write(std::string("run/") + name, whole);
  }
}

TEST_F(RunRecordTest, ATimelineAloneIsEnough) {
  remove("metrics.jsonl");
  remove("config.toml");
  const RunExplanation run = explain_run(run_);
  EXPECT_EQ(run.recorded_steps, 10);
  EXPECT_THAT(run.notes, Contains(HasSubstr("no config.toml")));
}

TEST_F(RunRecordTest, AnotherRunsConfigurationIsNone) {
  folder_.write("run/config.toml", to_toml(made::job_of("dp=1")));
  const RunRecord record = read_run(run_);
  EXPECT_FALSE(record.job);
  EXPECT_THAT(
      record.notes,
      ElementsAre(HasSubstr(
          "config.toml is for 1 rank, and the timeline has a rank 1")));
  // A simulated run shows only some ranks.
  folder_.write("run/config.toml", to_toml(made::job_of("dp=4")));
  EXPECT_TRUE(read_run(run_).job);
}

TEST_F(RunRecordTest, WhatFailsIsSaidWithoutTheLibrarysNumbers) {
  folder_.write("run/timeline.json", "{\"traceEvents\":[");
  folder_.write("run/metrics.jsonl", "garbage\n");
  EXPECT_THAT(
      refused("run"),
      AllOf(HasSubstr("metrics.jsonl:1: "), Not(HasSubstr("json."))));
  folder_.write("run/metrics.jsonl", "{\"step\":1,\"step_seconds\":0.1}\n");
  const RunRecord record = read_run(run_);
  EXPECT_THAT(record.notes, Contains(HasSubstr("is no trace")));
  EXPECT_THAT(record.notes, Each(Not(HasSubstr("exception"))));
}

TEST_F(RunRecordTest, WhatIsNoRunSaysSo) {
  EXPECT_THAT(refused("none"), HasSubstr("there is no such run"));
  folder_.make_folder("empty");
  EXPECT_THAT(
      refused("empty"), HasSubstr("neither timeline.json nor metrics.jsonl"));
  for (const char* garbage :
       {"", "garbage", "{\"traceEvents\":[]}", "[1,2,3]", "\xff\xfe},\n\x01",
        "{\"traceEvents\":[{\"ph\":\"X\"},\n{}]}"}) {
    folder_.write("broken/timeline.json", garbage);
    EXPECT_THAT(
        refused("broken"),
        AllOf(HasSubstr("timeline.json"), HasSubstr("no metrics.jsonl")))
        << garbage;
  }
  for (const auto& [rank, end, step] :
       {std::tuple(-1, 10, 0), {1 << 30, 10, 0}, {0, -10, 0}, {0, 10, -1}}) {
    timeline::Timeline odd;
    odd.spans.push_back(
        {rank, "compute", "forward", timeline::SpanKind::forward, 0, end,
         step});
    folder_.write("broken/timeline.json", timeline::to_chrome_trace(odd));
    EXPECT_THAT(
        refused("broken"),
        AllOf(HasSubstr("timeline.json: "), HasSubstr("no metrics.jsonl")))
        << rank << " " << end << " " << step;
  }
  EXPECT_THAT(
      error_text<DataError>([] { read_run("/dev/zero"); }),
      HasSubstr("no regular file"));
  EXPECT_THAT(
      error_text<DataError>([] { read_run(""); }), HasSubstr("RUN is empty"));
  folder_.write("other/package.json", "{\"name\":\"x\",\"traceEvents\":[]}");
  EXPECT_THAT(
      refused("other/package.json"),
      HasSubstr("it is another program's JSON; and there is no metrics.jsonl"));
  folder_.write("run/timeline.json", "garbage");
  EXPECT_THAT(read_run(run_).notes, Contains(HasSubstr("is no trace")));
  folder_.write("run/config.toml", "[model\n");
  EXPECT_FALSE(read_run(run_).job);
  folder_.write("run/metrics.jsonl", "garbage\n{}\n");
  EXPECT_THAT(refused("run"), HasSubstr("metrics.jsonl"));
}

}  // namespace echelon::explain::run_record_test
