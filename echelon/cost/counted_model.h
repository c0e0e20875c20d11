// Files of layers that the training wing counted, with which any network can be
// simulated.
//
//   echelon-train count first.toml --json > layers.json
//   echelon simulate first.toml --cluster h100-sxm:1x8 --layers layers.json
#pragma once

#include <filesystem>
#include <string>

#include "echelon/cost/model_shape.h"

namespace echelon {

/// One JSON object: the model's name, seq_len, and its layers with all their
/// fields.
std::string counted_model_json(const ModelShape& model);

/// Reads it back. Throws DataError with layer and key for a missing key, a
/// negative or infinite figure, or no layer.
ModelShape
parse_counted_model(const std::string& text, const std::string& name);
ModelShape read_counted_model(const std::filesystem::path& path);

}  // namespace echelon
