// What the launchers of a job say to each other grows with the number of hosts,
// and not with its square. benchmarks/README.md has figures of thousands.
#include <gmock/gmock.h>

#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/support/places.h"
#include "tests/support/process.h"

namespace echelon::testing_support::many_hosts_test {

using nlohmann::json;

/// The phases of a job of so many hosts, by name.
std::map<std::string, json> phases_of(int hosts) {
  Command job({test_program("many_hosts"), std::to_string(hosts), "8", "1"});
  EXPECT_EQ(job.wait(), 0) << job.err();
  std::map<std::string, json> phases;
  std::istringstream lines(job.out());
  for (std::string line; std::getline(lines, line);) {
    json phase = json::parse(line);
    phases.emplace(phase.at("phase"), std::move(phase));
  }
  return phases;
}

/// What a host of a job does at most in a phase, on average.
struct Most {
  double messages = 0;  // besides heartbeats
  double calls = 0;
};

void expect_few(int hosts) {
  const auto phases = phases_of(hosts);
  const std::map<std::string, Most> most = {
      {"join", {5, 0}},     {"idle", {0, 0}},    {"signal", {2, 0}},
      {"failure", {5, 0}},  {"restart", {3, 0}}, {"lost", {10, 5}},
      {"silent", {30, 20}}, {"end", {1, 0}}};
  EXPECT_EQ(phases.size(), most.size());
  for (const auto& [name, each] : most) {
    ASSERT_TRUE(phases.contains(name)) << name;
    const json& phase = phases.at(name);
    // Two a second in each direction.
    const double heartbeats = 4 * (phase.at("seconds").get<double>() + 1);
    EXPECT_LE(phase.at("messages"), hosts * (each.messages + heartbeats))
        << phase;
    EXPECT_LE(phase.at("calls"), hosts * each.calls) << phase;
    // A host is told where each of the others is, once.
    const bool tells_all = name == "join" || name == "restart" ||
                           name == "lost" || name == "silent";
    EXPECT_LE(
        phase.at("bytes"), hosts * ((tells_all ? 40 * hosts + 600 : 0) +
                                    200 * each.messages + 60 * heartbeats))
        << phase;
  }
}

TEST(ManyHosts, SayAFewMessagesEach) {
  expect_few(64);
}

// Their places are more than one message.
TEST(ManyHosts, SayNoMoreEachWhenTheyAreMore) {
  expect_few(300);
}

TEST(ManyHosts, NeedAFileEach) {
  Command job(
      {"sh", "-c",
       "ulimit -n 40; exec \"$0\" --nnodes 100 --node-rank 0 --master-addr "
       "127.0.0.1 --master-port " +
           std::to_string(free_port()) + " -- true",
       test_program("launch_run")});
  EXPECT_EQ(job.wait(), 2);
  EXPECT_THAT(
      job.err(), testing::HasSubstr(
                     "--nnodes 100: a launcher needs 116 open files, one for "
                     "each host, and this one may have 40"));
}

}  // namespace echelon::testing_support::many_hosts_test
