#include "echelon/checkpoint/remote/remote_files.h"

#include <algorithm>
#include <cstdio>
#include <span>

#include "echelon/checkpoint/format/hashes.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon {
namespace {

// Whether the blocks from `offset` on have the checksums of the manifest.
bool has_checksums(
    const SavedFile& file, int64_t offset, std::span<const std::byte> bytes) {
  auto block = static_cast<size_t>(offset / kChecksumBlockBytes);
  while (!bytes.empty()) {
    const size_t size =
        std::min(bytes.size(), static_cast<size_t>(kChecksumBlockBytes));
    if (checksum(bytes.data(), size) != file.blocks.at(block++)) return false;
    bytes = bytes.subspan(size);
  }
  return true;
}

}  // namespace

int64_t bytes_of(const CheckpointManifest& manifest) {
  int64_t bytes = 0;
  for (const auto& file : manifest.files) bytes += file.bytes;
  return bytes;
}

FoundFiles find_files(
    storage::ObjectStore& store, const std::string& from,
    const CheckpointManifest& manifest) {
  FoundFiles found;
  for (const auto& file : manifest.files) {
    auto object = store.find(from + file.name);
    if (!object) return {{}, format("{} is missing", file.name)};
    if (object->bytes != file.bytes) {
      return {
          {},
          format(
              "{} has {} bytes, not {}", file.name, object->bytes, file.bytes)};
    }
    found.objects.push_back(std::move(*object));
  }
  return found;
}

void say_fetching(const std::string& url, const CheckpointManifest& manifest) {
  std::fprintf(
      stderr, "fetching step %lld from %s (%s)\n",
      static_cast<long long>(manifest.step), url.c_str(),
      format_bytes(bytes_of(manifest)).c_str());
}

void download(
    storage::ObjectStore& store, const storage::ObjectInfo& object,
    const SavedFile& saved, int file) {
  store.download(
      object, file, [&](int64_t offset, std::span<const std::byte> part) {
        return has_checksums(saved, offset, part);
      });
}

}  // namespace echelon
