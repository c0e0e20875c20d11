// Shared by the sources of saved_state.h. Private to this folder.
#pragma once

#include <ATen/core/Generator.h>

#include <string>
#include <vector>

#include "echelon/comm/mesh_groups.h"

namespace echelon {

struct RandomSource {
  std::string name;  // in a manifest
  at::Generator generator;
};

/// The default generators of this rank.
std::vector<RandomSource>
random_sources(const World& world, const MeshGroups& groups);

}  // namespace echelon
