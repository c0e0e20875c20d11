// Folders of torch.distributed.checkpoint whose files are safetensors ones:
// what its HuggingFaceStorageWriter saves from many ranks. Free of LibTorch.
//
// Each file has its ranks' parts of tensors under the tensors' names, and in
// its metadata "DCP_SHARDING_INFO": {"name": {"saved_offsets": [row, column]},
// …}, where each part begins in the whole tensor. Source:
// torch/distributed/checkpoint of PyTorch 2.11, whose reader takes a tensor to
// be as large as its parts reach.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "echelon/checkpoint/format/box.h"
#include "echelon/checkpoint/format/safetensors.h"
#include "echelon/checkpoint/format/tensor_stream.h"

namespace echelon {

/// Whether there are files called "shard-….safetensors".
bool has_sharded_files(const std::string& folder);

class ShardedFiles : public TensorSource {
 public:
  /// Opens all of these files.
  ///
  ///   rename  from a name in the files to the one of tensors(); an empty one
  ///   is
  ///           passed over
  ///
  /// Throws CheckpointError as safetensors::File, for files without such
  /// metadata, and for parts of one tensor that have different dtypes, overlap
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
