// Copies tensors from any source to a safetensors file piece by piece: a model
// of any size passes through little memory. Free of LibTorch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "echelon/checkpoint/format/safetensors.h"
#include "echelon/layout/shard.h"

namespace echelon {

/// What is known about a tensor without reading it.
struct TensorFacts {
  std::string name;
  std::string dtype;  // as safetensors names it
  std::vector<int64_t> shape;

  int64_t numel() const;
  bool operator==(const TensorFacts&) const = default;
};

/// The tensors of a checkpoint, a file or a folder of files.
class TensorSource {
 public:
  /// Elements of a tensor, row-major, and their destination.
  struct Piece {
    size_t tensor = 0;  // number in tensors()
    IndexRange elements;
    std::byte* to = nullptr;
  };

  virtual ~TensorSource() = default;
  /// The name for messages.
  virtual const std::string& path() const = 0;
  /// Names are unique.
  virtual const std::vector<TensorFacts>& tensors() const = 0;
  /// Throws CheckpointError for what cannot be read or is damaged.
  virtual void read(const std::vector<Piece>& pieces) = 0;
};

/// A tensor to write: its index in the source, its new name and dtype. The
/// dtype is the source's own, or both are floating-point (float_convert.h).
struct TensorToWrite {
  size_t tensor = 0;
  std::string name;
  std::string dtype;
};

/// Bytes that the tensor takes in the file.
int64_t bytes_to_write(const TensorSource& source, const TensorToWrite& tensor);

/// How many bytes are read, converted and written at a time.
inline constexpr int64_t kStreamBytes = 64 << 20;

/// Writes them to `path` atomically, as safetensors::write() does, and their
/// checksums into the metadata (safetensors::checksum_key()).
///
///   memory_bytes  that copies take at a time
///
/// Throws what reading and writing throw, ConfigError for dtypes that cannot be
/// converted, and DataError (tensor, number, place) for a finite number that
/// the new dtype cannot hold.
void write_tensors(
    const std::string& path, TensorSource& source,
    const std::vector<TensorToWrite>& tensors,
    const safetensors::Metadata& metadata = {},
    int64_t memory_bytes = kStreamBytes);

}  // namespace echelon
