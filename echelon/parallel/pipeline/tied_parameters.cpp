// The constructor lets every rank tell which tied parameters it has, on which
// stage and with which dtype and shape. From that each rank builds the same
// sets, ordered by stage. gather() exchanges the members' values or gradients
// between the ranks that have one, all in one batch of messages, so no order
// can deadlock. Each of them then sums all members in the order of the set, so
// the sums have the same bits.
#include "echelon/parallel/pipeline/tied_parameters.h"

#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <map>

#include "echelon/error.h"
#include "echelon/parallel/pipeline/tuple_shape.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

using pipeline::Fingerprint;
using torch::Tensor;

// The sets of tied names, in the order of their first mention.
std::vector<std::vector<std::string>> sets_of(const std::vector<Tie>& ties) {
  std::vector<std::vector<std::string>> sets;
  const auto find = [&](const std::string& name) {
    return std::find_if(sets.begin(), sets.end(), [&](const auto& set) {
      return std::find(set.begin(), set.end(), name) != set.end();
    });
  };
  for (const auto& tie : ties) {
    auto first = find(tie.first);
    auto second = find(tie.second);
    if (first == sets.end() && second == sets.end()) {
      sets.push_back({tie.first, tie.second});
    } else if (first == sets.end()) {
      second->push_back(tie.first);
    } else if (second == sets.end()) {
      first->push_back(tie.second);
    } else if (first != second) {
      first->insert(first->end(), second->begin(), second->end());
      sets.erase(second);
    }
  }
  return sets;
}

int64_t kind_of(const Tensor& tensor) {
  Fingerprint print;
  print.add({{tensor.scalar_type(), tensor.sizes().vec(), false}});
  return print.value();
}

constexpr int kTag = 1 << 30;  // above the tags of a step's transfers

// What a rank tells about a parameter.
struct Description {
  int64_t stage = -1;  // -1: the rank does not have it
  int64_t kind = 0;    // a hash of dtype and shape
};

using Ours = std::map<std::string, std::pair<int32_t, Tensor>>;

// Returns descriptions by rank and name.
std::vector<std::vector<Description>> exchange(
    const Group& group, const std::vector<std::string>& names, const Ours& ours,
    torch::Device device) {
  std::vector<int64_t> own;
  for (const auto& name : names) {
    const auto found = ours.find(name);
    own.push_back(found == ours.end() ? -1 : found->second.first);
    own.push_back(found == ours.end() ? 0 : kind_of(found->second.second));
  }
  const auto width = static_cast<int64_t>(own.size());
  Tensor all = torch::empty({width * group.size()}, torch::kInt64).to(device);
  group.all_gather(
      all, torch::tensor(own).to(device), {.label = "tied parameters"});
  all = all.cpu();
  const auto* at =
      reinterpret_cast<const Description*>(all.data_ptr<int64_t>());
  std::vector<std::vector<Description>> descriptions;
  for (int rank = 0; rank < group.size(); ++rank) {
    descriptions.emplace_back(at, at + names.size());
    at += names.size();
  }
  return descriptions;
}

}  // namespace

TiedParameters::TiedParameters(
    const Group& group, const std::vector<Tie>& ties,
    const std::vector<StageParameter>& parameters, torch::Device device)
    : group_(group), device_(device) {
  const auto sets = sets_of(ties);
  if (sets.empty()) return;
  Ours ours;
  for (const auto& [name, stage, tensor] : parameters) {
    ours[name] = {stage, tensor};
  }
  std::vector<std::string> names;
  for (const auto& set : sets)
    names.insert(names.end(), set.begin(), set.end());
  const auto descriptions = exchange(group, names, ours, device_);
  size_t column = 0;
  for (const auto& set : sets) {
    std::multimap<int64_t, Member> by_stage;
    int64_t kind = 0;
    for (const auto& name : set) {
      int owner = -1;
      for (int rank = 0; rank < group.size(); ++rank) {
        if (descriptions[static_cast<size_t>(rank)][column].stage >= 0)
          owner = rank;
      }
      if (owner < 0) {
        throw ConfigError(format(
            "tied parameter \"{}\" is in no stage of the pipeline", name));
      }
      const Description& description =
          descriptions[static_cast<size_t>(owner)][column];
      if (kind != 0 && kind != description.kind) {
        throw ConfigError(format(
            "tied parameters \"{}\" and \"{}\" differ in shape or dtype; they "
            "must agree",
            set.front(), name));
      }
      kind = description.kind;
      const auto here = ours.find(name);
      by_stage.emplace(
          description.stage,
          Member{
              name, owner,
              here == ours.end() ? Tensor() : here->second.second});
      ++column;
    }
    Set members;
    for (auto& [_, member] : by_stage) {
      if (!members.empty() && member.tensor.defined()) {
        duplicates_.insert(member.name);
      }
      members.push_back(std::move(member));
    }
    sets_.push_back(std::move(members));
  }
}

