// A member is a header of 512 bytes and its content, filled up to a multiple of
// 512. Names of more than 100 bytes stand in a member of their own before it
// (GNU) or in an extended header (pax). Only headers and the few bytes of each
// class are read here. Numbers of the file are not trusted.
#include "echelon/data/sources/image_shards.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <optional>
#include <utility>

#include "echelon/data/sources/text.h"
#include "echelon/error.h"
#include "echelon/text/file_descriptor.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

constexpr int64_t kBlock = 512;
constexpr int64_t kMostName = 1 << 20;  // bytes of a name or extended header
constexpr int64_t kMostClass = 64;      // bytes of a .cls
constexpr int64_t kClasses = 1 << 20;

class TarFile {
 public:
  explicit TarFile(const std::string& path)
      : path_(path), file_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    struct stat status = {};
    if (file_.fd() < 0 || ::fstat(file_.fd(), &status) != 0) {
      throw DataError(path + ": cannot be read: " + std::strerror(errno));
    }
    size_ = status.st_size;
  }

  int64_t size() const { return size_; }

  std::string read(int64_t offset, int64_t bytes) const {
    std::string content(static_cast<size_t>(bytes), '\0');
    size_t done = 0;
    while (done < content.size()) {
      const ssize_t got = ::pread(
          file_.fd(), content.data() + done, content.size() - done,
          offset + static_cast<int64_t>(done));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) fail(offset, std::strerror(errno));
      if (got == 0) fail(offset, "the file ends within a member");
      done += static_cast<size_t>(got);
    }
    return content;
  }

  [[noreturn]] void fail(int64_t offset, const std::string& why) const {
    throw DataError(format("{}: at byte {}: {}", path_, offset, why));
  }

 private:
  std::string path_;
  FileDescriptor file_;
  int64_t size_ = 0;
};

// A field of a header: octal digits, or with a first bit a binary number.
std::optional<int64_t> number_of(std::string_view field) {
  if ((static_cast<unsigned char>(field[0]) & 0x80) != 0) {
    uint64_t value = 0;
    for (const char c : field.substr(field.size() - 8)) {
      value = value << 8 | static_cast<unsigned char>(c);
    }
    if (value >> 62 != 0) return std::nullopt;
    return static_cast<int64_t>(value);
  }
  const size_t first = field.find_first_not_of(' ');
  if (first == std::string_view::npos) return 0;
  constexpr std::string_view kEnds(" \0", 2);
  const size_t end = std::min(field.find_first_of(kEnds, first), field.size());
  int64_t value = 0;
  for (size_t i = first; i < end; ++i) {
    if (field[i] < '0' || field[i] > '7' || value >> 58 != 0)
      return std::nullopt;
    value = value * 8 + (field[i] - '0');
  }
  return value;
}

std::string text_of(std::string_view field) {
  return std::string(field.substr(0, field.find('\0')));
}

bool has_right_sum(std::string_view header) {
  int64_t sum = 0;
  for (size_t i = 0; i < header.size(); ++i) {
    const bool of_sum = i >= 148 && i < 156;  // counted as spaces
    sum += of_sum ? ' ' : static_cast<unsigned char>(header[i]);
  }
  return number_of(header.substr(148, 8)) == sum;
}

// "27 path=a/001.jpg\n": the length counts all of the record.
std::optional<std::string>
value_of(std::string_view records, std::string_view key) {
  std::optional<std::string> found;
  while (!records.empty()) {
    size_t length = 0;
    const auto [rest, error] = std::from_chars(
        records.data(), records.data() + records.size(), length);
    const auto digits = static_cast<size_t>(rest - records.data());
    if (error != std::errc() || length <= digits + 1 ||
        length > records.size()) {
      return found;
    }
    const auto record = records.substr(digits + 1, length - digits - 2);
    if (record.starts_with(key) && record.substr(key.size(), 1) == "=") {
      found = std::string(record.substr(key.size() + 1));
    }
    records.remove_prefix(length);
  }
  return found;
}

struct Key {
  std::string key;     // "a/001"
  std::string suffix;  // "jpg", in small letters
};

