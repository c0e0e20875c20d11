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
  data_ =
      layout.dp_shard == 1
          ? groups_.at(Axis::dp_replicate)
          : world.new_group(
                "dp", mesh_.ranks_along(
                          world.rank(), {Axis::dp_replicate, Axis::dp_shard}));
  data_index_ = mesh_.data_index(world.rank());
}

MeshGroups MeshGroups::alone(World& world) {
  MeshGroups groups(Layout{});
  const Group one = world.new_group("one device", {world.rank()});
  for (Axis axis : kAxes) groups.groups_.emplace(axis, one);
  groups.data_ = one;
  return groups;
}

}  // namespace echelon
