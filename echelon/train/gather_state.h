// A model that is cut over ranks, brought together.
#pragma once

#include <vector>

#include "echelon/checkpoint/tensor_file.h"
#include "echelon/comm/mesh_groups.h"
#include "echelon/models/parameter_list.h"
#include "echelon/train/parallel_model.h"

namespace echelon {

/// Parameters and buffers of the whole model, in the order of `list`, on world
/// rank 0, in its host's memory, one tensor after the other; nothing elsewhere. Every rank of the world
/// calls this. Throws Error when no rank of the first pipeline has one of the
/// list.
std::vector<NamedTensor> gather_state(
    const ParallelModel& model,
    const std::vector<ParameterInfo>& list,
    const MeshGroups& groups,
    torch::Device device);

}  // namespace echelon
