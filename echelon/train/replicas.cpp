// A rank hashes what it holds and all ranks gather the hashes, a few numbers
// each. Only when these differ do ranks exchange the hashes of single
// parameters.
#include "echelon/train/replicas.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <sstream>
#include <utility>

#include "echelon/architecture/language_model.h"
#include "echelon/checkpoint/format/hashes.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon {
namespace {

using torch::Tensor;

constexpr int64_t kRow = 1024;  // elements
constexpr size_t kShown = 3;    // parameters in a message

torch::Dtype integers_of(const Tensor& tensor) {
  switch (tensor.element_size()) {
    case 1:
      return torch::kInt8;
    case 2:
      return torch::kInt16;
    case 4:
      return torch::kInt32;
    default:
      return torch::kInt64;
  }
}

// A device sums the bits of its tensors, so that little is copied to the host.
int64_t hash_of(const std::vector<Tensor>& tensors) {
  ChecksumStream stream;
  const auto add = [&](const Tensor& host) {
    stream.update(host.const_data_ptr(), host.nbytes());
  };
  std::vector<Tensor> sums;
  for (const auto& tensor : tensors) {
    if (tensor.is_cpu()) {
      add(tensor.contiguous());
    } else {
      for (auto& one : detail::sums_of_rows(tensor)) sums.push_back(one);
    }
  }
  if (!sums.empty()) add(at::cat(sums).to(torch::kCPU));
  return static_cast<int64_t>(
      std::stoull(stream.digest().substr(0, 16), nullptr, 16));
}

bool is_whole(const Shard& shard) {
  return shard.local_shape() == shard.shape;
}

// "rank 3", "ranks 0, 1 and 3"
std::string names_of(const std::vector<int>& ranks) {
  if (ranks.size() == 1) return format("rank {}", ranks[0]);
  const std::vector<int> first(ranks.begin(), ranks.end() - 1);
  return format("ranks {} and {}", join(first, ", "), ranks.back());
}

}  // namespace

std::optional<Divergence> find_divergence(
    const std::vector<int64_t>& digests, const std::vector<int64_t>& sets) {
  std::set<int64_t> seen;
  for (const int64_t set : sets) {
    if (!seen.insert(set).second) continue;
    Divergence found;
    std::map<int64_t, size_t> counts;
    for (size_t rank = 0; rank < sets.size(); ++rank) {
      if (sets[rank] != set) continue;
      found.ranks.push_back(static_cast<int>(rank));
      ++counts[digests[rank]];
    }
    if (counts.size() < 2) continue;
    for (const auto& [digest, count] : counts) {
      if (2 * count <= found.ranks.size()) continue;
      for (const int rank : found.ranks) {
        if (digests[static_cast<size_t>(rank)] != digest) {
          found.wrong.push_back(rank);
        }
      }
    }
    return found;
  }
  return std::nullopt;
}

std::string divergence_text(
    int64_t step, const std::string& difference, int64_t equal,
    const std::string& checkpoint) {
  return format(
      "step {}: {}. {}; a device or its memory may be faulty, or a program "
      "changes parameters on one rank alone. {}. Processors of different kinds "
      "may round differently: [train] check_replicas_every = 0 turns this "
      "comparison off",
      step, difference,
      equal < 0 ? std::string("They were not compared before")
                : format("They were equal after step {}", equal),
      checkpoint.empty()
          ? std::string("There is no checkpoint from before")
          : format("The newest checkpoint, {}, is from before", checkpoint));
}

std::vector<Tensor> detail::sums_of_rows(const Tensor& tensor) {
  const Tensor bits = tensor.contiguous().view(integers_of(tensor)).view(-1);
  const int64_t whole = bits.numel() / kRow * kRow;
  const Tensor rest = bits.narrow(0, whole, bits.numel() - whole);
  return {
      bits.narrow(0, 0, whole).view({-1, kRow}).sum(1, false, torch::kInt64),
      rest.sum(torch::kInt64).view({1})};
}

