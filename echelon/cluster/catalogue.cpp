// Dense peaks, memory as the driver reports it, and links in one direction,
// from the vendors' data sheets: V100 (2018), A100 (2021), H100, H200, GH200,
// HGX B200 and B300, GB200 and GB300 NVL72, L4, L40S, Ada architecture (RTX
// 4090: fp16 and bf16 with fp32 sums), MI300X. Hosts' memory: channels of the
// processors that the vendors' guides to these systems name, of two usual ones
// where there is none. What software reaches of them is in
// cost/device_rates.cpp.
#include "echelon/cluster/catalogue.h"

#include <algorithm>
#include <array>

#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/nearest.h"

namespace echelon::cluster {
namespace {

constexpr double kGiB = 1 << 30;
constexpr double kGB = 1e9;
constexpr double kTera = 1e12;
constexpr double kMicrosecond = 1e-6;

struct DeviceRow {
  const char* name;
  double memory_gib;
  double memory_tb_per_second;
  std::array<double, kPrecisions.size()> teraflops;  // fp64 … fp4
  const char* source;
};

// clang-format off
constexpr DeviceRow kDevices[] = {
    //                GiB    TB/s    fp64  fp32   tf32    bf16    fp16    fp8     fp4
    {"v100",           32,   0.9,   {7.8,  15.7,  0,      0,      125,    0,      0},
     "NVIDIA V100 data sheet (SXM2, 32 GB)"},
    {"v100-16gb",      16,   0.9,   {7.8,  15.7,  0,      0,      125,    0,      0},
     "NVIDIA V100 data sheet (SXM2, 16 GB)"},
    {"a100-40gb",      40,   1.555, {19.5, 19.5,  156,    312,    312,    0,      0},
     "NVIDIA A100 data sheet (SXM4, 40 GB)"},
    {"a100-80gb",      80,   2.039, {19.5, 19.5,  156,    312,    312,    0,      0},
     "NVIDIA A100 data sheet (SXM4, 80 GB)"},
    {"h100-sxm",       79.6, 3.35,  {67,   67,    494.7,  989.4,  989.4,  1978.9, 0},
     "NVIDIA H100 data sheet (SXM5, 80 GB)"},
    {"h100-96gb",      95.6, 2.4,   {67,   67,    494.7,  989.4,  989.4,  1978.9, 0},
     "PyTorch torchtitan's benchmark pages (SXM5, 96 GB HBM2e, 500 W)"},
    {"h100-pcie",      79.6, 2.0,   {51,   51,    378,    756,    756,    1513,   0},
     "NVIDIA H100 data sheet (PCIe, 80 GB)"},
    {"h200",           140,  4.8,   {67,   67,    494.7,  989.4,  989.4,  1978.9, 0},
     "NVIDIA H200 data sheet (SXM5)"},
    {"gh200",          140,  4.8,   {67,   67,    494.7,  989.4,  989.4,  1978.9, 0},
     "NVIDIA GH200 data sheet (144 GB HBM3e)"},
    {"b200",           179,  8.0,   {37,   75,    1125,   2250,   2250,   4500,   9000},
     "NVIDIA HGX B200 data sheet"},
    {"gb200",          185,  8.0,   {40,   80,    1250,   2500,   2500,   5000,   10000},
     "NVIDIA GB200 NVL72 data sheet"},
    {"b300",           268,  8.0,   {1.2,  75,    1125,   2250,   2250,   4500,   13500},
     "NVIDIA HGX B300 data sheet"},
    {"gb300",          268,  8.0,   {1.3,  80,    1250,   2500,   2500,   5000,   15000},
     "NVIDIA GB300 NVL72 data sheet"},
    {"l4",             22.5, 0.3,   {0.5,  30.3,  60,     121,    121,    242.5,  0},
     "NVIDIA L4 data sheet"},
    {"l40s",           44.7, 0.864, {1.4,  91.6,  183,    362,    362,    733,    0},
     "NVIDIA L40S data sheet"},
    {"rtx-4090",       24,   1.008, {1.3,  82.6,  82.6,   165.2,  165.2,  330.3,  0},
     "NVIDIA Ada GPU architecture paper"},
    {"mi300x",         192,  5.3,   {163.4,163.4, 653.7,  1307.4, 1307.4, 2614.9, 0},
     "AMD Instinct MI300X data sheet"},
};

// Latencies: of one message of a collective, as all_reduces of a few bytes show.
const Link kPcie3 = {"PCIe 3", 15.75 * kGB, 8 * kMicrosecond};
const Link kPcie4 = {"PCIe 4", 31.5 * kGB, 7 * kMicrosecond};
const Link kPcie5 = {"PCIe 5", 63 * kGB, 6 * kMicrosecond};
const Link kNvlink2 = {"NVLink 2", 150 * kGB, 3 * kMicrosecond};
const Link kNvlink3 = {"NVLink 3", 300 * kGB, 3 * kMicrosecond};
const Link kNvlink4 = {"NVLink 4", 450 * kGB, 2.5 * kMicrosecond};
const Link kNvlink5 = {"NVLink 5", 900 * kGB, 2.5 * kMicrosecond};
const Link kInfinityFabric = {"Infinity Fabric", 448 * kGB, 4 * kMicrosecond};
const Link kChipToChip = {"NVLink-C2C", 450 * kGB, 3 * kMicrosecond};
const Link kGraceShared = {"NVLink-C2C", 225 * kGB, 3 * kMicrosecond};

// The link of one device: a node has `gigabits`, which its devices share.
Link network(const char* name, double gigabits, int64_t devices) {
  return {
      name,
      gigabits / 8 * kGB / static_cast<double>(devices),
      5 * kMicrosecond};
}

struct NodeRow {
  const char* name;
  const char* device;
  int64_t devices;
  Link inside;
  bool switched, reduces;
  Link network;
  Link host;
  double host_gib;
  double host_gb_per_second;  // of the node: sockets * channels * transfers * 8 bytes
};

const std::vector<NodeRow>& nodes() {
  static const std::vector<NodeRow> rows = {
      {"dgx-1", "v100", 8, kNvlink2, true, false,
       network("4 InfiniBand EDR", 4 * 100, 8), kPcie3, 512, 153.6},
      {"dgx-1-16gb", "v100-16gb", 8, kNvlink2, true, false,
       network("4 InfiniBand EDR", 4 * 100, 8), kPcie3, 512, 153.6},
      {"dgx-a100-40gb", "a100-40gb", 8, kNvlink3, true, false,
       network("8 InfiniBand HDR", 8 * 200, 8), kPcie4, 1024, 409.6},
      {"dgx-a100", "a100-80gb", 8, kNvlink3, true, false,
       network("8 InfiniBand HDR", 8 * 200, 8), kPcie4, 2048, 409.6},
      {"dgx-h100", "h100-sxm", 8, kNvlink4, true, true,
       network("8 InfiniBand NDR", 8 * 400, 8), kPcie5, 2048, 614.4},
      {"grand-teton", "h100-96gb", 8, kNvlink4, true, true,
       network("8 RoCE 400", 8 * 400, 8), kPcie5, 2048, 614.4},
      {"h100-pcie-8", "h100-pcie", 8, kPcie5, false, false,
       network("4 InfiniBand NDR", 4 * 400, 8), kPcie5, 1024, 614.4},
      {"dgx-h200", "h200", 8, kNvlink4, true, true,
       network("8 InfiniBand NDR", 8 * 400, 8), kPcie5, 2048, 614.4},
      {"gh200-1", "gh200", 1, {}, true, false,
       network("InfiniBand NDR", 400, 1), kChipToChip, 480, 384},
      {"dgx-b200", "b200", 8, kNvlink5, true, true,
       network("8 InfiniBand NDR", 8 * 400, 8), kPcie5, 4096, 716.8},
      {"gb200-nvl72", "gb200", 72, kNvlink5, true, true,
       network("72 InfiniBand NDR", 72 * 400, 72), kGraceShared, 17280, 18432},
      {"dgx-b300", "b300", 8, kNvlink5, true, true,
       network("8 InfiniBand XDR", 8 * 800, 8), kPcie5, 4096, 819.2},
      {"gb300-nvl72", "gb300", 72, kNvlink5, true, true,
       network("72 InfiniBand XDR", 72 * 800, 72), kGraceShared, 17280, 18432},
      {"l4-8", "l4", 8, kPcie4, false, false,
       network("Ethernet 100", 100, 8), kPcie4, 384, 409.6},
      {"l40s-8", "l40s", 8, kPcie4, false, false,
       network("4 Ethernet 100", 4 * 100, 8), kPcie4, 1024, 409.6},
      {"rtx-4090-8", "rtx-4090", 8, kPcie4, false, false,
       network("Ethernet 100", 100, 8), kPcie4, 512, 409.6},
      {"mi300x-8", "mi300x", 8, kInfinityFabric, true, false,
       network("8 RoCE 400", 8 * 400, 8), kPcie5, 2048, 921.6},
  };
  return rows;
}
// clang-format on

}  // namespace

const std::vector<std::string>& device_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> made;
    for (const auto& row : kDevices) made.emplace_back(row.name);
    return made;
  }();
  return names;
}

