// Results of chosen operators, kept from one run of a computation to the next.
// For recompute.cpp alone.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <unordered_set>
#include <vector>

#include "echelon/memory/random_state.h"
#include "echelon/profiling/operator_scope.h"

namespace echelon::detail {

/// What the first run kept, in the order of the calls that keep.
class KeptResults {
 public:
  /// One result: a tensor, or something that takes no memory.
  class Value {
   public:
    explicit Value(const c10::IValue& result);
    /// Gives the tensor to this thread's hooks (saved_tensors.h).
    void save();
    /// False when the tensor was changed in place: it is not what was returned.
    bool intact() const;
    /// As new as what the operator returned.
    c10::IValue get() const;

   private:
    c10::IValue plain_;  // until save(): a tensor, too
    std::function<at::Tensor()> saved_;
    c10::VariableVersion counter_;
    uint32_t version_ = 0;
  };

  /// Of one call; empty values: it is to run again.
  struct Call {
    bool intact() const;

    std::string name;
    std::vector<Value> values;
    size_t saved_before = 0;   // tensors that autograd had saved by then
    RandomState random_after;  // empty: it drew nothing
  };

  /// Forgets what the second run does not come to, since it ends with the last
  /// of `saved` tensors, and what was changed in place; saves the others.
  void finish(size_t saved);
  void clear() { calls_.clear(); }
  std::vector<Call>& calls() { return calls_; }

 private:
  std::vector<Call> calls_;
};

/// The first run: keeps.
class Keeper : public OperatorHandler {
 public:
  /// `saved`: how many tensors autograd has saved by now.
  Keeper(
      const std::unordered_set<std::string>& names, KeptResults& results,
      std::function<size_t()> saved,
      const std::vector<at::Generator>& generators);

  void run(OperatorCall& call) override;
  Results run_region(
      const std::string& name, const std::function<Results()>& next) override;

 private:
  void keep(const std::string& name, c10::ArrayRef<c10::IValue> values);

  const std::unordered_set<std::string>& names_;
  KeptResults& results_;
  std::function<size_t()> saved_;
  const std::vector<at::Generator>& generators_;
  bool inside_ = false;  // of a region that is kept whole
};

/// The second run: gives back, and keeps writes away from buffers.
class Replay : public OperatorHandler {
 public:
  Replay(
      const std::unordered_set<std::string>& names, KeptResults& results,
      const std::vector<at::Tensor>& buffers, const std::string& layer);

  void run(OperatorCall& call) override;
  Results run_region(
      const std::string& name, const std::function<Results()>& next) override;

 private:
  KeptResults::Call* next_call(const std::string& name);
  void protect_buffers(OperatorCall& call) const;

  const std::unordered_set<std::string>& names_;
  KeptResults& results_;
  std::unordered_set<const c10::StorageImpl*> buffers_;
  const std::string& layer_;
  size_t next_ = 0;
  bool inside_ = false;
};

}  // namespace echelon::detail
