// The text of manifest.json, and of a rank's part of it: written by appending,
// since a manifest may have a million slices, and read strictly.
#include <charconv>
#include <cmath>
#include <string_view>

#include "echelon/checkpoint/format/json_reader.h"
#include "echelon/checkpoint/format/manifest.h"
#include "echelon/checkpoint/format/manifest_check.h"
#include "echelon/checkpoint/format/safetensors_text.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

using safetensors::quote_printable;

constexpr const char* kManifestFormat = "echelon checkpoint";
constexpr const char* kPartFormat = "echelon checkpoint part";
/// A text ends with these and, between them, the checksum of everything before.
constexpr const char* kChecksumKey = "\"checksum\": \"";
constexpr const char* kChecksumEnd = "\"\n}\n";

/// Length of the UTF-8 sequence that `text` begins with; 0: none.
size_t sequence_length(std::string_view text) {
  const auto byte = [&](size_t i) -> unsigned {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u;
  };
  const unsigned lead = byte(0);
  if (lead < 0x80) return 1;
  const size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4) return 0;
  for (size_t i = 1; i < length; ++i) {
    if (byte(i) >> 6 != 2) return 0;
  }
  // Overlong encodings, surrogates, values beyond the last code point.
  const unsigned second = byte(1);
  if ((lead == 0xe0 && second < 0xa0) || (lead == 0xed && second > 0x9f) ||
      (lead == 0xf0 && second < 0x90) || (lead == 0xf4 && second > 0x8f)) {
    return 0;
  }
  return length;
}

void append_quoted(std::string& json, std::string_view text) {
  json += '"';
  for (size_t i = 0; i < text.size();) {
    const size_t length = sequence_length(text.substr(i));
    if (length == 0) {
      throw CheckpointError(format(
          "a checkpoint's manifest: byte {} of a text of {} is not UTF-8; "
          "names and settings have to be",
          i, text.size()));
    }
    const char c = text[i];
    if (c == '"' || c == '\\') {
      json += '\\';
      json += c;
    } else if (c == '\n') {
      json += "\\n";
    } else if (length == 1 && static_cast<unsigned char>(c) < 0x20) {
      json += "\\u00";
      json += "0123456789abcdef"[c >> 4];
      json += "0123456789abcdef"[c & 15];
    } else {
      json.append(text, i, length);
    }
    i += length;
  }
  json += '"';
}

template <typename Number>
void append_number(std::string& json, Number value) {
  char digits[32];
  const auto end = std::to_chars(digits, digits + sizeof digits, value).ptr;
  json.append(digits, end);
}

void append_value(std::string& json, const std::string& value) {
  append_quoted(json, value);
}
void append_value(std::string& json, int value) {
  append_number(json, value);
}
void append_value(std::string& json, int64_t value) {
  append_number(json, value);
}
void append_value(std::string& json, uint64_t value) {
  append_number(json, value);
}
void append_value(std::string& json, double value) {
  if (value == 0 && std::signbit(value)) {
    json += "-0.0";  // "-0" is a whole number to some readers, which have one 0
    return;
  }
  if (std::isfinite(value)) return append_number(json, value);
  json += std::isnan(value) ? "\"nan\"" : value > 0 ? "\"inf\"" : "\"-inf\"";
}

template <typename Items, typename Append>
void append_list(
    std::string& json, const Items& items, const char* between,
    const Append& append) {
  bool is_first = true;
  for (const auto& item : items) {
    if (!is_first) json += between;
    is_first = false;
    append(item);
  }
}

void append_value(std::string& json, const std::vector<int64_t>& values) {
  json += '[';
  append_list(
      json, values, ", ", [&](int64_t value) { append_number(json, value); });
  json += ']';
}

/// `before` precedes the key: ", ", a line's end or a brace.
template <typename Value>
void append_member(
    std::string& json, const char* before, const char* key,
    const Value& value) {
  json += before;
  append_quoted(json, key);
  json += ": ";
  append_value(json, value);
}

void append_slice(std::string& json, const SavedSlice& slice) {
  append_member(json, "{", "offset", slice.box.offset);
  append_member(json, ", ", "sizes", slice.box.sizes);
  append_member(json, ", ", "file", slice.file);
  append_member(json, ", ", "key", slice.key);
  json += '}';
}

/// A line each.
void append_tensors(
    std::string& json, const std::vector<SavedTensor>& tensors) {
  json += ",\n\"tensors\": [\n";
  append_list(json, tensors, ",\n", [&](const SavedTensor& tensor) {
    append_member(json, "{", "name", tensor.name);
    append_member(json, ", ", "kind", to_string(tensor.kind));
    append_member(json, ", ", "dtype", tensor.dtype);
    append_member(json, ", ", "shape", tensor.shape);
    append_member(json, ", ", "hash", hash_text(tensor.hash));
    json += ", \"slices\": [";
    append_list(json, tensor.slices, ", ", [&](const SavedSlice& slice) {
      append_slice(json, slice);
    });
    json += "]}";
  });
  json += "\n]";
}