// Returns the values (or gradients) of all members of the set on the ranks that
// have one of them, elsewhere nothing.
std::vector<Tensor>
TiedParameters::gather(const Set& set, size_t index, bool gradients) const {
  std::vector<Tensor> values(set.size());
  Tensor like;
  for (size_t i = 0; i < set.size(); ++i) {
    const Tensor& tensor = set[i].tensor;
    if (!tensor.defined()) continue;
    like = tensor;
    // Stages of one rank may share one tensor, whose gradient counts once.
    const bool counted = std::any_of(
        set.begin(), set.begin() + static_cast<std::ptrdiff_t>(i),
        [&](const Member& earlier) { return earlier.tensor.is_same(tensor); });
    if (!gradients) {
      values[i] = tensor.detach().to(device_).contiguous();
    } else if (tensor.grad().defined() && !counted) {
      values[i] = tensor.grad().to(device_).contiguous();
    } else {
      values[i] =
          torch::zeros(tensor.sizes(), tensor.options().device(device_));
    }
  }
  if (!like.defined()) return {};
  std::vector<PeerMessage> messages;
  std::set<int> peers;
  for (const auto& member : set) {
    if (!member.tensor.defined()) peers.insert(member.rank);
  }
  const auto tag = [&](size_t i) {
    return kTag + static_cast<int>(index * 64 + i);
  };
  for (size_t i = 0; i < set.size(); ++i) {
    if (set[i].tensor.defined()) {
      for (int peer : peers) {
        messages.push_back({.tensor = values[i], .peer = peer, .tag = tag(i)});
      }
    } else {
      values[i] = torch::empty(like.sizes(), like.options().device(device_));
      messages.push_back(
          {.send = false,
           .tensor = values[i],
           .peer = set[i].rank,
           .tag = tag(i)});
    }
  }
  group_.batch_send_recv(messages, {.label = "tied " + set.front().name});
  return values;
}

void TiedParameters::copy_first() {
  torch::NoGradGuard no_grad;
  for (size_t s = 0; s < sets_.size(); ++s) {
    const auto values = gather(sets_[s], s, false);
    for (size_t i = 1; i < values.size(); ++i) {
      Tensor tensor = sets_[s][i].tensor;
      if (tensor.defined()) tensor.copy_(values[0]);
    }
  }
}

void TiedParameters::check_equal() const {
  torch::NoGradGuard no_grad;
  for (size_t s = 0; s < sets_.size(); ++s) {
    const auto values = gather(sets_[s], s, false);
    for (size_t i = 1; i < values.size(); ++i) {
      if (torch::equal(values[0], values[i])) continue;
      throw ConfigError(format(
          "tied parameters \"{}\" and \"{}\" have different values; give them "
          "the same, or let the first one's be copied (copy_tied_values)",
          sets_[s][0].name, sets_[s][i].name));
    }
  }
}

void TiedParameters::sum_gradients() const {
  torch::NoGradGuard no_grad;
  for (size_t s = 0; s < sets_.size(); ++s) {
    const auto values = gather(sets_[s], s, true);
    if (values.empty()) continue;
    Tensor sum = values[0].clone();
    for (size_t i = 1; i < values.size(); ++i) sum += values[i];
    for (const auto& member : sets_[s]) {
      if (!member.tensor.defined()) continue;
      Tensor tensor = member.tensor;
      if (tensor.grad().defined()) {
        tensor.mutable_grad().copy_(sum);
      } else {
        tensor.mutable_grad() = sum.to(tensor.device(), false, /*copy=*/true);
      }
    }
  }
}

}  // namespace echelon
