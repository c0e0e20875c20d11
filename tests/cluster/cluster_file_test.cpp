#include "echelon/cluster/cluster_file.h"

#include <gmock/gmock.h>

#include <random>

#include "echelon/cluster/catalogue.h"
#include "tests/support/error_text.h"

namespace echelon::cluster::cluster_file_test {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

constexpr const char* kMixed = R"(
name = "two racks"
nodes_per_rack = 4
oversubscription = 2
mean_hours_between_failures = 20000

[devices.h100-sxm]
price_per_hour = 2.5

[devices.ours]
memory = "64 GiB"
memory_rate = "2 TB/s"
peak = { bf16 = "200 TFLOP/s", fp32 = "50 TFLOP/s" }
launch = "4 us"
launch_rates = [
  { beside = "0 B", launch = "4 us", backward = "6 us", view = "1 us", backward_view = "2 us" },
  { beside = "32 KiB", launch = "5 us", backward = "9 us" },
]
matrix_rates = [
  { precision = "bf16", m = 4096, n = 4096, k = 4096, rate = "150 TFLOP/s" },
]

[[nodes]]
device = "h100-sxm"
count = 8
network = { name = "InfiniBand NDR", rate = "400 Gbit/s", latency = "4 us" }

[[nodes]]
device = "ours"
count = 2
devices = 4
name = "our box"
switched = false
host_memory = "512 GiB"
host_memory_rate = "40 GB/s"
inside = { name = "bus", rate = "64 GB/s", latency = "3 us" }
network = { rate = "100 Gbit/s" }
)";

std::string error_of(const std::string& text) {
  return error_text<ConfigError>([&] { parse_cluster(text, "c.toml"); });
}

TEST(ClusterFile, ReadsEveryKey) {
  const Cluster cluster = parse_cluster(kMixed, "c.toml");
  EXPECT_EQ(cluster.name, "two racks");
  EXPECT_EQ(cluster.nodes_per_rack, 4);
  EXPECT_EQ(cluster.oversubscription, 2);
  EXPECT_EQ(cluster.num_devices(), 72);
  const Node& h100 = cluster.groups[0].node;
  EXPECT_EQ(h100.num_devices, 8);
  EXPECT_EQ(h100.device.price_per_hour, 2.5);
  EXPECT_EQ(h100.device.memory_bytes, find_device("h100-sxm").memory_bytes);
  EXPECT_EQ(h100.network, (Link{"InfiniBand NDR", 50e9, 4e-6}));
  EXPECT_EQ(h100.inside, usual_node("h100-sxm").inside);
  const Node& ours = cluster.groups[1].node;
  EXPECT_EQ(ours.name, "our box");
  EXPECT_FALSE(ours.switched);
  EXPECT_EQ(ours.inside, (Link{"bus", 64e9, 3e-6}));
  EXPECT_EQ(ours.network, (Link{"", 12.5e9, 0}));
  EXPECT_EQ(ours.device.peak(Precision::bf16), 200e12);
  EXPECT_EQ(ours.device.launch_seconds, 4e-6);
  EXPECT_EQ(
      ours.device.launch_rates,
      (std::vector<LaunchRate>{
          {0, 4e-6, 6e-6, 1e-6, 2e-6}, {32 * 1024, 5e-6, 9e-6, 5e-6, 9e-6}}));
  EXPECT_EQ(ours.host_memory_bytes_per_second, 40e9);
  ASSERT_EQ(ours.device.matrix_rates.size(), 1u);
  EXPECT_EQ(
      ours.device.matrix_rates[0],
      (MatrixRate{Precision::bf16, 4096, 4096, 4096, 150e12}));
}

TEST(ClusterFile, DropsKeysOfEarlierVersions) {
  std::string earlier = kMixed;
  const std::string launch = "launch = \"4 us\"\n";
  earlier.insert(earlier.find(launch), R"(jitter = "36 us"
host_work = [
  { beside = "60 us", step = "80 us", layer = "3 us", pass = "7 us", action = "15 us", pipeline = "90 us", operator = "2 us" },
  { beside = "0.5 ms", step = "90 us" },
]
)");
  const Cluster cluster = parse_cluster(earlier, "c.toml");
  EXPECT_EQ(cluster, parse_cluster(kMixed, "c.toml"));
  EXPECT_EQ(to_toml(cluster).find("host_work"), std::string::npos);
  EXPECT_EQ(to_toml(cluster).find("jitter"), std::string::npos);
}

TEST(ClusterFile, NameIsTheFilesWithoutOne) {
  const Cluster cluster =
      parse_cluster("[[nodes]]\ndevice = \"l4\"\n", "folder/lab.toml");
  EXPECT_EQ(cluster.name, "lab");
}

TEST(ClusterFile, WhatIsWrittenReadsBackIdentically) {
  const auto again = [](const Cluster& cluster) {
    EXPECT_EQ(parse_cluster(to_toml(cluster), "c.toml"), cluster)
        << to_toml(cluster);
  };
  again(parse_cluster(kMixed, "c.toml"));
  for (const auto& name : device_names()) again(find_cluster(name + ":3x1"));
  again(find_cluster("a100-80gb:1027+v100:5x4"));
  // A device of the catalogue that lacks what the catalogue's has.
  Cluster changed = find_cluster("h100-sxm:1");
  changed.groups[0].node.device.peak_flops_per_second[0] = 0;
  changed.groups[0].node.inside = {};
  changed.name = "quote \" newline \n, slash \\ é";
  again(changed);
  changed.groups[0].node.device.name = "odd [name].\"x\"";
  again(changed);
  changed.groups[0].node.device.like = "b200";
  again(changed);
}

struct Refused {
  std::string text;
  const char* says;
};

