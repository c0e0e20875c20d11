// The page of jobs that run, as Prometheus reads it.
#include <gmock/gmock.h>
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "tests/monitoring/http.h"
#include "tests/support/places.h"
#include "tests/support/process.h"

namespace echelon::exporter_test {

using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;
using testing_support::ask_page;
using testing_support::Command;
using testing_support::connect_to;
using testing_support::count;
using testing_support::free_port;
using testing_support::read_file;
using testing_support::send_text;

using Words = std::vector<std::string>;

Words run(int port, Words options, const Words& program_words) {
  Words words = {
      program("echelon"), "run", "--metrics-address", std::to_string(port)};
  words.insert(words.end(), options.begin(), options.end());
  words.push_back("--");
  words.insert(words.end(), program_words.begin(), program_words.end());
  return words;
}

bool page_has(int port, const std::string& text) {
  return Command::until(
      [&] { return ask_page(port).find(text) != std::string::npos; });
}

/// How many ranks a page has that are up.
int ranks_up(int port) {
  int up = 0;
  std::istringstream page(ask_page(port));
  for (std::string line; std::getline(page, line);) {
    up += line.starts_with("echelon_rank_up{") && line.ends_with("} 1") ? 1 : 0;
  }
  return up;
}

bool are_up(int port, int ranks) {
  return Command::until([&] { return ranks_up(port) == ranks; });
}

/// The process of a job with this name, as `ps` shows it.
pid_t process_of(const Command& job, const std::string& name) {
  for (const pid_t pid : job.living()) {
    if (read_file("/proc/" + std::to_string(pid) + "/comm") == name + "\n") {
      return pid;
    }
  }
  return -1;
}

const Words kWait = {"sleep", "600"};

TEST(Exporter, TellsWhichRanksAreUpAndWhyTheyStartedAgain) {
  const int port = free_port();
  Command job(run(port, {"-n", "2", "--max-restarts", "3"}, kWait));
  EXPECT_TRUE(are_up(port, 2));
  const std::string page = ask_page(port);
  EXPECT_THAT(page, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(page, HasSubstr("echelon_ranks{run=\"sleep\"} 2\n"));
  EXPECT_THAT(page, HasSubstr("reason=\"rank_killed\"} 0\n"));
  EXPECT_EQ(count(page, "kind=\"resident\""), 2);
  EXPECT_THAT(page, Not(HasSubstr("echelon_loss")));
  EXPECT_THAT(
      job.err(), HasSubstr(
                     "the job's figures are at http://127.0.0.1:" +
                     std::to_string(port) + "/metrics\n"));
  const pid_t rank = process_of(job, "sleep");
  ASSERT_GT(rank, 0);
  kill(rank, SIGKILL);
  EXPECT_TRUE(page_has(port, "reason=\"rank_killed\"} 1\n"));
  EXPECT_TRUE(are_up(port, 2));
  job.signal(SIGTERM);
  job.wait();
  EXPECT_TRUE(Command::until([&] { return job.living().empty(); }));
}

TEST(Exporter, EndsWithItsLauncher) {
  const int port = free_port();
  Command job(run(port, {}, kWait));
  EXPECT_TRUE(page_has(port, "echelon_rank_up{run=\"sleep\""));
  job.signal(SIGKILL);
  job.wait();
  EXPECT_TRUE(Command::until([&] { return job.living().empty(); }));
  EXPECT_FALSE(connect_to(port).is_open());
}

// The launcher goes on without its page.
TEST(Exporter, ItsEndIsNoneOfTheJob) {
  const int port = free_port();
  Command job(run(port, {}, {"sh", "-c", "sleep 1; echo done"}));
  EXPECT_TRUE(page_has(port, "echelon_rank_up{run=\"sh\""));
  const pid_t exporter = process_of(job, "echelon-metrics");
  ASSERT_GT(exporter, 0);
  kill(exporter, SIGKILL);
  EXPECT_EQ(job.wait(), 0);
  EXPECT_THAT(job.out(), HasSubstr("done"));
}

TEST(Exporter, RefusesAddressesThatCannotBeUsed) {
  const int port = free_port();
  Command other(run(port, {}, kWait));
  EXPECT_TRUE(page_has(port, "echelon_rank_up"));
  Command second(run(port, {}, kWait));
  EXPECT_EQ(second.wait(), 2);
  EXPECT_THAT(
      second.err(), HasSubstr(
                        "--metrics-address " + std::to_string(port) +
                        ": the port is in use; give another one"));
  for (const char* address :
       {"nine", "127.0.0.1", "127.0.0.1:", ":9464", "127.0.0.1:0",
        "127.0.0.1:65536", "::1:9464", "127.0.0.1:9464x"}) {
    Command job(
        {program("echelon"), "run", "--metrics-address", address, "--",
         "true"});
    EXPECT_EQ(job.wait(), 2) << address;
    EXPECT_THAT(job.err(), HasSubstr("--metrics-address")) << address;
  }
}

TEST(Exporter, TheFirstHostTellsOfTheJobAndTheOtherOfItsRanks) {
  const int port = free_port(), first = free_port(), second = free_port();
  const auto node = [&](int rank, int page) {
    return run(
        page,
        {"-n", "2", "--nnodes", "2", "--node-rank", std::to_string(rank),
         "--master-addr", "127.0.0.1", "--master-port", std::to_string(port)},
        kWait);
  };
  Command a(node(0, first));
  Command b(node(1, second));
  EXPECT_TRUE(are_up(second, 2));
  const std::string others = ask_page(second);
  EXPECT_THAT(others, HasSubstr("rank=\"3\""));
  EXPECT_THAT(others, Not(HasSubstr("rank=\"0\"")));
  EXPECT_THAT(others, Not(HasSubstr("echelon_restarts_total")));
  EXPECT_TRUE(page_has(first, "echelon_ranks{run=\"sleep\"} 4\n"));
  EXPECT_THAT(ask_page(first), HasSubstr("echelon_hosts{run=\"sleep\"} 2\n"));
}

TEST(Exporter, TellsWhatGpusDoByNvml) {
  const int port = free_port();
  Command job(
      run(port, {"-n", "2"}, kWait),
      {"LD_LIBRARY_PATH=" + test_program("fake_nvml"),
       "CUDA_VISIBLE_DEVICES=1,0"});
  EXPECT_TRUE(are_up(port, 2));
  const std::string page = ask_page(port);
  EXPECT_EQ(count(page, "echelon_device_power_watts{run=\"sleep\",gpu="), 2);
  EXPECT_THAT(page, HasSubstr("gpu=\"1\",UUID=\"GPU-second\",Hostname="));
  EXPECT_THAT(page, HasSubstr("\"} 412.5\n"));
  // The first rank has the first GPU that is visible.
  EXPECT_THAT(
      page,
      testing::ContainsRegex(
          "echelon_rank_device\\{run=\"sleep\",rank=\"0\",Hostname=\"[^\"]"
          "*\",gpu=\"1\"\\} 1\n"));
}

// Thousands of connections, most of which never ask for anything.
TEST(Exporter, RudeClientsCostTheJobNothing) {
  const int port = free_port();
  Command job(run(port, {"-n", "2"}, kWait));
  EXPECT_TRUE(are_up(port, 2));
  const pid_t exporter = process_of(job, "echelon-metrics");
  ASSERT_GT(exporter, 0);
  const auto pages = [&](pid_t pid) {
    std::ifstream file("/proc/" + std::to_string(pid) + "/statm");
    long total = 0, resident = 0;
    file >> total >> resident;
    return resident;
  };
  const auto files = [&](pid_t pid) {
    namespace fs = std::filesystem;
    return std::distance(
        fs::directory_iterator("/proc/" + std::to_string(pid) + "/fd"), {});
  };
  const long before = pages(exporter);
  const long launcher_before = pages(job.pid());
  std::vector<FileDescriptor> idle;
  for (int i = 0; i < 600; ++i) {
    FileDescriptor socket(connect_to(port));
    if (!socket.is_open()) continue;
    send_text(socket, "GET /metrics HTTP/1.1\r\nA: " + std::string(3000, 'a'));
    idle.push_back(std::move(socket));
    if (idle.size() > 60) idle.erase(idle.begin());
  }
  EXPECT_LT(files(exporter), 64);
  EXPECT_LT(pages(exporter) - before, 1024);  // 4 MiB
  EXPECT_LT(pages(job.pid()) - launcher_before, 256);
  idle.clear();
  EXPECT_TRUE(Command::until(
      [&] { return ask_page(port).starts_with("HTTP/1.1 200"); }));
}

}  // namespace echelon::exporter_test
