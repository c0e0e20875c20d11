#include "echelon/checkpoint/format/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "echelon/checkpoint/format/safetensors_text.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::safetensors {
namespace {

constexpr std::array<std::pair<std::string_view, uint64_t>, 18> kDtypes = {{
    {"BOOL", 1},
    {"U8", 1},
    {"I8", 1},
    {"F8_E4M3", 1},
    {"F8_E5M2", 1},
    {"F8_E8M0", 1},
    {"F8_E4M3FNUZ", 1},
    {"F8_E5M2FNUZ", 1},
    {"I16", 2},
    {"U16", 2},
    {"F16", 2},
    {"BF16", 2},
    {"I32", 4},
    {"U32", 4},
    {"F32", 4},
    {"I64", 8},
    {"U64", 8},
    {"F64", 8},
}};

/// What the header says about a tensor, before it is checked.
struct RawTensor {
  TensorInfo info;
  std::vector<uint64_t> offsets;
  std::set<std::string> fields;
};

/// Receives the header's JSON event by event and refuses the first one that is
/// out of place. Throws; never returns false.
class HeaderReader {
 public:
  using number_integer_t = nlohmann::json::number_integer_t;
  using number_unsigned_t = nlohmann::json::number_unsigned_t;
  using number_float_t = nlohmann::json::number_float_t;
  using string_t = nlohmann::json::string_t;
  using binary_t = nlohmann::json::binary_t;

  explicit HeaderReader(const std::string& path) : path_(path) {}

  std::vector<RawTensor> tensors;
  Metadata metadata;

  bool null() { return misplaced("null"); }
  bool boolean(bool) { return misplaced("true or false"); }
  bool number_integer(number_integer_t value) {
    if (place_ == Place::shape || place_ == Place::offsets) {
      fail(format("{} holds {}; it must be 0 or more", where(), value));
    }
    return misplaced("a number");
  }
  bool number_float(number_float_t, const string_t& text) {
    if (place_ == Place::shape || place_ == Place::offsets) {
      fail(
          where() + " holds " + printable(text) +
          "; it must be a whole number below 2^63");
    }
    return misplaced("a number");
  }
  bool number_unsigned(number_unsigned_t value) {
    if (place_ == Place::shape) {
      if (value > static_cast<uint64_t>(INT64_MAX)) {
        fail(format(
            "{} holds {}; it must be a whole number below 2^63", where(),
            value));
      }
      auto& shape = tensors.back().info.shape;
      if (shape.size() == kMaxDims) {
        fail(format("{} has more than {} dimensions", where(), kMaxDims));
      }
      shape.push_back(static_cast<int64_t>(value));
      return true;
    }
    if (place_ == Place::offsets) {
      auto& offsets = tensors.back().offsets;
      if (offsets.size() == 2) fail(where() + " has more than two numbers");
      offsets.push_back(value);
      return true;
    }
    return misplaced("a number");
  }
  bool string(string_t& value) {
    if (place_ == Place::tensor && field_ == "dtype") {
      tensors.back().info.dtype = value;
      return true;
    }
    if (place_ == Place::metadata) {
      metadata[field_] = value;
      return true;
    }
    return misplaced("a string");
  }
  bool binary(binary_t&) { return misplaced("binary data"); }

