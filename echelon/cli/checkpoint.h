// The commands of `echelon checkpoint`; none needs LibTorch.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "echelon/checkpoint/files/folder.h"
#include "echelon/checkpoint/format/manifest.h"

namespace echelon::cli {

struct CheckpointArguments {
  std::string path;
  std::string other;
  bool json = false;
  bool all = false;     // show: every tensor; diff: every state
  bool config = false;  // show: only the configuration
};

// Each returns the exit code.
int show_checkpoint(const CheckpointArguments& arguments);
int diff_checkpoints(const CheckpointArguments& arguments);

/// Reads manifest.json of a checkpoint. Throws CheckpointError.
CheckpointManifest read_manifest(const std::filesystem::path& checkpoint);

/// Bytes of all files except the manifest.
int64_t total_bytes(const CheckpointManifest& manifest);

/// "2026-11-21 10:04:28" in this host's time zone; "?" when unknown.
std::string saved_at(const std::filesystem::path& checkpoint);

}  // namespace echelon::cli
