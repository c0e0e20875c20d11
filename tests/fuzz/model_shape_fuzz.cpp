// Hugging Face configurations: whatever the bytes, a shape that can be counted,
// or a DataError.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "echelon/cost/model_catalogue.h"
#include "echelon/error.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const auto model = echelon::cost::parse_hugging_face_config(
        {reinterpret_cast<const char*>(data), size}, "config.json");
    if (!(model.num_parameters() > 0)) std::abort();
    if (!(model.active_parameters() <= model.num_parameters())) std::abort();
    if (!(model.model_flops(16, false) > 0)) std::abort();
  } catch (const echelon::DataError&) {
  }
  return 0;
}
