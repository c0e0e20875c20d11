#include "echelon/comm/mesh_groups.h"

#include <string>

namespace echelon {

MeshGroups::MeshGroups(World& world, const Layout& layout) : mesh_(layout) {
  check_world_size(layout, world.size());
  for (Axis axis : kAxes) {
    groups_.emplace(
        axis, world.new_group(
                  std::string(to_string(axis)),
                  mesh_.ranks_along(world.rank(), axis)));
  }
  const auto along_all = [&](const char* name, const std::vector<Axis>& axes) {
    return world.new_group(name, mesh_.ranks_along(world.rank(), axes));
  };
  same_experts_ = layout.dp_shard == 1
                      ? groups_.at(Axis::dp_replicate)
                      : along_all("dp", {Axis::dp_replicate, Axis::dp_shard});
  data_ =
      layout.ep == 1
          ? *same_experts_
          : along_all("data", {Axis::dp_replicate, Axis::dp_shard, Axis::ep});
  shard_all_ = layout.ep == 1 || layout.dp_shard == 1
                   ? groups_.at(Axis::dp_shard)
                   : along_all("dp_shard", {Axis::dp_shard, Axis::ep});
  data_index_ = mesh_.data_index(world.rank());
}

MeshGroups MeshGroups::alone(World& world) {
  MeshGroups groups(Layout{});
  const Group one = world.new_group("one device", {world.rank()});
  for (Axis axis : kAxes) groups.groups_.emplace(axis, one);
  groups.data_ = one;
  groups.same_experts_ = one;
  groups.shard_all_ = one;
  return groups;
}

}  // namespace echelon
