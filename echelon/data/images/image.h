// Decoding of JPEG and PNG files, which may be malicious.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace echelon {

/// Pixels of 4 bytes: red, green, blue, and one that is ignored. Valid until
/// the decoder is used again.
struct Raster {
  int64_t width = 0;
  int64_t height = 0;
  const uint8_t* pixels = nullptr;  // row by row, no padding between rows
  /// Each pixel stands for reduction x reduction pixels of the file.
  int64_t reduction = 1;
};

/// Reads one file after the other and reuses its memory. One per thread.
///
/// The result is that of Pillow's convert("RGB"): grey, palette and CMYK become
/// RGB, alpha is dropped, EXIF orientation and colour profiles are ignored, and
/// 16 bits are reduced to the upper 8. A file is broken if its content is
/// neither JPEG nor PNG, if it is truncated, or if the decoder gives a warning:
/// DataError then names the file.
class ImageDecoder {
 public:
  ImageDecoder();
  ~ImageDecoder();
  ImageDecoder(const ImageDecoder&) = delete;
  ImageDecoder& operator=(const ImageDecoder&) = delete;

  struct Size {
    int64_t width = 0;
    int64_t height = 0;
  };

  /// Reads the file and its header. Throws DataError, before decoding anything,
  /// when it has more than `max_pixels` pixels.
  Size open(const std::string& path, int64_t max_pixels);

  /// Decodes the open file. A JPEG is decoded at a size reduced by the largest
  /// of 1, 2, 4 and 8 that is at most `most_reduction`, which saves most of the
  /// work; a PNG is always decoded at full size.
  Raster decode(double most_reduction);

 private:
  struct Jpeg;
  struct Png;
  void read_file();
  Size open_jpeg();
  Size open_png();
  Raster decode_jpeg(double most_reduction);
  Raster decode_png();
  uint8_t* reserve_pixels(size_t bytes);
  [[noreturn]] void broken(const std::string& why) const;

  std::string path_;
  std::vector<uint8_t> file_;
  std::unique_ptr<uint8_t[]> pixels_;
  size_t pixels_bytes_ = 0;
  std::unique_ptr<Jpeg> jpeg_;
  std::unique_ptr<Png> png_;
  bool is_jpeg_ = false;
};

}  // namespace echelon
