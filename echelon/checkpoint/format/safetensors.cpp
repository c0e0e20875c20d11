// Reading: the length is checked against the file before anything is allocated;
// the header is walked by JsonReader; each tensor's bytes are checked against
// its shape, and all together against the data section. A file that passes can
// be read without further checks. Writing: wider dtypes come first, the header
// is padded so that the data begins at a multiple of kAlignment, and a NewFile
// makes the file whole or absent.
#include "echelon/checkpoint/format/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "echelon/checkpoint/format/hashes.h"
#include "echelon/checkpoint/format/json_reader.h"
#include "echelon/checkpoint/format/new_file.h"
#include "echelon/checkpoint/format/safetensors_text.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::safetensors {
namespace {

constexpr uint64_t kAlignment = 64;  // of the data section

/// Bytes of an element.
constexpr std::array<std::pair<std::string_view, uint64_t>, 19> kDtypes = {
    {{"BOOL", 1},
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
     {"C64", 8}}};

/// Reads a header's JSON, and refuses the first thing that is out of place.
class HeaderReader {
 public:
  HeaderReader(std::string_view text, const std::string& path)
      : path_(path), json_(text, path, "header") {}

  /// The tensors as the header lists them: no number is checked against another
  /// yet.
  std::vector<TensorInfo> tensors;
  Metadata metadata;

  void read() {
    std::set<std::string> names;
    json_.open_object();
    for (std::string name; json_.next_member(name);) {
      if (!names.insert(name).second) {
        fail("the name " + quote_printable(name) + " is there twice");
      }
      expect(
          Kind::object, "the header's " + quote_printable(name), "an object");
      json_.open_object();
      name == "__metadata__" ? read_metadata() : read_tensor(name);
    }
    json_.end();
  }

 private:
  using Kind = JsonReader::Kind;

  void read_metadata() {
    for (std::string key; json_.next_member(key);) {
      if (metadata.contains(key)) {
        fail("__metadata__ has the key " + quote_printable(key) + " twice");
      }
      expect(Kind::string, "__metadata__ " + quote_printable(key), "a string");
      metadata[key] = json_.string();
    }
  }

  void read_tensor(const std::string& name) {
    TensorInfo info{.name = name};
    std::vector<uint64_t> offsets;
    const std::string tensor = "tensor " + quote_printable(name);
    std::set<std::string> fields;
    for (std::string field; json_.next_member(field);) {
      if (field != "dtype" && field != "shape" && field != "data_offsets") {
        fail(format(
            "{} has the unknown key {}; known are dtype, shape and "
            "data_offsets",
            tensor, quote_printable(field)));
      }
      if (!fields.insert(field).second) {
        fail(format("{} has the key \"{}\" twice", tensor, field));
      }
      const std::string place = tensor + ": " + field;
      if (field == "dtype") {
        expect(Kind::string, place, "a string");
        info.dtype = json_.string();
      } else if (field == "shape") {
        info.shape = read_shape(place);
      } else {
        offsets = read_offsets(place);
      }
    }
    for (const char* field : {"dtype", "shape", "data_offsets"}) {
      if (!fields.contains(field)) {
        fail(format("{} has no \"{}\"", tensor, field));
      }
    }
    if (offsets.size() != 2) {
      fail(format(
          "{}: data_offsets has {} numbers; it must have two, begin and end",
          tensor, offsets.size()));
    }
    info.begin = offsets[0];
    info.end = offsets[1];
    tensors.push_back(std::move(info));
  }

  std::vector<int64_t> read_shape(const std::string& place) {
    std::vector<int64_t> shape;
    for (open_array(place); json_.next_item();) {
      const uint64_t size = read_number(place);
      if (size > static_cast<uint64_t>(INT64_MAX)) {
        fail(format(
            "{} holds {}; it must be a whole number below 2^63", place, size));
      }
      if (shape.size() == kMaxDims) {
        fail(format("{} has more than {} dimensions", place, kMaxDims));
      }
      shape.push_back(static_cast<int64_t>(size));
    }
    return shape;
  }

