// Collectives that autograd differentiates. Each one states its adjoint, the
// collective that its backward runs.
//
// The ranks together differentiate one number, F. Two conventions give two
// families:
//
//   sum of losses   F is the sum of the ranks' losses; every tensor belongs to
//                   one rank. all_reduce_sum, all_gather, reduce_scatter,
//                   all_to_all, broadcast_from, reduce_to, shift.
//   replicated      A tensor with the same value on all ranks is one variable,
//                   and a loss that all ranks compute alike is counted once.
//                   copy_to, reduce_from, gather_from, scatter_to: the pairs at
//                   the ends of a tensor-parallel region.
//
// For all of them:
//   * Every rank of the group calls, in the same order, and `requires_grad` of
//     the input is the same on every rank; in backward too every rank takes
//     part, so every rank's loss must depend on the result.
//   * The result is a new tensor (copy_to's shares the input's memory). In a
//     group of size 1 it is the input, and no call is made.
//   * Backward can be differentiated again, by the same rules.
//   * Empty slices are allowed. `label` appears in the timeline and in errors.
//   * They throw ConfigError for shapes that do not fit on this rank, and
//     CommError as Work::wait does.
#pragma once

#include <torch/types.h>

#include <string>
#include <vector>

#include "echelon/comm/group.h"

namespace echelon {

/// Sizes of `parts` slices of `total` that differ by at most one, the larger
/// ones first.
std::vector<int64_t> even_split(int64_t total, int parts);

// ------------------------------------------------------------- replicated

/// x -> x; adjoint reduce_from. For a replicated tensor that enters a region in
/// which the ranks compute different things.
torch::Tensor copy_to(
    const torch::Tensor& input, const Group& group,
    const std::string& label = {});

/// x_r -> sum of x_r on every rank; adjoint copy_to. For partial sums that
/// leave such a region.
torch::Tensor reduce_from(
    const torch::Tensor& input, const Group& group,
    const std::string& label = {});

/// Slices x_r -> all of them, concatenated along `dim` in rank order; adjoint
/// scatter_to: each rank takes its slice of a gradient that all ranks hold.
/// `sizes`: the slices' sizes along `dim`; empty means that they are equal.
torch::Tensor gather_from(
    const torch::Tensor& input, const Group& group, int64_t dim = 0,
    const std::vector<int64_t>& sizes = {}, const std::string& label = {});

/// A replicated x -> this rank's slice along `dim`; adjoint gather_from. Empty
/// `sizes` means even_split. Sends nothing in forward.
torch::Tensor scatter_to(
    const torch::Tensor& input, const Group& group, int64_t dim = 0,
    const std::vector<int64_t>& sizes = {}, const std::string& label = {});

// ---------------------------------------------------------- sum of losses

/// x_r -> sum of x_r on every rank; adjoint all_reduce_sum.
torch::Tensor all_reduce_sum(
    const torch::Tensor& input, const Group& group,
    const std::string& label = {});

/// Slices x_r -> all of them, concatenated along `dim` in rank order; adjoint
/// reduce_scatter. Empty `sizes` means that the slices are equal.
torch::Tensor all_gather(
    const torch::Tensor& input, const Group& group, int64_t dim = 0,
    const std::vector<int64_t>& sizes = {}, const std::string& label = {});

/// x_r -> this rank's slice along `dim` of the sum of x_r; adjoint all_gather.
/// Empty `sizes` means even_split.
torch::Tensor reduce_scatter(
    const torch::Tensor& input, const Group& group, int64_t dim = 0,
    const std::vector<int64_t>& sizes = {}, const std::string& label = {});

/// Slice i of x along dim 0 goes to rank i; the result is the slices from rank
/// 0, 1, … in order. Adjoint: all_to_all with the two lists exchanged. Both
/// lists empty means equal slices, which must divide.
torch::Tensor all_to_all(
    const torch::Tensor& input, const Group& group,
    const std::vector<int64_t>& input_splits = {},
    const std::vector<int64_t>& output_splits = {},
    const std::string& label = {});

/// x of rank `source` on every rank (the others give a tensor of the same shape
/// and dtype, whose values are not read); adjoint reduce_to.
torch::Tensor broadcast_from(
    const torch::Tensor& input, const Group& group, int source,
    const std::string& label = {});

/// The sum of x_r on rank `destination`, zeros elsewhere; adjoint
/// broadcast_from.
torch::Tensor reduce_to(
    const torch::Tensor& input, const Group& group, int destination,
    const std::string& label = {});

/// Rank r's x on rank r + offset, around the ring; adjoint shift by -offset.
/// All shapes are equal. Each rank starts its send and its receive together, so
/// no order of backward passes can deadlock.
torch::Tensor shift(
    const torch::Tensor& input, const Group& group, int offset,
    const std::string& label = {});

}  // namespace echelon
