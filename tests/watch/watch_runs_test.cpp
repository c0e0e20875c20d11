// What is written beside a run that trains, and what watches it.
#include <gmock/gmock.h>
#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "echelon/monitoring/run_status.h"
#include "echelon/timeline/metrics.h"
#include "echelon/timeline/rollback.h"
#include "echelon/watch/web_page.h"
#include "tests/support/places.h"
#include "tests/support/process.h"
#include "tests/support/python.h"
#include "tests/support/temp_folder.h"
#include "tests/train/trained_command.h"

namespace echelon::watch_runs_test {

using nlohmann::json;
using testing::HasSubstr;
using testing_support::Command;

class WatchedRuns : public testing::Test {
 protected:
  std::string run() const { return folder_.path("run"); }
  Words train(int64_t steps, const Words& more = {}) const {
    return train_digits(run(), steps) + Words{"-n", "2"} +
           set({"model.name=mlp", "model.hidden=[16]", "train.log_every=5"}) +
           more;
  }
  json watched() const {
    Command command({kEchelon, "watch", run(), "--json"});
    EXPECT_EQ(command.wait(), 0) << command.err();
    return json::parse(command.out());
  }
  std::vector<timeline::StepMetrics> steps() const {
    return timeline::read_metrics(run() + "/metrics.jsonl").steps;
  }

  TempFolder folder_;
};

TEST_F(WatchedRuns, SayWhatTheyDoAndHowTheyEnd) {
  Command job(train(1'000'000));
  ASSERT_TRUE(Command::until([&] {
    if (!std::filesystem::exists(run() + "/status/rank-0.json")) return false;
    const json view = watched();  // the ranks may be newer than the status
    return view.at("state") == "training" &&
           view.at("ranks").at(1).contains("resident_bytes");
  })) << job.err();
  const json view = watched();
  EXPECT_EQ(view.at("title"), "mlp on digits");
  EXPECT_EQ(view.at("total_steps"), 1'000'000);
  EXPECT_GT(view.at("flops_per_second"), 0);
  ASSERT_EQ(view.at("ranks").size(), 2u);
  for (const auto& rank : view.at("ranks")) {
    EXPECT_GT(rank.at("resident_bytes"), 1 << 20);
    EXPECT_EQ(rank.at("host"), view.at("ranks").at(0).at("host"));
  }
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(), 75);
  EXPECT_EQ(watched().at("state"), "stopped");
}

TEST_F(WatchedRuns, OfALauncherThatIsKilledHaveDied) {
  Command job(train(1'000'000));
  ASSERT_TRUE(Command::until(
      [&] { return std::filesystem::exists(run() + "/status/rank-0.json"); }));
  job.signal(SIGKILL);
  job.wait();
  EXPECT_TRUE(Command::until([&] { return job.living().empty(); }));
  // Another host sees no process, and has only this word for it.
  const auto statuses = monitoring::read_statuses(run());
  ASSERT_EQ(statuses.size(), 1u);
  EXPECT_TRUE(statuses[0].lost);
  EXPECT_EQ(watched().at("state"), "died");
}

TEST_F(WatchedRuns, SayWhyTheyFailed) {
  Command job(train(
      20, set({"optimizer.learning_rate=1e30", "optimizer.name=sgd"}) +
              Words{"--max-restarts", "0"}));
  EXPECT_EQ(job.wait(), 4);
  const json view = watched();
  EXPECT_EQ(view.at("state"), "failed");
  EXPECT_THAT(
      view.at("failure").get<std::string>(), HasSubstr("not a finite number"));
}

// The text is that of the page.
TEST_F(WatchedRuns, WriteTheirFiguresForTheNodeExporter) {
  const std::string text = folder_.path("metrics/echelon.prom");
  Command job(train(1'000'000, {"--metrics-file", text}));
  ASSERT_TRUE(Command::until([&] {
    return std::filesystem::exists(text) &&
           testing_support::read_file(text).find("echelon_step{run=\"run\"}") !=
               std::string::npos;
  }));
  EXPECT_EQ(names_in(folder_.path("metrics")).size(), 1u);
  job.signal(SIGTERM);
  job.wait();
  EXPECT_FALSE(std::filesystem::exists(text));
}

