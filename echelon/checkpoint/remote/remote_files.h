// The files of a checkpoint as objects. Private to this folder.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/checkpoint/format/manifest.h"
#include "echelon/error.h"
#include "echelon/storage/object_store.h"

namespace echelon {

/// Returns what `work` does; a StorageError becomes a CheckpointError.
template <class Work>
auto as_checkpoint_error(const Work& work) {
  try {
    return work();
  } catch (const storage::StorageError& error) {
    throw CheckpointError(error.what());
  }
}

int64_t bytes_of(const CheckpointManifest& manifest);

struct FoundFiles {
  std::vector<storage::ObjectInfo> objects;  // in the manifest's order
  std::string damage;                        // empty: they are as it says
};
/// `from`: the beginning of their keys.
FoundFiles find_files(
    storage::ObjectStore& store, const std::string& from,
    const CheckpointManifest& manifest);

/// "fetching step 40 from s3://models/first (12 MiB)", on standard error.
void say_fetching(const std::string& url, const CheckpointManifest& manifest);

/// Writes the object into an open file. Each block is compared with its
/// checksum; throws StorageError as ObjectStore::download.
void download(
    storage::ObjectStore& store, const storage::ObjectInfo& object,
    const SavedFile& saved, int file);

}  // namespace echelon
