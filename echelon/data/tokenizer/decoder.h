// The "decoder" of a tokenizer.json: how tokens become text again. Known:
// Sequence, ByteLevel, ByteFallback, Fuse, Replace, Strip, Metaspace.
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace echelon::detail {

class Decoder {
 public:
  virtual ~Decoder() = default;
  /// Changes the texts of tokens, which are joined afterwards.
  virtual void apply(std::vector<std::string>& tokens) const = 0;
};

/// Throws as make_normalizer().
std::unique_ptr<Decoder>
make_decoder(const nlohmann::json& description, const std::string& place);

}  // namespace echelon::detail
