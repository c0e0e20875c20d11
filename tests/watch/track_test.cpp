// Weights & Biases and MLflow get a run's figures from examples/monitoring,
// each in its offline mode.
#include <gmock/gmock.h>
#include <signal.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "echelon/timeline/metrics.h"
#include "tests/support/python.h"
#include "tests/support/temp_folder.h"
#include "tests/train/trained_command.h"

namespace echelon::track_test {

using nlohmann::json;
using testing_support::Command;

/// What the tracker `to` has of a run that it followed while it trained.
/// `wrote`: whether something of the run is in a folder.
void follow(
    const std::string& to, const TempFolder& folder,
    const std::function<bool(const std::string& folder)>& wrote) {
  const std::string run = folder.path("run");
  const std::string kept = folder.make_folder(to);
  Command job(
      train_digits(run, 1'000'000) + Words{"-n", "1"} +
      set({"train.batch=512", "train.eval_every=20"}));
  Command tracker(
      {"/usr/bin/env", "WANDB_MODE=offline", "WANDB_DIR=" + kept,
       "WANDB_ERROR_REPORTING=false", "MLFLOW_ALLOW_FILE_STORE=true",
       "MLFLOW_TRACKING_URI=file://" + kept, "MLFLOW_DISABLE_TELEMETRY=true",
       pytorch_python(), source_path("examples/monitoring/track.py"), to, run});
  EXPECT_TRUE(Command::until([&] { return wrote(kept); })) << tracker.err();
  EXPECT_FALSE(job.living().empty());
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(), 75) << job.err();
  ASSERT_EQ(tracker.wait(), 0) << tracker.err();
  const json found =
      json::parse(run_python_script("watch/read_tracked.py", {to, kept}));
  EXPECT_EQ(found.at("batch"), 512);
  const auto steps = timeline::read_metrics(run + "/metrics.jsonl").steps;
  const json& points = found.at("points");
  ASSERT_EQ(points.size(), steps.size());
  for (size_t i = 0; i < steps.size(); ++i) {
    ASSERT_EQ(points.at(i).at(0), steps[i].step);
    ASSERT_EQ(points.at(i).at(1), steps[i].loss);
  }
}

bool has_file(const std::string& folder, const std::string& name) {
  for (const auto& entry :
       std::filesystem::recursive_directory_iterator(folder)) {
    const std::string path = entry.path().string();
    std::error_code ignored;
    if (path.ends_with(name) && entry.is_regular_file(ignored) &&
        entry.file_size(ignored) > 0) {
      return true;
    }
  }
  return false;
}

TEST(Trackers, WandbFollowsARun) {
  ECHELON_NEED_PACKAGE("wandb");
  TempFolder folder;
  follow("wandb", folder, [](const std::string& kept) {
    return has_file(kept, ".wandb");
  });
}

TEST(Trackers, MlflowFollowsARun) {
  ECHELON_NEED_PACKAGE("mlflow");
  TempFolder folder;
  follow("mlflow", folder, [](const std::string& kept) {
    return has_file(kept, "/metrics/loss");
  });
}

}  // namespace echelon::track_test