TEST_F(WatchedRuns, HaveLinesThatFitTheSchema) {
  ECHELON_NEED_PYTHON();
  Command job(train(
      12, set(
              {"precision.compute=bf16", "train.layer_norms=true",
               "train.on_non_finite=skip", "train.eval_every=5"})));
  ASSERT_EQ(job.wait(), 0) << job.err();
  // What few runs have.
  const std::string rare = folder_.path("rare.jsonl");
  {
    timeline::MetricsWriter writer(rare);
    writer.append(timeline::StepMetrics{
        .step = 1,
        .loss = std::numeric_limits<double>::quiet_NaN(),
        .tokens_per_second = 1,
        .mfu = 0.5,
        .loss_scale = 1024,
        .layer_grad_norms = {{"a", std::numeric_limits<double>::infinity()}},
        .expert_imbalance = 2,
        .dropped_share = 0.25,
        .expert_loads = {{"a", {3, 1}, {1, 0}}, {"b", {2, 2}, {}}}});
    writer.append(timeline::StepMetrics{.step = 2, .simulated = true});
    writer.append(
        timeline::EvaluationMetrics{.step = 2, .tokens = 10, .perplexity = 3});
    writer.append(timeline::Rebalance{
        .step = 2, .before = {32, 32}, .seconds = {0.5, 1}, .after = {43, 21}});
  }
  timeline::append_rollback(
      rare, {.from_step = 8, .step = 4, .why = "a", .end = {0, 9}});
  EXPECT_NO_THROW(run_python_script(
      "watch/metrics_schema.py", {source_path("doc/metrics.schema.json"),
                                  run() + "/metrics.jsonl", rare}));
  std::ofstream(rare, std::ios::app) << "{\"step\":3,\"lost\":1}\n";
  EXPECT_ANY_THROW(run_python_script(
      "watch/metrics_schema.py",
      {source_path("doc/metrics.schema.json"), rare}));
}

// Ranks of a pipeline of two stages, twice.
TEST_F(WatchedRuns, ShowWhatEachRankDidInAStep) {
  Command job(
      train_digits(run(), 1'000'000) + Words{"-n", "4"} +
      set(
          {"layout.dp=2", "layout.pp=2", "layout.microbatches=4",
           "train.watch_seconds=0.2", "train.timeline_steps=0"}));
  const auto shown = [&] {
    const json view = watched();
    return view.contains("last_step") ? view.at("last_step") : json();
  };
  json last;
  ASSERT_TRUE(Command::until([&] {
    last = shown();
    return !last.is_null();
  })) << job.err();
  // It is another one soon.
  const int64_t first = last.at("step");
  ASSERT_TRUE(Command::until([&] {
    last = shown();
    // A rank that is late is left out.
    return last.at("step") > first && last.at("ranks").size() == 4;
  }));
  for (size_t rank = 0; rank < 4; ++rank) {
    const json& one = last.at("ranks").at(rank);
    EXPECT_EQ(one.at("rank"), rank);
    EXPECT_GT(one.at("compute_seconds"), 0);
    EXPECT_GT(one.at("step_seconds"), one.at("compute_seconds"));
  }
  EXPECT_LT(last.at("age_seconds"), 60);
  // The page draws the pipelines as the report does. Ranks are shown when their
  // launcher has said once how they are.
  std::string page;
  EXPECT_TRUE(Command::until([&] {
    watch::RunWatch watch(run(), {.last_step = true});
    page = watch::to_page(watch.look());
    return page.find("pipeline 1") != page.npos &&
           page.find("<section id=\"ranks\">") != page.npos;
  })) << page.size();
  for (const char* part : {"pipeline 0", "Ideal schedule", "backward"}) {
    EXPECT_THAT(page, HasSubstr(part));
  }
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(), 75) << job.err();
  EXPECT_FALSE(std::filesystem::exists(run() + "/last_step/rank-4.msgpack"));
}

