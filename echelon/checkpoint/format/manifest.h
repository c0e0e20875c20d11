// What a checkpoint consists of: the contents of its manifest.json, read
// strictly. doc/checkpoint_format.md describes the format. Free of LibTorch.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "echelon/checkpoint/format/box.h"
#include "echelon/checkpoint/format/content_hash.h"

namespace echelon {

/// Checksums are XXH3-128, 32 hexadecimal digits, of blocks of so many bytes.
inline constexpr int64_t kChecksumBlockBytes = 4 << 20;
inline constexpr int kCheckpointVersion = 1;

/// Where a part of a tensor is.
struct SavedSlice {
  Box box;
  int64_t file = 0;  // index into CheckpointManifest::files
  std::string key;   // the tensor's name in that file, whose shape is box.sizes
  bool operator==(const SavedSlice&) const = default;
};

enum class SavedKind { parameter, buffer, optimizer, random };
std::string to_string(SavedKind kind);

struct SavedTensor {
  /// Unique. Of a parameter's state: "PARAMETER/exp_avg".
  std::string name;
  SavedKind kind = SavedKind::parameter;
  std::string dtype;               // as safetensors names it: "F32"
  std::vector<int64_t> shape;      // of the whole tensor
  std::vector<SavedSlice> slices;  // each element in one
  ContentHash hash{};              // the same for any slices
  bool operator==(const SavedTensor&) const = default;
};

struct SavedFile {
  std::string name;  // in the checkpoint's folder: "rank-00000.safetensors"
  int64_t bytes = 0;
  std::vector<std::string>
      blocks;  // checksum of each block, the last may be short
  bool operator==(const SavedFile&) const = default;
};

/// Of the dynamic loss scale: LossScaler::State.
struct SavedLossScale {
  double scale = 1;
  int64_t good_steps = 0;
  int64_t overflows = 0;
  bool operator==(const SavedLossScale&) const = default;
};

struct CheckpointManifest {
  int version = kCheckpointVersion;
  int64_t step = 0;  // optimizer steps done, skipped ones among them
  int64_t skipped_steps = 0;
  int64_t total_steps = 0;  // that the learning rate's schedule was made for
  int64_t epoch = 0;     // data position: samples of this epoch, taken by all
  int64_t consumed = 0;  // ranks together
  uint64_t seed = 0;
  std::optional<SavedLossScale> loss_scale;
  std::string layout;  // that wrote it: "dp=2,tp=2"
  int64_t ranks = 1;
  std::string config;       // TOML, all values as used
  std::string config_hash;  // XXH3-128 of it
  std::string data;         // what the samples are: names, sizes, counts
  std::map<std::string, double>
      metrics;  // at this step: "loss", "eval_loss", …
  std::vector<SavedTensor> tensors;
  std::vector<SavedFile> files;
  /// Of step, position and all tensors but random state; the same whatever the
  /// layout that wrote it: content_hash() of the rest.
  std::string content_hash;

  /// Null when there is none of that name. Looks at one after the other.
  const SavedTensor* find(const std::string& name) const;
  bool operator==(const CheckpointManifest&) const = default;
};

/// Of everything that training's further course depends on: step, position,
/// seed, loss scale, and of all tensors but random state name, kind, dtype,
/// shape, hash.
std::string content_hash(const CheckpointManifest& manifest);

/// A line for each tensor and file; ends with a checksum of all that is before
/// it. Throws CheckpointError for texts that are not UTF-8, and checks nothing
/// else.
std::string to_json(const CheckpointManifest& manifest);

/// Throws CheckpointError, naming `path`, the place, the value and the rule,
/// for everything that to_json() would not have written: broken JSON, a wrong
/// checksum, unknown or doubled keys, a newer version, shapes whose product
/// overflows, slices outside of their tensor, that overlap or leave holes,
/// files whose names have slashes or dots in front, numbers of blocks that do
/// not match, hashes that are not those of what they are of.
CheckpointManifest
parse_manifest(const std::string& text, const std::string& path);

/// What one rank has written, before it is part of a manifest: only `tensors`
/// (with this rank's slices and their part of the hash) and one file are set.
struct RankPart {
  std::vector<SavedTensor> tensors;
  SavedFile file;
};
std::string to_json(const RankPart& part);
RankPart parse_rank_part(const std::string& text, const std::string& path);

/// Adds the parts of all ranks, rank 0's first, to a manifest that has the
/// rest, in place of tensors and files that it had, and sets its hashes. Throws
/// CheckpointError for tensors that differ in kind, dtype or shape, and for all
/// else that parse_manifest refuses in them, holes and overlaps among it.
void add_parts(
    CheckpointManifest& manifest, const std::vector<RankPart>& parts);

/// XXH3-128 as 32 hexadecimal digits.
std::string checksum(const void* bytes, size_t size);

}  // namespace echelon
