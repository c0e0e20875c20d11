#include "echelon/data/sources/digits.h"

#include <zlib.h>

#include <string>

#include "echelon/error.h"

namespace echelon {

// data/digits.csv.gz, embedded by the build.
extern const unsigned char kDigitsFile[];
extern const unsigned long kDigitsFileBytes;

namespace {

[[noreturn]] void broken(const std::string& what) {
  throw DataError("the digits built into this program are broken: " + what);
}

std::string unzip() {
  std::string text(400'000, '\0');
  z_stream stream = {};
  stream.next_in = const_cast<unsigned char*>(kDigitsFile);
  stream.avail_in = static_cast<uInt>(kDigitsFileBytes);
  stream.next_out = reinterpret_cast<unsigned char*>(text.data());
  stream.avail_out = static_cast<uInt>(text.size());
  constexpr int kGzip = 16 + MAX_WBITS;
  if (inflateInit2(&stream, kGzip) != Z_OK) broken("zlib cannot start");
  const int result = inflate(&stream, Z_FINISH);
  text.resize(stream.total_out);
  inflateEnd(&stream);
  if (result != Z_STREAM_END) broken("gzip error " + std::to_string(result));
  return text;
}

}  // namespace

Digits load_digits() {
  const std::string text = unzip();
  Digits digits;
  digits.pixels.reserve(Digits::kSamples);
  std::array<uint8_t, 64> pixels{};
  size_t column = 0;
  int value = 0;
  for (const char c : text) {
    if (c >= '0' && c <= '9') {
      value = value * 10 + (c - '0');
      continue;
    }
    const bool last = column == pixels.size();
    if ((c == '\n') != last || value > (last ? 9 : Digits::kMaxInk)) {
      broken("sample " + std::to_string(digits.labels.size()));
    }
    if (last) {
      digits.pixels.push_back(pixels);
      digits.labels.push_back(static_cast<uint8_t>(value));
      column = 0;
    } else {
      pixels[column++] = static_cast<uint8_t>(value);
    }
    value = 0;
  }
  if (digits.labels.size() != Digits::kSamples) {
    broken(std::to_string(digits.labels.size()) + " samples, not 1797");
  }
  return digits;
}

}  // namespace echelon
