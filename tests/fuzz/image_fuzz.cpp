// Any bytes are an image that becomes finite numbers, or one that is refused
// with a DataError. The first byte chooses the plan.
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <string>
#include <vector>

#include "echelon/data/images/image.h"
#include "echelon/data/images/resize.h"
#include "echelon/error.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace echelon;
  static const int fd = ::memfd_create("image", MFD_CLOEXEC);
  static const std::string path = "/proc/self/fd/" + std::to_string(fd);
  static ImageDecoder decoder;
  static Resizer resizer;
  if (size == 0) return 0;
  const uint8_t choice = data[0];
  if (::ftruncate(fd, 0) != 0 ||
      ::pwrite(fd, data + 1, size - 1, 0) != static_cast<ssize_t>(size - 1)) {
    std::abort();
  }
  const int64_t side = 1 + choice % 37;
  std::vector<float> out(static_cast<size_t>(3 * side * side));
  try {
    const auto image = decoder.open(path, 1 << 16);
    const ResizePlan plan = choice & 64
                                ? random_plan(image, side, true, choice, 0, 0)
                                : center_plan(image, side);
    const Raster raster = decoder.decode(choice & 128 ? plan.shrink() : 1.0);
    resizer.run(raster, plan, side, {{1, 1, 1}, {0, 0, 0}}, out.data());
    for (const float value : out) {
      if (!(value >= 0.0f && value <= 255.0f)) std::abort();
    }
  } catch (const DataError&) {
  }
  return 0;
}
