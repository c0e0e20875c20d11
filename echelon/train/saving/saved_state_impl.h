// What the files of saved_state.h share. Not for others.
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

/// Those that this rank draws from by default.
std::vector<RandomSource>
random_sources(const World& world, const MeshGroups& groups);

}  // namespace echelon
