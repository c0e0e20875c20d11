// Many tensors of a module sent as few messages.
#pragma once

#include <torch/types.h>

#include <string>
#include <vector>

#include "echelon/comm/group.h"

namespace echelon {

/// tensors <- those of group rank `source`, in place. Any dtypes; shapes and
/// dtypes are the same on every rank, which all call this. Large dense tensors
/// travel where they are, the rest in one buffer per dtype.
void broadcast_tensors(
    const std::vector<torch::Tensor>& tensors, int source, const Group& group,
    const std::string& label);

/// `lines` of every rank, by rank. Every rank of the group calls this.
std::vector<std::vector<std::string>> gather_lines(
    const std::vector<std::string>& lines, const Group& group,
    torch::Device device, const std::string& label);

}  // namespace echelon