  bool start_object(size_t) {
    if (place_ == Place::outside) {
      place_ = Place::top;
    } else if (place_ == Place::top && field_ == "__metadata__") {
      place_ = Place::metadata;
    } else if (place_ == Place::top) {
      place_ = Place::tensor;
      tensors.push_back({});
      tensors.back().info.name = field_;
    } else {
      return misplaced("an object");
    }
    return true;
  }
  bool end_object() {
    if (place_ == Place::tensor) {
      for (const char* field : {"dtype", "shape", "data_offsets"}) {
        if (!tensors.back().fields.contains(field)) {
          fail(format(
              "tensor {} has no \"{}\"",
              quote_printable(tensors.back().info.name), field));
        }
      }
      if (tensors.back().offsets.size() != 2) {
        fail(format(
            "tensor {}: data_offsets has {} numbers; it must have two, begin "
            "and end",
            quote_printable(tensors.back().info.name),
            tensors.back().offsets.size()));
      }
    }
    place_ = place_ == Place::top ? Place::outside : Place::top;
    return true;
  }
  bool key(string_t& name) {
    field_ = name;
    if (place_ == Place::top) {
      if (!names_.insert(name).second) {
        fail("the name " + quote_printable(name) + " is there twice");
      }
    } else if (place_ == Place::metadata) {
      if (metadata.contains(name)) {
        fail("__metadata__ has the key " + quote_printable(name) + " twice");
      }
    } else {
      if (name != "dtype" && name != "shape" && name != "data_offsets") {
        fail(format(
            "tensor {} has the unknown key {}; known are dtype, shape and "
            "data_offsets",
            quote_printable(tensors.back().info.name), quote_printable(name)));
      }
      if (!tensors.back().fields.insert(name).second) {
        fail(format(
            "tensor {} has the key \"{}\" twice",
            quote_printable(tensors.back().info.name), name));
      }
    }
    return true;
  }
  bool start_array(size_t) {
    if (place_ == Place::tensor && field_ == "shape") {
      place_ = Place::shape;
    } else if (place_ == Place::tensor && field_ == "data_offsets") {
      place_ = Place::offsets;
    } else {
      return misplaced("an array");
    }
    return true;
  }
  bool end_array() {
    place_ = Place::tensor;
    return true;
  }
  bool parse_error(
      size_t position, const std::string&, const nlohmann::json::exception&) {
    fail(format(
        "its header is not valid JSON in UTF-8: byte {} of the header",
        position));
  }

 private:
  enum class Place { outside, top, tensor, shape, offsets, metadata };

  [[noreturn]] void fail(const std::string& what) const {
    throw CheckpointError(path_ + ": " + what);
  }
  std::string where() const {
    switch (place_) {
      case Place::outside:
        return "the header";
      case Place::top:
        return "the header's " + quote_printable(field_);
      case Place::metadata:
        return "__metadata__ " + quote_printable(field_);
      default:
        break;
    }
    return "tensor " + quote_printable(tensors.back().info.name) + ": " +
           field_;
  }
  bool misplaced(const std::string& what) const {
    std::string rule = "an object";
    if (place_ == Place::metadata) rule = "a string";
    if (place_ == Place::shape || place_ == Place::offsets) {
      rule = "whole numbers";
    }
    if (place_ == Place::tensor) {
      rule = field_ == "dtype" ? "a string" : "an array of whole numbers";
    }
    fail(format("{} holds {}; it must be {}", where(), what, rule));
  }

  const std::string& path_;
  Place place_ = Place::outside;
  std::string field_;
  std::set<std::string> names_;
};

void check_tensor(
    const RawTensor& raw, uint64_t data_bytes, const std::string& path) {
  const auto& info = raw.info;
  const std::string place =
      path + ": tensor " + quote_printable(info.name) + ": ";
  const uint64_t width = dtype_bytes(info.dtype);
  if (width == 0) {
    throw CheckpointError(format(
        "{}unknown dtype {}; known are {}", place, quote_printable(info.dtype),
        known_dtypes()));
  }
  const auto bytes = tensor_bytes(info.shape, width);
  if (!bytes) {
    throw CheckpointError(format(
        "{}shape {} of {} overflows 63 bits", place, shape_string(info.shape),
        info.dtype));
  }
  const auto [begin, end] = std::pair(raw.offsets[0], raw.offsets[1]);
  const std::string offsets = format("data_offsets [{}, {}]", begin, end);
  if (begin > end) {
    throw CheckpointError(place + offsets + " end before they begin");
  }
  if (end > data_bytes) {
    throw CheckpointError(format(
        "{}{} reach behind the file's {} bytes of data; the file may be cut "
        "off",
        place, offsets, data_bytes));
  }
  if (end - begin != *bytes) {
    throw CheckpointError(format(
        "{}{} are {} bytes, but shape {} of {} takes {}", place, offsets,
        end - begin, shape_string(info.shape), info.dtype, *bytes));
  }
}

/// Tensors, sorted by begin, must follow each other without overlap, gap or
/// remainder.
void check_cover(
    const std::vector<TensorInfo>& tensors, uint64_t data_bytes,
    const std::string& path) {
  uint64_t covered = 0;
  const TensorInfo* previous = nullptr;
  for (const auto& tensor : tensors) {
    const std::string place = path + ": tensor " + quote_printable(tensor.name);
    if (tensor.begin < covered) {
      throw CheckpointError(format(
          "{} begins at byte {} and overlaps {}, which ends at {}", place,
          tensor.begin, quote_printable(previous->name), covered));
    }
    if (tensor.begin > covered) {
      throw CheckpointError(format(
          "{} begins at byte {}, which leaves a gap after byte {}; the data "
          "must have none",
          place, tensor.begin, covered));
    }
    covered = tensor.end;
    previous = &tensor;
  }
  if (covered != data_bytes) {
    throw CheckpointError(format(
        "{}: {} bytes follow the last tensor, which ends at {}; there must be "
        "none",
        path, data_bytes - covered, covered));
  }
}

}  // namespace

