#include "echelon/predict/replan.h"

#include <gmock/gmock.h>

#include <optional>
#include <string>

#include "echelon/cluster/catalogue.h"
#include "echelon/cluster/cluster_file.h"
#include "echelon/cluster/local_cluster.h"
#include "echelon/error.h"
#include "echelon/job/resize.h"
#include "echelon/text/format.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace echelon::predict::replan_test {

using testing::HasSubstr;
using testing::StartsWith;

class Replan : public testing::Test {
 protected:
  Job job_of(const std::string& layout, const std::string& more = "") {
    Job job = parse_job(
        "[model]\nname = \"gpt\"\nlayers = 4\nhidden_size = 32\nheads = 4\n"
        "max_positions = 64\n[data]\nname = \"text\"\nsources = [\"" +
            text_ +
            "\"]\ntokenizer = \"bytes\"\nsequence = 64\n[train]\nsteps = 5\n"
            "batch = 20\n" +
            more,
        "test.toml");
    job.layout = parse_layout(layout);
    return job;
  }
  // Processors with so much memory each, and links of such a rate.
  RunCluster desk(const char* memory, const char* rate = "1 GB/s") {
    const std::string path = folder_.write(
        "desk.toml",
        format(
            "name = \"desk\"\n[devices.cpu]\nmemory = \"{}\"\nmemory_rate = "
            "\"10 GB/s\"\npeak = {{ fp32 = \"0.05 TFLOP/s\" }}\nprocessor = "
            "true\n[[nodes]]\ndevice = \"cpu\"\ndevices = 64\ninside = {{ name "
            "= \"link\", rate = \"{}\", latency = \"20 us\" }}\n",
            memory, rate));
    return {.cluster = cluster::read_cluster(path), .missing = ""};
  }
  static JobFacts facts_of(const Job& job) {
    return check_job(job, job.layout.num_ranks());
  }
  static std::string
  text_on(const Job& job, int64_t ranks, const RunCluster& cluster) {
    return to_text(job, replan(job, facts_of(job), ranks, cluster));
  }

  TempFolder folder_;
  std::string text_ = folder_.write("text.txt", std::string(4096, 'x'));
};

TEST_F(Replan, TakesAMuchFasterLayoutThanTheNearest) {
  const Job job = job_of("fsdp=2,tp=2");
  const JobFacts facts = facts_of(job);
  const RunCluster cluster = desk("2 GiB");
  ASSERT_EQ(to_string(layout_on(job, 2, facts.data)), "tp=2");
  const Replanned plan = replan(job, facts, 2, cluster);
  EXPECT_EQ(to_string(plan.layout), "dp=2");
  Job nearest = job;
  nearest.layout = parse_layout("tp=2");
  const double slower =
      predict_step(configured(nearest, facts), *cluster.cluster).step_seconds;
  EXPECT_GT(slower, 1.2 * plan.step_seconds);
  EXPECT_GT(plan.step_seconds, 0);
}

// Compute takes all the time, so that layouts without idle ranks are equal.
TEST_F(Replan, ChangesLeastAmongLayoutsThatAreAsFast) {
  const RunCluster fast_links = desk("2 GiB", "1000 GB/s");
  EXPECT_EQ(text_on(job_of("fsdp=4"), 2, fast_links), "fsdp=2");
  EXPECT_EQ(text_on(job_of("dp=4"), 2, fast_links), "dp=2");
}

TEST_F(Replan, TheJobsOwnLayoutStays) {
  const Job job = job_of("tp=4");
  for (const char* memory : {"2 GiB", "1 MiB"}) {
    EXPECT_EQ(text_on(job, 4, desk(memory)), "tp=4");
  }
}

