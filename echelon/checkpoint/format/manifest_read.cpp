#include <cmath>
#include <string_view>

#include "echelon/checkpoint/format/json_reader.h"
#include "echelon/checkpoint/format/manifest.h"
#include "echelon/checkpoint/format/manifest_check.h"
#include "echelon/checkpoint/format/safetensors_text.h"
#include "echelon/error.h"

namespace echelon {
namespace {

/// Throws unless the text ends with the checksum of what is before it.
void check_checksum(const std::string& text, const std::string& path) {
  const std::string_view key = kChecksumKey;
  const std::string_view end = kChecksumEnd;
  const size_t tail = key.size() + 32 + end.size();
  if (text.size() < tail ||
      text.compare(text.size() - tail, key.size(), key) != 0 ||
      !text.ends_with(end)) {
    throw CheckpointError(
        path + ": its " + std::to_string(text.size()) +
        " bytes do not end with a checksum; it may be cut off, or is none of "
        "ours");
  }
  const std::string written = text.substr(text.size() - tail + key.size(), 32);
  const std::string found = checksum(text.data(), text.size() - tail);
  if (written != found) {
    throw CheckpointError(
        path + ": its checksum is " + found + ", but " +
        safetensors::printable(written) +
        " was written: the file was damaged or changed");
  }
}

void read_head(JsonReader& json, std::string_view format, int& version) {
  json.open_object();
  json.key("format");
  const std::string found = json.string();
  if (found != format) {
    json.fail(
        safetensors::in_quotes(found) + "; it must be " +
        safetensors::in_quotes(format));
  }
  json.key("version");
  const int64_t number = json.count();
  if (number > kCheckpointVersion) {
    json.fail(
        "version " + std::to_string(number) +
        " of the format; this program reads up to " +
        std::to_string(kCheckpointVersion) + ": use a newer one");
  }
  if (number < 1) json.fail("0; versions begin with 1");
  version = static_cast<int>(number);
}

SavedKind read_kind(JsonReader& json) {
  const std::string text = json.string();
  for (const SavedKind kind :
       {SavedKind::parameter, SavedKind::buffer, SavedKind::optimizer,
        SavedKind::random}) {
    if (to_string(kind) == text) return kind;
  }
  json.fail(
      safetensors::in_quotes(text) +
      "; it must be parameter, buffer, optimizer or random");
}

std::string read_checksum(JsonReader& json) {
  std::string text = json.string();
  if (!is_checksum(text)) {
    json.fail(
        safetensors::in_quotes(text) +
        "; it must be 32 hexadecimal digits, lower case");
  }
  return text;
}

ContentHash read_hash(JsonReader& json) {
  const std::string text = read_checksum(json);
  return {
      std::stoull(text.substr(0, 16), nullptr, 16),
      std::stoull(text.substr(16), nullptr, 16)};
}

std::vector<int64_t> read_counts(JsonReader& json) {
  std::vector<int64_t> counts;
  for (json.open_array(); json.next_item();) counts.push_back(json.count());
  return counts;
}

SavedSlice read_slice(JsonReader& json) {
  SavedSlice slice;
  json.open_object();
  json.key("offset");
  slice.box.offset = read_counts(json);
  json.key("sizes");
  slice.box.sizes = read_counts(json);
  json.key("file");
  slice.file = json.count();
  json.key("key");
  slice.key = json.string();
  json.close_object();
  return slice;
}

std::vector<SavedTensor> read_tensors(JsonReader& json) {
  std::vector<SavedTensor> tensors;
  json.key("tensors");
  for (json.open_array(); json.next_item();) {
    auto& tensor = tensors.emplace_back();
    json.open_object();
    json.key("name");
    tensor.name = json.string();
    json.key("kind");
    tensor.kind = read_kind(json);
    json.key("dtype");
    tensor.dtype = json.string();
    json.key("shape");
    tensor.shape = read_counts(json);
    json.key("hash");
    tensor.hash = read_hash(json);
    json.key("slices");
    for (json.open_array(); json.next_item();) {
      tensor.slices.push_back(read_slice(json));
    }
    json.close_object();
  }
  return tensors;
}

SavedFile read_file(JsonReader& json) {
  SavedFile file;
  json.open_object();
  json.key("name");
  file.name = json.string();
  json.key("bytes");
  file.bytes = json.count();
  json.key("blocks");
  for (json.open_array(); json.next_item();) {
    file.blocks.push_back(read_checksum(json));
  }
  json.close_object();
  return file;
}

std::optional<SavedLossScale> read_loss_scale(JsonReader& json) {
  if (json.is_null()) return std::nullopt;
  SavedLossScale scale;
  json.open_object();
  json.key("scale");
  scale.scale = json.number();
  if (!std::isfinite(scale.scale) || scale.scale <= 0) {
    json.fail("it must be a finite number above 0");
  }
  json.key("good_steps");
  scale.good_steps = json.count();
  json.key("overflows");
  scale.overflows = json.count();
  json.close_object();
  return scale;
}

void read_metrics(JsonReader& json, std::map<std::string, double>& metrics) {
  json.open_object();
  for (std::string name; json.next_member(name);) {
    if (!metrics.emplace(name, json.number()).second) {
      json.fail("it is there twice");
    }
  }
}

/// The checksum was compared before.
void read_end(JsonReader& json) {
  json.key("checksum");
  json.string();
  json.close_object();
  json.end();
}

void check_hash(
    const std::string& path, const char* key, const std::string& written,
    const std::string& found) {
  if (written == found) return;
  throw CheckpointError(
      path + ": " + key + " is " + written + ", but what it is of has " +
      found);
}

}  // namespace

CheckpointManifest
parse_manifest(const std::string& text, const std::string& path) {
  check_checksum(text, path);
  JsonReader json(text, path);
  CheckpointManifest manifest;
  read_head(json, kManifestFormat, manifest.version);
  const auto count = [&](const char* key, int64_t& value) {
    json.key(key);
    value = json.count();
  };
  const auto string = [&](const char* key, std::string& value) {
    json.key(key);
    value = json.string();
  };
  count("step", manifest.step);
  count("skipped_steps", manifest.skipped_steps);
  count("total_steps", manifest.total_steps);
  count("epoch", manifest.epoch);
  count("consumed", manifest.consumed);
  json.key("seed");
  manifest.seed = json.whole();
  json.key("loss_scale");
  manifest.loss_scale = read_loss_scale(json);
  string("layout", manifest.layout);
  count("ranks", manifest.ranks);
  if (manifest.ranks < 1) json.fail("0; at least one rank wrote it");
  string("config", manifest.config);
  json.key("config_hash");
  manifest.config_hash = read_checksum(json);
  string("data", manifest.data);
  json.key("metrics");
  read_metrics(json, manifest.metrics);
  manifest.tensors = read_tensors(json);
  json.key("files");
  for (json.open_array(); json.next_item();) {
    manifest.files.push_back(read_file(json));
  }
  json.key("content_hash");
  manifest.content_hash = read_checksum(json);
  read_end(json);

  check_contents(manifest, path);
  check_hash(
      path, "config_hash", manifest.config_hash,
      checksum(manifest.config.data(), manifest.config.size()));
  check_hash(
      path, "content_hash", manifest.content_hash, content_hash(manifest));
  return manifest;
}

RankPart parse_rank_part(const std::string& text, const std::string& path) {
  check_checksum(text, path);
  JsonReader json(text, path);
  int version = 0;
  read_head(json, kPartFormat, version);
  RankPart part;
  part.tensors = read_tensors(json);
  json.key("file");
  part.file = read_file(json);
  read_end(json);
  check_file(part.file, path);
  for (const auto& tensor : part.tensors) check_tensor(tensor, 1, path);
  return part;
}

}  // namespace echelon
