// Any bytes are a header that is refused with a CheckpointError, or one whose
// promises all hold.
#include <cstdlib>

#include "echelon/checkpoint/format/safetensors.h"
#include "echelon/error.h"

namespace {

void check(bool holds) {
  if (!holds) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace echelon::safetensors;
  const auto file = std::as_bytes(std::span(data, size));
  try {
    const Header header = parse(file, "fuzz");
    check(header.data_begin <= size);
    uint64_t covered = 0;
    for (const auto& tensor : header.tensors) {
      check(tensor.begin == covered && tensor.end >= tensor.begin);
      uint64_t bytes = dtype_bytes(tensor.dtype);
      check(bytes > 0 && tensor.shape.size() <= kMaxDims);
      for (const int64_t dim : tensor.shape) {
        check(dim >= 0);
        bytes *= static_cast<uint64_t>(dim);
      }
      check(tensor.end - tensor.begin == bytes);
      covered = tensor.end;
    }
    check(covered == size - header.data_begin);
  } catch (const echelon::CheckpointError&) {
  }
  return 0;
}
