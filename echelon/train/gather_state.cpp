#include "echelon/train/gather_state.h"

#include <map>
#include <sstream>
#include <string>

#include "echelon/error.h"
#include "echelon/parallel/data/coalesced.h"

namespace echelon {
namespace {

torch::Dtype dtype_in(const ParameterInfo& info) {
  return info.dtype == "int64" ? torch::kInt64 : dtype_of(info.dtype);
}

// The first rank of the pipeline that has each name.
std::map<std::string, int>
owners(const NamedTensors& own, const Group& group, torch::Device device) {
  std::vector<std::string> names;
  for (const auto& [name, _] : own) names.push_back(name);
  const auto all = gather_lines(names, group, device, "who holds what");
  std::map<std::string, int> owners;
  for (int rank = 0; rank < group.size(); ++rank) {
    for (const auto& name : all[static_cast<size_t>(rank)]) {
      owners.emplace(name, rank);
    }
  }
  return owners;
}

// What the ranks of a tensor-parallel group have of each tensor that is cut: by
// rank and name.
using Shards = std::vector<std::map<std::string, Shard>>;

// "name dim begin end begin end": the shape is known.
Shards exchange_shards(
    const ParallelModel& model, const Group& group, torch::Device device) {
  std::vector<std::string> lines;
  const auto own = model.shards();
  for (const auto& [name, one] : own) {
    std::string line = name + " " + std::to_string(one.shard.dim);
    for (const auto& piece : one.shard.pieces) {
      line += " " + std::to_string(piece.begin) + " " +
              std::to_string(piece.end);
    }
    lines.push_back(std::move(line));
  }
  Shards shards;
  for (const auto& rank : gather_lines(lines, group, device, "shards")) {
    auto& named = shards.emplace_back();
    for (const auto& line : rank) {
      std::istringstream words(line);
      std::string name;
      words >> name;
      Shard shard = own.at(name).shard;
      words >> shard.dim;
      shard.pieces.clear();
      for (IndexRange piece; words >> piece.begin >> piece.end;) {
        shard.pieces.push_back(piece);
      }
      named.emplace(std::move(name), std::move(shard));
    }
  }
  return shards;
}

// The whole tensor on the group's first rank; undefined elsewhere.
torch::Tensor whole_on_first(
    const torch::Tensor& own,
    const ParameterInfo& info,
    const Shards& shards,
    const Group& group) {
  const Call call{.label = info.name};
  const auto rank = static_cast<size_t>(group.rank());
  if (!shards[rank].contains(info.name)) {
    return rank == 0 ? own : torch::Tensor();
  }
  if (rank > 0) {
    group.send(own.contiguous(), 0, 0, call).wait();
    return {};
  }
  auto whole = torch::empty(info.shape, own.options());
  copy_to_whole(whole, own, shards[0].at(info.name));
  for (int peer = 1; peer < group.size(); ++peer) {
    const Shard& shard = shards[static_cast<size_t>(peer)].at(info.name);
    auto part = torch::empty(shard.local_shape(), own.options());
    group.recv(part, peer, 0, call).wait();
    copy_to_whole(whole, part, shard);
  }
  return whole;
}

}  // namespace

std::vector<NamedTensor> gather_state(
    const ParallelModel& model,
    const std::vector<ParameterInfo>& list,
    const MeshGroups& groups,
    torch::Device device) {
  const torch::NoGradGuard no_grad;
  const Group& pipeline = groups.along(Axis::pp);
  const Group& tensor = groups.along(Axis::tp);
  if (groups.data_index() != 0) return {};
  const NamedTensors own = model.state();
  const auto owner = owners(own, pipeline, device);
  const auto shards = exchange_shards(model, tensor, device);
  const std::map<std::string, torch::Tensor> here(own.begin(), own.end());
  std::vector<NamedTensor> state;
  for (const auto& info : list) {
    const auto found = owner.find(info.name);
    if (found == owner.end()) {
      throw Error("no rank of the pipeline holds \"" + info.name + "\"");
    }
    const int source = found->second;
    torch::Tensor whole;
    if (pipeline.rank() == source) {
      whole = whole_on_first(
          here.at(info.name).detach(), info, shards, tensor);
    }
    if (tensor.rank() > 0) continue;
    const Call call{.label = info.name};
    if (pipeline.rank() == 0 && source > 0) {
      whole = torch::empty(
          info.shape, torch::dtype(dtype_in(info)).device(device));
      pipeline.recv(whole, source, 0, call).wait();
    } else if (pipeline.rank() == source && source > 0) {
      pipeline.send(whole.contiguous(), 0, 0, call).wait();
    }
    if (pipeline.rank() == 0) state.emplace_back(info.name, whole);
  }
  return state;
}

}  // namespace echelon
