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

using Parts = std::map<std::string, ParameterPart>;

// Parameters and buffers that this rank has a part of.
Parts parts_of(const ParallelModel& model) {
  Parts parts;
  for (auto& part : model.parts()) parts.emplace(part.name, part);
  for (auto& part : model.buffers()) parts.emplace(part.name, part);
  return parts;
}

// The first rank of the pipeline that has each name.
std::map<std::string, int>
owners(const Parts& own, const Group& group, torch::Device device) {
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

// What the ranks of a group have of each tensor that is cut: by rank and name.
using Shards = std::vector<std::map<std::string, Shard>>;
using Ranges = std::vector<std::map<std::string, IndexRange>>;

// "name dim begin end begin end": the shape is known.
Shards exchange_shards(
    const Parts& own, const Group& group, torch::Device device) {
  std::vector<std::string> lines;
  for (const auto& [name, part] : own) {
    if (!part.shard) continue;
    std::ostringstream line;
    line << name << " " << part.shard->shard.dim;
    for (const auto& piece : part.shard->shard.pieces) {
      line << " " << piece.begin << " " << piece.end;
    }
    lines.push_back(line.str());
  }
  Shards shards;
  for (const auto& rank : gather_lines(lines, group, device, "shards")) {
    auto& named = shards.emplace_back();
    for (const auto& line : rank) {
      std::istringstream words(line);
      std::string name;
      words >> name;
      Shard shard = own.at(name).shard->shard;
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

// "name begin end"
Ranges exchange_ranges(
    const Parts& own, const Group& group, torch::Device device) {
  std::vector<std::string> lines;
  for (const auto& [name, part] : own) {
    if (!part.range) continue;
    lines.push_back(
        name + " " + std::to_string(part.range->begin) + " " +
        std::to_string(part.range->end));
  }
  Ranges ranges;
  for (const auto& rank : gather_lines(lines, group, device, "ranges")) {
    auto& named = ranges.emplace_back();
    for (const auto& line : rank) {
      std::istringstream words(line);
      std::string name;
      IndexRange range;
      words >> name >> range.begin >> range.end;
      named.emplace(std::move(name), range);
    }
  }
  return ranges;
}

// One tensor on its way to world rank 0: what all ranks know of it.
struct Gathering {
  const ParameterInfo& info;
  const Shards& shards;
  const Ranges& ranges;
  const Group& tensor;
  const Group& shard;  // dp_shard
  torch::Device device;
};

// The tensor-parallel part on the first rank of dp_shard; undefined elsewhere.
torch::Tensor
local_on_first(const ParameterPart& own, const Gathering& gathering) {
  const auto& group = gathering.shard;
  auto values = own.value.detach().to(gathering.device);
  if (!own.range) return group.rank() == 0 ? values : torch::Tensor();
  const Call call{.label = own.name};
  if (group.rank() > 0) {
    if (values.numel() > 0) group.send(values.contiguous(), 0, 0, call).wait();
    return {};
  }
  auto local = torch::empty(
      own.shard ? own.shard->shard.local_shape() : gathering.info.shape,
      values.options());
  auto flat = local.view(-1);
  for (int peer = 0; peer < group.size(); ++peer) {
    const auto& range =
        gathering.ranges[static_cast<size_t>(peer)].at(own.name);
    if (range.size() == 0) continue;
    auto piece = flat.narrow(0, range.begin, range.size());
    if (peer == 0) {
      piece.copy_(values);
    } else {
      group.recv(piece, peer, 0, call).wait();
    }
  }
  return local;
}

// The whole tensor on the first rank of the group; undefined elsewhere.
torch::Tensor
whole_on_first(const ParameterPart& own, const Gathering& gathering) {
  const auto local = local_on_first(own, gathering);
  const auto& group = gathering.tensor;
  if (!local.defined()) return {};
  if (!own.shard) return group.rank() == 0 ? local : torch::Tensor();
  const Call call{.label = own.name};
  if (group.rank() > 0) {
    group.send(local.contiguous(), 0, 0, call).wait();
    return {};
  }
  auto whole = torch::empty(gathering.info.shape, local.options());
  copy_to_whole(whole, local, own.shard->shard);
  for (int peer = 1; peer < group.size(); ++peer) {
    const Shard& shard =
        gathering.shards[static_cast<size_t>(peer)].at(own.name);
    auto part = torch::empty(shard.local_shape(), local.options());
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
  if (groups.along(Axis::dp_replicate).rank() != 0) return {};
  const Group& pipeline = groups.along(Axis::pp);
  const Group& tensor = groups.along(Axis::tp);
  const Group& shard = groups.along(Axis::dp_shard);
  const Parts own = parts_of(model);
  const auto owner = owners(own, pipeline, device);
  const auto shards = exchange_shards(own, tensor, device);
  const auto ranges = exchange_ranges(own, shard, device);
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
          own.at(info.name), {info, shards, ranges, tensor, shard, device});
    }
    if (tensor.rank() > 0 || shard.rank() > 0) continue;
    const Call call{.label = info.name};
    if (pipeline.rank() == 0 && source > 0) {
      whole = torch::empty(
          info.shape, torch::dtype(dtype_in(info)).device(device));
      pipeline.recv(whole, source, 0, call).wait();
    } else if (pipeline.rank() == source && source > 0) {
      pipeline.send(whole.contiguous(), 0, 0, call).wait();
    }
    if (pipeline.rank() == 0) state.emplace_back(info.name, whole.cpu());
  }
  return state;
}

}  // namespace echelon
