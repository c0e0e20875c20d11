// The work of one operator call, from shapes: its floating-point operations,
// the product that it computes, and the bytes that it reads and writes.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <string>
#include <vector>

namespace echelon::counting {

/// Whether operator_flops knows a formula for `op` ("aten::mm").
bool has_flops(const std::string& op);

/// The floating-point operations of a call; a multiplication and an addition
/// are two. 0 for an operator without a formula.
///
/// Formulas exist for the operators that dominate a step: matmuls (mm, addmm,
/// bmm, baddbmm, addbmm, addmv, mv, dot), convolutions and their gradients, and
/// fused attention. All others count 0: they are bound by memory. The
/// conventions are those of PyTorch's flop counter (torch.utils.flop_counter),
/// except that the gradient of a grouped convolution's weights counts each
/// group once.
double operator_flops(
    const std::string& op, const std::vector<c10::IValue>& arguments,
    at::ArrayRef<c10::IValue> results);

/// A view, and an operator that only reads shapes, have neither a product nor
/// bytes.
struct OperatorWork {
  /// "mm", without "aten::"; "max_pool2d … channels last" for images in
  /// channels-last order.
  std::string name;
  /// "product", "convolution", "attention" and their gradients, as
  /// cluster/device.h names measured throughputs; empty: it moves `bytes`.
  std::string product;
  int64_t count = 0;  // equal products [m, k] x [k, n] that run together
  int64_t m = 0, n = 0, k = 0;
  bool one_weight = false;  // all of them have the same [k, n] in memory
  double bytes = 0;         // of its tensors, each once
  bool causal = false;      // attention: no query sees later keys
  int64_t launches = 1;     // kernels on a GPU, in eager mode; 0: a view
  bool for_weight = false;  // a gradient of a parameter, and nothing else
};

/// The work of one call, as an OperatorObserver sees it. The backward of a
/// convolution is two: the gradient of its inputs and that of its weights.
std::vector<OperatorWork> operator_work(
    const std::string& op,  // "aten::mm"
    const std::vector<c10::IValue>& arguments,
    at::ArrayRef<c10::IValue> results);

}  // namespace echelon::counting
