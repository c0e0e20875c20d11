// Models by name, and from a Hugging Face config.json. The convolutional
// networks that echelon trains are counted by formula, layer by layer under the
// same names: He et al., 2015, arXiv:1512.03385, table 1; a test compares with
// the counts of echelon's own layers (counting/layer_cost.h).
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "echelon/cost/model_shape.h"

namespace echelon::cost {

/// gpt2 … gpt3-175b, megatron-1.7b … megatron-1t, mt-nlg-530b, bloom-176b,
/// llama2-7b … llama3.1-405b, mixtral-8x7b, deepseek-v3, mpt-125m … mpt-70b,
/// resnet18 … resnet152, simple_cnn; and the values of [model] name that have a
/// size.
const std::vector<std::string>& catalogue_names();

/// A name of the catalogue, a config.json or a folder that has one. Throws
/// ConfigError for an unknown name, with the nearest.
ModelShape find_model(const std::string& text);

/// GPT-2, Llama, Mistral, Mixtral, Qwen 2 and 3, DeepSeek, BLOOM, MPT,
/// GPT-NeoX, OPT, gpt-oss. Throws DataError with file and key for an unknown
/// family or value.
ModelShape read_hugging_face_config(const std::filesystem::path& path);
/// The same of a text; errors call the file `name`.
ModelShape
parse_hugging_face_config(std::string_view text, const std::string& name);

struct ImageShape {
  int64_t channels = 3;
  int64_t height = 224;
  int64_t width = 224;
  bool operator==(const ImageShape&) const = default;
};

/// resnet18, resnet34, resnet50, resnet101, resnet152, simple_cnn.
const std::vector<std::string>& convolution_names();

/// `name` is one of convolution_names(). Throws ConfigError for images that are
/// too small.
ModelShape convolution_shape(
    const std::string& name, const ImageShape& image, int64_t classes);

}  // namespace echelon::cost
