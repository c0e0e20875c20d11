// The pool's decisions beside those of a real Slurm whose accounts and QOS say
// the same: who runs after each arrival and each end.
#include <gmock/gmock.h>

#include <map>
#include <set>
#include <sstream>
#include <utility>

#include "tests/pool/pool_cases.h"
#include "tests/support/test_slurm.h"

namespace echelon::pool::slurm_decisions_test {

using testing_support::Command;
using testing_support::TestSlurm;

enum Team { vision, language, speech, robots };

class SlurmDecisions : public testing::Test {
 protected:
  static constexpr int kDevices = 8;

  void SetUp() override {
    if (!slurm_.reason().empty()) GTEST_SKIP() << slurm_.reason();
    state_.projects = {
        {.name = "vision", .guaranteed = 3},
        {.name = "language", .guaranteed = 5},
        {.name = "speech", .guaranteed = 0},
        {.name = "robots", .guaranteed = 0}};
    for (const auto& project : state_.projects) {
      slurm_.add_project(project.name, project.guaranteed);
    }
  }

  // A job of both. Slurm's cannot shrink, so that it has the most devices.
  void arrive(
      const std::string& name, Team project, int64_t least, int64_t most,
      Kept kept) {
    state_.now += 10;
    submit(state_, project, least, most, kept);
    Job& job = state_.jobs.back();
    job.id = ++number_;
    job.submitted = job.waiting_since = state_.now;
    const std::string account = state_.projects[project].name;
    // Each ends before those that came earlier, so that Slurm's backfill lets
    // it pass them.
    slurm_names_[name] = slurm_.submit(
        "exec sleep 1000\n",
        {"--account=" + account,
         "--qos=" + (kept == Kept::all ? account + "-guaranteed" : "overquota"),
         "--nodes=1", "--ntasks=1", "--gpus=" + std::to_string(most),
         "--time=" + std::to_string(600 - 5 * number_)});
    pool_names_[job.id] = name;
    pool::settle(state_);
  }
  void guaranteed(const std::string& name, Team project, int64_t devices) {
    arrive(name, project, devices, devices, Kept::all);
  }
  void borrower(const std::string& name, Team project, int64_t devices) {
    arrive(name, project, devices, devices, Kept::none);
  }
  void end(const std::string& name) {
    state_.now += 10;
    std::erase_if(state_.jobs, [&](const Job& job) {
      return pool_names_.at(job.id) == name;
    });
    slurm_.output_of({"scancel", slurm_names_.at(name)});
    pool::settle(state_);
  }
  void end_all() {
    for (const Job& job : std::vector(state_.jobs)) {
      end(pool_names_.at(job.id));
    }
  }

  using Names = std::set<std::string>;
  Names pool() const {
    Names names;
    for (const Job& job : state_.jobs) {
      if (!job.devices.empty()) names.insert(pool_names_.at(job.id));
    }
    return names;
  }
  /// Who runs in Slurm: `expected`, when it is that and stays so while Slurm
  /// looks at its queue twice more.
  Names slurm(const Names& expected) {
    int since = -1;
    Command::until([&] {
      const auto [running, moves] = look();
      const int cycles = cycles_done();
      if (moves || running != expected || since < 0) since = cycles;
      return cycles >= since + 2;
    });
    return look().first;
  }
  void expect_both(const Names& expected) {
    EXPECT_EQ(pool(), expected);
    EXPECT_EQ(slurm(expected), expected);
  }

