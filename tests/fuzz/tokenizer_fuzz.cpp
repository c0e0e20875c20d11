// Any bytes are a tokenizer.json that is refused with a DataError, or one that
// encodes texts to its own ids and decodes these.
#include <cstdlib>

#include "echelon/data/tokenizer/tokenizer.h"
#include "echelon/error.h"

namespace {

void check(bool holds) {
  if (!holds) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace echelon;
  const std::string_view content(reinterpret_cast<const char*>(data), size);
  std::unique_ptr<Tokenizer> tokenizer;
  try {
    tokenizer = parse_json_tokenizer(content, "fuzz");
  } catch (const DataError&) {
    return 0;
  }
  for (const std::string_view text :
       {"abc ab  <s>\n1 don't", "\xff\xc3\xa9 \xe2\x96\x81x", ""}) {
    try {
      for (const bool specials : {false, true}) {
        const auto ids = tokenizer->encode(text, specials);
        for (const TokenId id : ids) {
          check(id >= 0 && id < tokenizer->vocab_size());
        }
        tokenizer->decode(ids);
      }
    } catch (const DataError&) {
    }
  }
  return 0;
}
