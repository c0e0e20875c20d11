// A checkpoint read with suspicion: nothing of a file is used before the
// checksum of its block was compared. Free of LibTorch.
//
//   CheckpointReader reader("runs/first/checkpoints/step-00000100");
//   const SavedTensor* tensor = reader.manifest().find("fc.weight");
//   reader.read({{.tensor = tensor, .box = box, .to = bytes}, …});
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "echelon/checkpoint/format/manifest.h"

namespace echelon {

/// What to read, and where to: element i of the box goes to element
/// sum(i[d] * strides[d]) of `to`. No strides: row-major.
struct BoxRead {
  const SavedTensor* tensor = nullptr;  // of the reader's manifest
  Box box;                              // inside of tensor->shape
  std::byte* to = nullptr;
  std::vector<int64_t> strides;
};

class CheckpointReader {
 public:
  /// Reads the manifest; files are opened when they are needed. Throws
  /// CheckpointError as parse_manifest, for a folder that is no checkpoint, and
  /// for files that are missing or of another length.
  ///
  ///   threads  that read and verify, the caller's among them; 0: as the
  ///   machine
  ///            has processors, at most 4
  explicit CheckpointReader(const std::string& folder, int threads = 0);
  ~CheckpointReader();
  CheckpointReader(const CheckpointReader&) = delete;
  CheckpointReader& operator=(const CheckpointReader&) = delete;

  const std::string& folder() const;
  const CheckpointManifest& manifest() const;

  /// Reads the blocks of the files that have something of the boxes, and the
  /// headers of those files, and nothing else; each block once, in the order of
  /// the files, whatever the order of the boxes. So all that a rank needs is
  /// best read by one call. The boxes' memory must not overlap.
  ///
  /// Throws CheckpointError: file, tensor, offset, what was expected and found;
  /// the boxes' memory may then hold anything. ConfigError for a box outside of
  /// its tensor. One thread at a time.
  void read(const std::vector<BoxRead>& boxes);
  void read(const SavedTensor& tensor, const Box& box, std::byte* to) {
    read({{.tensor = &tensor, .box = box, .to = to}});
  }

  /// Read from files until now, the manifest left out.
  int64_t bytes_read() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// What is wrong with a file.
struct Damage {
  std::string file;
  std::string tensor;  // the first that it concerns; empty: the file's header
  int64_t offset = 0;  // in the file
  std::string what;    // a sentence that names all of these
};

/// Reads all of a checkpoint, and says what is wrong, in the order of the
/// files. Throws CheckpointError when the manifest itself cannot be trusted.
///
///   progress  called now and then, by the caller's thread, with the bytes of
///   files
///             that are done
///   threads   as of CheckpointReader
std::vector<Damage> verify_checkpoint(
    const std::string& folder,
    const std::function<void(int64_t)>& progress = {}, int threads = 0);

}  // namespace echelon
