#include "echelon/comm/nccl/choose_gpu.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>
#include <sstream>

#include "echelon/cluster/cuda_driver.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

/// The CUDA that LibTorch's wheel is built for: drivers of this major version
/// and later run it.
constexpr int kCuda = 13;

constexpr const char* kWayOut =
    "or set [comm] device = \"cpu\" to compute on CPUs";

/// By rank, the GPU that each takes; none for those that are left without.
std::map<int, std::optional<int>> shared_out(std::vector<RankGpus> ranks) {
  std::sort(ranks.begin(), ranks.end(), [](const auto& a, const auto& b) {
    return a.local_rank < b.local_rank;
  });
  std::map<int, std::optional<int>> chosen;
  std::set<std::string> taken;
  for (const auto& one : ranks) {
    auto& index = chosen[one.rank];
    for (size_t i = 0; i < one.gpus.size() && !index; ++i) {
      if (taken.insert(one.gpus[i]).second) index = static_cast<int>(i);
    }
  }
  return chosen;
}

}  // namespace

std::string to_text(const RankGpus& gpus) {
  std::string text = format(
      "{}\t{}\t{}\t{}", gpus.rank, gpus.node, gpus.local_rank, gpus.problem);
  for (const auto& one : gpus.gpus) text += "\t" + one;
  return text;
}

RankGpus rank_gpus_from_text(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> fields;
  for (std::string field; std::getline(stream, field, '\t');) {
    fields.push_back(field);
  }
  fields.resize(std::max<size_t>(4, fields.size()));
  return {
      .rank = std::atoi(fields[0].c_str()),
      .node = std::atoi(fields[1].c_str()),
      .local_rank = std::atoi(fields[2].c_str()),
      .gpus = {fields.begin() + 4, fields.end()},
      .problem = fields[3]};
}

GpuChoice choose_gpu(const std::vector<RankGpus>& all, int rank, bool needed) {
  std::map<int, std::vector<RankGpus>> nodes;
  bool any = false;
  for (const auto& one : all) {
    if (!one.problem.empty()) {
      throw ConfigError(format(
          "rank {} cannot use its GPU: {}, {}", one.rank, one.problem,
          kWayOut));
    }
    any = any || !one.gpus.empty();
    nodes[one.node].push_back(one);
  }
  if (!any) {
    if (!needed) return {};
    throw ConfigError(format(
        "the CUDA driver reports no GPU on this machine; leave [comm] device "
        "and backend automatic, {}",
        kWayOut));
  }
  GpuChoice choice;
  for (const auto& [node, ranks] : nodes) {
    const auto chosen = shared_out(ranks);
    std::set<std::string> seen;
    for (const auto& one : ranks) {
      seen.insert(one.gpus.begin(), one.gpus.end());
    }
    for (const auto& [other, index] : chosen) {
      if (index) continue;
      const std::string fewer = format(
          "host {} has {} rank(s) and {} GPU(s) for them, so rank {} has none",
          node, ranks.size(), seen.size(), other);
      if (needed) {
        throw ConfigError(format(
            "{}; start at most one rank for each GPU, {}", fewer, kWayOut));
      }
      return {
          .index = std::nullopt, .note = fewer + ": all ranks compute on CPUs"};
    }
    if (seen.size() > ranks.size() && choice.note.empty()) {
      choice.note = format(
          "host {} has {} GPUs and {} rank(s): {} GPU(s) are not used", node,
          seen.size(), ranks.size(), seen.size() - ranks.size());
    }
    const auto mine = chosen.find(rank);
    if (mine != chosen.end()) choice.index = mine->second;
  }
  return choice;
}

RankGpus gpus_of_process(int rank, int node, int local_rank) noexcept {
  static const cluster::CudaFindings found = cluster::ask_cuda();
  static const std::string problem =
      cluster::why_unusable(found, cluster::find_gpu_signs(), kCuda);
  return {
      .rank = rank,
      .node = node,
      .local_rank = local_rank,
      .gpus = problem.empty() ? found.gpus : std::vector<std::string>(),
      .problem = problem};
}

}  // namespace echelon