// Several watch one run; one is killed, and the others and the run go on.
TEST_F(WatchedRuns, GoOnWhateverTheirWatchersDo) {
  Command job(train(1'000'000));
  ASSERT_TRUE(Command::until([&] {
    return std::filesystem::exists(run() + "/status/rank-0.json") &&
           watched().contains("step");
  }));
  const std::string port = std::to_string(testing_support::free_port());
  const Words web = {kEchelon, "watch", run(), "--web", port};
  Command first({kEchelon, "watch", run()});
  Command second({kEchelon, "watch", run()});
  auto third = std::make_unique<Command>(web);
  ASSERT_TRUE(first.until_output("step ")) << first.err();
  ASSERT_TRUE(second.until_output("step ")) << second.err();
  ASSERT_TRUE(third->until_output("?token=")) << third->err();
  first.signal(SIGKILL);
  third->signal(SIGKILL);
  first.wait();
  third->wait();
  // Its port is free at once, and the page has another token.
  Command again(web);
  ASSERT_TRUE(again.until_output("?token=")) << again.err();
  const int64_t before = watched().at("step");
  ASSERT_TRUE(
      Command::until([&] { return watched().at("step") > before + 5; }));
  // The launcher says so once a second.
  EXPECT_TRUE(
      Command::until([&] { return watched().at("state") == "training"; }));
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(), 75) << job.err();
  EXPECT_EQ(second.wait(), 0) << second.err();
  EXPECT_THAT(second.out(), HasSubstr("stopped"));
}

TEST_F(WatchedRuns, GoOnWhereTheDiskBesideTheirMetricsIsFull) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root's rights, for small disks";
  ASSERT_EQ(Command(train(1)).wait(), 0);  // the folder is a run's
  Command job(
      Words{
          "/usr/bin/unshare", "-m", "/bin/sh", "-c",
          "cd " + run() +
              "; for place in tensorboard otlp last_step; do mkdir -p $place; "
              "mount -t tmpfs -o size=4k none $place; done; exec \"$@\"",
          "sh"} +
      train(
          300,
          Words{"--overwrite"} + set(
                                     {"train.log=[\"tensorboard\", \"otlp\"]",
                                      "train.watch_seconds=0.1"})));
  ASSERT_EQ(job.wait(), 0) << job.err();
  EXPECT_EQ(steps().size(), 300u);
  for (const char* file : {"[tensorboard]", "[otlp]"}) {
    const std::string warning =
        std::string("warning: ") + file + " cannot write ";
    const size_t at = job.out().find(warning);
    ASSERT_NE(at, std::string::npos) << job.out();
    EXPECT_EQ(job.out().find(warning, at + 1), std::string::npos);
    EXPECT_THAT(job.out().substr(at), HasSubstr("No space left on device"));
  }
}

TEST_F(WatchedRuns, RecordNoStepWhereNobodyWants) {
  Command job(train(30, set({"train.watch_seconds=0"})));
  ASSERT_EQ(job.wait(), 0) << job.err();
  EXPECT_FALSE(std::filesystem::exists(run() + "/last_step"));
}

