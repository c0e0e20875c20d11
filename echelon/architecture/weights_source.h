// Where a model's weights lie: in one safetensors file, in a Hugging Face
// folder, which has model.safetensors or the shards that
// model.safetensors.index.json names, or in a checkpoint, to which a run's
// folder leads as well. Free of LibTorch.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "echelon/checkpoint/format/safetensors.h"
#include "echelon/checkpoint/format/tensor_stream.h"

namespace echelon {

/// The name in front of a language model's names that its base model, saved
/// alone, leaves out: "transformer." or "model."; empty for other models.
///
///   names  of all layers or all parameters, in order
std::string base_prefix(const std::vector<std::string>& names);

/// The name that a tensor of a file has in the model: with `prefix`, as
/// base_prefix gives it, in front where it lacks it (all but "lm_head.…").
/// Empty, with a prefix, for masks and frequencies that old releases of
/// transformers stored as buffers
/// ("….attn.bias", "….attn.masked_bias", "….rotary_emb.inv_freq").
std::string name_in_model(const std::string& name, const std::string& prefix);

/// FOLDER/checkpoints/last.safetensors where a run, or an import, has left that
/// and no checkpoint; else empty.
std::string last_weights(const std::string& run);

/// All tensors of a file or folder, or parameters and buffers of a checkpoint,
/// not read. A value; copies share the files.
class WeightsSource {
 public:
  /// Under the names of name_in_model().
  ///
  /// Throws CheckpointError when there is no such file, when it is malformed or
  /// cut off, when the index is no index or names a shard that is not there or
  /// has not the tensor, when two tensors have one name, and for a checkpoint
  /// whose manifest or files cannot be trusted.
  explicit WeightsSource(const std::string& path, std::string prefix = "");

  struct Tensor {
    TensorFacts facts;  // by its name in the model
    std::shared_ptr<const safetensors::File>
        file;  // mapped; null: a checkpoint's
    const safetensors::TensorInfo* info = nullptr;  // of `file`
    std::shared_ptr<TensorSource> checkpoint;
    size_t number = 0;  // in `checkpoint`

    /// Copies elements, row-major; of a checkpoint every byte is verified.
    /// Throws CheckpointError.
    void read(const IndexRange& elements, std::byte* to) const;
  };

  const std::string& path() const { return path_; }
  /// By name, as the model has it.
  const std::map<std::string, Tensor>& tensors() const { return tensors_; }
  /// Null when there is none of that name.
  const Tensor* find(const std::string& name) const;

 private:
  void add_file(const std::string& path);
  void add_index(const std::string& path);
  void add_checkpoint(const std::string& path);
  void
  add(std::shared_ptr<const safetensors::File> file,
      const safetensors::TensorInfo& info);
  void add(Tensor tensor);

  std::string path_;
  std::string prefix_;
  std::map<std::string, Tensor> tensors_;
};

}  // namespace echelon
