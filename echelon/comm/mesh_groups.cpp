#include "echelon/comm/mesh_groups.h"

#include <string>
#include <vector>

#include "echelon/text/check.h"

namespace echelon {

MeshGroups::MeshGroups(World& world, const Layout& layout, int64_t head_ranks)
    : mesh_(layout) {
  check_world_size(layout, world.size());
  for (Axis axis : kAxes) {
    groups_.emplace(
        axis,
        world.new_group(
            std::string(to_string(axis)), mesh_.ranks_along(world.rank(), axis),
            std::nullopt, axis == Axis::pp ? Traffic::messages : Traffic::any));
  }
  const auto together = [&](const char* name, const std::vector<Axis>& axes) {
    return world.new_group(name, mesh_.ranks_along(world.rank(), axes));
  };
  const bool cut = layout.cp > 1;
  const bool spread = layout.ep > 1;
  expert_shard_ = cut ? together("dp_shard", {Axis::dp_shard, Axis::cp})
                      : groups_.at(Axis::dp_shard);
  same_experts_ =
      layout.dp_shard == 1 && !cut
          ? groups_.at(Axis::dp_replicate)
          : together("dp", {Axis::dp_replicate, Axis::dp_shard, Axis::cp});
  data_ = spread ? together(
                       "data",
                       {Axis::dp_replicate, Axis::dp_shard, Axis::ep, Axis::cp})
                 : *same_experts_;
  shard_ = spread && expert_shard_->size() > 1
               ? together("shard", {Axis::dp_shard, Axis::ep, Axis::cp})
               : *expert_shard_;
  make_context_groups(world, head_ranks);
  data_index_ = mesh_.data_index(world.rank());
}

void MeshGroups::make_context_groups(World& world, int64_t head_ranks) {
  const Group& all = along(Axis::cp);
  if (head_ranks == 1 || head_ranks == all.size()) {
    const Group one = Group::alone("cp");
    context_heads_ = head_ranks == 1 ? one : all;
    context_keys_ = head_ranks == 1 ? all : one;
    return;
  }
  ECHELON_CHECK(
      head_ranks > 1 && all.size() % head_ranks == 0, "cp={}, in groups of {}",
      all.size(), head_ranks);
  std::vector<int> heads, keys;
  for (int i = 0; i < all.size(); ++i) {
    const int rank = all.ranks()[static_cast<size_t>(i)];
    if (i / head_ranks == all.rank() / head_ranks) heads.push_back(rank);
    if (i % head_ranks == all.rank() % head_ranks) keys.push_back(rank);
  }
  context_heads_ = world.new_group("cp", heads);
  context_keys_ = world.new_group("cp", keys);
}

MeshGroups MeshGroups::alone(World& world) {
  MeshGroups groups(Layout{});
  const Group one = world.new_group("one device", {world.rank()});
  for (Axis axis : kAxes) groups.groups_.emplace(axis, one);
  groups.data_ = groups.same_experts_ = one;
  groups.shard_ = groups.expert_shard_ = one;
  groups.context_heads_ = groups.context_keys_ = one;
  return groups;
}

}  // namespace echelon
