// Parameters of one unit in one piece of memory, of which each rank keeps an
// equal range. Gathered parameters and gradients are views of pooled buffers.
//
//   whole      [N * slot]  parameters in the compute dtype; gathered, or always
//   here master     [slot]      this rank's range of them, which the optimizer
//   updates gradient   [slot]      the same range of the mean gradient, in
//   master's dtype
//
// Parameters that weight decay applies to come first, each at a multiple of
// kAlignment elements; what lies between them stays zero.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "echelon/comm/group.h"
#include "echelon/layout/shard.h"
#include "echelon/parallel/shard/buffer_pool.h"
#include "echelon/parallel/shard/copy_stream.h"
#include "echelon/parallel/shard/sharded_units.h"

namespace echelon::sharding {

/// Kernels want their operands at such places.
inline constexpr int64_t kAlignment = 16;

/// What all flat buffers of a ShardedUnits share.
struct Surroundings {
  Surroundings(
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

  /// Gathered parameters stay from one step to the next.
  bool keeps_whole() const {
    return !options.offload_shards &&
           (options.shard.stage < 3 || shard.size() == 1);
  }
  bool offloads() const {
    return options.offload_optimizer || options.offload_shards;
  }
};

/// Not thread-safe. Gradients come by add_gradient(); a round of reduction is
/// start_reduce() and advance_reduce() until that says true.
class FlatBuffer {
 public:
  using Named = std::vector<std::pair<std::string, torch::Tensor>>;

  /// `parameters`: of one dtype and one requires_grad. They become views of the
  /// buffer; see ShardedUnits::add.
  FlatBuffer(
      Surroundings& surroundings, std::string name, const Named& parameters,
      bool equal);

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
    return whole_.tensor().storage().unsafeGetStorageImpl();
  }
  int64_t gathered_bytes() const;
  ShardedUnits::UnitBytes bytes() const;

  // Parameters ---------------------------------------------------------------

  bool gathered() const { return gather_ == Gather::done; }
  bool gathering() const { return gather_ == Gather::running; }
  /// Every rank calls it, or none.
  void start_gather();
  void finish_gather();
  /// Frees the gathered parameters; keeps_whole() ones are only out of date.
  void release();
  /// The master copy was updated.
  void after_update();
  /// It got other values, which a frozen one gets in no other way.
  void after_load();

  // Gradients ----------------------------------------------------------------

  void add_gradient(size_t index, const torch::Tensor& gradient);
  bool has_whole_gradient() const { return whole_gradient_.attached(); }
  /// Sets the parameters' .grad to views of the whole gradient, zeros where
  /// there is none; false takes them away.
  void show_gradients(bool show);
  void start_reduce();
  /// Waits for what is under way; true when gradient() is complete.
  bool advance_reduce();
  /// Waits for copies to the host. Then the shards' .grad are set.
  void finish_reduce();
  /// The next step: no gradients.
  void clear_gradients();

  /// Of the optimizer: parts of the master copy that are not empty.
  std::vector<ShardedUnits::FlatShard> shards() const;
  ShardedPart part(size_t index) const;

 private:
  struct Parameter {
    std::string name;
    torch::Tensor tensor;
    std::vector<int64_t> shape;
    int64_t begin = 0;
    int64_t numel = 0;
    torch::Tensor gradient;  // view of the whole one
    bool written = false;    // the whole gradient has its own
  };
  enum class Gather { none, running, done };
  enum class Reduce { none, scatter, replicate, copy };

  void place(const Named& parameters);
  void fill(const torch::Tensor& flat, bool equal);
  void make_master(const torch::Tensor& flat);
  torch::Tensor on_host(torch::ScalarType dtype) const;
  IndexRange own_range(int64_t begin, int64_t end) const;
  void fill_gaps();
  bool gradient_is_whole() const;
  void store(const torch::Tensor& reduced);
  void store_on_host(const torch::Tensor& reduced, bool first);
  void end_reduce();
  void settle();

  Surroundings& around_;
  std::string name_;
  bool trainable_ = false;
  std::vector<Parameter> parameters_;
  std::vector<IndexRange> gaps_;  // without parameters
  int64_t decay_end_ = 0;         // decaying parameters lie before
  int64_t slot_ = 0;
  int64_t begin_ = 0;  // of this rank's range
  torch::Device device_ = torch::kCPU;
  torch::Dtype dtype_ = torch::kFloat32;  // of the master copy
  torch::Dtype compute_ = torch::kFloat32;

  PooledTensor whole_;
  torch::Tensor own_whole_;     // this rank's range of it
  bool shares_memory_ = false;  // master is own_whole_
  torch::Tensor master_;
  torch::Tensor low_;  // of an offloaded master: on the device, to compute with
  torch::Tensor decaying_, plain_;  // what the optimizer sees of the master
  Gather gather_ = Gather::none;
  Work gathering_;
  CopyStream::Mark copied_;

  PooledTensor whole_gradient_;
  torch::Tensor own_gradient_;  // this rank's range of it
  PooledTensor partial_;        // of one reduction, before it is added
  torch::Tensor gradient_;
  bool has_gradient_ = false;
  Reduce reduce_ = Reduce::none;
  torch::Tensor reducing_;
  Work reduction_;
  torch::Tensor arriving_;  // on the host, to be added to gradient_
  bool arriving_adds_ = false;
  CopyStream::Mark arrived_;
};

}  // namespace echelon::sharding
