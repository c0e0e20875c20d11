// The source of a model's weights: one safetensors file; a Hugging Face folder,
// which has model.safetensors or the shards that model.safetensors.index.json
// names; or a checkpoint, which the folder of a run may contain. Each may be on
// object storage (s3://…): a copy is read then. Free of LibTorch.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "echelon/checkpoint/format/safetensors.h"
#include "echelon/checkpoint/format/tensor_stream.h"

namespace echelon {

/// The prefix of a language model's names that is missing in files of its base
/// model alone: "transformer." or "model."; empty for other models.
///
///   names  of all layers or all parameters, in order
std::string base_prefix(const std::vector<std::string>& names);

/// The name that a tensor of a file has in the model: adds `prefix`, that of
/// base_prefix, where it is missing (except before "lm_head.…"). If there is a
/// prefix, the result is empty for masks and frequencies that old releases of
/// transformers stored as buffers ("….attn.bias", "….attn.masked_bias",
/// "….rotary_emb.inv_freq").
std::string name_in_model(const std::string& name, const std::string& prefix);

/// RUN/checkpoints/last.safetensors if a run or an import left that file and no
/// checkpoint; else empty.
std::string last_weights(const std::string& run);

/// All tensors of a file or folder, or parameters and buffers of a checkpoint,
/// not yet read. A value; copies share the files.
class WeightsSource {
 public:
  /// Tensors get the names of name_in_model().
  ///
  /// Throws CheckpointError when there is no such file, when it is malformed or
  /// truncated, when the index is malformed or names a shard that is missing or
  /// lacks the tensor, when two tensors have the same name, and for a
  /// checkpoint whose manifest or files are damaged. For an address on object
  /// storage, throws as storage::local_copy() and local_checkpoint() too.
  explicit WeightsSource(const std::string& path, std::string prefix = "");

  struct Tensor {
    TensorFacts facts;  // with its name in the model
    // A mapped file and the tensor in it, or a checkpoint and its index there.
    std::shared_ptr<const safetensors::File> file;
    const safetensors::TensorInfo* info = nullptr;
    std::shared_ptr<TensorSource> checkpoint;
    size_t number = 0;

    /// Copies elements in row-major order. Every byte of a checkpoint, and of a
    /// file's tensor that has a checksum, is verified. Throws CheckpointError.
    void read(const IndexRange& elements, std::byte* to) const;
  };

  const std::string& path() const { return path_; }
  /// By name in the model.
  const std::map<std::string, Tensor>& tensors() const { return tensors_; }
  /// Null when there is no tensor of that name.
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

/// Reads the tensors of a source piece by piece. Pages of a mapped file are
/// released after they were read.
class MappedTensors : public TensorSource {
 public:
  explicit MappedTensors(WeightsSource weights);

  const std::string& path() const override { return weights_.path(); }
  const std::vector<TensorFacts>& tensors() const override { return facts_; }
  void read(const std::vector<Piece>& pieces) override;

 private:
  WeightsSource weights_;
  std::vector<TensorFacts> facts_;
  std::vector<const WeightsSource::Tensor*> mapped_;  // in the order of facts_
};

}  // namespace echelon
