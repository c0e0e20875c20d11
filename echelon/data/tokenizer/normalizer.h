// The "normalizer" of a tokenizer.json: how a text is changed before it is
// split. Known: Sequence, Prepend, Replace, NFC, NFD, NFKC, NFKD, Lowercase,
// Strip.
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace echelon::detail {

class Normalizer {
 public:
  virtual ~Normalizer() = default;
  virtual void apply(std::string& text) const = 0;
};

/// Throws DataError that begins with `place` and names what is not known.
std::unique_ptr<Normalizer>
make_normalizer(const nlohmann::json& description, const std::string& place);

}  // namespace echelon::detail
