// Tensors that are read piece by piece, wherever they lie, and written to a
// safetensors file: a model of any size passes through little memory. Free of
// LibTorch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "echelon/checkpoint/format/safetensors.h"
#include "echelon/layout/shard.h"

namespace echelon {

/// What is known of a tensor without reading it.
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
  /// Elements of a tensor, row-major, and where they go to.
  struct Piece {
    size_t tensor = 0;  // number in tensors()
    IndexRange elements;
    std::byte* to = nullptr;
  };

  virtual ~TensorSource() = default;
  /// As messages name it.
  virtual const std::string& path() const = 0;
  /// Each name once.
  virtual const std::vector<TensorFacts>& tensors() const = 0;
  /// Throws CheckpointError for what cannot be read or is damaged.
  virtual void read(const std::vector<Piece>& pieces) = 0;
};

/// A tensor to write: from which of a source, under which name, in which dtype.
/// The dtype is the source's own, or both are floating-point ones
/// (float_convert.h).
struct TensorToWrite {
  size_t tensor = 0;
  std::string name;
  std::string dtype;
};

/// Of the file's data.
int64_t bytes_to_write(const TensorSource& source, const TensorToWrite& tensor);

/// How many bytes are read, converted and written at a time.
inline constexpr int64_t kStreamBytes = 64 << 20;

/// Writes them to `path` as safetensors::write() does: the old file or the
/// whole new one is seen.
///
///   memory_bytes  of the copies that are held at a time
///
/// Throws what reading and writing throw, ConfigError for dtypes that are not
/// converted, and DataError for a finite number that the new dtype cannot hold:
/// the tensor, the number and its place.
void write_tensors(
    const std::string& path, TensorSource& source,
    const std::vector<TensorToWrite>& tensors,
    const safetensors::Metadata& metadata = {},
    int64_t memory_bytes = kStreamBytes);

}  // namespace echelon
