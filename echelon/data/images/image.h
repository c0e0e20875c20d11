// Decoding of JPEG and PNG files, which may be malicious; and resizing: a box
// is cut out of an image, resized and turned into normalised floats, in one go.
// Only the pixels that are asked for are computed, and they are written where
// the batch wants them.
#pragma once

#include <array>
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

  /// Part of a file; -1 bytes: all of it.
  struct Part {
    int64_t offset = 0;
    int64_t bytes = -1;
  };

  /// Reads the file, or a part of it, and the image's header. Throws DataError,
  /// before decoding anything, when it has more than `max_pixels` pixels.
  Size open(const std::string& path, int64_t max_pixels, Part part);
  Size open(const std::string& path, int64_t max_pixels) {
    return open(path, max_pixels, {});
  }

  /// Decodes the open file. A JPEG is decoded at a size reduced by the largest
  /// of 1, 2, 4 and 8 that is at most `most_reduction`, which saves most of the
  /// work; a PNG is always decoded at full size.
  Raster decode(double most_reduction);

 private:
  struct Jpeg;
  struct Png;
  void read_file(const std::string& path, Part part);
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

/// The part of an image that becomes the sample.
struct ResizePlan {
  /// The box that is resized, in pixels of the file.
  double left = 0, top = 0, right = 0, bottom = 0;
  /// Its size after that.
  int64_t width = 0, height = 0;
  /// The corner of the window, size x size, that is kept of it.
  int64_t window_left = 0, window_top = 0;
  bool flip = false;  // mirrored left to right

  /// Pixels of the file per pixel of the result, the lesser of both directions.
  double shrink() const;
};

/// Resize the shorter side to `size`, then crop the centre: torchvision's
/// Resize(size) and CenterCrop(size).
ResizePlan center_plan(ImageDecoder::Size image, int64_t size);

/// A box of 8 % to 100 % of the area and a width of 3/4 to 4/3 of its height,
/// resized to `size`: torchvision's RandomResizedCrop(size); with `flip` it is
/// mirrored half of the time. A function of (seed, epoch, index).
ResizePlan random_plan(
    ImageDecoder::Size image, int64_t size, bool flip, uint64_t seed,
    int64_t epoch, int64_t index);

/// output = pixel * scale + shift, per channel.
struct Normalise {
  std::array<float, 3> scale;
  std::array<float, 3> shift;

  /// (pixel / 255 - mean) / std
  static Normalise
  from(const std::vector<double>& mean, const std::vector<double>& std);
};

/// Resizes, bilinear with antialiasing, in the fixed-point arithmetic of
/// Pillow's Image.resize(..., BILINEAR), rows first: equal to the bit as long
/// as the image was not decoded at a reduced size. (For some tall boxes Pillow
/// 13 begins with the columns; a pixel may then differ by one step of 255.)
/// Keeps its memory. One per thread.
class Resizer {
 public:
  /// Uses AVX2 where the processor has it; the result is the same without.
  explicit Resizer(bool allow_avx2 = true);

  /// output [3, size, size] <- `raster` by `plan`. `size` and the window lie in
  /// plan.width and plan.height.
  void
  run(const Raster& raster, const ResizePlan& plan, int64_t size,
      const Normalise& normalise, float* output);

 private:
  /// Weights of one direction. Output i reads taps pixels from first[i] on; the
  /// weights have 22 fractional bits and are kept in two halves of 11, as pairs
  /// for two neighbouring pixels.
  struct Weights {
    int64_t taps = 0;  // even
    std::vector<int32_t> first;
    std::vector<int16_t> high, low;  // [count, taps]
  };

  static void make_weights(
      Weights& weights, int64_t pixels, double begin, double end,
      int64_t resized, int64_t window, int64_t count, bool mirrored);
  bool wide_;

  Weights x_;
  Weights y_;
  std::vector<uint8_t> rows_;
};

}  // namespace echelon
