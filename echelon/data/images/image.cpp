// Files may be hostile: sizes are checked against limits before memory is
// taken, and both decoders are left usable after an error. libpng reports
// errors by longjmp, so calls that may fail are in functions whose setjmp frame
// holds no object with a destructor. The JPEG decoder and the buffers are kept
// from image to image.
#include "echelon/data/images/image.h"

#include <fcntl.h>
#include <png.h>
#include <sys/stat.h>
#include <turbojpeg.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csetjmp>
#include <cstring>
#include <utility>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

constexpr int64_t kMaxFileBytes = int64_t{1} << 30;
/// More memory than this is released after the image that needed it.
constexpr size_t kKeptBytes = size_t{64} << 20;

struct FileHandle {
  int fd = -1;
  ~FileHandle() {
    if (fd >= 0) ::close(fd);
  }
};

}  // namespace

struct ImageDecoder::Jpeg {
  tjhandle handle = nullptr;
  int width = 0;
  int height = 0;
  int colour = 0;

  ~Jpeg() { reset(); }
  void reset() {
    if (handle) tjDestroy(handle);
    handle = nullptr;
  }
};

struct ImageDecoder::Png {
  png_structp png = nullptr;
  png_infop info = nullptr;
  const uint8_t* from = nullptr;
  size_t left = 0;
  char message[256] = {};
  std::jmp_buf jump;
  std::vector<png_bytep> rows;

  ~Png() { reset(); }
  void reset() {
    if (png) png_destroy_read_struct(&png, &info, nullptr);
    png = nullptr;
    info = nullptr;
  }

  static void on_error(png_structp png, png_const_charp text) {
    auto* self = static_cast<Png*>(png_get_error_ptr(png));
    std::strncpy(self->message, text, sizeof(self->message) - 1);
    std::longjmp(self->jump, 1);
  }
  static void on_warning(png_structp, png_const_charp) {}
  static void on_read(png_structp png, png_bytep to, size_t bytes) {
    auto* self = static_cast<Png*>(png_get_io_ptr(png));
    if (bytes > self->left) png_error(png, "it is truncated");
    std::memcpy(to, self->from, bytes);
    self->from += bytes;
    self->left -= bytes;
  }

  // setjmp's frames hold no object with a destructor: longjmp skips those.
  bool read_header() {
    if (setjmp(jump)) return false;
    // Colour profiles and texts are ignored, so they are not unpacked, whatever
    // size they claim to have.
    static const png_byte kIgnored[] =
        "iCCP\0zTXt\0iTXt\0tEXt\0sPLT\0eXIf\0hIST\0pCAL\0sCAL";
    png_set_keep_unknown_chunks(
        png, PNG_HANDLE_CHUNK_NEVER, kIgnored, sizeof(kIgnored) / 5);
    png_set_keep_unknown_chunks(png, PNG_HANDLE_CHUNK_NEVER, nullptr, 0);
    png_set_user_limits(png, PNG_UINT_31_MAX, PNG_UINT_31_MAX);
    png_set_chunk_malloc_max(png, 8 << 20);
    png_set_chunk_cache_max(png, 128);
    png_set_read_fn(png, this, on_read);
    png_read_info(png, info);
    return true;
  }
  bool read_pixels() {
    if (setjmp(jump)) return false;
    png_read_image(png, rows.data());
    png_read_end(png, nullptr);
    return true;
  }
  bool choose_rgbx() {
    if (setjmp(jump)) return false;
    png_set_expand(png);
    png_set_strip_16(png);
    png_set_strip_alpha(png);
    png_set_gray_to_rgb(png);
    png_set_filler(png, 0xff, PNG_FILLER_AFTER);
    png_set_interlace_handling(png);
    png_read_update_info(png, info);
    if (png_get_rowbytes(png, info) != 4u * png_get_image_width(png, info)) {
      png_error(png, "its pixels do not become RGB");
    }
    return true;
  }
};

ImageDecoder::ImageDecoder()
    : jpeg_(std::make_unique<Jpeg>()), png_(std::make_unique<Png>()) {}

ImageDecoder::~ImageDecoder() = default;

void ImageDecoder::broken(const std::string& why) const {
  throw DataError(path_ + ": broken image: " + why);
}

