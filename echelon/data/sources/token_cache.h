// Plain text, tokenised once: the tokens are kept in the user's cache folder
// and mapped afterwards.
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

/// How plain text becomes documents of tokens.
struct TextRecipe {
  std::string tokenizer = "bytes";  // a name of load_tokenizer()
  /// Parts a file into documents, and is left out; "": each file is one.
  std::string separator;
  int64_t end_of_text = -1;  // a token put behind each document; -1: none
};

/// The tokens of `files`, one after the other, with their documents. Empty
/// documents are left out.
///
/// The cached pair of files (token_file.h) is keyed by the texts, the tokenizer
/// and the recipe: a text above 64 MiB by its path, size, time of change, first
/// and last MiB. Texts are mapped and encoded in pieces of about 1 MiB
/// (TextCut). A pair that is damaged is made anew.
///
/// Throws DataError: a file that cannot be read or written, a text that the
/// tokenizer cannot encode.
TokenFile tokenise(
    const std::vector<std::string>& files, const TextRecipe& recipe,
    const Tokenizer& tokenizer);

/// Where `text` may be cut near `near` (0 < near < text.size()), by `cut`; its
/// size when there is no such place behind it.
size_t find_cut(std::string_view text, size_t near, TextCut cut);

}  // namespace echelon
