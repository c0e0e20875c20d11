// The text of manifest.json, and of a rank's part of it: written by appending,
// since a manifest may have a million slices, and read strictly. One members()
// function for each object lists its members in the order of the format. Writer
// and Reader are the two visitors that it takes, so that writing and reading
// cannot differ. The last member is the checksum of everything before it, which
// is compared before anything is parsed.
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

/// Writes an object's members(). A top member, and an item of a top array, has
/// a line of its own.
class Writer {
 public:
  // members() takes a const object from a Writer, a mutable one from a Reader.
  template <class T>
  using Of = const T;

  std::string text = "{\n";

  template <class T>
  void operator()(const char* key, const T& value) {
    if (!is_first_) text += depth_ == 1 ? ",\n" : ", ";
    is_first_ = false;
    append_quoted(text, key);
    text += ": ";
    write(value);
  }
  void checksum(const char* key, const std::string& value) {
    (*this)(key, value);
  }
  void require(bool, const char*) {}

 private:
  void write(const std::string& value) { append_quoted(text, value); }
  void write(SavedKind kind) { write(to_string(kind)); }
  void write(const ContentHash& hash) { write(hash_text(hash)); }
  void write(int64_t value) { write_number(value); }
  void write(uint64_t value) { write_number(value); }
  void write(double value) {
    if (value == 0 && std::signbit(value)) {
      text += "-0.0";  // "-0" is a whole number to some readers, with one 0
    } else if (std::isfinite(value)) {
      write_number(value);
    } else {
      write(std::string(
          std::isnan(value) ? "nan"
          : value > 0       ? "inf"
                            : "-inf"));
    }
  }
  template <class Number>
  void write_number(Number value) {
    char digits[32];
    const auto end = std::to_chars(digits, digits + sizeof digits, value).ptr;
    text.append(digits, end);
  }
  template <class T>
  void write(const std::vector<T>& items) {
    const bool lines = depth_ == 1;
    text += lines ? "[\n" : "[";
    for (size_t i = 0; i < items.size(); ++i) {
      if (i > 0) text += lines ? ",\n" : ", ";
      write(items[i]);
    }
    text += lines ? "\n]" : "]";
  }
  void write(const std::map<std::string, double>& values) {
    write_object([&] {
      for (const auto& [key, value] : values) (*this)(key.c_str(), value);
    });
  }
  void write(const std::optional<SavedLossScale>& scale) {
    if (scale) {
      write(*scale);
    } else {
      text += "null";
    }
  }
  template <class T>
  void write(const T& object) {
    write_object([&] { members(*this, object); });
  }
  template <class Members>
  void write_object(const Members& write_members) {
    text += '{';
    ++depth_;
    is_first_ = true;
    write_members();
    is_first_ = false;
    --depth_;
    text += '}';
  }

  int depth_ = 1;
  bool is_first_ = true;
};

/// Reads an object's members().
class Reader {
 public:
  template <class T>
  using Of = T;

  explicit Reader(JsonReader& json) : json_(json) {}

  template <class T>
  void operator()(const char* key, T& value) {
    json_.key(key);
    read(value);
  }
  void checksum(const char* key, std::string& value) {
    json_.key(key);
    value = read_checksum();
  }
  void require(bool holds, const char* rule) {
    if (!holds) json_.fail(rule);
  }

 private:
  std::string read_checksum() {
    std::string text = json_.string();
    if (is_checksum(text)) return text;
    json_.fail(
        quote_printable(text) +
        "; it must be 32 hexadecimal digits, lower case");
  }
  void read(std::string& value) { value = json_.string(); }
  void read(int64_t& value) { value = json_.count(); }
  void read(uint64_t& value) { value = json_.whole(); }
  void read(double& value) { value = json_.number(); }
  void read(SavedKind& value) {
    const std::string text = json_.string();
    for (const SavedKind kind :
         {SavedKind::parameter, SavedKind::buffer, SavedKind::optimizer,
          SavedKind::random}) {
      value = kind;
      if (to_string(kind) == text) return;
    }
    json_.fail(
        quote_printable(text) +
        "; it must be parameter, buffer, optimizer or random");
  }
  void read(ContentHash& hash) {
    const std::string text = read_checksum();
    hash = {
        std::stoull(text.substr(0, 16), nullptr, 16),
        std::stoull(text.substr(16), nullptr, 16)};
  }
  /// The blocks of a file.
  void read(std::vector<std::string>& checksums) {
    for (json_.open_array(); json_.next_item();) {
      checksums.push_back(read_checksum());
    }
  }
  template <class T>
  void read(std::vector<T>& items) {
    for (json_.open_array(); json_.next_item();) read(items.emplace_back());
  }
  void read(std::map<std::string, double>& values) {
    json_.open_object();
    for (std::string name; json_.next_member(name);) {
      const bool is_new = values.emplace(name, json_.number()).second;
      require(is_new, "it is there twice");
    }
  }
  void read(std::optional<SavedLossScale>& scale) {
    if (!json_.is_null()) read(scale.emplace());
  }
  template <class T>
  void read(T& object) {
    json_.open_object();
    members(*this, object);
    json_.close_object();
  }