void append_file(std::string& json, const SavedFile& file) {
  append_member(json, "{", "name", file.name);
  append_member(json, ", ", "bytes", file.bytes);
  json += ", \"blocks\": [";
  append_list(json, file.blocks, ", ", [&](const std::string& block) {
    append_quoted(json, block);
  });
  json += "]}";
}

void append_loss_scale(
    std::string& json, const std::optional<SavedLossScale>& scale) {
  json += ",\n\"loss_scale\": ";
  if (!scale) {
    json += "null";
    return;
  }
  append_member(json, "{", "scale", scale->scale);
  append_member(json, ", ", "good_steps", scale->good_steps);
  append_member(json, ", ", "overflows", scale->overflows);
  json += '}';
}

std::string with_checksum(std::string json) {
  json += ",\n";
  const std::string sum = checksum(json.data(), json.size());
  return json + kChecksumKey + sum + kChecksumEnd;
}

/// Throws unless the text ends with the checksum of what is before it.
void check_checksum(const std::string& text, const std::string& path) {
  const std::string_view key = kChecksumKey;
  const std::string_view end = kChecksumEnd;
  const size_t tail = key.size() + 32 + end.size();
  if (text.size() < tail ||
      text.compare(text.size() - tail, key.size(), key) != 0 ||
      !text.ends_with(end)) {
    throw CheckpointError(format(
        "{}: its {} bytes do not end with a checksum; it may be cut off, or is "
        "none of ours",
        path, text.size()));
  }
  const std::string written = text.substr(text.size() - tail + key.size(), 32);
  const std::string found = checksum(text.data(), text.size() - tail);
  if (written != found) {
    throw CheckpointError(format(
        "{}: its checksum is {}, but {} was written: the file was damaged or "
        "changed",
        path, found, safetensors::printable(written)));
  }
}

void read_head(JsonReader& json, std::string_view wanted, int& version) {
  json.check_syntax();
  json.open_object();
  json.key("format");
  const std::string found = json.string();
  if (found != wanted) {
    json.fail(
        quote_printable(found) + "; it must be " + quote_printable(wanted));
  }
  json.key("version");
  const int64_t number = json.count();
  if (number > kCheckpointVersion) {
    json.fail(format(
        "version {} of the format; this program reads up to {}: use a newer "
        "one",
        number, kCheckpointVersion));
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
      quote_printable(text) +
      "; it must be parameter, buffer, optimizer or random");
}

std::string read_checksum(JsonReader& json) {
  std::string text = json.string();
  if (!is_checksum(text)) {
    json.fail(
        quote_printable(text) +
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
  throw CheckpointError(format(
      "{}: {} is {}, but what it is of has {}", path, key, written, found));
}

}  // namespace

std::string to_json(const CheckpointManifest& manifest) {
  constexpr const char* kLine = ",\n";
  std::string json;
  append_member(json, "{\n", "format", std::string(kManifestFormat));
  append_member(json, kLine, "version", manifest.version);
  append_member(json, kLine, "step", manifest.step);
  append_member(json, kLine, "skipped_steps", manifest.skipped_steps);
  append_member(json, kLine, "total_steps", manifest.total_steps);
  append_member(json, kLine, "epoch", manifest.epoch);
  append_member(json, kLine, "consumed", manifest.consumed);
  append_member(json, kLine, "seed", manifest.seed);
  append_loss_scale(json, manifest.loss_scale);
  append_member(json, kLine, "layout", manifest.layout);
  append_member(json, kLine, "ranks", manifest.ranks);
  append_member(json, kLine, "config", manifest.config);
  append_member(json, kLine, "config_hash", manifest.config_hash);
  append_member(json, kLine, "data", manifest.data);
  json += ",\n\"metrics\": {";
  append_list(json, manifest.metrics, ", ", [&](const auto& metric) {
    append_member(json, "", metric.first.c_str(), metric.second);
  });
  json += '}';
  append_tensors(json, manifest.tensors);
  json += ",\n\"files\": [\n";
  append_list(json, manifest.files, ",\n", [&](const SavedFile& file) {
    append_file(json, file);
  });
  json += "\n]";
  append_member(json, kLine, "content_hash", manifest.content_hash);
  return with_checksum(std::move(json));
}

std::string to_json(const RankPart& part) {
  std::string json;
  append_member(json, "{\n", "format", std::string(kPartFormat));
  append_member(json, ",\n", "version", kCheckpointVersion);
  append_tensors(json, part.tensors);
  json += ",\n\"file\": ";
  append_file(json, part.file);
  return with_checksum(std::move(json));
}

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
