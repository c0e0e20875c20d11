#include "benchmarks/published/row_cluster.h"

#include <algorithm>
#include <cctype>
#include <regex>
#include <string>
#include <vector>

#include "echelon/cluster/catalogue.h"
#include "echelon/error.h"

namespace echelon {
namespace {

constexpr double kGigabit = 1e9 / 8;

std::vector<std::string> words(const std::string& text) {
  std::vector<std::string> words(1);
  for (const unsigned char c : text) {
    if (std::isalnum(c)) {
      words.back() += static_cast<char>(std::tolower(c));
    } else if (!words.back().empty()) {
      words.emplace_back();
    }
  }
  if (words.back().empty()) words.pop_back();
  return words;
}

bool among(const std::vector<std::string>& words, const std::string& word) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

/// Bytes a second of one device that the row's texts give the network; 0: none.
double stated_network(const std::string& text, int64_t devices_per_node) {
  const auto devices = static_cast<double>(devices_per_node);
  std::smatch found;
  static const std::regex adapters(
      R"((\d{1,2})x [a-z -]{0,20}(\d{2,4}) ?gb(/s|ps)[a-z ]{0,12} per node)");
  if (std::regex_search(text, found, adapters)) {
    return std::stod(found[1]) * std::stod(found[2]) * kGigabit / devices;
  }
  static const std::regex node(R"((\d{2,5}) ?gb(/s|ps) (node-node|per node))");
  if (std::regex_search(text, found, node)) {
    return std::stod(found[1]) * kGigabit / devices;
  }
  static const std::regex device(R"((\d{2,4}) ?gb(/s|ps) (rdma )?per gpu)");
  if (std::regex_search(text, found, device)) {
    return std::stod(found[1]) * kGigabit;
  }
  return 0;
}

}  // namespace

std::string device_of(const std::string& gpu) {
  const auto cell = words(gpu);
  if (among(cell, "h100") && among(cell, "hbm2e") && !among(cell, "pcie")) {
    return "h100-96gb";
  }
  std::string best;
  double most = 0;
  for (const auto& name : cluster::device_names()) {
    const auto parts = words(name);
    // "rtx-4090" is named by its second word, every other by its first.
    const auto& model =
        parts[0] == "rtx" && parts.size() > 1 ? parts[1] : parts[0];
    if (!among(cell, model)) continue;
    double score = 1;
    for (const auto& part : parts) score += among(cell, part) ? 1 : -0.1;
    if (parts.back() == "sxm" || parts.back() == "80gb") score += 0.05;
    if (score > most) {
      most = score;
      best = name;
    }
  }
  if (best.empty()) {
    throw ConfigError(
        "gpu \"" + gpu.substr(0, 60) + "\" is not in the catalogue of devices");
  }
  return best;
}

cluster::Cluster cluster_of(const StepRow& row) {
  if (row.gpus <= 0) throw ConfigError("the row does not say how many gpus");
  cluster::Node node = cluster::usual_node(device_of(row.gpu));
  const auto cell = words(row.gpu);
  if (among(cell, "dgx") && among(cell, "2") && among(cell, "v100")) {
    node.name = "dgx-2";
    node.num_devices = 16;
  }
  if (node.num_devices == 72 && row.gpus % 72 != 0) node.num_devices = 64;
  if (const double rate = stated_network(row.text(), node.num_devices);
      rate > 0) {
    node.network.bytes_per_second = rate;
  }
  cluster::Cluster cluster;
  cluster.name = row.gpu;
  cluster.groups = {
      {node, (row.gpus + node.num_devices - 1) / node.num_devices}};
  return cluster.first(row.gpus);
}

}  // namespace echelon
