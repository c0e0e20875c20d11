// The commands of `echelon checkpoint`; none needs LibTorch.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "echelon/checkpoint/files/reader.h"
#include "echelon/checkpoint/format/manifest.h"

namespace echelon::cli {

struct CheckpointArguments {
  std::string path;
  std::string other;
  bool json = false;
  bool all = false;     // show: every tensor; diff: every state
  bool config = false;  // show: only the configuration
};

/// A checkpoint on a disk or on object storage.
struct NamedCheckpoint {
  std::string name;  // its path or address
  int64_t step = 0;
  std::filesystem::path path;  // of its folder, or of one with its manifest
  bool latest = false;
  std::string damage;  // why there is no manifest; empty: there is one
  OpenRemote files;    // empty: they are in `path`
};

/// What a user's path or address leads to.
struct NamedCheckpoints {
  std::string folder;                        // the one above them
  std::vector<NamedCheckpoint> checkpoints;  // in the order to try them
  std::vector<NamedCheckpoint> incomplete;   // no manifest, and no crash's
  std::vector<std::string> others;  // "unfinished: NAME", "set aside: NAME"
};

/// At least one checkpoint. Throws as find_checkpoints() or
/// find_object_checkpoints().
NamedCheckpoints named_checkpoints(const std::string& given);

/// Returns the exit code.
int diff_checkpoints(const CheckpointArguments& arguments);

/// Bytes of all files except the manifest.
int64_t total_bytes(const CheckpointManifest& manifest);

}  // namespace echelon::cli
