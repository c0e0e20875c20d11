#include "echelon/watch/run_watch.h"

#include <gmock/gmock.h>
#include <sys/wait.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "tests/watch/written_run.h"

namespace echelon::watch::run_view_test {

using testing::ElementsAre;
using testing::HasSubstr;
using namespace written_run;

class RunViews : public testing::Test {
 protected:
  std::string metrics() const { return folder_.path("run/metrics.jsonl"); }
  RunView look() const {
    RunWatch watch(folder_.path("run"), {.findings = false});
    return watch.look();
  }

  TempFolder folder_;
};

TEST_F(RunViews, ShowWhatARunDoes) {
  write_run(folder_);
  auto status = living();
  status.ranks[1].idle_seconds = 50;
  write(folder_, status);
  const RunView view = look();
  EXPECT_EQ(view.state, RunState::training);
  EXPECT_EQ(view.title, "simple_cnn on digits");
  EXPECT_EQ(view.layout, "dp=2");
  ASSERT_TRUE(view.last);
  EXPECT_EQ(view.last->step, 40);
  EXPECT_EQ(view.total_steps, 100);
  EXPECT_NEAR(view.samples_per_second, 640, 1e-9);
  EXPECT_NEAR(view.data_share, 0.1, 1e-9);
  ASSERT_TRUE(view.eta_seconds);
  EXPECT_NEAR(*view.eta_seconds, 60 * 0.1, 1e-9);
  EXPECT_EQ(view.losses.points().size(), 40u);
  ASSERT_EQ(view.ranks.size(), 2u);
  EXPECT_EQ(view.ranks[0].state, "trains");
  EXPECT_EQ(view.ranks[1].state, "no progress for 50 s");
  EXPECT_TRUE(view.ranks[1].in_doubt);
}

TEST_F(RunViews, ReadOnlyWhatHasCome) {
  write_run(folder_);
  RunWatch watch(folder_.path("run"), {.findings = false});
  EXPECT_EQ(watch.look().last->step, 40);
  const std::string next = step_line(41, "0.5");
  append(metrics(), next.substr(0, 20));
  EXPECT_EQ(watch.look().last->step, 40);
  append(metrics(), next.substr(20));
  EXPECT_EQ(watch.look().last->step, 41);
  EXPECT_EQ(watch.look().losses.points().size(), 41u);
  // A line that is none, and a text that has no end.
  append(metrics(), "nonsense\n" + steps(42, 43) + std::string(3000, 'x'));
  EXPECT_EQ(watch.look().last->step, 43);
  EXPECT_EQ(watch.look().losses.points().size(), 43u);
}

TEST_F(RunViews, CountTheStepsOfEpochsThatHaveEnded) {
  folder_.write(
      "run/config.toml",
      "[model]\nname = \"simple_cnn\"\nclasses = 10\n"
      "[data]\nname = \"digits\"\npath = \"digits.csv\"\n"
      "[train]\nepochs = 7\nrun = \"run\"\n");
  // 2.5 batches are an epoch of three steps.
  const double epochs[] = {0.4, 0.8, 1, 1.4, 1.8};
  std::string lines;
  for (int i = 0; i < 5; ++i) {
    lines += format(
        "{{\"step\":{},\"epoch\":{},\"loss\":1,\"step_seconds\":0.1}}\n", i + 1,
        epochs[i]);
  }
  folder_.write("run/metrics.jsonl", lines);
  EXPECT_EQ(look().total_steps, 21);
}

TEST_F(RunViews, FollowTrainingThatGoesBack) {
  write_run(folder_);
  RunWatch watch(folder_.path("run"), {.findings = false});
  watch.look();
  // Fewer bytes than before, of other steps.
  std::string other = steps(1, 30);
  for (int64_t step = 31; step <= 39; ++step) {
    other += step_line(step, "0.25");
  }
  folder_.write("run/metrics.jsonl", other);
  EXPECT_EQ(watch.look().last->step, 39);
  EXPECT_EQ(watch.look().losses.points().size(), 39u);
  // More bytes than before: the size alone does not tell.
  other = steps(1, 30);
  for (int64_t step = 31; step <= 60; ++step) other += step_line(step, "0.125");
  folder_.write("run/metrics.jsonl", other);
  EXPECT_EQ(watch.look().last->step, 60);
  EXPECT_EQ(watch.look().losses.points().size(), 60u);
  EXPECT_EQ(watch.look().losses.points()[34].y, 0.125);
  std::filesystem::remove(metrics());
  EXPECT_FALSE(watch.look().last);
}

TEST_F(RunViews, KnowALossThatIsNotANumber) {
  write_run(folder_);
  append(
      metrics(),
      "{\"step\":41,\"loss\":null,\"loss_is\":\"nan\",\"step_seconds\":0.1}\n");
  const RunView view = look();
  EXPECT_TRUE(std::isnan(view.last->loss));
  EXPECT_EQ(nlohmann::json::parse(to_json(view, true)).at("loss"), "nan");
}

TEST_F(RunViews, SayWhatHasNotBegun) {
  EXPECT_EQ(look().state, RunState::not_begun);
  EXPECT_THAT(look().why, HasSubstr("no such folder"));
  folder_.make_folder("run");
  EXPECT_EQ(look().state, RunState::not_begun);
  folder_.write("run/config.toml", kConfiguration);
  auto status = living();
  for (auto& rank : status.ranks) rank.progress = 0;
  write(folder_, status);
  EXPECT_EQ(look().state, RunState::starting);
  EXPECT_EQ(look().ranks[0].state, "starts");
}

TEST_F(RunViews, SayHowARunEnded) {
  write_run(folder_);
  const auto state_with = [&](int code) {
    auto status = living();
    status.exit_code = code;
    status.failure = "rank 1: the disk is full";
    write(folder_, status);
    return look();
  };
  EXPECT_EQ(state_with(0).state, RunState::finished);
  EXPECT_EQ(state_with(0).failure, "");
  EXPECT_EQ(state_with(75).state, RunState::stopped);
  EXPECT_EQ(state_with(130).state, RunState::stopped);
  EXPECT_EQ(state_with(3).state, RunState::failed);
  EXPECT_EQ(state_with(3).failure, "rank 1: the disk is full");
  EXPECT_EQ(state_with(3).ranks[0].state, "ended");
}

TEST_F(RunViews, TellALauncherThatDiedFromOneOfAnotherHost) {
  write_run(folder_);
  auto status = living();
  status.lost = true;
  write(folder_, status);
  EXPECT_EQ(look().state, RunState::died);
  status = living();
  status.time -= 3600;
  status.process = "another";
  write(folder_, status);
  EXPECT_EQ(look().state, RunState::died);
  // It lives, but its process no longer writes.
  status.process = monitoring::process_name(::getpid());
  write(folder_, status);
  EXPECT_EQ(look().state, RunState::silent);
  status.host = "elsewhere";
  write(folder_, status);
  RunView view = look();
  EXPECT_EQ(view.state, RunState::silent);
  EXPECT_THAT(view.why, HasSubstr("of elsewhere, wrote last 60 min"));
  // A clock that is wrong, of a launcher that writes.
  RunWatch watch(folder_.path("run"), {.findings = false});
  watch.look();
  status.beat += 1;
  write(folder_, status);
  EXPECT_EQ(watch.look().state, RunState::training);
}

TEST_F(RunViews, ShowRunsThatNoLauncherOfOursStarted) {
  write_run(folder_);
  EXPECT_EQ(look().state, RunState::training);
  EXPECT_THAT(look().why, HasSubstr("no launcher"));
  append(metrics(), steps(41, 100));
  folder_.write("run/report.html", "");
  EXPECT_EQ(look().state, RunState::finished);
}

TEST_F(RunViews, HaveTheStateOfEachHostsRanks) {
  write_run(folder_);
  auto first = living();
  first.world_size = 4;
  first.num_hosts = 2;
  auto second = living();
  second.host = "n1";
  second.coordinates = false;
  second.ranks[0].rank = 2;
  second.ranks[1].rank = 3;
  write(folder_, first);
  folder_.write("run/status/rank-2.json", to_json(second));
  auto old = second;  // of an earlier job with more hosts
  old.ranks[0].rank = 4;
  old.ranks[1].rank = 5;
  folder_.write("run/status/rank-4.json", to_json(old));
  folder_.write("run/status/rank-6.json", "{\"host\":");
  RunView view = look();
  ASSERT_EQ(view.ranks.size(), 4u);
  EXPECT_EQ(view.ranks[3].host, "n1");
  EXPECT_EQ(view.ranks[3].state, "trains");
  second.time -= 100;
  folder_.write("run/status/rank-2.json", to_json(second));
  view = look();
  EXPECT_EQ(view.ranks[3].state, "not known");
  EXPECT_EQ(view.ranks[1].state, "trains");
}

TEST_F(RunViews, OfLongRunsAreFewSamples) {
  write_run(folder_);
  std::string lines;
  for (int64_t step = 1; lines.size() < (20u << 20); ++step) {
    lines += step_line(step, "0.5");
  }
  folder_.write("run/metrics.jsonl", lines);
  const RunView view = look();
  EXPECT_EQ(
      lines.substr(lines.rfind("{\"step\":") + 8, 4),
      std::to_string(view.last->step).substr(0, 4));
  EXPECT_GT(view.losses.points().size(), 200u);
  EXPECT_LE(view.losses.points().size(), CurvePoints::kMost);
  EXPECT_LT(view.losses.points().front().x, 500);
}

TEST(Statuses, AreReadBack) {
  auto status = living();
  status.exit_code = 75;
  status.failure = "rank 0: \"a\"\n";
  status.restarts = 3;
  status.ranks[1].gpu = 2;
  status.ranks[1].gpu_busy = 0.5;
  EXPECT_EQ(monitoring::parse_status(to_json(status)), status);
  const std::string text = to_json(status);
  for (size_t size = 0; size + 1 < text.size(); ++size) {
    EXPECT_FALSE(monitoring::parse_status(text.substr(0, size)));
  }
  EXPECT_FALSE(monitoring::parse_status("[]"));
  EXPECT_FALSE(monitoring::parse_status("{\"host\":1,\"pid\":1,\"time\":1}"));
}

TEST(Curves, KeepTheMeansOfTheirValues) {
  CurvePoints curve;
  constexpr int kValues = 100'000;
  for (int i = 0; i < kValues; ++i) curve.add(i, i % 2);
  EXPECT_LE(curve.points().size(), CurvePoints::kMost);
  EXPECT_GE(curve.points().size(), CurvePoints::kMost / 2);
  for (const auto& point : curve.points()) EXPECT_NEAR(point.y, 0.5, 1e-9);
  EXPECT_LT(curve.points().front().x, 200);
  EXPECT_GT(curve.points().back().x, kValues - 300);
}

TEST(Runs, AreFoundTheNewestFirst) {
  TempFolder folder;
  folder.write("a/metrics.jsonl", "");
  folder.write("deep/b/config.toml", "");
  folder.write("deep/b/checkpoints/step-00000001/config.toml", "");
  folder.write("other/notes.txt", "");
  const auto time =
      std::filesystem::last_write_time(folder.path("deep/b/config.toml"));
  std::filesystem::last_write_time(
      folder.path("a/metrics.jsonl"), time - std::chrono::hours(1));
  EXPECT_THAT(
      find_runs(folder.path()),
      ElementsAre(folder.path("deep/b"), folder.path("a")));
  EXPECT_THAT(find_runs(folder.path("a")), ElementsAre(folder.path("a")));
}

TEST(ProcessNames, AreOfOneProcess) {
  EXPECT_NE(monitoring::process_name(::getpid()), "");
  const pid_t child = ::fork();
  if (child == 0) ::_exit(0);
  siginfo_t info{};
  ::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT);
  EXPECT_EQ(monitoring::process_name(child), "");  // it has ended
  ::waitpid(child, nullptr, 0);
  EXPECT_EQ(monitoring::process_name(child), "");
}

}  // namespace echelon::watch::run_view_test
