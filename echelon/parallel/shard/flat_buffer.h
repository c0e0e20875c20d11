// The parameters of one unit in one flat buffer, of which each of N ranks keeps
// an equal shard. Unsharded parameters and gradients are views of pooled
// memory.
//
//   unsharded  [N * shard_numel]  the parameters in the compute dtype: between
//                                 unshard and reshard, or always
//   master     [shard_numel]      this rank's shard, for the optimizer
//   gradient   [shard_numel]      this rank's shard of the mean gradient, in
//                                 the dtype of the master copy
//
// Parameters with weight decay come first. Each parameter begins at a multiple
// of kAlignment elements; the gaps between them stay zero. A matrix of
// options.padded has a gap behind it that makes its rows a multiple of
// kPaddedRows.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "echelon/comm/group.h"
#include "echelon/layout/shard.h"
#include "echelon/parallel/shard/buffer_pool.h"
#include "echelon/parallel/shard/sharded_units.h"

namespace echelon::sharding {

/// In elements: kernels want aligned operands.
inline constexpr int64_t kAlignment = 16;

/// What all flat buffers of a ShardedUnits share.
struct ShardContext {
  ShardContext(
      Group shard, Group replicate, ShardedUnitsOptions options,
      torch::Device device)
      : shard(std::move(shard)),
        replicate(std::move(replicate)),
        options(std::move(options)),
        pool(device),
        copies(device) {}

  Group shard;
  Group replicate;
  ShardedUnitsOptions options;
  BufferPool pool;
  CopyStream copies;

  /// Whether unsharded parameters keep their memory from step to step.
  bool keeps_unsharded() const {
    return !options.offload_shards &&
           (options.shard.stage < 3 || shard.size() == 1);
  }
  bool offloads() const {
    return options.offload_optimizer || options.offload_shards;
  }
};

/// Not thread-safe. Gradients arrive by add_gradient(). A reduction is
/// start_reduce(), then advance_reduce() until it returns true.
class FlatBuffer {
 public:
  using Named = std::vector<std::pair<std::string, torch::Tensor>>;

  /// `parameters` have one dtype and one requires_grad. They become views of
  /// the buffer; see ShardedUnits::add.
  FlatBuffer(
      ShardContext& context, std::string name, const Named& parameters,
      bool equal);
  /// On a device, what its streams still write is not reused before. The host
  /// does not wait.
  ~FlatBuffer();
  FlatBuffer(const FlatBuffer&) = delete;
  FlatBuffer& operator=(const FlatBuffer&) = delete;

  const std::string& name() const { return name_; }
  bool trainable() const { return trainable_; }
  size_t num_parameters() const { return parameters_.size(); }
  const torch::Tensor& parameter(size_t index) const {
    return parameters_[index].tensor;
  }
  const std::string& parameter_name(size_t index) const {
    return parameters_[index].name;
  }
  const c10::StorageImpl* storage() const {
    return unsharded_.tensor().storage().unsafeGetStorageImpl();
  }
  int64_t unsharded_bytes() const;
  ShardedUnits::UnitBytes bytes() const;

  // Parameters ---------------------------------------------------------------

  bool unsharded() const { return unshard_state_ == UnshardState::done; }
  bool unsharding() const { return unshard_state_ == UnshardState::running; }
  /// Starts the all-gather. Every rank calls it, or none.
  void start_unshard();
  void finish_unshard();
  /// Frees the unsharded parameters; with keeps_unsharded() they only count as
  /// out of date.
  void reshard();
  /// Call when the optimizer has updated the master copy.
  void after_update();
  /// Call when the master copy was given other values, also a frozen one.
  void after_load();

  // Gradients ----------------------------------------------------------------

