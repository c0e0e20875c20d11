// A checkpoint's model as a TensorSource, and as one safetensors file. Free of
// LibTorch.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "echelon/checkpoint/files/reader.h"
#include "echelon/checkpoint/format/tensor_stream.h"

namespace echelon {

/// Parameters and buffers, in the manifest's order; every byte is verified. The
/// reader keeps at most 64 MiB of blocks that are needed twice.
class CheckpointTensors : public TensorSource {
 public:
  /// Borrows the reader, or owns it.
  ///
  ///   way_out  ends the errors of read(): says what to read instead
  explicit CheckpointTensors(
      CheckpointReader& reader, std::string way_out = "");
  explicit CheckpointTensors(
      std::unique_ptr<CheckpointReader> reader, std::string way_out = "");

  const CheckpointManifest& manifest() const { return reader_.manifest(); }
  const std::string& path() const override { return reader_.path(); }
  const std::vector<TensorFacts>& tensors() const override { return facts_; }
  void read(const std::vector<Piece>& pieces) override;

 private:
  std::unique_ptr<CheckpointReader> own_;
  CheckpointReader& reader_;
  std::string way_out_;
  std::vector<TensorFacts> facts_;
  std::vector<const SavedTensor*> saved_;  // as facts_
};

/// Writes the parameters and buffers of these names (empty: all) to `path`
/// atomically, as safetensors::write does.
///
///   memory_bytes  that copies take at a time, about
///
/// Throws what reading and writing throw, and CheckpointError for a name that
/// is not there.
void write_weights(
    CheckpointReader& reader, const std::string& path,
    const std::vector<std::string>& names = {},
    int64_t memory_bytes = 64 << 20);

}  // namespace echelon