// The suffix begins at the first dot of the last part, as WebDataset has it.
Key key_of(const std::string& name) {
  const size_t slash = name.rfind('/');
  const size_t dot = name.find('.', slash == std::string::npos ? 0 : slash + 1);
  if (dot == std::string::npos) return {name, ""};
  std::string suffix = name.substr(dot + 1);
  for (char& c : suffix) {
    c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return {name.substr(0, dot), suffix};
}

// A sample while its members are read.
struct Sample {
  std::string key;
  std::optional<TarMember> image, label;
};

class Shard {
 public:
  Shard(const std::string& path, ImageFolder& found)
      : path_(path), file_(path), found_(found) {}

  void scan() {
    Sample sample;
    for (auto& member : list_tar(path_)) {
      const auto [key, suffix] = key_of(member.name);
      const bool is_image = has_image_extension("." + suffix) &&
                            suffix.find('.') == std::string::npos;
      if (!is_image && suffix != "cls") continue;
      if (key != sample.key) finish(std::exchange(sample, {.key = key}));
      auto& part = is_image ? sample.image : sample.label;
      if (part) {
        file_.fail(
            member.offset, format(
                               "\"{}\" and \"{}\" are of one sample; it has "
                               "one image and one .cls",
                               part->name, member.name));
      }
      part = std::move(member);
    }
    finish(sample);
  }

 private:
  void finish(const Sample& sample) {
    if (!sample.image && !sample.label) return;
    if (!sample.image || !sample.label) {
      file_.fail(
          (sample.image ? sample.image : sample.label)->offset,
          format(
              "\"{}\" has no {}; the members of a sample stand one behind the "
              "other",
              sample.key,
              sample.image ? "class (.cls)" : "image (.jpg, .jpeg or .png)"));
    }
    found_.images.push_back(
        {.path = path_,
         .label = class_of(*sample.label),
         .offset = sample.image->offset,
         .bytes = sample.image->bytes});
  }

  int64_t class_of(const TarMember& member) const {
    const std::string text =
        file_.read(member.offset, std::min(member.bytes, kMostClass));
    const size_t first = text.find_first_not_of(" \t");
    const size_t end = text.find_last_not_of(" \t\r\n") + 1;
    int64_t value = -1;
    const char* begin = text.data() + std::min(first, text.size());
    const auto [rest, error] = std::from_chars(begin, text.data() + end, value);
    const bool fits = error == std::errc() && rest == text.data() + end &&
                      value >= 0 && value < kClasses;
    if (!fits) {
      file_.fail(
          member.offset,
          format(
              "\"{}\" is \"{}\"; a class is a whole number from 0 and below "
              "{}",
              member.name, text.substr(0, end), kClasses));
    }
    return value;
  }

  const std::string& path_;
  TarFile file_;
  ImageFolder& found_;
};

}  // namespace

std::vector<TarMember> list_tar(const std::string& path) {
  const TarFile file(path);
  std::vector<TarMember> members;
  std::string long_name;  // of the next member
  std::optional<int64_t> long_size;
  for (int64_t at = 0; at < file.size();) {
    const std::string header = file.read(at, kBlock);
    if (header.find_first_not_of('\0') == std::string::npos) break;  // its end
    const std::string_view fields = header;
    if (!has_right_sum(fields)) {
      file.fail(
          at,
          "is no header of a tar file; compressed ones are to be unpacked "
          "to .tar");
    }
    const char kind = header[156];
    auto size = number_of(fields.substr(124, 12));
    const bool is_file = kind == '0' || kind == '\0' || kind == '7';
    if (is_file && long_size) size = std::exchange(long_size, std::nullopt);
    const int64_t begin = at + kBlock;
    if (!size || *size < 0 || *size > file.size() - begin) {
      file.fail(at, "the file ends within a member; it is truncated");
    }
    if (kind == 'L' || kind == 'x') {
      if (*size > kMostName) file.fail(at, "a name of more than 1 MiB");
      const std::string content = file.read(begin, *size);
      if (kind == 'L') {
        long_name = text_of(content);
      } else {
        if (const auto name = value_of(content, "path")) long_name = *name;
        if (const auto text = value_of(content, "size")) {
          int64_t value = -1;
          std::from_chars(text->data(), text->data() + text->size(), value);
          long_size = value;
        }
      }
    } else if (kind != 'g') {
      std::string name = text_of(fields.substr(0, 100));
      const std::string prefix = text_of(fields.substr(345, 155));
      const bool is_posix =
          fields.substr(257, 6) == std::string_view("ustar\0", 6);
      if (is_posix && !prefix.empty()) name = prefix + "/" + name;
      if (!long_name.empty()) name = std::exchange(long_name, "");
      if (is_file) members.push_back({std::move(name), begin, *size});
      long_size.reset();
    }
    at = begin + (*size + kBlock - 1) / kBlock * kBlock;
  }
  return members;
}

bool is_shards(const std::string& path) {
  return path.ends_with(".tar");
}

ImageFolder scan_image_shards(const std::string& pattern) {
  ImageFolder found;
  for (const std::string& path : expand_source(pattern)) {
    Shard(path, found).scan();
  }
  if (found.images.empty()) {
    throw DataError(
        pattern +
        ": has no images; a sample is NAME.jpg (or .jpeg, .png) and NAME.cls "
        "with its class as a number");
  }
  int64_t largest = 0;
  for (const auto& image : found.images) {
    largest = std::max(largest, image.label);
  }
  for (int64_t label = 0; label <= largest; ++label) {
    found.classes.push_back(std::to_string(label));
  }
  return found;
}

}  // namespace echelon
