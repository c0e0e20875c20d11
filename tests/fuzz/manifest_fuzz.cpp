// Any bytes are a manifest or a rank's part that is refused with a
// CheckpointError, or one whose promises all hold, and that is written and read
// again as the same. The first byte chooses: which of the two, and whether the
// text, from its end's checksum on, is signed anew, so that changed ones get
// past the checksum.
#include <cstdlib>
#include <set>
#include <string>

#include "echelon/checkpoint/format/manifest.h"
#include "echelon/checkpoint/format/safetensors.h"
#include "echelon/error.h"

namespace {

using namespace echelon;

void check(bool holds) {
  if (!holds) std::abort();
}

void check_tensor(const SavedTensor& tensor, size_t num_files) {
  check(!tensor.name.empty());
  __int128 bytes =
      static_cast<__int128>(safetensors::dtype_bytes(tensor.dtype));
  check(bytes > 0 && tensor.shape.size() <= safetensors::kMaxDims);
  for (const int64_t size : tensor.shape) {
    bytes *= size;
    check(bytes >= 0 && bytes <= INT64_MAX);
  }
  for (const auto& slice : tensor.slices) {
    check(slice.file >= 0 && static_cast<size_t>(slice.file) < num_files);
    check(is_inside(slice.box, tensor.shape));
  }
}

void check_file(const SavedFile& file) {
  check(!file.name.empty() && file.name[0] != '.');
  check(file.name.find('/') == std::string::npos);
  check(file.name.find('\0') == std::string::npos);
  check(
      static_cast<uint64_t>(file.bytes) + kChecksumBlockBytes - 1 >=
      static_cast<uint64_t>(file.blocks.size()) * kChecksumBlockBytes);
  check(
      static_cast<uint64_t>(file.bytes) <=
      static_cast<uint64_t>(file.blocks.size()) * kChecksumBlockBytes);
}

void read_manifest(const std::string& text) {
  const CheckpointManifest manifest = parse_manifest(text, "fuzz");
  std::set<std::string> names;
  std::set<std::pair<int64_t, std::string>> keys;
  for (const auto& file : manifest.files) {
    check_file(file);
    check(names.insert(file.name).second);
  }
  names.clear();
  for (const auto& tensor : manifest.tensors) {
    check_tensor(tensor, manifest.files.size());
    check(names.insert(tensor.name).second);
    int64_t left = whole_box(tensor.shape).numel();
    for (const auto& slice : tensor.slices) {
      check(keys.emplace(slice.file, slice.key).second);
      left -= slice.box.numel();
      for (const auto& other : tensor.slices) {
        check(&other == &slice || !overlap(other.box, slice.box));
      }
    }
    check(left == 0);
  }
  // As text: a metric may be no number, which is not equal to itself.
  const std::string again = to_json(manifest);
  check(to_json(parse_manifest(again, "fuzz")) == again);
}

void read_part(const std::string& text) {
  const RankPart part = parse_rank_part(text, "fuzz");
  check_file(part.file);
  for (const auto& tensor : part.tensors) check_tensor(tensor, 1);
  const RankPart again = parse_rank_part(to_json(part), "fuzz");
  check(again.tensors == part.tensors && again.file == part.file);
  CheckpointManifest manifest;
  add_parts(manifest, {part});
  read_manifest(to_json(manifest));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const uint8_t choice = data[0];
  std::string text(reinterpret_cast<const char*>(data + 1), size - 1);
  if ((choice & 2) == 0) {
    const std::string key = "\"checksum\": \"";
    text.resize(std::min(text.rfind(key), text.size()));
    text += key + checksum(text.data(), text.size()) + "\"\n}\n";
  }
  try {
    if ((choice & 1) == 0) {
      read_manifest(text);
    } else {
      read_part(text);
    }
  } catch (const CheckpointError&) {
  }
  return 0;
}