  std::vector<uint64_t> read_offsets(const std::string& place) {
    std::vector<uint64_t> offsets;
    for (open_array(place); json_.next_item();) {
      const uint64_t offset = read_number(place);
      if (offsets.size() == 2) fail(place + " has more than two numbers");
      offsets.push_back(offset);
    }
    return offsets;
  }

  void open_array(const std::string& place) {
    expect(Kind::array, place, "an array of whole numbers");
    json_.open_array();
  }

  uint64_t read_number(const std::string& place) {
    if (json_.next() == Kind::negative) {
      fail(format("{} holds {}; it must be 0 or more", place, json_.shown()));
    }
    if (json_.next() == Kind::number) {
      fail(format(
          "{} holds {}; it must be a whole number below 2^63", place,
          printable(json_.text())));
    }
    expect(Kind::whole, place, "whole numbers");
    return json_.whole();
  }

  void expect(Kind kind, const std::string& place, const char* rule) const {
    if (json_.next() == kind) return;
    fail(format("{} holds {}; it must be {}", place, json_.kind_name(), rule));
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw CheckpointError(path_ + ": " + what);
  }

  const std::string& path_;
  JsonReader json_;
};

void check_tensor(
    const TensorInfo& info, uint64_t data_bytes, const std::string& path) {
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
  const std::string offsets =
      format("data_offsets [{}, {}]", info.begin, info.end);
  if (info.begin > info.end) {
    throw CheckpointError(place + offsets + " end before they begin");
  }
  if (info.end > data_bytes) {
    throw CheckpointError(format(
        "{}{} reach behind the file's {} bytes of data; the file may be cut "
        "off",
        place, offsets, data_bytes));
  }
  if (info.end - info.begin != *bytes) {
    throw CheckpointError(format(
        "{}{} are {} bytes, but shape {} of {} takes {}", place, offsets,
        info.end - info.begin, shape_string(info.shape), info.dtype, *bytes));
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

void check_list(
    const std::string& path, const std::vector<TensorBytes>& tensors) {
  std::set<std::string> names = {"__metadata__"};
  for (const auto& tensor : tensors) {
    const std::string place =
        path + ": tensor " + quote_printable(tensor.name) + ": ";
    if (!names.insert(tensor.name).second) {
      throw ConfigError(place + "the name is taken; each needs its own");
    }
    const uint64_t width = dtype_bytes(tensor.dtype);
    if (width == 0) {
      throw ConfigError(format(
          "{}unknown dtype {}; known are {}", place,
          quote_printable(tensor.dtype), known_dtypes()));
    }
    const auto bytes = tensor_bytes(tensor.shape, width);
    if (tensor.shape.size() > kMaxDims || !bytes ||
        *bytes != tensor.bytes.size()) {
      throw ConfigError(format(
          "{}shape {} of {} does not match its {} bytes", place,
          shape_string(tensor.shape), tensor.dtype, tensor.bytes.size()));
    }
  }
}

/// Wider dtypes first: the narrower ones are then aligned without gaps.
std::vector<const TensorBytes*>
in_file_order(const std::vector<TensorBytes>& tensors) {
  std::vector<const TensorBytes*> order;
  for (const auto& tensor : tensors) order.push_back(&tensor);
  std::ranges::stable_sort(order, std::greater(), [](const auto* tensor) {
    return dtype_bytes(tensor->dtype);
  });
  return order;
}

std::string header_text(
    const std::string& path, const std::vector<const TensorBytes*>& tensors,
    const Metadata& metadata) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  if (!metadata.empty()) json["__metadata__"] = metadata;
  // push_back of pairs: ordered_json would search for each name it is given.
  auto& members = json.get_ref<nlohmann::ordered_json::object_t&>();
  uint64_t begin = 0;
  for (const auto* tensor : tensors) {
    const uint64_t end = begin + tensor->bytes.size();
    nlohmann::ordered_json entry;
    entry["dtype"] = tensor->dtype;
    entry["shape"] = tensor->shape;
    entry["data_offsets"] = {begin, end};
    members.std::vector<std::pair<const std::string, nlohmann::ordered_json>>::
        emplace_back(tensor->name, std::move(entry));
    begin = end;
  }
  std::string text;
  try {
    text = json.dump();
  } catch (const nlohmann::json::exception&) {
    throw ConfigError(path + ": a name or a metadata text is not UTF-8");
  }
  text.append((kAlignment - (8 + text.size()) % kAlignment) % kAlignment, ' ');
  if (text.size() > kMaxHeaderBytes) {
    throw ConfigError(format(
        "{}: its header would take {} bytes; the limit is {}", path,
        text.size(), kMaxHeaderBytes));
  }
  return text;
}

}  // namespace

std::string checksum_key(const std::string& tensor) {
  return "xxh3_128:" + tensor;
}

uint64_t dtype_bytes(std::string_view dtype) {
  for (const auto& [name, bytes] : kDtypes) {
    if (name == dtype) return bytes;
  }
  return 0;
}

std::string known_dtypes() {
  return join(kDtypes, " ", [](const auto& dtype) { return dtype.first; });
}

std::string shape_string(std::span<const int64_t> shape) {
  return format("[{}]", join(shape, ", "));
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
  HeaderReader reader({text, length}, path);
  reader.read();

  Header header{
      std::move(reader.tensors), std::move(reader.metadata), head.size()};
  const uint64_t data_bytes = file_bytes - header.data_begin;
  for (const auto& tensor : header.tensors) {
    check_tensor(tensor, data_bytes, path);
  }
  std::ranges::stable_sort(header.tensors, {}, [](const TensorInfo& tensor) {
    return std::pair(tensor.begin, tensor.end);
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
  verified_ = std::make_unique<std::atomic<bool>[]>(header_.tensors.size());
}

File::File(File&& other) noexcept
    : path_(std::move(other.path_)),
      header_(std::move(other.header_)),
      map_(std::exchange(other.map_, nullptr)),
      map_bytes_(std::exchange(other.map_bytes_, 0)),
      verified_(std::move(other.verified_)) {}

File& File::operator=(File&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(header_, other.header_);
  std::swap(map_, other.map_);
  std::swap(map_bytes_, other.map_bytes_);
  std::swap(verified_, other.verified_);
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

void File::verify(const TensorInfo& tensor) const {
  auto& done = verified_[static_cast<size_t>(&tensor - header_.tensors.data())];
  const auto expected = header_.metadata.find(checksum_key(tensor.name));
  if (done || expected == header_.metadata.end()) return;
  const auto held = bytes(tensor);
  const std::string found = checksum(held.data(), held.size());
  if (found != expected->second) {
    throw CheckpointError(format(
        "{}: tensor {} is damaged: its bytes have the checksum {}, the file's "
        "metadata says {}; copy or write the file again, or name a checkpoint "
        "of the run",
        path_, quote_printable(tensor.name), found,
        quote_printable(expected->second)));
  }
  done = true;
}

void File::forget(std::span<const std::byte> bytes) const {
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(bytes.data()) / page * page;
  const auto end = reinterpret_cast<uintptr_t>(bytes.data() + bytes.size());
  // A hint: where the system ignores it, the pages stay.
  ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

FilePlan plan_file(
    const std::string& path, const std::vector<TensorBytes>& tensors,
    const Metadata& metadata) {
  check_list(path, tensors);
  FilePlan plan;
  plan.order = in_file_order(tensors);
  const std::string header = header_text(path, plan.order, metadata);
  for (size_t i = 0; i < 8; ++i) {
    plan.head += static_cast<char>(header.size() >> (8 * i));
  }
  plan.head += header;
  plan.bytes = plan.head.size();
  for (const auto* tensor : plan.order) plan.bytes += tensor->bytes.size();
  return plan;
}

void write(
    const std::string& path, const std::vector<TensorBytes>& tensors,
    const Metadata& metadata) {
  const FilePlan plan = plan_file(path, tensors, metadata);
  NewFile file(path, plan.bytes, NewFile::Under::beside);
  file.append(plan.head.data(), plan.head.size());
  for (const auto* tensor : plan.order) {
    file.append(tensor->bytes.data(), tensor->bytes.size());
  }
  file.move_into_place();
}

}  // namespace echelon::safetensors
