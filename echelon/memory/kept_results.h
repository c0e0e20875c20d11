// Random states and results of selected operators, kept from the first run of a
// computation for the second. For recompute.cpp alone.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "echelon/profiling/operator_scope.h"

namespace echelon::detail {

/// Torch's generators: the CPU's, and those of the GPUs that `tensors` are on.
std::vector<at::Generator>
generators_of(const std::vector<at::Tensor>& tensors);

/// The states of generators.
class RandomState {
 public:
  RandomState() = default;
  explicit RandomState(const std::vector<at::Generator>& generators);

  void restore() const;
  bool empty() const { return states_.empty(); }
  /// Both must be of the same generators.
  bool operator==(const RandomState& other) const;

 private:
  std::vector<std::pair<at::Generator, at::Tensor>> states_;
};

/// The results that the first run kept, in the order of its calls.
class KeptResults {
 public:
  /// One result: a tensor, or a value that takes no memory.
  class Value {
   public:
    explicit Value(const c10::IValue& result);
    /// Gives the tensor to this thread's hooks (saved_tensors.h).
    void save();
    /// False when the tensor was changed in place since it was returned.
    bool intact() const;
    /// The result, as a new tensor without history.
    c10::IValue get() const;

   private:
    c10::IValue plain_;  // until save() a tensor, too
    std::function<at::Tensor()> saved_;
    c10::VariableVersion counter_;
    uint32_t version_ = 0;
  };

  /// The results of one call.
  struct Call {
    bool intact() const;

    std::string name;
    std::vector<Value> values;  // empty: the call must run again
    size_t saved_before = 0;    // tensors that autograd had saved by then
    RandomState random_after;   // empty: the call drew no random numbers
  };

  /// Saves the results that the second run can use and drops the others: those
  /// that were changed in place, and those that come after the last of `saved`
  /// tensors, where the second run ends.
  void finish(size_t saved);
  void clear() { calls_.clear(); }
  std::vector<Call>& calls() { return calls_; }

 private:
  std::vector<Call> calls_;
};

/// Records the results that are kept, in the first run.
class ResultRecorder : public profiling::OperatorHandler {
 public:
  /// `saved`: how many tensors autograd has saved by now.
  ResultRecorder(
      const std::unordered_set<std::string>& names, KeptResults& results,
      std::function<size_t()> saved,
      const std::vector<at::Generator>& generators);

  void run(profiling::OperatorCall& call) override;
  Results run_region(
      const std::string& name, const std::function<Results()>& next) override;

 private:
  void record(const std::string& name, c10::ArrayRef<c10::IValue> values);

  const std::unordered_set<std::string>& names_;
  KeptResults& results_;
  std::function<size_t()> saved_;
  const std::vector<at::Generator>& generators_;
  bool inside_ = false;  // a region whose results are kept
};

/// Returns the kept results in the second run, and protects buffers from
/// writes.
class Replay : public profiling::OperatorHandler {
 public:
  Replay(
      const std::unordered_set<std::string>& names, KeptResults& results,
      const std::vector<at::Tensor>& buffers, const std::string& layer);

  void run(profiling::OperatorCall& call) override;
  Results run_region(
      const std::string& name, const std::function<Results()>& next) override;

 private:
  KeptResults::Call* next_call(const std::string& name);
  void protect_buffers(profiling::OperatorCall& call) const;

  const std::unordered_set<std::string>& names_;
  KeptResults& results_;
  std::unordered_set<const c10::StorageImpl*> buffers_;
  const std::string& layer_;
  size_t next_ = 0;
  bool inside_ = false;
};

}  // namespace echelon::detail
