// Any bytes as a rank's file of a checkpoint whose manifest has their
// checksums: an error that says what is wrong, or the bytes that the file's
// header says.
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "echelon/checkpoint/files/reader.h"
#include "echelon/checkpoint/format/safetensors.h"
#include "echelon/error.h"

namespace {

using namespace echelon;

void check(bool holds) {
  if (!holds) std::abort();
}

/// Tensor "a" [4, 3] of F32 in two slices, "b" a scalar of I64.
CheckpointManifest manifest_of(const uint8_t* data, size_t size) {
  CheckpointManifest manifest;
  SavedTensor a;
  a.name = "a";
  a.dtype = "F32";
  a.shape = {4, 3};
  a.slices = {{{{0, 0}, {1, 3}}, 0, "a"}, {{{1, 0}, {3, 3}}, 0, "a#1"}};
  SavedTensor b;
  b.name = "b";
  b.dtype = "I64";
  b.slices = {{{{}, {}}, 0, "b"}};
  RankPart part;
  part.tensors = {a, b};
  part.file.name = "rank-00000.safetensors";
  part.file.bytes = static_cast<int64_t>(size);
  for (size_t at = 0; at < size; at += kChecksumBlockBytes) {
    part.file.blocks.push_back(
        checksum(data + at, std::min<size_t>(kChecksumBlockBytes, size - at)));
  }
  manifest.config_hash = checksum("", 0);
  add_parts(manifest, {part});
  return manifest;
}

void write(const std::string& path, const void* data, size_t size) {
  std::ofstream file(path, std::ios::binary);
  file.write(
      static_cast<const char*>(data), static_cast<std::streamsize>(size));
  check(file.good());
}

/// What the reader gives must be the elements that the header points at.
void compare(const std::byte* read, const uint8_t* file, size_t size) {
  const auto header =
      safetensors::parse(std::as_bytes(std::span(file, size)), "fuzz");
  for (const auto& info : header.tensors) {
    const size_t at = info.name == "a" ? 0 : info.name == "a#1" ? 12 : 48;
    check(
        std::memcmp(
            read + at, file + header.data_begin + info.begin,
            info.end - info.begin) == 0);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::string folder =
      (std::filesystem::temp_directory_path() /
       ("echelon-fuzz-" + std::to_string(::getpid())))
          .string();
  std::filesystem::create_directories(folder);
  std::string text;
  try {
    text = to_json(manifest_of(data, size));
  } catch (const CheckpointError&) {
    return 0;  // too short for the tensors
  }
  write(folder + "/manifest.json", text.data(), text.size());
  write(folder + "/rank-00000.safetensors", data, size);
  bool whole = false;
  try {
    CheckpointReader reader(folder, 1);
    std::byte memory[56];
    reader.read(
        {{reader.manifest().find("a"), whole_box({4, 3}), memory, {}},
         {reader.manifest().find("b"), whole_box({}), memory + 48, {}}});
    compare(memory, data, size);
    whole = true;
  } catch (const CheckpointError&) {
  }
  bool verified = false;
  try {
    verified = verify_checkpoint(folder, {}, 1).empty();
  } catch (const CheckpointError&) {
  }
  check(whole == verified);
  return 0;
}
