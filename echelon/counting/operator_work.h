// What one operator call does, from shapes: the product that it computes, or
// the bytes that it reads and writes.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <string>
#include <vector>

namespace echelon {

/// Views and what only asks for shapes have neither product nor bytes.
struct OperatorWork {
  /// "mm", without "aten::"; of images whose channels lie together, "max_pool2d
  /// … channels last".
  std::string name;
  /// "product", "convolution", "attention" and their gradients, as
  /// cluster/device.h names what a rate was measured of; empty: it moves
  /// `bytes`.
  std::string product;
  int64_t count = 0;  // equal products [m, k] x [k, n] that run together
  int64_t m = 0, n = 0, k = 0;
  double bytes = 0;         // of its tensors, each once
  bool for_weight = false;  // a gradient of a parameter, and nothing else
};

/// One call, as an OperatorObserver sees it. The backward of a convolution is
/// two: the gradient of its inputs and that of its weights.
std::vector<OperatorWork> operator_work(
    const std::string& op,  // "aten::mm"
    const std::vector<c10::IValue>& arguments,
    at::ArrayRef<c10::IValue> results);

}  // namespace echelon
