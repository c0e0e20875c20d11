// A checkpoint's manifest.json, which lists its tensors and files, read
// strictly. doc/checkpoint_format.md describes the format. Free of LibTorch.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "echelon/checkpoint/format/box.h"
#include "echelon/checkpoint/format/hashes.h"

namespace echelon {

/// Files have a checksum (hashes.h) for each block of so many bytes.
inline constexpr int64_t kChecksumBlockBytes = 4 << 20;
inline constexpr int kCheckpointVersion = 1;

/// Where a box of a tensor is stored.
struct SavedSlice {
  Box box;
  int64_t file = 0;  // index into CheckpointManifest::files
  std::string key;   // the tensor's name in that file, whose shape is box.sizes
  bool operator==(const SavedSlice&) const = default;
};

enum class SavedKind { parameter, buffer, optimizer, random };
std::string to_string(SavedKind kind);

struct SavedTensor {
  /// Unique. The state of a parameter is called "PARAMETER/exp_avg".
  std::string name;
  SavedKind kind = SavedKind::parameter;
  std::string dtype;               // as safetensors names it: "F32"
  std::vector<int64_t> shape;      // of the full tensor
  std::vector<SavedSlice> slices;  // each element is in one
  ContentHash hash{};              // does not depend on the slices
  bool operator==(const SavedTensor&) const = default;
};

struct SavedFile {
  std::string name;  // in the checkpoint's folder: "rank-00000.safetensors"
  int64_t bytes = 0;
  std::vector<std::string> blocks;  // checksums; the last block may be short
  bool operator==(const SavedFile&) const = default;
};

/// LossScaler::State, of the dynamic loss scale.
struct SavedLossScale {
  double scale = 1;
  int64_t good_steps = 0;
  int64_t overflows = 0;
  bool operator==(const SavedLossScale&) const = default;
};

struct CheckpointManifest {
  int version = kCheckpointVersion;
  int64_t step = 0;  // optimizer steps done, including skipped ones
  int64_t skipped_steps = 0;
  int64_t total_steps = 0;  // of the learning rate's schedule
  /// Data position: all ranks together have taken `consumed` samples of
  /// `epoch`.
  int64_t epoch = 0;
  int64_t consumed = 0;
  uint64_t seed = 0;
  std::optional<SavedLossScale> loss_scale;
  std::string layout;  // of the run that saved it: "dp=2,tp=2"
  int64_t ranks = 1;
  std::string config;       // TOML, all values as used
  std::string config_hash;  // checksum of config
  std::string data;         // what the samples are: names, sizes, counts
  /// At this step: "loss", "eval_loss", …
  std::map<std::string, double> metrics;
  std::vector<SavedTensor> tensors;
  std::vector<SavedFile> files;
  /// content_hash() of the manifest.
  std::string content_hash;

  /// Null when no tensor has that name. A linear search.
  const SavedTensor* find(const std::string& name) const;
  bool operator==(const CheckpointManifest&) const = default;
};

/// A hash of everything that the rest of the training depends on: step,
/// position, seed, loss scale, and name, kind, dtype, shape and hash of all
/// tensors except random state. Any layout gives the same.
std::string content_hash(const CheckpointManifest& manifest);

/// A line for each tensor and file; ends with a checksum of everything before
/// it. Throws CheckpointError for texts that are not UTF-8, and checks nothing
/// else.
std::string to_json(const CheckpointManifest& manifest);

/// Throws CheckpointError, naming `path`, the place, the value and the rule,
/// for anything that to_json() would not have written: broken JSON, a wrong
/// checksum, unknown or repeated keys, a newer version, shapes whose product
/// overflows, slices that leave their tensor, overlap or leave holes, file
/// names with slashes or a leading dot, a wrong number of blocks, wrong hashes.
CheckpointManifest
parse_manifest(const std::string& text, const std::string& path);

/// What one rank has written: its file, and the tensors with this rank's slices
/// and their part of the hash.
struct RankPart {
  std::vector<SavedTensor> tensors;
  SavedFile file;
};
std::string to_json(const RankPart& part);
RankPart parse_rank_part(const std::string& text, const std::string& path);

/// Replaces a manifest's tensors and files by the parts of all ranks, rank 0's
/// first, and sets its hashes. Throws CheckpointError for tensors that differ
/// in kind, dtype or shape between ranks, and for whatever parse_manifest
/// refuses in them, such as holes and overlaps.
void add_parts(
    CheckpointManifest& manifest, const std::vector<RankPart>& parts);

}  // namespace echelon
