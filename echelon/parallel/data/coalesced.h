// Sends many tensors of a module as few messages, and what ranks tell each
// other of themselves.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/comm/group.h"

namespace echelon {

/// Overwrites `tensors` with those of group rank `source`. Every rank of the
/// group calls this, with tensors of the same shapes and dtypes. Large dense
/// tensors are sent from where they are, the rest in one buffer per dtype.
void broadcast_tensors(
    const std::vector<torch::Tensor>& tensors, int source, const Group& group,
    const std::string& label);

/// Returns the `lines` of every rank, by rank. Every rank of the group calls
/// this.
std::vector<std::vector<std::string>> gather_lines(
    const std::vector<std::string>& lines, const Group& group,
    torch::Device device, const std::string& label);

/// The sums of `numbers` over the ranks, element by element. Every rank of the
/// group calls this, with as many.
std::vector<int64_t> sum_numbers(
    const std::vector<int64_t>& numbers, const Group& group,
    torch::Device device, const std::string& label);

/// The elements of an int64 tensor on any device.
std::vector<int64_t> to_numbers(const torch::Tensor& tensor);

}  // namespace echelon
