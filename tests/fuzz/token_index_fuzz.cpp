// Any bytes are an index of tokens that is refused with a DataError, or one
// whose documents follow each other over all tokens.
#include <cstdlib>

#include "echelon/data/sources/token_file.h"
#include "echelon/error.h"

namespace {

void check(bool holds) {
  if (!holds) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace echelon;
  // The first two bytes are the size of the .bin.
  if (size < 2) return 0;
  const uint64_t bin_bytes = data[0] + 256u * data[1];
  const auto file = std::as_bytes(std::span(data + 2, size - 2));
  try {
    const TokenIndex index = parse_token_index(file, bin_bytes, "fuzz");
    check(index.num_documents >= 0);
    check(
        static_cast<uint64_t>(index.num_tokens) * token_bytes(index.type) ==
        bin_bytes);
    int64_t before = 0;
    for (int64_t d = 0; d <= index.num_documents; ++d) {
      const int64_t begin = index.document_begin(d);
      check(begin >= before && begin <= index.num_tokens);
      before = begin;
    }
    check(before == index.num_tokens);
  } catch (const DataError&) {
  }
  return 0;
}
