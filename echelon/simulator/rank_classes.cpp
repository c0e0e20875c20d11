#include "echelon/simulator/rank_classes.h"

#include <algorithm>
#include <numeric>
#include <unordered_map>

#include "echelon/simulator/draws.h"

namespace echelon::simulator {

std::vector<Axis> axes_of(AxisMask mask) {
  std::vector<Axis> axes;
  for (const Axis axis : kAxes) {
    if (mask & mask_of(axis)) axes.push_back(axis);
  }
  return axes;
}

namespace {

using Colours = std::vector<uint64_t>;

size_t count_colours(Colours colours) {
  std::ranges::sort(colours);
  return colours.size() - std::ranges::unique(colours).size();
}

// Colours are 64-bit hashes, so that a round costs the same for any number of
// colours. A round mixes into each rank's colour those of its groups and
// neighbours; the refinement ends when a round does not split any colour.
class Refinement {
 public:
  Refinement(const Mesh& mesh, const RankColours& given)
      : mesh_(mesh),
        given_(given),
        colours_(given.of_rank),
        next_(colours_.size()),
        sums_(colours_.size()) {}

  Colours run() {
    size_t before = 0;
    size_t now = count_colours(colours_);
    while (now != before && now != colours_.size()) {
      before = now;
      round();
      now = count_colours(colours_);
    }
    return std::move(colours_);
  }

 private:
  void round() {
    next_ = colours_;
    for (const AxisMask axes : given_.axes) mix_groups(axes);
    for (size_t rank = 0; rank < colours_.size(); ++rank) {
      mix_neighbours(static_cast<int64_t>(rank));
    }
    colours_.swap(next_);
  }

  // A group's colour is a sum, so the order of its members does not matter.
  void mix_groups(AxisMask mask) {
    std::ranges::fill(sums_, 0);
    const auto axes = axes_of(mask);
    const auto sum = [&](size_t rank) -> uint64_t& {
      return sums_[static_cast<size_t>(
          mesh_.first_along(static_cast<int64_t>(rank), axes))];
    };
    for (size_t rank = 0; rank < colours_.size(); ++rank) {
      sum(rank) += mixed(colours_[rank], mask);
    }
    for (size_t rank = 0; rank < colours_.size(); ++rank) {
      next_[rank] = mixed(next_[rank], sum(rank));
    }
  }

  void mix_neighbours(int64_t rank) {
    const auto at = static_cast<size_t>(mesh_.coordinate(rank, Axis::pp));
    for (const int64_t other : given_.pipeline[at]) {
      const int64_t neighbour = mesh_.moved(rank, Axis::pp, other);
      next_[static_cast<size_t>(rank)] = mixed(
          next_[static_cast<size_t>(rank)],
          colours_[static_cast<size_t>(neighbour)]);
    }
  }

  const Mesh& mesh_;
  const RankColours& given_;
  Colours colours_;
  Colours next_;
  Colours sums_;
};

void number_classes(
    const Mesh& mesh, const Colours& colours, RankClasses& all) {
  std::unordered_map<uint64_t, int32_t> numbers;
  all.class_of.resize(colours.size());
  for (size_t rank = 0; rank < colours.size(); ++rank) {
    const auto next = static_cast<int32_t>(all.classes.size());
    const auto [at, is_new] = numbers.emplace(colours[rank], next);
    if (is_new) {
      RankClass one;
      one.representative = static_cast<int64_t>(rank);
      one.stage_rank = mesh.coordinate(one.representative, Axis::pp);
      all.classes.push_back(std::move(one));
    }
    all.class_of[rank] = at->second;
    ++all.classes[static_cast<size_t>(at->second)].ranks;
  }
}

void number_neighbours(const Mesh& mesh, RankClasses& all) {
  for (RankClass& one : all.classes) {
    for (int64_t at = 0; at < mesh.layout().pp; ++at) {
      const int64_t rank = mesh.moved(one.representative, Axis::pp, at);
      one.neighbours.push_back(all.class_of[static_cast<size_t>(rank)]);
    }
  }
}

// A group along the pipeline consists of its two ends alone.
std::vector<int> members_of(
    const Mesh& mesh, const RankColours& colours, int64_t rank, AxisMask axes) {
  if (axes != mask_of(Axis::pp)) return mesh.ranks_along(rank, axes_of(axes));
  std::vector<int> ranks;
  for (const int64_t at : colours.ends) {
    ranks.push_back(static_cast<int>(mesh.moved(rank, Axis::pp, at)));
  }
  return ranks;
}

void number_groups(
    const Mesh& mesh, const RankColours& colours, AxisMask axes,
    RankClasses& all) {
  std::vector<int32_t> group_of(all.classes.size(), -1);
  for (size_t c = 0; c < all.classes.size(); ++c) {
    const auto ranks =
        members_of(mesh, colours, all.classes[c].representative, axes);
    const int64_t own = all.classes[c].representative;
    const bool meets = std::ranges::find(ranks, own) != ranks.end();
    if (meets && group_of[c] < 0) {
      GroupClass group{.axes = axes, .representative = own};
      for (const int rank : ranks) {
        group.members.push_back(all.class_of[static_cast<size_t>(rank)]);
      }
      std::ranges::sort(group.members);
      const auto repeated = std::ranges::unique(group.members);
      group.members.erase(repeated.begin(), repeated.end());
      for (const int32_t member : group.members) {
        group_of[static_cast<size_t>(member)] =
            static_cast<int32_t>(all.groups.size());
      }
      all.groups.push_back(std::move(group));
    }
    all.classes[c].groups.push_back(group_of[c]);
  }
}

}  // namespace

RankClasses
find_classes(const Mesh& mesh, const RankColours& colours, bool symmetry) {
  RankClasses all;
  all.axes = colours.axes;
  Colours last(colours.of_rank.size());
  if (symmetry) {
    last = Refinement(mesh, colours).run();
  } else {
    std::iota(last.begin(), last.end(), uint64_t{0});
  }
  number_classes(mesh, last, all);
  number_neighbours(mesh, all);
  for (const AxisMask axes : colours.axes) {
    number_groups(mesh, colours, axes, all);
  }
  return all;
}

}  // namespace echelon::simulator
