// Checkpoints that an address on object storage leads to, to be read.
//
//   s3://BUCKET/PREFIX                    of a run's checkpoint.remote
//   s3://BUCKET/PREFIX/checkpoints        the same
//   s3://BUCKET/…/step-00000040-1f3ac27b-2   one checkpoint: manifest.json and
//                                         its files, with any name
//
// A run's folder or a checkpoint that another program has copied there is read
// as well. Free of LibTorch.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "echelon/checkpoint/files/reader.h"

namespace echelon {

struct ObjectCheckpoint {
  std::string url;  // "s3://BUCKET/PREFIX/checkpoints/step-00000040-1f3ac27b-2"
  int64_t step = 0;
};

struct ObjectCheckpoints {
  std::string folder;                         // the address above all of them
  std::vector<ObjectCheckpoint> checkpoints;  // in the order to try them
  /// Names of uploads that run, or that a crash has left.
  std::vector<std::string> unfinished;
};

// What follows throws CheckpointError where the storage refuses, does not
// answer, or has no such checkpoint; ConfigError for a wrong address, without
// keys or without a cache (storage/local_copy.h); DataError where the cache
// cannot be written. The message has the address.

/// What find_checkpoints() says of a path, for an address; at least one
/// checkpoint. Fetches no file but the list of a run's checkpoints.
ObjectCheckpoints find_object_checkpoints(const std::string& url);

/// The folder, in the user's cache, that has a copy of its manifest.
std::filesystem::path copy_manifest(const ObjectCheckpoint& checkpoint);

/// Opens its files where they are.
OpenRemote files_of(const ObjectCheckpoint& checkpoint);

/// `path` itself, unless it is s3://…: then a folder of the user's cache with a
/// copy of the checkpoint. It is fetched when the cache has it not, by one
/// process of the host, and each block is compared with its checksum. Of
/// several checkpoints the newest that is whole is taken, with a warning for
/// each that is damaged.
std::filesystem::path local_checkpoint(const std::string& path);

}  // namespace echelon
