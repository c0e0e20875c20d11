// Runs whose checkpoints are on moto's S3 server, and that go on from there on
// an empty machine.
#include <gmock/gmock.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "echelon/checkpoint/files/folder.h"
#include "echelon/checkpoint/remote/remote_checkpoints.h"
#include "echelon/timeline/metrics.h"
#include "tests/support/error_text.h"
#include "tests/support/s3_server.h"
#include "tests/train/trained_command.h"

namespace echelon::remote_command_test {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::Not;
using testing_support::Command;
using testing_support::S3Server;
using testing_support::TempFolder;

class RemoteCommand : public testing::Test {
 protected:
  void SetUp() override {
    ECHELON_NEED_S3();
    server_ = S3Server::get();
    url_ = std::string("s3://models/") +
           testing::UnitTest::GetInstance()->current_test_info()->name();
  }
  std::string run(const std::string& name = "run") const {
    return folder_.path() + "/" + name;
  }
  static Words train(const std::string& run, int64_t steps, const Words& more) {
    return train_digits(run, steps) +
           set(
               {"optimizer.schedule=constant", "model.dtype=float64",
                "train.log_every=1"}) +
           Words{"--max-restarts", "0"} + more;
  }
  Words with_remote(int64_t steps, const Words& more = {}) const {
    return train(run(), steps, set({"checkpoint.remote=" + url_}) + more);
  }
  void finishes(const Words& words) {
    Command job(words, server_->environment() + environment_);
    ASSERT_EQ(job.wait(), 0) << job.out() << job.err();
    said_ = job.out() + job.err();
  }
  static std::vector<double> losses(const std::string& run) {
    std::vector<double> all;
    for (const auto& one :
         timeline::read_metrics(fs::path(run) / "metrics.jsonl").steps) {
      all.push_back(one.loss);
    }
    return all;
  }
  std::vector<int64_t> steps_there() const {
    std::vector<int64_t> steps;
    for (const auto& one :
         RemoteCheckpoints(url_, server_->settings()).list()) {
      steps.push_back(one.step);
    }
    return steps;
  }

