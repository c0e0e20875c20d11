// Floating-point operations of one operator call, from shapes.
//
// A multiplication and an addition are two. Counted are the operators that a
// step spends its time in: matrix products (mm, addmm, bmm, baddbmm, addbmm,
// addmv, mv, dot), convolutions and their gradients, and fused attention. All
// others count 0: their time is that of moving their tensors. The conventions
// are those of PyTorch's flop counter (torch.utils.flop_counter), except that
// the gradient of a grouped convolution's weights counts each group once.
#pragma once

#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

namespace echelon {

/// Whether operator_flops knows a formula for `op` ("aten::mm").
bool has_flops(const std::string& op);

/// 0 for an operator without a formula.
double operator_flops(
    const std::string& op, const std::vector<c10::IValue>& arguments,
    at::ArrayRef<c10::IValue> results);

}  // namespace echelon