  JsonReader& json_;
};

// The members of each object, in the order of the format.

template <class Json>
void members(Json& json, typename Json::template Of<SavedSlice>& slice) {
  json("offset", slice.box.offset);
  json("sizes", slice.box.sizes);
  json("file", slice.file);
  json("key", slice.key);
}

template <class Json>
void members(Json& json, typename Json::template Of<SavedTensor>& tensor) {
  json("name", tensor.name);
  json("kind", tensor.kind);
  json("dtype", tensor.dtype);
  json("shape", tensor.shape);
  json("hash", tensor.hash);
  json("slices", tensor.slices);
}

template <class Json>
void members(Json& json, typename Json::template Of<SavedFile>& file) {
  json("name", file.name);
  json("bytes", file.bytes);
  json("blocks", file.blocks);
}

template <class Json>
void members(Json& json, typename Json::template Of<SavedLossScale>& scale) {
  json("scale", scale.scale);
  json.require(
      std::isfinite(scale.scale) && scale.scale > 0,
      "it must be a finite number above 0");
  json("good_steps", scale.good_steps);
  json("overflows", scale.overflows);
}

template <class Json>
void members(Json& json, typename Json::template Of<RankPart>& part) {
  json("tensors", part.tensors);
  json("file", part.file);
}

template <class Json>
void members(
    Json& json, typename Json::template Of<CheckpointManifest>& manifest) {
  json("step", manifest.step);
  json("skipped_steps", manifest.skipped_steps);
  json("total_steps", manifest.total_steps);
  json("epoch", manifest.epoch);
  json("consumed", manifest.consumed);
  json("seed", manifest.seed);
  json("loss_scale", manifest.loss_scale);
  json("layout", manifest.layout);
  json("ranks", manifest.ranks);
  json.require(manifest.ranks >= 1, "0; at least one rank wrote it");
  json("config", manifest.config);
  json.checksum("config_hash", manifest.config_hash);
  json("data", manifest.data);
  json("metrics", manifest.metrics);
  json("tensors", manifest.tensors);
  json("files", manifest.files);
  json.checksum("content_hash", manifest.content_hash);
}

/// Ends the text with the checksum of what is before it.
template <class T>
std::string to_text(const char* kind, int version, const T& object) {
  Writer json;
  json("format", std::string(kind));
  json("version", int64_t{version});
  members(json, object);
  json.text += ",\n";
  const std::string sum = checksum(json.text.data(), json.text.size());
  return json.text + kChecksumKey + sum + kChecksumEnd;
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

/// Returns the version.
int read_head(JsonReader& json, std::string_view wanted) {
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
  return static_cast<int>(number);
}

/// Returns the version.
template <class T>
int from_text(
    const std::string& text, const std::string& path, const char* kind,
    T& object) {
  check_checksum(text, path);
  JsonReader json(text, path);
  const int version = read_head(json, kind);
  Reader reader(json);
  members(reader, object);
  json.key("checksum");  // compared before
  json.string();
  json.close_object();
  json.end();
  return version;
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
  return to_text(kManifestFormat, manifest.version, manifest);
}

std::string to_json(const RankPart& part) {
  return to_text(kPartFormat, kCheckpointVersion, part);
}

CheckpointManifest
parse_manifest(const std::string& text, const std::string& path) {
  CheckpointManifest manifest;
  manifest.version = from_text(text, path, kManifestFormat, manifest);
  check_contents(manifest, path);
  check_hash(
      path, "config_hash", manifest.config_hash,
      checksum(manifest.config.data(), manifest.config.size()));
  check_hash(
      path, "content_hash", manifest.content_hash, content_hash(manifest));
  return manifest;
}

RankPart parse_rank_part(const std::string& text, const std::string& path) {
  RankPart part;
  from_text(text, path, kPartFormat, part);
  check_file(part.file, path);
  for (const auto& tensor : part.tensors) check_tensor(tensor, 1, path);
  return part;
}

}  // namespace echelon
