// Plain text, tokenised once: the tokens are stored in the user's cache folder
// and memory-mapped from there.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/data/sources/token_file.h"
#include "echelon/data/tokenizer/tokenizer.h"

namespace echelon {

/// ECHELON_CACHE, XDG_CACHE_HOME/echelon or ~/.cache/echelon, then "tokens".
/// Throws ConfigError when none of the variables nor HOME is set.
std::string token_cache_folder();

/// How plain text is split into documents of tokens.
struct TextRecipe {
  std::string tokenizer = "bytes";  // a name of load_tokenizer()
  /// Separates the documents of a file and is dropped; "": each file is one.
  std::string separator;
  int64_t end_of_text = -1;  // a token added after each document; -1: none
};

/// The tokens of `files`, one file after the other, with their documents. Empty
/// documents are dropped.
///
/// The cached pair of files (token_file.h) is keyed by the texts, the tokenizer
/// and the recipe. A text above 64 MiB counts by its path, size, modification
/// time, and first and last MiB. Texts are mapped and encoded in pieces of
/// about 1 MiB (TextCut). A damaged pair is replaced.
///
/// Throws DataError for a file that cannot be read or written, and for a text
/// that the tokenizer cannot encode.
TokenFile tokenise(
    const std::vector<std::string>& files, const TextRecipe& recipe,
    const Tokenizer& tokenizer);

/// The place near `near` (0 < near < text.size()) where `cut` allows to split
/// `text`; the size of `text` when there is none after `near`.
size_t find_cut(std::string_view text, size_t near, TextCut cut);

}  // namespace echelon