  /// `gradient`: may be the memory that gradient_memory() gave, which then has
  /// the values. Another one is copied, or added to the one that is there.
  void add_gradient(size_t index, const torch::Tensor& gradient);
  /// As ParameterOwner::gradient_of, for weights in this buffer.
  torch::Tensor gradient_memory(const torch::Tensor& weight);
  /// As ParameterOwner::with_zero_rows.
  torch::Tensor with_zero_rows(const torch::Tensor& matrix) const;
  /// Several layers use the parameter: gradient_memory() has none for it.
  void share(const torch::Tensor& parameter);
  /// True: sets each parameter's .grad to its view of the unsharded gradient,
  /// zeros where none arrived. False: clears .grad again.
  void expose_gradients(bool expose);
  void start_reduce();
  /// Waits for the collective in progress; true when the reduction is complete.
  bool advance_reduce();
  /// Waits for copies to the host, then sets .grad of the shards.
  void finish_reduce();
  /// Drops all gradients before the next step.
  void clear_gradients();

  /// For the optimizer: the parts of the master copy that are not empty.
  std::vector<ShardedUnits::FlatShard> shards() const;
  ShardedPart part(size_t index) const;

 private:
  struct Parameter {
    std::string name;
    torch::Tensor tensor;
    std::vector<int64_t> shape;
    int64_t begin = 0;
    int64_t numel = 0;
    int64_t room = 0;  // numel and the zeros that are rows of the matrix
    bool shared = false;
    torch::Tensor gradient;     // a view of the unsharded gradient
    bool has_gradient = false;  // the view holds this round's gradient
    bool given = false;         // by gradient_memory(), in this round
  };
  enum class UnshardState { none, running, done };
  enum class ReduceState { none, scatter, replicate, copy };

  void lay_out(const Named& parameters);
  // The parameters in the elements [begin, end) of the buffer, if these are
  // theirs as a whole.
  std::vector<Parameter*> parameters_in(int64_t begin, int64_t end);
  void fill(const torch::Tensor& flat, bool equal);
  void make_master(const torch::Tensor& flat);
  torch::Tensor empty_on_host(torch::ScalarType dtype) const;
  IndexRange local_range(int64_t begin, int64_t end) const;
  IndexRange decaying_range() const { return local_range(0, decay_end_); }
  IndexRange plain_range() const {
    return local_range(decay_end_, shard_numel_ * context_.shard.size());
  }
  void zero_missing();
  bool shares_gradient_memory() const;
  void store(const torch::Tensor& reduced);
  void store_on_host(const torch::Tensor& reduced, bool first);
  void end_reduce();
  void forget_gradients();
  void finish_host_copy();

  ShardContext& context_;
  std::string name_;
  bool trainable_ = false;
  std::vector<Parameter> parameters_;
  std::vector<IndexRange> gaps_;  // without parameters
  int64_t decay_end_ = 0;         // end of the parameters with weight decay
  int64_t shard_numel_ = 0;
  int64_t shard_begin_ = 0;  // of this rank's shard
  torch::Device device_ = torch::kCPU;
  torch::Dtype dtype_ = torch::kFloat32;  // of the master copy
  torch::Dtype compute_ = torch::kFloat32;

  PooledTensor unsharded_;
  torch::Tensor own_unsharded_;  // this rank's range of unsharded_
  bool shares_memory_ = false;   // master_ is own_unsharded_
  torch::Tensor master_;
  torch::Tensor
      compute_shard_;  // on the device, while the master is on the host
  torch::Tensor decaying_, plain_;  // the optimizer's views of master_
  UnshardState unshard_state_ = UnshardState::none;
  Work unshard_work_;
  CopyStream::Mark copied_;

  PooledTensor unsharded_gradient_;
  torch::Tensor own_gradient_;  // this rank's range of unsharded_gradient_
  PooledTensor partial_;        // result of one reduction, before it is added
  torch::Tensor gradient_;
  bool has_gradient_ = false;
  ReduceState reduce_state_ = ReduceState::none;
  torch::Tensor reducing_;
  Work reduce_work_;
  torch::Tensor host_copy_;  // in progress, to be added to gradient_
  bool host_copy_adds_ = false;
  CopyStream::Mark host_copied_;
};

}  // namespace echelon::sharding