TEST_F(Replan, RecomputesWhereMemoryAsksForIt) {
  const Job job = job_of("fsdp=2,tp=2", "[layout]\nmicrobatches = 2\n");
  const JobFacts facts = facts_of(job);
  // 20 samples do not divide by 3 ranks, nor 4 heads.
  std::string narrow;
  for (int mib = 540; mib > 500; --mib) {
    std::optional<Replanned> plan;
    try {
      plan = replan(job, facts, 3, desk(format("{} MiB", mib).c_str()));
    } catch (const ConfigError& error) {
      EXPECT_THAT(
          error.what(), StartsWith("no layout of 3 ranks fits the memory"));
      break;
    }
    EXPECT_EQ(to_string(plan->layout), "pp=3");
    EXPECT_LE(plan->peak_bytes, 0.99 * mib * 1048576);
    narrow = to_text(job, *plan);
  }
  EXPECT_EQ(narrow, "pp=3 recompute=all");
  // A job that recomputes stops where it need not.
  Job recomputing = job;
  recomputing.memory.recompute = Recompute::all;
  EXPECT_EQ(text_on(recomputing, 3, desk("2 GiB")), "pp=3 recompute=none");
}

TEST_F(Replan, ACloserLookCountsMoreThanFormulas) {
  const Job job = job_of("fsdp=2,tp=2");
  const auto no_dp = [](const Job& other) {
    return other.layout.data_degree() > 1 ? "too large" : "";
  };
  const Replanned plan = replan(job, facts_of(job), 2, desk("2 GiB"), no_dp);
  EXPECT_EQ(plan.layout.data_degree(), 1);
  EXPECT_THAT(
      error_text([&] {
        replan(job, facts_of(job), 2, desk("2 GiB"), [](const Job&) {
          return "too large";
        });
      }),
      HasSubstr("too large"));
}

TEST_F(Replan, TheNearestIsTakenWhereNothingIsPredicted) {
  const Job job = job_of("fsdp=2,tp=2");
  const Replanned plan = replan(
      job, facts_of(job), 2,
      {.cluster = std::nullopt, .missing = "Not known."});
  EXPECT_EQ(to_string(plan.layout), "tp=2");
  EXPECT_EQ(plan.unknown, "Not known.");
  EXPECT_EQ(plan.step_seconds, 0);
}

TEST_F(Replan, WhatNothingFitsSaysWhatDoes) {
  const Job job = job_of("dp=4");
  EXPECT_THAT(
      error_text([&] { text_on(job, 7, desk("2 GiB")); }),
      HasSubstr("no layout of 7 ranks fits; dp=7: "));
}

TEST_F(Replan, ATextHasLayoutAndRecompute) {
  const Job job = job_of("dp=4");
  for (const std::string text :
       {"fsdp=2,tp=2", "dp=1 recompute=all", "pp=2 recompute=selective"}) {
    const Job other = replanned(job, text);
    EXPECT_EQ(
        to_text(
            job, {.layout = other.layout, .recompute = other.memory.recompute}),
        text);
  }
}

// Hosts have a network between them.
TEST_F(Replan, HostsOfMeasuredRanks) {
  ::setenv("XDG_CONFIG_HOME", folder_.path().c_str(), 1);
  const auto path = cluster::saved_cluster_path(2);
  const std::string name =
      std::filesystem::relative(path, folder_.path()).string();
  cluster::Cluster measured = *desk("2 GiB").cluster;
  measured.groups[0].node.num_devices = 2;
  measured.groups[0].node.network = {"net", 1e9, 1e-5};
  folder_.write(name, cluster::to_toml(measured));
  const RunCluster three = cluster_of_hosts(6, 2, true);
  ASSERT_TRUE(three.cluster) << three.missing;
  EXPECT_EQ(three.cluster->num_nodes(), 3);
  EXPECT_EQ(three.cluster->num_devices(), 6);
  EXPECT_EQ(cluster_of_hosts(2, 2, true).cluster->num_nodes(), 1);
  ::unsetenv("XDG_CONFIG_HOME");
}

}  // namespace echelon::predict::replan_test
