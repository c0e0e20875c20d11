// Any bytes are an image that is decoded, or one that is refused with a
// DataError. The first byte chooses by how much the decoder may shrink it.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "echelon/data/images/image.h"
#include "echelon/error.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace echelon;
  static const int fd = ::memfd_create("image", MFD_CLOEXEC);
  static const std::string path = "/proc/self/fd/" + std::to_string(fd);
  static ImageDecoder decoder;
  if (size == 0) return 0;
  const uint8_t choice = data[0];
  if (::ftruncate(fd, 0) != 0 ||
      ::pwrite(fd, data + 1, size - 1, 0) != static_cast<ssize_t>(size - 1)) {
    std::abort();
  }
  try {
    const auto image = decoder.open(path, 1 << 16);
    (void)image;
    (void)decoder.decode(choice & 128 ? 1.0 + choice % 8 : 1.0);
  } catch (const DataError&) {
  }
  return 0;
}
