// Models by name, and from a Hugging Face config.json.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "echelon/cost/model_shape.h"

namespace echelon {

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

}  // namespace echelon
