#include "echelon/cluster/local_machine.h"

#include <gmock/gmock.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <memory>

#include "echelon/cluster/catalogue.h"
#include "echelon/cluster/cluster_file.h"
#include "tests/cluster/machine.h"
#include "tests/support/error_text.h"
#include "tests/support/places.h"

namespace echelon::cluster::local_machine_test {

namespace fs = std::filesystem;
using testing::HasSubstr;

class FakeNvml : public testing::Test {
 protected:
  static std::unique_ptr<Nvml> nvml() {
    return std::make_unique<Nvml>(
        test_program("fake_nvml/libnvidia-ml.so.1").c_str());
  }
  static NvmlFindings ask() { return nvml()->find(); }
  ~FakeNvml() override {
    for (const char* name :
         {"FAKE_NVML_ERROR", "FAKE_NVML_NAME", "FAKE_NVML_OLD",
          "FAKE_NVML_SICK"}) {
      ::unsetenv(name);
    }
  }
};

TEST_F(FakeNvml, TellsDevicesLinksAndDriver) {
  const NvmlFindings found = ask();
  ASSERT_TRUE(found.library);
  EXPECT_EQ(found.error, 0);
  EXPECT_EQ(found.driver, "560.35.03");
  EXPECT_EQ(found.cuda, 12060);
  ASSERT_EQ(found.gpus.size(), 2u);
  const Gpu& gpu = found.gpus[1];
  EXPECT_EQ(gpu.name, "NVIDIA H100 80GB HBM3");
  EXPECT_EQ(gpu.memory_bytes, 85520809984.0);
  EXPECT_EQ(gpu.nvlinks, 18);
  EXPECT_EQ(gpu.nvlink_version, 4);
  EXPECT_TRUE(gpu.nvswitch);
  EXPECT_EQ(nvlink_bytes_per_second(gpu), 450e9);
  EXPECT_NEAR(pcie_bytes_per_second(5, 16), 63e9, 0.1e9);

  LocalMachine here = test_machine(found.gpus);
  const Node node = cluster_of(here).groups[0].node;
  EXPECT_EQ(node.num_devices, 2);
  EXPECT_EQ(node.device.name, "h100-sxm");
  EXPECT_EQ(node.device.memory_bytes, 85520809984.0);
  EXPECT_EQ(node.inside.bytes_per_second, 450e9);
  EXPECT_TRUE(node.switched);
  EXPECT_EQ(cluster_of(here, 1).num_devices(), 1);
  EXPECT_THAT(
      error_text<ConfigError>([&] { cluster_of(here, 3); }),
      HasSubstr("has 2 GPUs"));
}

TEST_F(FakeNvml, ADriverWithoutLinksLeavesPcie) {
  ::setenv("FAKE_NVML_OLD", "1", 1);
  const NvmlFindings found = ask();
  EXPECT_EQ(found.gpus.at(0).nvlinks, 0);
  const Node node = cluster_of(test_machine(found.gpus)).groups[0].node;
  EXPECT_EQ(node.inside.name, "PCIe 5");
  EXPECT_FALSE(node.switched);
  EXPECT_FALSE(node.reduces_in_switch);
}

TEST_F(FakeNvml, AFailedStartAndNoLibraryAreTold) {
  ::setenv("FAKE_NVML_ERROR", "9", 1);
  const NvmlFindings failed = ask();
  EXPECT_TRUE(failed.library);
  EXPECT_EQ(failed.error, 9);
  EXPECT_TRUE(failed.gpus.empty());
  EXPECT_FALSE(Nvml("libecho-none.so.1").find().library);
}

TEST_F(FakeNvml, TellsWhatIsWrongWithAGpu) {
  const auto ask = [&](const char* sick,
                       const std::optional<std::string>& visible = {}) {
    ::setenv("FAKE_NVML_SICK", sick, 1);
    return nvml()->health(visible);
  };
  for (const char* sick :
       {"none", "lost", "reset", "ecc", "pages", "rows", "hot", "power"}) {
    SCOPED_TRACE(sick);
    const auto is = [&](const char* word) { return std::string(sick) == word; };
    const auto gpus = ask(sick);
    ASSERT_EQ(gpus.size(), 2U);
    EXPECT_FALSE(gpus[0].lost || gpus[0].hot);
    const GpuHealth& gpu = gpus[1];
    EXPECT_EQ(gpu.index, 1);
    EXPECT_EQ(gpu.lost, is("lost"));
    EXPECT_EQ(gpu.needs_reset, is("reset"));
    EXPECT_EQ(gpu.ecc_errors, is("ecc") ? 3 : 0);
    EXPECT_EQ(gpu.bad_memory_pending, is("pages"));
    EXPECT_EQ(gpu.no_spare_rows, is("rows"));
    EXPECT_EQ(gpu.hot, is("hot"));
    EXPECT_EQ(gpu.short_of_power, is("power"));
  }
  EXPECT_TRUE(ask("hot", "").empty());
  EXPECT_TRUE(ask("hot", "-1").empty());
  EXPECT_FALSE(ask("lost", "0").at(0).lost);
  EXPECT_EQ(ask("lost", "0").size(), 1U);
  EXPECT_TRUE(ask("lost", "1,0").at(0).lost);
  EXPECT_EQ(ask("hot", "GPU-second").at(0).index, 1);
  EXPECT_TRUE(Nvml("libecho-none.so.1").health({}).empty());
  ::setenv("FAKE_NVML_ERROR", "9", 1);
  EXPECT_TRUE(ask("hot").empty());
}

TEST_F(FakeNvml, ReadsWhatGpusDo) {
  const auto gpus = nvml()->use("1,0");
  ASSERT_EQ(gpus.size(), 2U);
  EXPECT_EQ(gpus[0].index, 1);
  EXPECT_EQ(gpus[0].uuid, "GPU-second");
  EXPECT_EQ(gpus[0].busy, 0.5);
  EXPECT_EQ(gpus[1].busy, 0.25);
  EXPECT_EQ(gpus[0].memory_used, 4e9);
  EXPECT_EQ(gpus[0].memory_total, 85520809984.0);
  EXPECT_EQ(gpus[0].celsius, 61);
  EXPECT_EQ(gpus[0].watts, 412.5);
  EXPECT_EQ(gpus[0].hertz, 1.98e9);
  EXPECT_TRUE(Nvml("libecho-none.so.1").use({}).empty());
}

TEST(LocalMachine, GpusAreFoundInTheCatalogue) {
  const auto named = [](const char* name, double gib) {
    return device_of_gpu({.name = name, .memory_bytes = gib * (1 << 30)});
  };
  EXPECT_EQ(named("Tesla V100-SXM2-32GB", 32), "v100");
  EXPECT_EQ(named("Tesla V100-SXM2-16GB", 16), "v100-16gb");
  EXPECT_EQ(named("NVIDIA A100-SXM4-40GB", 40), "a100-40gb");
  EXPECT_EQ(named("NVIDIA A100-SXM4-80GB", 80), "a100-80gb");
  EXPECT_EQ(named("NVIDIA H100 PCIe", 80), "h100-pcie");
  EXPECT_EQ(named("NVIDIA H100", 94), "h100-96gb");
  EXPECT_EQ(named("NVIDIA H200", 140), "h200");
  EXPECT_EQ(named("NVIDIA GH200 144G HBM3e", 140), "gh200");
  EXPECT_EQ(named("NVIDIA GB200", 185), "gb200");
  EXPECT_EQ(named("NVIDIA B200", 179), "b200");
  EXPECT_EQ(named("NVIDIA L4", 22), "l4");
  EXPECT_EQ(named("NVIDIA L40S", 45), "l40s");
  EXPECT_EQ(named("NVIDIA L40", 45), "");
  EXPECT_EQ(named("NVIDIA GeForce RTX 4090", 24), "rtx-4090");
  EXPECT_EQ(named("NVIDIA GeForce RTX 4090 Laptop GPU", 16), "");
  EXPECT_THAT(
      error_text<ConfigError>(
          [&] { cluster_of(test_machine({{.name = "NVIDIA T4"}})); }),
      HasSubstr("echelon bench --save"));
  EXPECT_THAT(
      error_text<ConfigError>([&] {
        cluster_of(
            test_machine({{.name = "NVIDIA L4"}, {.name = "NVIDIA H200"}}));
      }),
      HasSubstr("several kinds"));
}

TEST(LocalMachine, AProcessorIsSharedByItsDevices) {
  const Cluster eight = cluster_of(test_machine());
  EXPECT_EQ(eight.num_devices(), 8);
  const Node two = cluster_of(test_machine(), 2).groups[0].node;
  EXPECT_EQ(two.num_devices, 2);
  EXPECT_EQ(two.device.memory_bytes, 32e9);
  EXPECT_EQ(two.device.peak(Precision::fp32), 3e9 * 64 * 4);
  EXPECT_EQ(two.device.peak(Precision::fp64), 3e9 * 32 * 4);
  EXPECT_FALSE(two.switched);
  EXPECT_THAT(two.device.source, HasSubstr("Test 9000, 8 cores"));
  EXPECT_EQ(parse_cluster(to_toml(eight), "x.toml"), eight);

  LocalMachine limited = test_machine();
  limited.memory.limit_bytes = 16e9;
  EXPECT_EQ(cluster_of(limited, 1).groups[0].node.device.memory_bytes, 16e9);
}

TEST(LocalMachine, ThisOneIsACluster) {
  const Cluster here = find_cluster("local");
  EXPECT_GE(here.num_devices(), 1);
  EXPECT_EQ(parse_cluster(to_toml(here), "x.toml"), here);
  EXPECT_THAT(
      error_text<ConfigError>([] { find_cluster("local:0"); }),
      HasSubstr("no number"));
  EXPECT_THAT(
      error_text<ConfigError>([] { find_cluster("local:9999999"); }),
      HasSubstr("at most"));
}

TEST(LocalMachine, ReadsProcessorsAndAdapters) {
  const Processor amd = parse_cpuinfo(
      "processor\t: 0\nmodel name\t: AMD EPYC\ncpu MHz\t\t: 2596.123\n"
      "flags\t\t: fpu avx avx2 avx512f\n\n"
      "processor\t: 1\nmodel name\t: AMD EPYC\ncpu MHz\t\t: 3100.5\n");
  EXPECT_EQ(amd.name, "AMD EPYC");
  EXPECT_EQ(amd.hertz, 3100.5e6);
  EXPECT_EQ(amd.fp32_flops_per_cycle, 64);
  EXPECT_EQ(parse_cpuinfo("flags\t: sse\n").fp32_flops_per_cycle, 8);
  EXPECT_EQ(parse_cpuinfo("model name:").name, "");
  EXPECT_EQ(parse_cpuinfo("").hertz, 0);

  const fs::path sys = fs::path(testing::TempDir()) / "echelon_sys";
  const auto write = [&](const std::string& path, const std::string& text) {
    fs::create_directories((sys / path).parent_path());
    std::ofstream(sys / path) << text << "\n";
  };
  write("class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE");
  write("class/infiniband/mlx5_0/ports/1/rate", "400 Gb/sec (4X NDR)");
  write("class/infiniband/mlx5_1/ports/1/state", "1: DOWN");
  write("class/infiniband/mlx5_1/ports/1/rate", "400 Gb/sec (4X NDR)");
  write("class/net/eth0/device/vendor", "0x15b3");
  write("class/net/eth0/speed", "25000");
  write("class/net/eth0/operstate", "up");
  write("class/net/lo/speed", "-1");
  const auto adapters = find_adapters(sys.string());
  fs::remove_all(sys);
  ASSERT_EQ(adapters.size(), 2u);
  EXPECT_EQ(adapters[0].name, "mlx5_0");
  EXPECT_EQ(adapters[0].bytes_per_second, 50e9);
  EXPECT_EQ(adapters[1].bytes_per_second, 3.125e9);

  LocalMachine here = test_machine();
  here.adapters = adapters;
  EXPECT_EQ(cluster_of(here, 2).groups[0].node.network.bytes_per_second, 25e9);
  EXPECT_TRUE(find_adapters("/nowhere").empty());
}

}  // namespace echelon::cluster::local_machine_test
