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
  /// Every rank of the world calls this with the same arguments. Throws
  /// ConfigError unless the layout's degrees multiply to the world's size.
  /// `head_ranks`, a divisor of cp: see context_heads().
  MeshGroups(World& world, const Layout& layout, int64_t head_ranks = 1);
  /// Groups of this rank alone, whatever the world's size. Every rank of the
  /// world calls this.
  static MeshGroups alone(World& world);

  const Mesh& mesh() const { return mesh_; }
  /// The ranks whose mesh coordinates differ from this one's along `axis`
  /// alone.
  const Group& along(Axis axis) const { return groups_.at(axis); }
  /// The ranks whose gradients are summed, because they have other samples or
  /// other tokens of them: along dp_replicate, dp_shard, ep and cp together.
  const Group& data() const { return *data_; }
  /// Those of them that have the same experts: along dp_replicate, dp_shard and
  /// cp together.
  const Group& same_experts() const { return *same_experts_; }
  /// The ranks that shard experts, where parameters are sharded: along dp_shard
  /// and cp together.
  const Group& expert_shard() const { return *expert_shard_; }
  /// The ranks that shard what is no expert, where parameters are sharded, and
  /// those that have the same of it: where several ranks shard experts, those
  /// of ep shard all else too, otherwise they replicate it.
  const Group& shard() const { return *shard_; }
  const Group& replicate() const {
    return expert_shard().size() > 1 ? along(Axis::dp_replicate) : data();
  }
  /// The ranks of cp are cut into groups of `head_ranks` neighbours, which
  /// exchange heads for tokens: context_heads(). Keys and values go between the
  /// ranks that have the same place in their groups: context_keys().
  const Group& context_heads() const { return *context_heads_; }
  const Group& context_keys() const { return *context_keys_; }
  /// Ranks that see different samples. Those of cp have parts of the same ones.
  int64_t data_ranks() const { return mesh_.layout().data_ranks(); }
  /// The share of the samples that this rank sees, in [0, data_ranks()).
  int64_t data_index() const { return data_index_; }

 private:
  explicit MeshGroups(const Layout& layout) : mesh_(layout) {}
  void make_context_groups(World& world, int64_t head_ranks);

  Mesh mesh_;
  std::map<Axis, Group> groups_;
  std::optional<Group> data_;
  std::optional<Group> same_experts_;
  std::optional<Group> expert_shard_;
  std::optional<Group> shard_;
  std::optional<Group> context_heads_;
  std::optional<Group> context_keys_;
  int64_t data_index_ = 0;
};

}  // namespace echelon