 private:
  // Who runs, and whether there is a job of which Slurm has not decided.
  std::pair<Names, bool> look() const {
    Names running;
    bool moves = false;
    std::istringstream lines(
        slurm_.output_of({"squeue", "--noheader", "--format=%i %T %r"}));
    std::string id, state, reason;
    while (lines >> id >> state && std::getline(lines, reason)) {
      for (const auto& [name, own] : slurm_names_) {
        if (own == id && state == "RUNNING") running.insert(name);
      }
      const bool again = reason == " BeginTime";  // it is queued again
      if (again) {
        slurm_.output_of({"scontrol", "update", "job=" + id, "starttime=now"});
      }
      moves |= again || (state != "RUNNING" && state != "PENDING") ||
               (state == "PENDING" && reason == " None");
    }
    return {running, moves};
  }
  int cycles_done() const {
    const std::string text = slurm_.output_of({"sdiag"});
    const std::string name = "Total cycles:";
    return std::stoi(text.substr(text.find(name) + name.size()));
  }

  TestSlurm slurm_{{.nodes = 1, .gpus = kDevices, .accounting = true}};
  State state_ = make_pool(kDevices);
  int64_t number_ = 0;
  std::map<std::string, std::string> slurm_names_;  // numbers by names
  std::map<int64_t, std::string> pool_names_;
};

TEST_F(SlurmDecisions, AreTheSameForJobsThatCannotShrink) {
  borrower("a", language, 4);
  expect_both({"a"});
  borrower("b1", speech, 2);
  expect_both({"a", "b1"});
  borrower("b2", speech, 2);
  expect_both({"a", "b1", "b2"});
  // The project above its share gives, and its youngest job first.
  guaranteed("c1", vision, 2);
  expect_both({"a", "b1", "c1"});
  guaranteed("c2", vision, 1);
  expect_both({"a", "c1", "c2"});
  guaranteed("d", vision, 1);  // a fourth is not guaranteed
  expect_both({"a", "c1", "c2"});
  borrower("e", vision, 1);  // but may be borrowed, past the larger ones
  expect_both({"a", "c1", "c2", "e"});
  end("c1");
  expect_both({"a", "c2", "d", "e"});
  end("a");
  expect_both({"b1", "b2", "c2", "d", "e"});
  guaranteed("f", language, 5);
  expect_both({"c2", "d", "e", "f"});
  guaranteed("g", language, 1);
  borrower("h", robots, 1);
  expect_both({"c2", "d", "e", "f"});
  end("c2");
  expect_both({"d", "e", "f", "h"});
  end("f");
  expect_both({"b1", "b2", "d", "e", "g", "h"});
}

// doc/pool.md says why.
TEST_F(SlurmDecisions, DifferWhereThePoolKnowsMore) {
  // A job that can shrink is not stopped.
  arrive("a", language, 2, 8, Kept::none);
  expect_both({"a"});
  guaranteed("b", vision, 3);
  EXPECT_EQ(pool(), Names({"a", "b"}));
  EXPECT_EQ(slurm({"b"}), Names({"b"}));
  end_all();

  // Who holds no more than its fair share gives nothing; Slurm takes from the
  // youngest.
  borrower("c", speech, 3);
  expect_both({"c"});
  borrower("d", language, 5);
  expect_both({"c", "d"});
  guaranteed("e", vision, 3);
  EXPECT_EQ(pool(), Names({"d", "e"}));
  EXPECT_EQ(slurm({"c", "e"}), Names({"c", "e"}));
  end_all();

  // A project below its fair share takes back for a job that may itself be
  // stopped; Slurm pre-empts for what is guaranteed alone.
  borrower("f", speech, 8);
  expect_both({"f"});
  borrower("g", language, 4);
  EXPECT_EQ(pool(), Names({"g"}));
  EXPECT_EQ(slurm({"f"}), Names({"f"}));
  end_all();

  // What is idle goes to the project that has least of its share; Slurm's
  // priority, without its fair-share factor, is the order of arrival.
  borrower("h", speech, 4);
  guaranteed("i", language, 4);
  borrower("j", speech, 4);
  borrower("k", robots, 4);
  expect_both({"h", "i"});
  end("i");
  EXPECT_EQ(pool(), Names({"h", "k"}));
  EXPECT_EQ(slurm({"h", "j"}), Names({"h", "j"}));
}

}  // namespace echelon::pool::slurm_decisions_test
