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

TEST(ManyHosts, SayAFewMessagesEach) {
  constexpr double kHosts = 64;
  const auto phases = phases_of(kHosts);
  // Besides heartbeats, two a second in each direction.
  const std::map<std::string, double> most = {{"join", 5},    {"idle", 0},
                                              {"signal", 2},  {"failure", 5},
                                              {"restart", 3}, {"end", 1}};
  EXPECT_EQ(phases.size(), most.size());
  for (const auto& [name, messages] : most) {
    ASSERT_TRUE(phases.contains(name)) << name;
    const json& phase = phases.at(name);
    const double heartbeats = 4 * (phase.at("seconds").get<double>() + 1);
    EXPECT_LE(phase.at("messages"), kHosts * (messages + heartbeats)) << phase;
    // A host is told where each of the others is, once.
    const bool tells_all = name == "join" || name == "restart";
    EXPECT_LE(
        phase.at("bytes"), kHosts * ((tells_all ? 40 * kHosts + 600 : 0) +
                                     200 * messages + 60 * heartbeats))
        << phase;
  }
}

// Their places are more than one message.
TEST(ManyHosts, AreToldOfInSeveralMessages) {
  EXPECT_EQ(phases_of(300).size(), 6U);
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
