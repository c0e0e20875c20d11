// The tensors of a call as the contiguous host memory that the collectives
// work on, and the checks of a call's arguments.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <optional>
#include <string>
#include <vector>

#include "echelon/comm/shared_memory/communicator.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::local {

using Tensors = std::vector<at::Tensor>;

/// A tensor of a call, and the contiguous host memory that stands for it while
/// the operation runs: the tensor itself where that is possible.
struct Staged {
  at::Tensor tensor;
  at::Tensor host;
  bool copy_back = false;

  char* data() const { return static_cast<char*>(host.data_ptr()); }
};

enum class Use { input, output, both };

/// Tensors that peers cannot address in place, because they are on another
/// device or strided, pass through host memory.
Staged stage(const at::Tensor& tensor, Use use);

/// The stream that the caller's work on the device is in: copies back are
/// ordered with it.
std::optional<c10::Stream> current_stream(const std::vector<Staged>& staged);

void copy_back(
    const std::vector<Staged>& staged,
    const std::optional<c10::Stream>& stream);

/// All elements of `tensors` in one dimension, one tensor after another.
at::Tensor flatten(const Tensors& tensors);
/// The reverse: fills `tensors` from `flat`.
void unflatten(const at::Tensor& flat, const Tensors& tensors);

/// `size` rows of `row_bytes` each, from `data` on.
template <class Char>
std::vector<Char*> rows(char* data, int size, uint64_t row_bytes) {
  std::vector<Char*> rows;
  for (int j = 0; j < size; ++j) {
    rows.push_back(data + j * row_bytes);
  }
  return rows;
}

/// Slices along dim 0, equal or as `splits` says, as pieces of the memory at
/// `data`. `what` names the tensor in errors.
std::vector<Piece> slices(
    const char* what, const at::Tensor& tensor,
    const std::vector<int64_t>& splits, char* data, int size);

Dtype dtype_of(const char* operation, const at::Tensor& tensor);
Shape shape_of(const char* operation, const at::Tensor& tensor);
Reduction reduction_of(
    const char* operation, const c10d::ReduceOp& op, const at::Tensor& tensor);

/// "Float [2, 3]", for errors.
std::string text(const at::Tensor& tensor);

/// The checks throw ConfigError.
template <typename... Values>
[[noreturn]] void refuse(
    const char* operation,
    std::type_identity_t<echelon::detail::FormatPattern<sizeof...(Values)>> why,
    const Values&... values) {
  throw ConfigError(
      format("[local] {}: {}", operation, format(why, values...)));
}
at::Tensor& only(const char* operation, Tensors& tensors);
void check_equal(
    const char* operation, const at::Tensor& tensor, const at::Tensor& model);
void check_list(const char* operation, const Tensors& list, int size);
/// One dtype and one device for all.
void check_coalesced(const char* operation, const Tensors& tensors);

}  // namespace echelon::local