bool in_catalogue(std::string_view device) {
  return std::ranges::find(device_names(), device) != device_names().end();
}

Device find_device(std::string_view name) {
  for (const auto& row : kDevices) {
    if (name != row.name) continue;
    Device device;
    device.name = row.name;
    device.memory_bytes = row.memory_gib * kGiB;
    device.memory_bytes_per_second = row.memory_tb_per_second * kTera;
    for (size_t i = 0; i < row.teraflops.size(); ++i) {
      device.peak_flops_per_second[i] = row.teraflops[i] * kTera;
    }
    device.source = row.source;
    return device;
  }
  throw ConfigError(format(
      "unknown device \"{}\"{} (the catalogue has {})", name.substr(0, 60),
      config::did_you_mean(name, device_names()), join(device_names(), ", ")));
}

Node usual_node(std::string_view device) {
  Node node;
  node.device = find_device(device);
  for (const auto& row : nodes()) {
    if (node.device.name != row.device) continue;
    node.name = row.name;
    node.num_devices = row.devices;
    node.inside = row.inside;
    node.switched = row.switched;
    node.reduces_in_switch = row.reduces;
    node.network = row.network;
    node.host = row.host;
    node.host_memory_bytes = row.host_gib * kGiB;
    node.host_memory_bytes_per_second =
        row.host_gb_per_second * kGB / static_cast<double>(row.devices);
    return node;
  }
  throw InternalError("no usual node of device " + node.device.name);
}

}  // namespace echelon::cluster
