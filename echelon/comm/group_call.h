// What the calls of a Group have in common; for the files of comm/ alone.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "echelon/comm/group_impl.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::detail {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// A reduction as the backends know it: bool becomes bytes with a maximum (or)
/// or minimum (and), and an average becomes a sum that is divided afterwards.
struct Reduction {
  torch::Tensor tensor;
  c10d::ReduceOp op = c10d::ReduceOp::SUM;
  int64_t divide_by = 1;
};

/// The checks of one call, which throw ConfigErrors that name the operation.
class Checks {
 public:
  Checks(const Group::Impl& group, const char* operation)
      : group_(group), operation_(operation) {}

  template <typename... Values>
  [[noreturn]] void refuse(
      std::type_identity_t<FormatPattern<sizeof...(Values)>> rule,
      const Values&... values) const {
    throw ConfigError(format(
        "{} on axis {} of {} ranks: {}", operation_, group_.axis,
        group_.ranks.size(), format(rule, values...)));
  }

  void tensor(const torch::Tensor& tensor) const;
  void
  same_dtype(const torch::Tensor& output, const torch::Tensor& input) const;
  void numel(
      const torch::Tensor& output, const torch::Tensor& input,
      int64_t expected) const;
  /// One tensor a rank on `root`, none elsewhere, each as large as `model`.
  void one_per_rank(
      const std::vector<torch::Tensor>& tensors, const char* what, int root,
      const torch::Tensor& model) const;
  void list(const std::vector<torch::Tensor>& tensors) const;
  void pairs(
      const std::vector<torch::Tensor>& outputs,
      const std::vector<torch::Tensor>& inputs) const;
  void rank(int rank) const;
  void peer(int rank) const;

  /// Returns whether there is nothing to send: in a silent group, and for
  /// tensors on the meta device. The other ranks need not agree: they may count
  /// another layer. This rank's input comes last.
  bool no_data(const std::vector<torch::Tensor>& tensors) const;

  Reduction reduction(const torch::Tensor& tensor, echelon::ReduceOp op) const;

 private:
  void trace(const std::vector<torch::Tensor>& tensors) const;

  const Group::Impl& group_;
  const char* operation_;
};

/// `tensor` as bytes when the backend does not know its dtype; for calls that
/// move elements and do not reduce them.
torch::Tensor movable(const Group::Impl& group, const torch::Tensor& tensor);
std::vector<torch::Tensor>
movable(const Group::Impl& group, const std::vector<torch::Tensor>& tensors);

/// Waits for `works`, unless the call is asynchronous; then `after` runs. A
/// null work is of a call that is over for the host: NCCL puts a call that is
/// not asynchronous on the current stream, so what follows there comes after.
Work finish(
    std::vector<WorkPtr> works, const Call& call,
    std::function<void()> after = nullptr);

/// The work of a call that Checks::no_data found to send nothing: a trace
/// learns where it is waited for.
Work nothing_sent(const Call& call);

/// The label of the collectives of `call`.
std::string label_of(const Call& call);

}  // namespace echelon::detail