uint64_t dtype_bytes(std::string_view dtype) {
  for (const auto& [name, bytes] : kDtypes) {
    if (name == dtype) return bytes;
  }
  return dtype == "C64" ? 8 : 0;
}

std::string known_dtypes() {
  std::string names;
  for (const auto& [name, bytes] : kDtypes) names += std::string(name) + " ";
  return names + "C64";
}

std::string shape_string(std::span<const int64_t> shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return text + "]";
}

std::optional<uint64_t>
tensor_bytes(std::span<const int64_t> shape, uint64_t width) {
  // A dimension of 0 does not excuse the others: strides must not overflow.
  bool empty = false;
  int64_t product = static_cast<int64_t>(width);
  for (const int64_t dim : shape) {
    if (dim < 0) return std::nullopt;
    empty = empty || dim == 0;
    if (dim > 0 && __builtin_mul_overflow(product, dim, &product)) {
      return std::nullopt;
    }
  }
  return empty ? 0 : static_cast<uint64_t>(product);
}

std::string printable(std::string_view text) {
  constexpr size_t kMost = 120;
  static constexpr char kHex[] = "0123456789abcdef";
  std::string out;
  for (const char c : text.substr(0, kMost)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) {
      out += std::string("\\x") + kHex[byte >> 4] + kHex[byte & 15];
    } else {
      out += c;
    }
  }
  return text.size() > kMost ? out + "…" : out;
}

std::string quote_printable(std::string_view text) {
  return "\"" + printable(text) + "\"";
}

uint64_t head_bytes(
    std::span<const std::byte> first, uint64_t file_bytes,
    const std::string& path) {
  if (file_bytes < 8 || first.size() < 8) {
    throw CheckpointError(format(
        "{}: {} bytes long; a safetensors file has 8 or more", path,
        file_bytes));
  }
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) {
    length = length << 8 | static_cast<uint64_t>(first[static_cast<size_t>(i)]);
  }
  if (length > kMaxHeaderBytes) {
    throw CheckpointError(format(
        "{}: its first 8 bytes announce a header of {} bytes; the limit is {}; "
        "is this a safetensors file?",
        path, length, kMaxHeaderBytes));
  }
  if (length > file_bytes - 8) {
    throw CheckpointError(format(
        "{}: its header should be {} bytes long, but the file ends after {}; "
        "it may be cut off",
        path, length, file_bytes - 8));
  }
  return 8 + length;
}

Header parse(std::span<const std::byte> file, const std::string& path) {
  const uint64_t head = head_bytes(file, file.size(), path);
  return parse_head(file.first(head), file.size(), path);
}

