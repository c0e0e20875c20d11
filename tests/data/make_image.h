// Image files for tests.
#pragma once

#include <png.h>
#include <turbojpeg.h>

#include <csetjmp>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace echelon {

/// RGB, 3 bytes a pixel: a gradient with an edge, so that no two rows or
/// columns are equal.
inline std::vector<uint8_t> test_pixels(int width, int height) {
  std::vector<uint8_t> pixels;
  for (int y = 0; y < height; ++y) {
    for (int x = 0; x < width; ++x) {
      const bool inside = 3 * x > width && 2 * y > height;
      pixels.push_back(static_cast<uint8_t>(255 * x / width));
      pixels.push_back(static_cast<uint8_t>(255 * y / height));
      pixels.push_back(static_cast<uint8_t>(inside ? 200 : (x + y) & 127));
    }
  }
  return pixels;
}

inline std::string
make_jpeg(int width, int height, int subsampling = TJSAMP_420, int flags = 0) {
  auto pixels = test_pixels(width, height);
  tjhandle handle = tjInitCompress();
  unsigned char* out = nullptr;
  unsigned long bytes = 0;
  if (tjCompress2(
          handle, pixels.data(), width, 0, height, TJPF_RGB, &out, &bytes,
          subsampling, 90, flags) != 0) {
    throw std::runtime_error(tjGetErrorStr2(handle));
  }
  const std::string file(reinterpret_cast<char*>(out), bytes);
  tjFree(out);
  tjDestroy(handle);
  return file;
}

/// PNG of the given colour type; `pixels` are rows of its own format.
inline std::string make_png(
    int width, int height, int colour, int depth,
    const std::vector<uint8_t>& pixels, bool interlaced = false) {
  std::string file;
  png_structp png =
      png_create_write_struct(PNG_LIBPNG_VER_STRING, nullptr, nullptr, nullptr);
  png_infop info = png_create_info_struct(png);
  png_set_write_fn(
      png, &file,
      [](png_structp self, png_bytep data, size_t bytes) {
        static_cast<std::string*>(png_get_io_ptr(self))
            ->append(reinterpret_cast<char*>(data), bytes);
      },
      nullptr);
  png_set_IHDR(
      png, info, static_cast<png_uint_32>(width),
      static_cast<png_uint_32>(height), depth, colour,
      interlaced ? PNG_INTERLACE_ADAM7 : PNG_INTERLACE_NONE,
      PNG_COMPRESSION_TYPE_DEFAULT, PNG_FILTER_TYPE_DEFAULT);
  if (colour == PNG_COLOR_TYPE_PALETTE) {
    const png_color palette[] = {{255, 0, 0}, {0, 255, 0}, {0, 0, 255}};
    png_set_PLTE(png, info, palette, 3);
    const png_byte alpha[] = {0, 128};
    png_set_tRNS(png, info, alpha, 2, nullptr);
  }
  png_write_info(png, info);
  std::vector<png_bytep> rows;
  const size_t row_bytes = png_get_rowbytes(png, info);
  for (int y = 0; y < height; ++y) {
    rows.push_back(const_cast<png_bytep>(
        pixels.data() + static_cast<size_t>(y) * row_bytes));
  }
  png_write_image(png, rows.data());
  png_write_end(png, nullptr);
  png_destroy_write_struct(&png, &info);
  return file;
}

inline std::string make_png(int width, int height, bool interlaced = false) {
  return make_png(
      width, height, PNG_COLOR_TYPE_RGB, 8, test_pixels(width, height),
      interlaced);
}

inline std::string png_chunk(const std::string& type, const std::string& data) {
  const auto number = [](uint32_t value) {
    std::string text;
    for (int shift = 24; shift >= 0; shift -= 8) {
      text += static_cast<char>(value >> shift);
    }
    return text;
  };
  const std::string body = type + data;
  uint32_t crc = ~0u;
  for (const char c : body) {
    crc ^= static_cast<uint8_t>(c);
    for (int bit = 0; bit < 8; ++bit) {
      crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
    }
  }
  return number(static_cast<uint32_t>(data.size())) + body + number(~crc);
}

}  // namespace echelon
