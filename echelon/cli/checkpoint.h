// The commands of `echelon checkpoint`; none needs LibTorch.
#pragma once

#include <cstdint>
#include <string>

#include "echelon/checkpoint/format/manifest.h"

namespace echelon::cli {

struct CheckpointArguments {
  std::string path;
  std::string other;
  bool json = false;
  bool all = false;     // show: every tensor; diff: every state
  bool config = false;  // show: only the configuration
};

/// Returns the exit code.
int diff_checkpoints(const CheckpointArguments& arguments);

/// Bytes of all files except the manifest.
int64_t total_bytes(const CheckpointManifest& manifest);

}  // namespace echelon::cli
