// The messages between a PrivateStore and its server. A message is its size (4
// bytes) and that many bytes: what is called or answered (1 byte), and then
// numbers of 8 bytes and texts, a text being its size and its bytes. Numbers
// are little-endian. A connection has one call at a time.
//
//   call     sends                                  is answered with
//   set      number of pairs, then key, value each
//   append   key, value
//   replace  key, the value expected, the new one   the value that it has now
//   add      key, number                            the sum
//   remove   key                                    1 if it was there, else 0
//   check    number of keys, keys                   1 if all are there, else 0
//   count                                           number of keys
//   wait     milliseconds, number of keys, keys
//   get      milliseconds, number of keys, keys     the values
//
// wait and get wait for all keys, and get "late" when the milliseconds are
// over; 0 milliseconds never are. "refused" comes with the reason.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace echelon {

static_assert(std::endian::native == std::endian::little);

enum class StoreCall : uint8_t {
  set,
  append,
  replace,
  add,
  remove,
  check,
  count,
  wait,
  get,
};

enum class StoreAnswer : uint8_t { done, late, refused };

/// What may come in one message.
constexpr size_t kMaxStoreMessage = size_t{16} << 20;

class StoreWriter {
 public:
  template <typename Kind>
  explicit StoreWriter(Kind kind) : bytes_(kSize, '\0') {
    bytes_ += static_cast<char>(kind);
  }
  StoreWriter& number(int64_t value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  StoreWriter& text(std::string_view text) {
    number(static_cast<int64_t>(text.size()));
    bytes_ += text;
    return *this;
  }
  size_t size() const { return bytes_.size() - kSize; }
  /// The message, with its size in front.
  std::string take() {
    const auto count = static_cast<uint32_t>(size());
    std::memcpy(bytes_.data(), &count, sizeof count);
    return std::move(bytes_);
  }

  static constexpr size_t kSize = sizeof(uint32_t);

 private:
  std::string bytes_;
};

/// Reads a message without its size. What is not there reads as 0 or as an
/// empty text, and ok() is false from then on.
class StoreReader {
 public:
  explicit StoreReader(std::string_view bytes) : bytes_(bytes) {}
  uint8_t kind() {
    const std::string_view byte = take(1);
    return byte.empty() ? 0 : static_cast<uint8_t>(byte[0]);
  }
  int64_t number() {
    int64_t value = 0;
    const std::string_view bytes = take(sizeof value);
    if (!bytes.empty()) std::memcpy(&value, bytes.data(), sizeof value);
    return value;
  }
  std::string_view text() {
    const int64_t size = number();
    return take(size < 0 ? bytes_.size() + 1 : static_cast<size_t>(size));
  }
  bool ok() const { return ok_; }
  /// All was read, and nothing was missing.
  bool ended() const { return ok_ && bytes_.empty(); }

 private:
  std::string_view take(size_t size) {
    if (!ok_ || size > bytes_.size()) {
      ok_ = false;
      return {};
    }
    const std::string_view part = bytes_.substr(0, size);
    bytes_.remove_prefix(size);
    return part;
  }

  std::string_view bytes_;
  bool ok_ = true;
};

}  // namespace echelon
