// A checkpoint read with suspicion: nothing of a file is used before the checksum of
// its block was compared. Free of LibTorch.
//
//   CheckpointReader reader("runs/first/checkpoints/step-00000100");
//   const SavedTensor* tensor = reader.manifest().find("fc.weight");
//   reader.read(*tensor, box, bytes);
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "echelon/checkpoint/manifest.h"

namespace echelon {

class CheckpointReader {
 public:
  /// Reads the manifest; files are opened when they are needed. Throws
  /// CheckpointError as parse_manifest, for a folder that is no checkpoint, and for
  /// files that are missing or of another length.
  explicit CheckpointReader(const std::string& folder);
  ~CheckpointReader();
  CheckpointReader(const CheckpointReader&) = delete;
  CheckpointReader& operator=(const CheckpointReader&) = delete;

  const std::string& folder() const;
  const CheckpointManifest& manifest() const;

  /// Copies the elements of `box` (inside of tensor.shape) to `to`, row-major.
  /// Reads the blocks of the files that have some of them and no others, each once
  /// as long as reads go through the tensors in the manifest's order. Throws
  /// CheckpointError: file, tensor, offset, what was expected.
  ///
  /// One thread at a time.
  void read(const SavedTensor& tensor, const Box& box, std::byte* to);

  /// Read from files until now, the manifest left out.
  int64_t bytes_read() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// What is wrong with a file.
struct Damage {
  std::string file;
  std::string tensor;   // the first that it concerns; empty: the file's header
  int64_t offset = 0;   // in the file
  std::string what;
};

/// Reads all of a checkpoint, and says what is wrong. Throws CheckpointError when
/// the manifest itself cannot be trusted.
///
///   progress  called now and then with the bytes of files that are done
std::vector<Damage> verify_checkpoint(
    const std::string& folder,
    const std::function<void(int64_t)>& progress = {});

}  // namespace echelon
