// Hugging Face's config.json: of any family as a shape, of those that are
// trained here (architectures() in language_model.h) as the options for it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "echelon/architecture/transformer_shape.h"
#include "echelon/options/model.h"

namespace echelon::hugging_face {

struct ConfigShape {
  TransformerShape shape;
  int64_t positions = 0;  // tokens of the longest sequence
};

/// GPT-2, Llama, Mistral, Mixtral, Qwen 2 and 3, Gemma, DeepSeek, BLOOM,
/// MPT, GPT-NeoX, OPT, gpt-oss. Errors call the file `name`. Throws DataError
/// with file and key for an unknown family or value; whether the numbers fit
/// together is not checked.
ConfigShape parse_shape(std::string_view text, const std::string& name);

/// Throws DataError when the file cannot be read or is empty.
std::string read_config_text(const std::filesystem::path& path);

/// The model of a config.json, every number set: name "gpt" for
/// GPT2LMHeadModel, "llama" for LlamaForCausalLM and so on; where no
/// architecture is named, by model_type. Missing fields have transformers'
/// defaults.
///
///   path  of the config.json
///
/// Throws DataError, with the field, its value and the known values, when the
/// file is missing or malformed, for another architecture, and for settings
/// that these models do not support: other activations, biases or scalings of
/// positions, windows in other layers than the architecture has them, a
/// quantised model, dropouts that differ …
ModelOptions read_config(const std::string& path);

}  // namespace echelon::hugging_face
