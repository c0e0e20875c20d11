// Folders of torch.distributed.checkpoint with safetensors files, as its
// HuggingFaceStorageWriter saves them from many ranks. Free of LibTorch.
//
// Each file has a rank's shards under the tensors' names, and in its metadata
// "DCP_SHARDING_INFO": {"name": {"saved_offsets": [row, column]}, …}, which
// says where each shard begins in the full tensor. Source:
// torch/distributed/checkpoint of PyTorch 2.11, whose reader takes a tensor to
// be as large as its shards reach.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "echelon/checkpoint/format/box.h"
#include "echelon/checkpoint/format/safetensors.h"
#include "echelon/checkpoint/format/tensor_stream.h"

namespace echelon {

/// Whether the folder has files called "shard-….safetensors".
bool has_sharded_files(const std::string& folder);

class ShardedFiles : public TensorSource {
 public:
  /// Opens all of these files.
  ///
  ///   rename  returns the name in tensors() for a name in the files; tensors
  ///           with an empty one are left out
  ///
  /// Throws CheckpointError as safetensors::File, for files without such
  /// metadata, and for shards of one tensor that have different dtypes, overlap
  /// or leave holes.
  ShardedFiles(
      const std::string& folder,
      const std::function<std::string(const std::string&)>& rename);

  const std::string& path() const override { return folder_; }
  const std::vector<TensorFacts>& tensors() const override { return facts_; }
  void read(const std::vector<Piece>& pieces) override;

 private:
  struct Part {
    Box box;
    std::shared_ptr<const safetensors::File> file;
    const safetensors::TensorInfo* info = nullptr;
  };

  void read(size_t tensor, const Box& box, std::byte* to) const;

  std::string folder_;
  std::vector<TensorFacts> facts_;
  std::vector<std::vector<Part>> parts_;  // as facts_
};

}  // namespace echelon