TEST_F(WatchedRuns, AreReadByTensorBoard) {
  ECHELON_NEED_PACKAGE("tensorboard");
  const auto tensorboard = set({"train.log=[\"tensorboard\"]"});
  const auto saves = set({"checkpoint.every_steps=10"});
  {
    Command job(train(1'000'000, tensorboard + saves));
    ASSERT_TRUE(Command::until([&] {
      std::error_code error;
      return std::filesystem::exists(
          run() + "/checkpoints/step-00000020", error);
    })) << job.err();
    job.signal(SIGKILL);
    job.wait();
    ASSERT_TRUE(Command::until([&] { return job.living().empty(); }));
  }
  // It goes on from a checkpoint, with steps that the file has already.
  Command job(train(1'000'000, tensorboard + saves));
  const auto last = [&] {
    const auto all = steps();
    return all.empty() ? 0 : all.back().step;
  };
  const int64_t before = last();
  ASSERT_TRUE(Command::until([&] { return last() > before + 5; }));
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(), 75) << job.err();
  const auto all = steps();
  const json found = json::parse(
      run_python_script("watch/read_events.py", {run() + "/tensorboard"}));
  const auto& loss = found.at("loss_metrics/global_avg_loss");
  ASSERT_EQ(loss.size(), all.size());
  for (size_t i = 0; i < all.size(); ++i) {
    ASSERT_EQ(loss.at(i).at(0), all[i].step);
    ASSERT_EQ(loss.at(i).at(1).get<float>(), static_cast<float>(all[i].loss));
  }
  EXPECT_EQ(found.at("time_metrics/end_to_end(s)").size(), all.size());
  EXPECT_GT(found.at("tflops").at(0).at(1), 0);
  EXPECT_GT(found.at("memory/max_reserved(GiB)").at(0).at(1), 0);
}

TEST_F(WatchedRuns, WriteTracesThatOpenTelemetryReads) {
  ECHELON_NEED_PACKAGE("opentelemetry");
  Command job(train(
      12, set(
              {"train.log=[\"otlp\"]", "train.eval_every=5",
               "checkpoint.every_steps=6"})));
  ASSERT_EQ(job.wait(), 0) << job.err();
  const json spans = json::parse(run_python_script(
      "watch/read_traces.py", {run() + "/otlp/traces.jsonl"}));
  std::map<std::string, json> steps;  // by trace
  for (const auto& span : spans) {
    if (span.at("name") == "step") steps[span.at("trace")] = span;
  }
  ASSERT_EQ(steps.size(), 12u);
  std::map<std::string, int> parts;
  for (const auto& span : spans) {
    const json& step = steps.at(span.at("trace"));
    EXPECT_LE(step.at("begin"), span.at("begin")) << span;
    EXPECT_GE(step.at("end"), span.at("end")) << span;
    if (span.at("name") == "step") continue;
    EXPECT_EQ(span.at("parent"), step.at("id"));
    ++parts[span.at("name")];
  }
  for (const char* part : {"data", "forward", "backward", "update"}) {
    EXPECT_EQ(parts[part], 12) << part;
  }
  EXPECT_EQ(parts["evaluation"], 3);  // after 5, 10 and all steps
  EXPECT_GE(parts["checkpoint"], 2);
  const auto all = this->steps();
  const auto metrics_of = [&](const json& span) {
    const json& step = steps.at(span.at("trace")).at("attributes");
    return all.at(step.at("echelon.step").get<size_t>() - 1);
  };
  for (const auto& span : spans) {
    const json& figures = span.at("attributes");
    const auto step = metrics_of(span);
    if (span.at("name") == "step") {
      EXPECT_EQ(figures.at("echelon.loss"), step.loss);
      EXPECT_EQ(
          figures.at("echelon.communication_seconds"),
          step.communication_seconds.value());
    } else if (span.at("name") == "forward") {
      EXPECT_EQ(figures.at("echelon.seconds"), step.forward_seconds.value());
    } else if (span.at("name") == "backward") {
      EXPECT_EQ(figures.at("echelon.seconds"), step.backward_seconds.value());
    } else if (span.at("name") == "update") {
      EXPECT_EQ(figures.at("echelon.seconds"), step.update_seconds.value());
    }
  }
  const json& resource = spans.at(0).at("resource");
  EXPECT_EQ(resource.at("service.name"), "echelon");
  EXPECT_EQ(resource.at("echelon.layout"), "dp=2");
  EXPECT_EQ(resource.at("echelon.ranks"), 2);
}

}  // namespace echelon::watch_runs_test
