// A group along each axis of the mesh.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

#include "echelon/comm/world.h"
#include "echelon/layout/mesh.h"

namespace echelon {

/// This rank's group along every axis. Axes of degree 1 have a group of size 1,
/// which costs nothing. Copies share the groups.
class MeshGroups {
 public:
  /// Every rank of the world calls this with the same layout. Throws
  /// ConfigError unless the layout's degrees multiply to the world's size.
  MeshGroups(World& world, const Layout& layout);
  /// Groups of this rank alone, whatever the world's size. Every rank of the
  /// world calls this.
  static MeshGroups alone(World& world);

  const Mesh& mesh() const { return mesh_; }
  /// The ranks whose mesh coordinates differ from this one's along `axis`
  /// alone.
  const Group& along(Axis axis) const { return groups_.at(axis); }
  /// The ranks with different samples: along dp_replicate, dp_shard and ep
  /// together, by data_index().
  const Group& data() const { return *data_; }
  /// Those of them that have the same experts: along dp_replicate and dp_shard.
  const Group& same_experts() const { return *same_experts_; }
  /// The ranks that shard what is no expert, and those that have the same of
  /// it: with dp_shard the ranks of ep shard it too, otherwise they replicate
  /// it.
  const Group& shard_all() const { return *shard_all_; }
  const Group& replicate_all() const {
    return along(Axis::dp_shard).size() > 1 ? along(Axis::dp_replicate)
                                            : data();
  }
  /// The share of the samples that this rank sees, in [0, data().size()).
  int64_t data_index() const { return data_index_; }

 private:
  explicit MeshGroups(const Layout& layout) : mesh_(layout) {}

  Mesh mesh_;
  std::map<Axis, Group> groups_;
  std::optional<Group> data_;
  std::optional<Group> same_experts_;
  std::optional<Group> shard_all_;
  int64_t data_index_ = 0;
};

}  // namespace echelon
