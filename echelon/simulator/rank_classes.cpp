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

RankGrid::RankGrid(const Layout& layout) : size_(layout.num_ranks()) {
  for (const Axis axis : kAxes) {
    degrees_[number(axis)] = layout.degree(axis);
    strides_[number(axis)] = layout.stride(axis);
  }
}

int64_t RankGrid::base(int64_t rank, AxisMask axes) const {
  for (const Axis axis : kAxes) {
    if (axes & mask_of(axis)) {
      rank -= coordinate(rank, axis) * strides_[number(axis)];
    }
  }
  return rank;
}

int64_t RankGrid::group_size(AxisMask axes) const {
  int64_t size = 1;
  for (const Axis axis : kAxes) {
    if (axes & mask_of(axis)) size *= degree(axis);
  }
  return size;
}

std::vector<int64_t> RankGrid::group(int64_t rank, AxisMask axes) const {
  std::vector<int64_t> ranks = {base(rank, axes)};
  for (const Axis axis : kAxes) {
    if (!(axes & mask_of(axis))) continue;
    const size_t so_far = ranks.size();
    for (int64_t i = 1; i < degree(axis); ++i) {
      for (size_t r = 0; r < so_far; ++r) {
        ranks.push_back(ranks[r] + i * strides_[number(axis)]);
      }
    }
  }
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

namespace {

using Colours = std::vector<uint64_t>;

size_t count_colours(Colours colours) {
  std::sort(colours.begin(), colours.end());
  const auto end = std::unique(colours.begin(), colours.end());
  return static_cast<size_t>(end - colours.begin());
}

class Refinement {
 public:
  Refinement(const RankGrid& grid, const RankColours& given)
      : grid_(grid),
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
  void mix_groups(AxisMask axes) {
    std::fill(sums_.begin(), sums_.end(), 0);
    for (size_t rank = 0; rank < colours_.size(); ++rank) {
      sums_[base(rank, axes)] += mixed(colours_[rank], axes);
    }
    for (size_t rank = 0; rank < colours_.size(); ++rank) {
      next_[rank] = mixed(next_[rank], sums_[base(rank, axes)]);
    }
  }

  void mix_neighbours(int64_t rank) {
    const auto at = static_cast<size_t>(grid_.coordinate(rank, Axis::pp));
    for (const int64_t other : given_.pipeline[at]) {
      const int64_t neighbour = grid_.moved(rank, Axis::pp, other);
      next_[static_cast<size_t>(rank)] = mixed(
          next_[static_cast<size_t>(rank)],
          colours_[static_cast<size_t>(neighbour)]);
    }
  }

  size_t base(size_t rank, AxisMask axes) const {
    return static_cast<size_t>(grid_.base(static_cast<int64_t>(rank), axes));
  }

  const RankGrid& grid_;
  const RankColours& given_;
  Colours colours_;
  Colours next_;
  Colours sums_;
};

void number_classes(
    const RankGrid& grid, const Colours& colours, RankClasses& all) {
  std::unordered_map<uint64_t, int32_t> numbers;
  all.class_of.resize(colours.size());
  for (size_t rank = 0; rank < colours.size(); ++rank) {
    const auto next = static_cast<int32_t>(all.classes.size());
    const auto [at, is_new] = numbers.emplace(colours[rank], next);
    if (is_new) {
      RankClass one;
      one.representative = static_cast<int64_t>(rank);
      one.stage_rank = grid.coordinate(one.representative, Axis::pp);
      all.classes.push_back(std::move(one));
    }
    all.class_of[rank] = at->second;
    ++all.classes[static_cast<size_t>(at->second)].ranks;
  }
}

void number_neighbours(const RankGrid& grid, RankClasses& all) {
  for (RankClass& one : all.classes) {
    for (int64_t at = 0; at < grid.degree(Axis::pp); ++at) {
      const int64_t rank = grid.moved(one.representative, Axis::pp, at);
      one.neighbours.push_back(all.class_of[static_cast<size_t>(rank)]);
    }
  }
}

// A group along the pipeline consists of its two ends alone.
std::vector<int64_t> members_of(
    const RankGrid& grid, const RankColours& colours, int64_t rank,
    AxisMask axes) {
  if (axes != mask_of(Axis::pp)) return grid.group(rank, axes);
  std::vector<int64_t> ranks;
  for (const int64_t at : colours.ends) {
    ranks.push_back(grid.moved(rank, Axis::pp, at));
  }
  return ranks;
}

void number_groups(
    const RankGrid& grid, const RankColours& colours, AxisMask axes,
    RankClasses& all) {
  std::vector<int32_t> group_of(all.classes.size(), -1);
  for (size_t c = 0; c < all.classes.size(); ++c) {
    const auto ranks =
        members_of(grid, colours, all.classes[c].representative, axes);
    const bool meets =
        std::find(ranks.begin(), ranks.end(), all.classes[c].representative) !=
        ranks.end();
    if (meets && group_of[c] < 0) {
      GroupClass group{.axes = axes};
      group.representative = all.classes[c].representative;
      for (const int64_t rank : ranks) {
        group.members.push_back(all.class_of[static_cast<size_t>(rank)]);
      }
      std::sort(group.members.begin(), group.members.end());
      group.members.erase(
          std::unique(group.members.begin(), group.members.end()),
          group.members.end());
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
find_classes(const RankGrid& grid, const RankColours& colours, bool symmetry) {
  RankClasses all;
  all.axes = colours.axes;
  Colours last(colours.of_rank.size());
  if (symmetry) {
    last = Refinement(grid, colours).run();
  } else {
    std::iota(last.begin(), last.end(), uint64_t{0});
  }
  number_classes(grid, last, all);
  number_neighbours(grid, all);
  for (const AxisMask axes : colours.axes) {
    number_groups(grid, colours, axes, all);
  }
  return all;
}

}  // namespace echelon::simulator