ReplicaCheck::ReplicaCheck(
    World& world, const MeshGroups& groups, const ParallelModel& model)
    : world_(world), model_(model) {
  std::vector<Axis> axes[kKinds] = {
      {Axis::dp_replicate},
      {Axis::dp_replicate, Axis::dp_shard, Axis::cp},
      {Axis::dp_replicate, Axis::dp_shard, Axis::cp, Axis::tp}};
  for (size_t kind = 0; kind < kOfExperts; ++kind) {
    axes[kOfExperts + kind] = axes[kind];
    // Where several ranks shard experts, those of ep shard all else too.
    const bool sharded = kind == 0 && groups.expert_shard().size() > 1;
    if (!sharded) axes[kind].push_back(Axis::ep);
  }
  for (size_t kind = 0; kind < kKinds; ++kind) {
    for (int rank = 0; rank < world.size(); ++rank) {
      sets_[kind].push_back(groups.mesh().first_along(rank, axes[kind]));
      has_replicas_[kind] |= sets_[kind].back() != rank;
    }
  }
}

bool ReplicaCheck::has_replicas() const {
  return std::ranges::find(has_replicas_, true) != std::end(has_replicas_);
}

size_t ReplicaCheck::kind_of(const LocalParameter& part) {
  const size_t first = expert_of(part.name) ? kOfExperts : 0;
  if (part.range) return first;
  return first + (part.shard && !is_whole(part.shard->shard) ? 1 : 2);
}

std::optional<std::string> ReplicaCheck::compare() const {
  const torch::NoGradGuard no_grad;
  std::vector<Tensor> tensors[kKinds];
  for (const auto& part : model_.parameters()) {
    const size_t kind = kind_of(part);
    if (has_replicas_[kind]) tensors[kind].push_back(part.value.detach());
  }
  auto own = torch::empty({kKinds}, torch::kInt64);
  for (size_t kind = 0; kind < kKinds; ++kind) {
    own.mutable_data_ptr<int64_t>()[kind] = hash_of(tensors[kind]);
  }
  own = own.to(world_.device());
  auto all = torch::empty({world_.size() * int64_t{kKinds}}, own.options());
  world_.group().all_gather(all, own, {.label = "replicas"});
  all = all.to(torch::kCPU);
  for (size_t kind = 0; kind < kKinds; ++kind) {
    std::vector<int64_t> digests;
    for (int64_t rank = 0; rank < world_.size(); ++rank) {
      digests.push_back(all.const_data_ptr<
                        int64_t>()[rank * int64_t{kKinds} + int64_t(kind)]);
    }
    if (const auto found = find_divergence(digests, sets_[kind])) {
      return describe(kind, *found);
    }
  }
  return std::nullopt;
}

// Every rank calls this with the same arguments.
std::string ReplicaCheck::describe(size_t kind, const Divergence& found) const {
  std::string lines;
  for (const auto& part : model_.parameters()) {
    if (kind_of(part) != kind) continue;
    lines += format("{} {}\n", part.name, hash_of({part.value.detach()}));
  }
  const auto all = world_.exchange(lines);
  std::map<std::string, std::set<std::string>> hashes;
  std::vector<std::string> names;  // of parameters that differ, in order
  for (const int rank : found.ranks) {
    std::istringstream text(all[static_cast<size_t>(rank)]);
    for (std::string name, hash; text >> name >> hash;) {
      auto& seen = hashes[name];
      if (seen.insert(hash).second && seen.size() == 2) names.push_back(name);
    }
  }
  const size_t more = names.size() - std::min(kShown, names.size());
  names.resize(names.size() - more);
  const std::string which =
      join(names, ", ") + (more > 0 ? format(" and {} more", more) : "");
  if (found.wrong.empty()) {
    return format(
        "the parameters of {}, which should be the same, differ: {}; {} which "
        "of them is wrong",
        names_of(found.ranks), which,
        found.ranks.size() == 2 ? "two copies do not show"
                                : "no majority shows");
  }
  std::vector<int> right;
  std::ranges::set_difference(
      found.ranks, found.wrong, std::back_inserter(right));
  return format(
      "the parameters of {} differ from those of {}, which agree: {}",
      names_of(found.wrong), names_of(right), which);
}

}  // namespace echelon
