// Decoding of JPEG and PNG files, from whoever made them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace echelon {

/// Pixels of 4 bytes: red, green, blue, and one without meaning. Valid until
/// the decoder is used again.
struct Raster {
  int64_t width = 0;
  int64_t height = 0;
  const uint8_t* pixels = nullptr;  // row by row, no padding between rows
  /// Each pixel stands for reduction x reduction pixels of the file.
  int64_t reduction = 1;
};

/// Reads one file after the other; keeps its memory in between. One per thread.
///
/// The result is what Pillow's convert("RGB") gives: grey, palette and CMYK
/// become RGB, alpha is dropped, EXIF orientation and colour profiles are
/// ignored; of 16 bits the upper 8 are taken. A file whose content is neither
/// JPEG nor PNG, that is cut off, or that the decoder only reads with a warning
/// is broken: DataError names the file.
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

  /// Reads the file and its header. Throws DataError when it has more than
  /// `max_pixels` pixels; nothing has been decoded then.
  Size open(const std::string& path, int64_t max_pixels);

  /// Decodes what was opened. A JPEG is decoded smaller by the largest of 1, 2,
  /// 4 and 8 that is not above `most_reduction`, which saves most of the work;
  /// a PNG is always decoded whole.
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
