#include <charconv>
#include <cmath>

#include "echelon/checkpoint/format/manifest.h"
#include "echelon/checkpoint/format/manifest_check.h"
#include "echelon/error.h"

namespace echelon {
namespace {

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
  // Longer than need be, surrogates, behind the last code point.
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
      throw CheckpointError(
          "a checkpoint's manifest: byte " + std::to_string(i) +
          " of a text of " + std::to_string(text.size()) +
          " is not UTF-8; names and settings have to be");
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

/// `before` is what is there before the key: ", " or a line's end, or a brace.
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

}  // namespace echelon