void expect_refused(const std::vector<Refused>& all) {
  for (const Refused& one : all) {
    EXPECT_THAT(error_of(one.text), HasSubstr(one.says)) << one.text;
  }
}

TEST(ClusterFile, ErrorsSayLineColumnValueAndRule) {
  const std::string l4 = "[[nodes]]\ndevice = \"l4\"\n";
  EXPECT_THAT(
      error_of("[[nodes]]\ndevice = \"h100-smx\"\n"),
      AllOf(
          StartsWith("c.toml:2:10: [[nodes]] 1 device"),
          HasSubstr("did you mean \"h100-sxm\"?")));
  EXPECT_THAT(
      error_of(l4 + "network = { rate = 400 }\n"),
      AllOf(
          StartsWith("c.toml:3:20: [[nodes]] 1 network rate = 400"),
          HasSubstr("unit")));
  EXPECT_THAT(
      error_of(l4 + "netwrk = { rate = \"1 GB/s\" }\n"),
      AllOf(
          StartsWith("c.toml:3:1: [[nodes]] 1 has no key netwrk"),
          HasSubstr("did you mean \"network\"?")));
  expect_refused(
      {{l4 + "network = { rate = \"400\" }\n",
        "a number with a unit, as in 400 Gbit/s"},
       {l4 + "count = 0\n", "count = 0 must be at least 1"},
       {l4 + "switched = 1\n", "true or false"},
       {l4 + "inside = { rate = \"-1 GB/s\" }\n", "must be at least 0"},
       {"[nodes]\ndevice = \"l4\"\n", "must be written as [[nodes]]"},
       {"nodes = []\n", "[[nodes]]"},
       {"nodes = [1]\n", "must be a table"},
       {"", "needs [[nodes]]"},
       {"[[nodes]]\ncount = 2\n", "needs device"},
       {"[[nodes]\n", "not TOML"},
       {"devices = 8\n" + l4, "[devices] = 8 is a whole number"}});
}

const std::string kOwn =
    "[devices.ours]\nmemory = \"64 GiB\"\nmemory_rate = \"2 TB/s\"\n"
    "peak = { bf16 = \"200 TFLOP/s\" }\n";
const std::string kOurNodes = "[[nodes]]\ndevice = \"ours\"\n";

TEST(ClusterFile, MissingLinksAreNamed) {
  EXPECT_THAT(
      error_of(kOwn + kOurNodes + "devices = 4\n"),
      AllOf(
          StartsWith("c.toml:5:"),
          HasSubstr("4 devices and no link between them; add inside = {")));
  EXPECT_EQ(error_of(kOwn + kOurNodes), "no error");
  expect_refused(
      {{kOwn + kOurNodes + "count = 2\n",
        "no link to the other nodes; add network = {"},
       {kOwn + kOurNodes + "host = { latency = \"1 us\" }\n",
        "host needs rate"}});
}

TEST(ClusterFile, DevicesNeedTheirFigures) {
  const std::string device = "[devices.ours]\n";
  EXPECT_EQ(
      error_of(device + "like = \"l4\"\nmemory = \"48 GiB\"\n" + kOurNodes),
      "no error");
  expect_refused(
      {{device + "memory = \"64 GiB\"\n" + kOurNodes,
        "[devices.ours] needs memory_rate"},
       {device + "memory = \"64 GiB\"\nmemory_rate = \"1 TB/s\"\n" + kOurNodes,
        "needs peak"},
       {device + "like = \"l5\"\n" + kOurNodes, "did you mean \"l4\"?"},
       {kOwn + "matrix_rates = [ { m = 1 } ]\n" + kOurNodes,
        "needs precision, m, n, k and rate"},
       {kOwn +
            "matrix_rates = [ { of = \"convolutions\", precision = \"fp32\", "
            "m = 1, n = 1, k = 1, rate = \"1 GFLOP/s\" } ]\n" +
            kOurNodes,
        "did you mean \"convolution\"?"},
       {kOwn + "operator_rates = [ { name = \"gelu\" } ]\n" + kOurNodes,
        "needs name, bytes and rate"},
       {kOwn +
            "operator_rates = [ { name = \"gelu\", bytes = \"0 B\", rate = "
            "\"1 GB/s\" } ]\n" +
            kOurNodes,
        "operator_rates: bytes"}});
}

// Any change of a byte, and any end, is read or refused: no crash, no hang, and
// what is read is a cluster that a job can run on.
TEST(ClusterFile, DamagedTextsAreReadOrRefused) {
  const std::string whole = kMixed;
  std::mt19937 random(11);
  int read = 0, refused = 0;
  const auto attempt = [&](const std::string& text) {
    try {
      const Cluster cluster = parse_cluster(text, "c.toml");
      check(cluster);
      ASSERT_EQ(parse_cluster(to_toml(cluster), "c.toml"), cluster);
      ++read;
    } catch (const ConfigError& error) {
      const std::string message = error.what();
      ASSERT_THAT(message, StartsWith("c.toml"));
      ASSERT_LE(std::count(message.begin(), message.end(), '\n'), 4);
      ASSERT_LT(message.size(), 600u) << message;
      ++refused;
    }
  };
  for (size_t size = 0; size <= whole.size(); ++size) {
    attempt(whole.substr(0, size));
  }
  for (int i = 0; i < 3000; ++i) {
    std::string text = whole;
    for (int changes = 1 + static_cast<int>(random() % 3); changes > 0;
         --changes) {
      text[random() % text.size()] = static_cast<char>(random() % 256);
    }
    attempt(text);
  }
  EXPECT_GT(read, 20);
  EXPECT_GT(refused, 1000);
}

}  // namespace echelon::cluster::cluster_file_test
