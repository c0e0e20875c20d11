// A pool's daemon and its commands, as users run them.
#pragma once

#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/support/places.h"
#include "tests/support/process.h"

namespace echelon::pool {

using testing_support::Command;
using Words = std::vector<std::string>;
using Json = nlohmann::json;

/// language is guaranteed 3 of 4 slots and vision 1, of at most 2.
constexpr const char* kTwoProjects = R"([pool]
grace = "1s"
[project.language]
guaranteed = 3
[project.vision]
guaranteed = 1
limit = 2
)";

class PoolServer : public testing::Test {
 protected:
  ~PoolServer() override {
    // Jobs outlive the daemon, so that each is ended.
    if (daemon_) {
      const Json all = ask({"list"});
      for (const Json& job : all["jobs"]) {
        finished({"cancel", std::to_string(job["job"].get<int64_t>())});
      }
      Command::until([&] { return ask({"list"})["jobs"].empty(); });
    }
  }

  void
  start(const std::string& text = kTwoProjects, const char* devices = "4") {
    std::ofstream(path("pool.toml")) << text;
    daemon_ = std::make_unique<Command>(daemon(devices));
    ASSERT_TRUE(daemon_->until_output("echelon pool:")) << daemon_->err();
  }
  /// Without `devices`: those of the machine.
  Words daemon(const char* devices = "4") const {
    Words words = {program("echelon"), "pool",     "start",
                   path("pool.toml"),  "--folder", path("pool")};
    if (*devices != '\0') words.insert(words.end(), {"--devices", devices});
    words.insert(words.end(), options_.begin(), options_.end());
    words.insert(words.begin(), variables_.begin(), variables_.end());
    return unmarked(std::move(words));
  }
  /// kill -9, and another daemon.
  void replace_daemon() {
    daemon_->signal(SIGKILL);
    daemon_->wait();
    daemon_ = std::make_unique<Command>(daemon());
    ASSERT_TRUE(daemon_->until_output("echelon pool:")) << daemon_->err();
  }

  std::string path(const std::string& name = "") const {
    return name.empty() ? folder_.path() : folder_.path() + "/" + name;
  }
  Words command(Words words) const {
    words.insert(words.begin(), {program("echelon"), "pool"});
    // What follows -- is the job's.
    const auto dashes = std::ranges::find(words, "--");
    words.insert(dashes, {"--folder", path("pool")});
    return unmarked(std::move(words));
  }
  // Command ends what has its mark; jobs outlive what started them.
  static Words unmarked(Words words) {
    words.insert(
        words.begin(),
        {"env", "-u", "ECHELON_TEST_MARKER", "-u", "ECHELON_TOKEN"});
    return words;
  }
  struct Finished {
    int code;
    std::string out, err;
  };
  Finished finished(Words words) const {
    Command run(command(std::move(words)));
    const int code = run.wait();
    return {code, run.out(), run.err()};
  }
  Json ask(Words words) const {
    words.insert(words.begin() + 1, "--json");
    const Finished run = finished(std::move(words));
    EXPECT_EQ(run.code, 0) << run.err;
    return Json::parse(run.out, nullptr, false);
  }
  /// A job that runs this line of the shell.
  int64_t submit(Words options, const std::string& line) const {
    options.insert(options.begin(), {"submit", "--json"});
    options.insert(options.end(), {"--", "sh", "-c", line});
    const Finished run = finished(std::move(options));
    EXPECT_EQ(run.code, 0) << run.err;
    return run.code == 0 ? Json::parse(run.out)["job"].get<int64_t>() : -1;
  }
  Json job(int64_t id) const { return ask({"status", std::to_string(id)}); }
  std::string state(int64_t id) const {
    return job(id)["state"].get<std::string>();
  }
  bool reaches(int64_t id, const std::string& wanted) const {
    return Command::until([&] { return state(id) == wanted; });
  }
  bool appears(const std::string& name) const {
    return Command::until([&] { return std::filesystem::exists(path(name)); });
  }
  std::string text_of(const std::string& name) const {
    return testing_support::read_file(path(name));
  }
  std::string why(int64_t id) const {
    return ask({"why", std::to_string(id)})["why"].get<std::string>();
  }

  testing_support::TempFolder folder_;
  Words options_;    // of the daemon, besides
  Words variables_;  // of its environment: "NAME=value"
  std::unique_ptr<Command> daemon_;
};

}  // namespace echelon::pool