  S3Server* server_ = nullptr;
  std::string url_;
  std::string said_;
  Words environment_;  // of finishes(), in addition
  TempFolder folder_;
};

TEST_F(RemoteCommand, AnEmptyMachineGoesOnWithTheSameLosses) {
  finishes(train(run("whole"), 6, {"-n", "2"}));
  finishes(with_remote(4, {"-n", "2", "--set", "checkpoint.every_steps=2"}));
  EXPECT_THAT(said_, HasSubstr("and in " + url_));
  EXPECT_EQ(steps_there(), (std::vector<int64_t>{4, 2}));
  fs::remove_all(run());
  finishes(with_remote(6, {"-n", "2"}));
  EXPECT_THAT(said_, HasSubstr("resumes from step 4"));
  EXPECT_EQ(losses(run()), losses(run("whole")));
  // Another layout, up to the order of sums.
  fs::remove_all(run());
  const auto four = RemoteCheckpoints(url_, server_->settings()).list()[1];
  EXPECT_EQ(four.step, 4);
  finishes(with_remote(8, {"--layout", "fsdp=2"}));
  finishes(train(run("eight"), 8, {"-n", "2"}));
  const auto here = losses(run()), there = losses(run("eight"));
  ASSERT_EQ(here.size(), there.size());
  for (size_t i = 0; i < here.size(); ++i) {
    EXPECT_NEAR(here[i], there[i], 1e-10) << i;
  }
  // Nothing of the run has the keys.
  for (const auto& entry : fs::recursive_directory_iterator(run())) {
    if (!entry.is_regular_file()) continue;
    EXPECT_THAT(
        testing_support::read_file(entry.path()),
        Not(HasSubstr(server_->settings().secret_key)))
        << entry.path();
  }
  finishes(with_remote(2, {"--overwrite"}));
  EXPECT_EQ(steps_there(), std::vector<int64_t>{2});
}

// A run of its own that begins with what another one has uploaded: the same as
// from that run's folder.
TEST_F(RemoteCommand, AnotherRunsAddressIsAsGoodAsItsFolder) {
  finishes(with_remote(3, {"-n", "2"}));
  environment_ = {"ECHELON_CACHE=" + folder_.path() + "/cache"};
  for (const auto& [name, from] :
       {std::pair("folder", run()), std::pair("address", url_)}) {
    const std::string here = run(name);
    finishes(train(here, 5, {"-n", "2", "--resume", from}));
    EXPECT_THAT(said_, HasSubstr("resumes from step 3 of " + from));
    // The weights alone, with a new optimizer.
    finishes(train(here + "-weights", 2, set({"model.weights=" + from})));
  }
  EXPECT_EQ(losses(run("address")), losses(run("folder")));
  EXPECT_EQ(losses(run("address-weights")), losses(run("folder-weights")));
  // It goes on from its own, though the storage has gone.
  environment_.push_back("AWS_SECRET_ACCESS_KEY=wrong");
  finishes(train(run("address"), 6, {"-n", "2", "--resume", url_}));
  EXPECT_THAT(said_, HasSubstr("no longer needs " + url_));
  Command wrong(
      train(run("new"), 5, {"--resume", url_}),
      server_->environment() + environment_);
  EXPECT_EQ(wrong.wait(), 3);
  EXPECT_THAT(wrong.err(), HasAll(url_, "403"));
  EXPECT_FALSE(fs::exists(run("new")));
  // What it begins with is not replaced.
  Command both(
      train(run("new"), 5, set({"checkpoint.remote=" + url_})) +
          Words{"--resume", url_, "--overwrite"},
      server_->environment());
  EXPECT_EQ(both.wait(), 2);
  EXPECT_THAT(both.err(), HasSubstr("overwrite would remove what"));
}

// Training reads an object as it reads a file.
TEST_F(RemoteCommand, ObjectsAreAsGoodAsFiles) {
  environment_ = {"ECHELON_CACHE=" + folder_.path() + "/cache"};
  const std::string words = folder_.path() + "/words.txt";
  std::string text;
  for (int i = 0; i < 200; ++i) text += std::to_string(i * i % 97) + " words ";
  std::ofstream(words) << text;
  const std::string place =
      url_.substr(std::string("s3://models/").size()) + "/words.txt";
  storage::ObjectStore("models", server_->settings()).upload_file(words, place);
  for (const auto& source : {words, url_ + "/words.txt"}) {
    const std::string name = source == words ? "file" : "object";
    const std::string configuration = folder_.path() + "/" + name + ".toml";
    std::ofstream(configuration)
        << "[model]\nname = \"gpt\"\nlayers = 1\nhidden_size = 16\nheads = "
           "2\nmax_positions = 16\n[data]\nname = \"text\"\ntokenizer = "
           "\"bytes\"\nsequence = 16\nsources = [\""
        << source << "\"]\n[train]\nbatch = 4\nsteps = 3\nrun = \"" << run(name)
        << "\"\n";
    finishes({program("echelon"), "train", configuration, "-n", "2"});
  }
  EXPECT_EQ(losses(run("object")).size(), 3u);
  EXPECT_EQ(losses(run("object")), losses(run("file")));
}

// The commands print of an address what they print of the folder.
TEST_F(RemoteCommand, CheckpointsAreListedShownVerifiedAndCompared) {
  finishes(with_remote(4, {"--set", "checkpoint.every_steps=2"}));
  environment_ = {"ECHELON_CACHE=" + folder_.path() + "/cache"};
  const auto asked = [&](const std::string& command, const std::string& of) {
    Command job(
        {program("echelon"), "checkpoint", command, of, "--json"},
        server_->environment() + environment_);
    EXPECT_EQ(job.wait(), 0) << job.err();
    return nlohmann::json::parse(job.out());
  };
  const auto same = [&](const std::string& command, const Words& but) {
    auto here = asked(command, run()), there = asked(command, url_);
    const auto without = [&](nlohmann::json& json) {
      for (const auto& key : but) json.erase(key);
    };
    if (command == "list") {
      EXPECT_EQ(there["folder"], url_ + "/checkpoints");
      here = here["checkpoints"];
      there = there["checkpoints"];
    }
    for (auto* json : {&here, &there}) {
      if (!json->is_array()) without(*json);
      if (json->is_array()) std::ranges::for_each(*json, without);
    }
    EXPECT_EQ(here, there) << command;
  };
  same("list", {"path", "saved"});
  same("show", {"path", "saved"});
  same("verify", {"path"});
  int64_t copied = 0;
  const auto count = [&] {
    copied = 0;
    for (const auto& entry :
         fs::recursive_directory_iterator(folder_.path() + "/cache")) {
      copied += entry.path().filename().string().starts_with("rank-");
    }
    return copied;
  };
  EXPECT_EQ(count(), 0);  // of manifests alone
  same("diff", {"a", "b"});
  EXPECT_EQ(count(), 2);
  // "2026-11-28 10:00:00", as the storage says.
  EXPECT_THAT(
      asked("show", url_)["saved"].get<std::string>(),
      testing::MatchesRegex("20[0-9-]+ [0-9:]+"));
}

// The storage fails for good while the last checkpoint is uploaded: it stays
// here, and the same command uploads it later.
TEST_F(RemoteCommand, AFailedUploadIsMadeUpFor) {
  server_->set("only=/rank-0000&at=1&many=0&mode=busy");
  Command job(with_remote(3), server_->environment());
  EXPECT_EQ(job.wait(), 3) << job.err();
  EXPECT_THAT(
      job.err(), HasAll("step 3 is in ", "but not in " + url_, "503 SlowDown"));
  EXPECT_EQ(latest_checkpoint(fs::path(run()) / "checkpoints")->step, 3);
  EXPECT_TRUE(steps_there().empty());
  server_->set("");
  finishes(with_remote(3));
  EXPECT_THAT(said_, HasSubstr("lacks the last checkpoint"));
  EXPECT_EQ(steps_there(), std::vector<int64_t>{3});
}

TEST_F(RemoteCommand, WrongStorageIsFoundBeforeARankStarts) {
  const auto refused = [&](const std::vector<std::string>& environment,
                           const std::string& said) {
    Command job(with_remote(2), environment);
    EXPECT_EQ(job.wait(), 2) << said;
    EXPECT_THAT(job.err(), HasAll("[checkpoint] remote", url_, said));
    EXPECT_FALSE(fs::exists(run()));
  };
  refused(server_->environment("none"), "403 AccessDenied");
  auto silent = server_->environment();
  silent[0] = "AWS_ENDPOINT_URL=http://127.0.0.1:" +
              std::to_string(testing_support::free_port());
  refused(silent, "AWS_ENDPOINT_URL");
  auto wrong = server_->environment();
  wrong[2] = "AWS_SECRET_ACCESS_KEY=wrong";
  refused(wrong, "correct the keys");
  auto without = server_->environment();
  without[1] = "AWS_ACCESS_KEY_ID=";
  without[2] = "AWS_SECRET_ACCESS_KEY=";
  without.push_back("HOME=" + folder_.path());
  refused(without, "there are no keys for S3");
}

}  // namespace echelon::remote_command_test
