// Reads checkpoints. No byte of a file is used before the checksum of its block
// was verified. Free of LibTorch.
//
//   CheckpointReader reader("runs/first/checkpoints/step-00000100");
//   const SavedTensor* tensor = reader.manifest().find("fc.weight");
//   reader.read({{.tensor = tensor, .box = box, .to = bytes}, …});
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "echelon/checkpoint/format/manifest.h"

namespace echelon {

/// A box to read: its element i goes to element sum(i[d] * strides[d]) of `to`.
/// Without strides, row-major.
struct BoxRead {
  const SavedTensor* tensor = nullptr;  // of the reader's manifest
  Box box;                              // inside of tensor->shape
  std::byte* to = nullptr;
  std::vector<int64_t> strides;
};

/// Adds the reads of elements `range` of a tensor, in row-major order, into
/// contiguous memory at `to`.
void add_reads(
    std::vector<BoxRead>& reads, const SavedTensor& tensor,
    const IndexRange& range, std::byte* to);

/// The bytes of a file that is not in the checkpoint's folder.
class RemoteFile {
 public:
  virtual ~RemoteFile() = default;
  virtual int64_t size() const = 0;
  /// Several threads may call it at once. Throws CheckpointError.
  virtual void read(int64_t offset, std::span<std::byte> to) = 0;
};

/// Opens the file that a manifest gives that name; null when it is in the
/// folder. Throws CheckpointError.
using OpenRemote =
    std::function<std::unique_ptr<RemoteFile>(const std::string& name)>;

class CheckpointReader {
 public:
  /// Reads the manifest; files are opened when they are needed. `path`: the
  /// checkpoint's folder, or a manifest of any name in the folder of its files.
  /// Throws CheckpointError as parse_manifest, for a folder that is no
  /// checkpoint, and for files that are missing or of another length.
  ///
  ///   threads  that read and verify, including the caller's; 0: one for each
  ///            processor of the machine, at most 4
  ///   remote   opens files that are elsewhere
  explicit CheckpointReader(
      const std::string& path, int threads = 0, const OpenRemote& remote = {});
  ~CheckpointReader();
  CheckpointReader(const CheckpointReader&) = delete;
  CheckpointReader& operator=(const CheckpointReader&) = delete;

  const std::string& path() const;
  const CheckpointManifest& manifest() const;

  /// Reads only the blocks that overlap the boxes, and the headers of their
  /// files: each block once, in the order of the files, whatever the order of
  /// the boxes. So one call should read everything that a rank needs. The
  /// boxes' memory must not overlap.
  ///
  /// Throws CheckpointError: file, tensor, offset, what was expected and found;
  /// the boxes' memory may then hold anything. ConfigError for a box outside of
  /// its tensor. One thread at a time.
  void read(const std::vector<BoxRead>& boxes);
  void read(const SavedTensor& tensor, const Box& box, std::byte* to) {
    read({{.tensor = &tensor, .box = box, .to = to}});
  }

  /// Bytes read from files so far, without the manifest.
  int64_t bytes_read() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// A damaged place of a file.
struct Damage {
  std::string file;
  std::string tensor;  // the first one affected; empty: the file's header
  int64_t offset = 0;  // in the file
  std::string what;    // a sentence that names all of these
};

/// Reads all of a checkpoint and returns what is wrong, in the order of the
/// files. Throws CheckpointError when the manifest itself is damaged.
///
///   progress  called now and then, by the caller's thread, with the bytes of
///             files that are done
///   threads   as for CheckpointReader
std::vector<Damage> verify_checkpoint(
    const std::string& folder,
    const std::function<void(int64_t)>& progress = {}, int threads = 0);

/// The same for files that `remote` opens; messages name them as if they were
/// in `folder`.
std::vector<Damage> verify_files(
    const CheckpointManifest& manifest, const std::string& folder,
    const OpenRemote& remote, const std::function<void(int64_t)>& progress = {},
    int threads = 0);

}  // namespace echelon