void ImageDecoder::read_file(const std::string& path, Part part) {
  const FileHandle file{
      ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  struct stat status = {};
  if (file.fd < 0 || ::fstat(file.fd, &status) != 0) {
    throw DataError(path_ + ": cannot be read: " + std::strerror(errno));
  }
  if (!S_ISREG(status.st_mode)) throw DataError(path_ + ": is not a file");
  const int64_t bytes = part.bytes < 0 ? status.st_size : part.bytes;
  if (bytes > kMaxFileBytes) {
    throw DataError(format(
        "{}: {} bytes; an image file has at most {}", path_, bytes,
        kMaxFileBytes));
  }
  file_.resize(static_cast<size_t>(bytes));
  size_t done = 0;
  while (done < file_.size()) {
    const ssize_t got = ::pread(
        file.fd, file_.data() + done, file_.size() - done,
        part.offset + static_cast<int64_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      throw DataError(path_ + ": cannot be read: " + std::strerror(errno));
    }
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  file_.resize(done);
}

uint8_t* ImageDecoder::reserve_pixels(size_t bytes) {
  bytes += 4;  // Resizer may read one pixel behind the last, with weight 0
  if (bytes > pixels_bytes_ ||
      (pixels_bytes_ > kKeptBytes && bytes <= kKeptBytes)) {
    pixels_.reset();  // before the new one is there
    pixels_ = std::make_unique_for_overwrite<uint8_t[]>(bytes);
    pixels_bytes_ = bytes;
  }
  return pixels_.get();
}

ImageDecoder::Size
ImageDecoder::open(const std::string& path, int64_t max_pixels, Part part) {
  path_ = path;
  if (part.bytes >= 0) path_ += format(" at byte {}", part.offset);
  if (file_.capacity() > kKeptBytes) std::vector<uint8_t>().swap(file_);
  read_file(path, part);
  static constexpr uint8_t kJpeg[] = {0xff, 0xd8, 0xff};
  static constexpr uint8_t kPng[] = {0x89, 'P', 'N', 'G', '\r', '\n', 26, '\n'};
  const auto begins_with = [&](const uint8_t* magic, size_t bytes) {
    return file_.size() >= bytes &&
           std::memcmp(file_.data(), magic, bytes) == 0;
  };
  is_jpeg_ = begins_with(kJpeg, sizeof(kJpeg));
  if (file_.empty()) broken("the file is empty");
  if (!is_jpeg_ && !begins_with(kPng, sizeof(kPng))) {
    broken("its content is neither JPEG nor PNG");
  }
  const Size size = is_jpeg_ ? open_jpeg() : open_png();
  if (size.width < 1 || size.height < 1) broken("it has no pixels");
  if (size.width > max_pixels / size.height) {
    throw DataError(format(
        "{}: {}x{} pixels are more than {}; if the file can be trusted, raise "
        "[data] max_image_pixels",
        path_, size.width, size.height, max_pixels));
  }
  return size;
}

ImageDecoder::Size ImageDecoder::open_jpeg() {
  auto& jpeg = *jpeg_;
  if (!jpeg.handle) jpeg.handle = tjInitDecompress();
  if (!jpeg.handle) throw Error("TurboJPEG cannot start");
  int subsampling = 0;
  if (tjDecompressHeader3(
          jpeg.handle, file_.data(), file_.size(), &jpeg.width, &jpeg.height,
          &subsampling, &jpeg.colour) != 0) {
    const std::string why = tjGetErrorStr2(jpeg.handle);
    jpeg.reset();  // unusable after an error
    broken(why);
  }
  return {jpeg.width, jpeg.height};
}

Raster ImageDecoder::decode_jpeg(double most_reduction) {
  auto& jpeg = *jpeg_;
  int reduction = 1;
  while (reduction < 8 && 2 * reduction <= most_reduction) reduction *= 2;
  const auto reduced = [&](int size) {
    return (size + reduction - 1) / reduction;
  };
  const int width = reduced(jpeg.width), height = reduced(jpeg.height);
  const size_t count = static_cast<size_t>(width) * static_cast<size_t>(height);
  uint8_t* pixels = reserve_pixels(4 * count);
  const bool inks = jpeg.colour == TJCS_CMYK || jpeg.colour == TJCS_YCCK;
  if (tjDecompress2(
          jpeg.handle, file_.data(), file_.size(), pixels, width, 4 * width,
          height, inks ? TJPF_CMYK : TJPF_RGBX,
          TJFLAG_STOPONWARNING | TJFLAG_LIMITSCANS) != 0) {
    const std::string why = tjGetErrorStr2(jpeg.handle);
    jpeg.reset();
    broken(why);
  }
  if (inks) {
    // Files hold the inks inverted, as Adobe writes them: 255 is no ink. The
    // products are divided by 255 with exact rounding.
    for (uint8_t* p = pixels; p < pixels + 4 * count; p += 4) {
      const int light = p[3];
      for (int c = 0; c < 3; ++c) {
        const int product = (255 - p[c]) * light + 128;
        const int ink = ((product >> 8) + product) >> 8;
        p[c] = static_cast<uint8_t>(std::clamp(light - ink, 0, 255));
      }
    }
  }
  return {width, height, pixels, reduction};
}

ImageDecoder::Size ImageDecoder::open_png() {
  auto& png = *png_;
  png.reset();
  png.from = file_.data();
  png.left = file_.size();
  png.png = png_create_read_struct(
      PNG_LIBPNG_VER_STRING, &png, Png::on_error, Png::on_warning);
  if (png.png) png.info = png_create_info_struct(png.png);
  if (!png.info) throw Error("libpng cannot start");
  if (!png.read_header()) broken(png.message);
  return {
      png_get_image_width(png.png, png.info),
      png_get_image_height(png.png, png.info)};
}

Raster ImageDecoder::decode_png() {
  auto& png = *png_;
  const size_t width = png_get_image_width(png.png, png.info);
  const size_t height = png_get_image_height(png.png, png.info);
  if (!png.choose_rgbx()) broken(png.message);
  uint8_t* pixels = reserve_pixels(4 * width * height);
  png.rows.resize(height);
  for (size_t y = 0; y < height; ++y) png.rows[y] = pixels + 4 * width * y;
  const bool complete = png.read_pixels();
  png.reset();
  if (!complete) broken(png.message);
  return {static_cast<int64_t>(width), static_cast<int64_t>(height), pixels, 1};
}

Raster ImageDecoder::decode(double most_reduction) {
  return is_jpeg_ ? decode_jpeg(most_reduction) : decode_png();
}

}  // namespace echelon
