// Text for training: windows of tokens from one source or a blend of several.
// Plain text is tokenised first, once.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "echelon/data/sources/json_lines.h"
#include "echelon/data/sources/order.h"
#include "echelon/data/sources/token_file.h"
#include "echelon/data/tokenizer/tokenizer.h"
#include "echelon/options/data.h"

namespace echelon {

/// The tokenizer of options.tokenizer; where that is "" and some source is
/// plain text, the tokenizer of bytes. Throws ConfigError when all sources are
/// tokens and no tokenizer is named, otherwise as load_tokenizer().
std::unique_ptr<Tokenizer> open_tokenizer(const DataOptions& options);

/// The windows of all sources, numbered source by source. A source of t tokens
/// has floor((t - 1) / sequence) windows; window i has its tokens
/// [i * sequence, (i + 1) * sequence]: the inputs, and the targets that are one
/// token ahead. Immutable; any thread may read.
class TextCorpus {
 public:
  /// Opens the files, and tokenises plain text first (tokenise()). Throws
  /// ConfigError for a wrong setting and DataError for a file that is missing,
  /// broken, empty, too short, or has ids outside of the vocabulary. If the
  /// token files have at most 256 MiB together, all their ids are checked here,
  /// otherwise ids are checked when they are read.
  explicit TextCorpus(const DataOptions& options);
  /// A corpus of held-out text with the vocabulary of `train`.
  TextCorpus(const DataOptions& options, const TextCorpus& train);

  int64_t num_samples() const { return num_samples_; }
  int64_t num_tokens() const { return num_tokens_; }
  int64_t sequence() const { return options_.sequence; }
  int64_t vocabulary() const { return vocabulary_; }
  /// Whether some source says which of its tokens count in the loss.
  bool has_masks() const;
  bool respects_documents() const {
    return options_.documents == Documents::respected;
  }
  /// "12,345 tokens of 2 sources"
  std::string describe() const;

  /// The name of each source, as in the settings, and TokenFile::fingerprint().
  std::vector<std::pair<std::string, std::string>> fingerprints() const;

  /// Reads window `sample`, `sequence` numbers each. If `documents` is not
  /// null, it gets the document of each input, counted from 0 within the
  /// window, and a target that begins another document is -100, so that it is
  /// not predicted. So is a target that a mask leaves out. Throws DataError,
  /// with file and offset, for a token outside of the vocabulary.
  void read(
      int64_t sample, int64_t* inputs, int64_t* targets,
      int64_t* documents) const;

  /// split_samples() of each source.
  Split split(double holdout, uint64_t seed) const;

  /// The order of an epoch over `samples` (as split() gives them):
  /// epoch_order() for a single source, otherwise blend_order() by the weights.
  std::vector<int64_t> training_order(
      std::vector<int64_t> samples, uint64_t seed, int64_t epoch,
      bool shuffle) const;

 private:
  struct Source {
    std::string name;  // as in the settings
    TokenFile tokens;
    std::shared_ptr<const TokenFile> mask;  // 0 or 1 for each token; null: 1
    int64_t first_sample = 0;
    int64_t num_samples = 0;
  };

  void open(const std::vector<std::string>& names);
  Source open_source(const std::string& name);
  Source open_tokens(const std::string& name) const;
  void find_vocabulary();
  void number_samples();
  const Tokenizer& tokenizer();
  size_t source_of(int64_t sample) const;
  void write_documents(
      const Source& source, int64_t begin, const int64_t* tokens,
      int64_t* targets, int64_t* documents) const;

  DataOptions options_;
  std::shared_ptr<const Tokenizer> tokenizer_;  // loaded when needed
  std::vector<Source> sources_;
  int64_t end_of_text_ = -1;  // ends documents of plain token files; -1: none
  int64_t vocabulary_ = 0;
  int64_t num_samples_ = 0;
  int64_t num_tokens_ = 0;
};

/// The files that a source names: `name` itself or, if it contains one of * ?
/// [, the files that match, sorted by their bytes. Throws DataError when none
/// does.
std::vector<std::string> expand_source(const std::string& name);

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
/// documents are dropped. Plain text is tokenised once: the tokens are stored
/// in the user's cache folder and memory-mapped from there.
///
/// The cached pair of files (token_file.h) is keyed by the texts, the tokenizer
/// and the recipe. A text above 64 MiB counts by its path, size, modification
/// time, and first and last MiB. Texts are mapped and encoded in pieces of
/// about 1 MiB (TextSplit). A third file, .sums, has checksums of the pair
/// (TokenFile::checksums()). A pair that differs from them, or is otherwise
/// damaged, is made anew with a warning; a block of a .bin of more than 256 MiB
/// that differs is an error when it is first read.
///
/// Throws DataError for a file that cannot be read or written, and for a text
/// that the tokenizer cannot encode.
TokenFile tokenise(
    const std::vector<std::string>& files, const TextRecipe& recipe,
    const Tokenizer& tokenizer);

/// Tokens, and which of them count in the loss.
struct MaskedTokens {
  TokenFile tokens;
  std::shared_ptr<const TokenFile> mask;  // null: all of them
};

/// The same for .jsonl files, whose lines are documents (json_lines.h). Empty
/// lines are left out. The mask is a pair of files of its own, beside that of
/// the tokens. Throws DataError as
/// tokens_of_line(), with the file and the line.
///
///   tokenizer_file  as TextRecipe::tokenizer
MaskedTokens tokenise_lines(
    const std::vector<std::string>& files, const LineRecipe& recipe,
    const std::string& tokenizer_file, const Tokenizer& tokenizer);

/// The place near `near` (0 < near < text.size()) where `split` allows to split
/// `text`; the size of `text` when there is none after `near`.
size_t find_split(std::string_view text, size_t near, TextSplit split);

}  // namespace echelon
