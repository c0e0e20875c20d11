// The safetensors file format, read strictly and written atomically.
//
//   8 bytes   n: length of the header, little-endian
//   n bytes   JSON: {"name": {"dtype": "F32", "shape": [2, 3],
//             "data_offsets": [begin, end]}, …, "__metadata__": {"k": "v"}}
//   the rest  the tensors' bytes, little-endian, row-major, without gaps
//
// Source: the format's description in the README of huggingface/safetensors.
// The reader refuses whatever that description does not allow, so a file that
// it accepts can be mapped and used without further checks.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace echelon::safetensors {

/// One tensor of a file. Its bytes are [begin, end) of the data section.
struct TensorInfo {
  std::string name;
  std::string dtype;           // "F32", "I64", …: see dtype_bytes
  std::vector<int64_t> shape;  // [] is a scalar
  uint64_t begin = 0;
  uint64_t end = 0;

  bool operator==(const TensorInfo&) const = default;
};

using Metadata = std::map<std::string, std::string>;

struct Header {
  std::vector<TensorInfo> tensors;  // by begin
  Metadata metadata;
  uint64_t data_begin = 0;  // where the data section starts in the file
};

/// The key in the metadata of the checksum of a tensor's bytes (hashes.h).
/// Other readers ignore it.
std::string checksum_key(const std::string& tensor);

/// Longest header, in bytes, that is read or written.
inline constexpr uint64_t kMaxHeaderBytes = 100'000'000;
/// Most dimensions of a tensor.
inline constexpr size_t kMaxDims = 64;

/// Bytes of one element; 0 when there is no such dtype.
uint64_t dtype_bytes(std::string_view dtype);

/// "[2, 3]".
std::string shape_string(std::span<const int64_t> shape);

/// The header of a file with the content `file`, which is not kept. Throws
/// CheckpointError that names `path`, the tensor, the values and the rule, for
/// a wrong header length, JSON (UTF-8, no duplicate or unknown keys), dtype,
/// shape (whole numbers, no overflow) or data_offsets (in the file, as long as
/// the shape says, no overlap, no gap, nothing behind the last tensor).
Header parse(std::span<const std::byte> file, const std::string& path);

/// How many of a file's `file_bytes` precede its data. `first` has its first 8
/// bytes, or as many as it has. Throws as parse().
uint64_t head_bytes(
    std::span<const std::byte> first, uint64_t file_bytes,
    const std::string& path);
/// parse() from the head_bytes() alone.
Header parse_head(
    std::span<const std::byte> head, uint64_t file_bytes,
    const std::string& path);

/// A file, mapped for reading. Moves, does not copy. The spans that it returns
/// live as long as it does. Truncating the file meanwhile kills the process
/// (SIGBUS); write() replaces files and never changes them.
class File {
 public:
  /// Throws CheckpointError when the file cannot be opened, or as parse().
  explicit File(const std::string& path);
  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  ~File();

  const std::string& path() const { return path_; }
  const std::vector<TensorInfo>& tensors() const { return header_.tensors; }
  const Metadata& metadata() const { return header_.metadata; }

  /// Null when no tensor has that name.
  const TensorInfo* find(const std::string& name) const;
  /// Throws CheckpointError that lists the existing names.
  const TensorInfo& at(const std::string& name) const;
  /// The bytes of one of tensors(), aligned to the dtype if write() wrote the
  /// file; the format itself promises no alignment.
  std::span<const std::byte> bytes(const TensorInfo& tensor) const;
  /// Compares the bytes of one of tensors() with the checksum that the metadata
  /// has of them, the first time; without one it does nothing. Throws
  /// CheckpointError with both. Several threads may call at once.
  void verify(const TensorInfo& tensor) const;
  /// Drops the pages that hold these bytes; reading them again gives the file's
  /// bytes. Changes made through load_tensor() are lost.
  void forget(std::span<const std::byte> bytes) const;

 private:
  std::string path_;
  Header header_;
  const std::byte* map_ = nullptr;
  size_t map_bytes_ = 0;
  std::unique_ptr<std::atomic<bool>[]> verified_;  // of each tensor
};

/// A tensor for write(), which borrows the bytes.
struct TensorBytes {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  std::span<const std::byte> bytes;
};

/// Writes `path` atomically: next to it, synced, renamed, folder synced. The
/// data starts at a multiple of 64 bytes and wider dtypes come first (otherwise
/// in the order given), so every tensor is aligned to its elements.
///
/// Throws ConfigError for a wrong list (a name twice, unknown dtype, bytes that
/// do not match the shape) and CheckpointError for errors of the disk (full,
/// I/O error, no such folder): path, bytes needed, bytes free. What was written
/// until then is removed, and an older file of that name stays.
void write(
    const std::string& path, const std::vector<TensorBytes>& tensors,
    const Metadata& metadata = {});

}  // namespace echelon::safetensors