Header parse_head(
    std::span<const std::byte> head, uint64_t file_bytes,
    const std::string& path) {
  const uint64_t length = head.size() - 8;
  const auto* text = reinterpret_cast<const char*>(head.data()) + 8;
  if (length == 0 || text[0] != '{') {
    throw CheckpointError(
        path + ": its header must begin with '{'; is this a safetensors file?");
  }
  // The JSON parser would take a NUL for the end of its input.
  if (std::memchr(text, 0, length) != nullptr) {
    throw CheckpointError(
        path + ": its header is not valid JSON in UTF-8: it holds a NUL byte");
  }
  HeaderReader reader(path);
  nlohmann::json::sax_parse(text, text + length, &reader);

  Header header;
  header.data_begin = head.size();
  header.metadata = std::move(reader.metadata);
  const uint64_t data_bytes = file_bytes - header.data_begin;
  for (auto& raw : reader.tensors) {
    check_tensor(raw, data_bytes, path);
    raw.info.begin = raw.offsets[0];
    raw.info.end = raw.offsets[1];
    header.tensors.push_back(std::move(raw.info));
  }
  std::stable_sort(
      header.tensors.begin(), header.tensors.end(),
      [](const TensorInfo& a, const TensorInfo& b) {
        return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
      });
  check_cover(header.tensors, data_bytes, path);
  return header;
}

File::File(const std::string& path) : path_(path) {
  const auto fail = [&](const std::string& what) {
    throw CheckpointError(path + ": " + what);
  };
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) fail(std::string("cannot be opened: ") + std::strerror(errno));
  struct stat status = {};
  const bool known = ::fstat(fd, &status) == 0;
  if (!known || !S_ISREG(status.st_mode)) {
    ::close(fd);
    fail("not a file; a safetensors file is needed");
  }
  map_bytes_ = static_cast<size_t>(status.st_size);
  if (map_bytes_ > 0) {
    // Private and writable, so that a tensor that shares it may be changed in
    // memory; without a reservation, since the file may exceed the memory.
    void* map = ::mmap(
        nullptr, map_bytes_, PROT_READ | PROT_WRITE,
        MAP_PRIVATE | MAP_NORESERVE, fd, 0);
    if (map == MAP_FAILED) {
      const int error = errno;
      ::close(fd);
      fail(format(
          "cannot be mapped ({} bytes): {}", map_bytes_, std::strerror(error)));
    }
    map_ = static_cast<const std::byte*>(map);
  }
  ::close(fd);
  try {
    header_ = parse({map_, map_bytes_}, path);
  } catch (...) {
    if (map_) ::munmap(const_cast<std::byte*>(map_), map_bytes_);
    throw;
  }
}

File::File(File&& other) noexcept
    : path_(std::move(other.path_)),
      header_(std::move(other.header_)),
      map_(std::exchange(other.map_, nullptr)),
      map_bytes_(std::exchange(other.map_bytes_, 0)) {}

File& File::operator=(File&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(header_, other.header_);
  std::swap(map_, other.map_);
  std::swap(map_bytes_, other.map_bytes_);
  return *this;
}

File::~File() {
  if (map_) ::munmap(const_cast<std::byte*>(map_), map_bytes_);
}

const TensorInfo* File::find(const std::string& name) const {
  for (const auto& tensor : header_.tensors) {
    if (tensor.name == name) return &tensor;
  }
  return nullptr;
}

const TensorInfo& File::at(const std::string& name) const {
  if (const auto* tensor = find(name)) return *tensor;
  std::string names;
  for (const auto& tensor : header_.tensors) {
    if (names.size() > 400) {
      names += ", …";
      break;
    }
    names += (names.empty() ? "" : ", ") + printable(tensor.name);
  }
  throw CheckpointError(format(
      "{}: has no tensor {}; it has {}", path_, quote_printable(name),
      (names.empty() ? "none" : names)));
}

std::span<const std::byte> File::bytes(const TensorInfo& tensor) const {
  return {map_ + header_.data_begin + tensor.begin, tensor.end - tensor.begin};
}

void File::forget(std::span<const std::byte> bytes) const {
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(bytes.data()) / page * page;
  const auto end = reinterpret_cast<uintptr_t>(bytes.data() + bytes.size());
  // A hint: where the system ignores it, the pages stay.
  ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

}  // namespace echelon::safetensors
