// Options name sources, and each becomes a TokenFile: a pair of .bin and .idx,
// a plain .bin, or text that tokenise() turns into a pair first. Samples are
// windows that overlap by one token, numbered source by source, so a sample's
// source is found by binary search. Blends of sources are made by order.h
// alone.
#include "echelon/data/sources/text.h"

#include <glob.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <utility>

#include "echelon/error.h"
#include "echelon/storage/local_copy.h"
#include "echelon/storage/settings.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kIgnored = -100;
constexpr int64_t kCheckedBytes = int64_t{256} << 20;
constexpr int64_t kLargestVocabulary = std::numeric_limits<int32_t>::max();

[[noreturn]] void
fail(const char* key, int64_t value, const std::string& rule) {
  throw ConfigError(format("[data] {}={}: {}", key, value, rule));
}

bool exists(const std::string& path) {
  return storage::exists_there(path);
}

void check_weights(const DataOptions& options, size_t sources) {
  if (options.weights.empty()) return;
  if (options.weights.size() != sources) {
    throw ConfigError(format(
        "[data] weights has {} numbers for {} source{}; give one for each, or "
        "none",
        options.weights.size(), sources, sources == 1 ? "" : "s"));
  }
  for (const double weight : options.weights) {
    if (!(weight > 0 && std::isfinite(weight))) {
      throw ConfigError(format(
          "[data] weights holds {:f}; each must be more than 0", weight));
    }
  }
}

std::vector<std::string> source_names(const DataOptions& options) {
  if (!options.path.empty() && !options.sources.empty()) {
    throw ConfigError(
        "[data] path and sources are both set; use sources = [\"" +
        options.path + "\", ...] for all");
  }
  if (!options.path.empty()) return {options.path};
  if (options.sources.empty()) {
    throw ConfigError(
        "[data] name=\"text\" needs path or sources: text files, or tokens in "
        ".bin files");
  }
  return options.sources;
}

void check_options(const DataOptions& options) {
  if (options.sequence < 1) {
    fail("sequence", options.sequence, "must be 1 or more");
  }
  if (options.token_bytes != 0 && options.token_bytes != 2 &&
      options.token_bytes != 4) {
    fail(
        "token_bytes", options.token_bytes, "must be 2 (uint16) or 4 (uint32)");
  }
  if (options.vocab_size < 0 || options.vocab_size > kLargestVocabulary) {
    fail(
        "vocab_size", options.vocab_size,
        "must be 0 (the tokenizer's) to 2147483647");
  }
}

enum class FileKind { text, lines, flat, indexed };

struct Files {
  FileKind kind = FileKind::text;
  std::string bin;
  std::string idx;
};

// Whether the source is tokenised.
bool is_plain(FileKind kind) {
  return kind == FileKind::text || kind == FileKind::lines;
}

// Throws unless the mask has a number for each token.
void check_mask(const TokenFile& mask, const TokenFile& tokens) {
  if (mask.size() == tokens.size()) return;
  throw DataError(format(
      "{}: has {} numbers, but {} has {} tokens; a mask has one byte for each "
      "token, 0 or 1",
      mask.path(), mask.size(), tokens.path(), tokens.size()));
}

Files files_of(const std::string& name, TextFormat format) {
  const bool bin = name.ends_with(".bin");
  const bool idx = name.ends_with(".idx");
  const std::string stem = bin || idx ? name.substr(0, name.size() - 4) : name;
  const Files indexed{FileKind::indexed, stem + ".bin", stem + ".idx"};
  switch (format) {
    case TextFormat::text:
      return {};
    case TextFormat::tokens:
      return {FileKind::flat, name, ""};
    case TextFormat::indexed:
      return indexed;
    case TextFormat::jsonl:
      return {FileKind::lines, "", ""};
    case TextFormat::by_suffix:
      break;
  }
  if (idx || (bin && exists(indexed.idx))) return indexed;
  if (bin) return {FileKind::flat, name, ""};
  if (name.ends_with(".jsonl") || name.ends_with(".parquet")) {
    return {FileKind::lines, "", ""};
  }
  // A name without suffix means the pair of files that begin with it.
  if (!exists(name) && exists(indexed.idx)) return indexed;
  return {};
}

}  // namespace

std::unique_ptr<Tokenizer> open_tokenizer(const DataOptions& options) {
  if (!options.tokenizer.empty()) {
    return load_tokenizer(storage::local_copy(options.tokenizer));
  }
  const auto names = source_names(options);
  const bool has_text = std::ranges::any_of(names, [&](const auto& name) {
    return is_plain(files_of(name, options.format).kind);
  });
  if (has_text) return load_tokenizer("bytes");
  throw ConfigError(format(
      "[data] tokenizer is not set, and {} has tokens, not text; name the "
      "tokenizer that they were made with",
      names.front()));
}

std::vector<std::string> expand_source(const std::string& name) {
  if (storage::is_object_url(name)) return {storage::local_copy(name)};
  if (name.find_first_of("*?[") == std::string::npos || exists(name)) {
    return {name};
  }
  glob_t found = {};
  const int result =
      ::glob(name.c_str(), GLOB_NOSORT | GLOB_ERR, nullptr, &found);
  std::vector<std::string> files;
  if (result == 0) {
    files.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  }
  const int reason = errno;
  ::globfree(&found);
  // A folder that is not there matches nothing.
  if (result == GLOB_ABORTED && reason != ENOENT && reason != ENOTDIR) {
    throw DataError(name + ": cannot be read: " + std::strerror(reason));
  }
  std::erase_if(files, [](const auto& file) {
    std::error_code ignored;
    return fs::is_directory(file, ignored);
  });
  if (files.empty()) {
    throw DataError(
        name +
        ": the pattern matches no file; relative paths start in the "
        "current folder");
  }
  std::sort(files.begin(), files.end());
  return files;
}

TextCorpus::TextCorpus(const DataOptions& options) : options_(options) {
  check_options(options_);
  const auto names = source_names(options_);
  check_weights(options_, names.size());
  open(names);
  find_vocabulary();
}

TextCorpus::TextCorpus(const DataOptions& options, const TextCorpus& train)
    : options_(options), vocabulary_(train.vocabulary_) {
  options_.weights.clear();
  open({options_.holdout_path});
}

const Tokenizer& TextCorpus::tokenizer() {
  if (!tokenizer_) tokenizer_ = open_tokenizer(options_);
  return *tokenizer_;
}

void TextCorpus::open(const std::vector<std::string>& names) {
  end_of_text_ = options_.end_of_text_id;
  if (!options_.tokenizer.empty()) {
    const auto own = tokenizer().end_of_text();
    if (end_of_text_ < 0 && own) end_of_text_ = *own;
  }
  for (const auto& name : names) sources_.push_back(open_source(name));
  number_samples();
}

TextCorpus::Source TextCorpus::open_tokens(const std::string& name) const {
  const Files files = files_of(name, options_.format);
  const auto bin = storage::local_copy(files.bin);
  const auto open = [&]() -> TokenFile {
    if (files.kind == FileKind::indexed) {
      return {bin, storage::local_copy(files.idx)};
    }
    if (respects_documents() && end_of_text_ < 0) {
      throw ConfigError(format(
          "[data] documents=\"respected\": {} does not say where documents "
          "end; set end_of_text_id, the token that ends one, or use a file "
          "with an .idx",
          name));
    }
    return {bin, options_.token_bytes == 4 ? TokenType::u32 : TokenType::u16};
  };
  Source source{name, open(), nullptr};
  const std::string mask = files.bin.substr(0, files.bin.size() - 4) + ".mask";
  if (!files.bin.ends_with(".bin") || !exists(mask)) return source;
  source.mask = std::make_shared<const TokenFile>(
      storage::local_copy(mask), TokenType::u8);
  check_mask(*source.mask, source.tokens);
  return source;
}

TextCorpus::Source TextCorpus::open_source(const std::string& name) {
  const auto kind = files_of(name, options_.format).kind;
  if (!is_plain(kind)) return open_tokens(name);
  TextRecipe recipe;
  if (!options_.tokenizer.empty()) {
    recipe.tokenizer = storage::local_copy(options_.tokenizer);
  }
  recipe.separator = options_.document_separator;
  recipe.end_of_text = options_.end_of_text_id;
  const auto own = tokenizer().end_of_text();
  if (recipe.end_of_text < 0 && own) recipe.end_of_text = *own;
  if (recipe.end_of_text >= tokenizer().vocab_size()) {
    fail(
        "end_of_text_id", recipe.end_of_text,
        format(
            "the tokenizer has {} tokens; ids are below that",
            tokenizer().vocab_size()));
  }
  const auto files = expand_source(name);
  if (kind == FileKind::text) {
    return {name, tokenise(files, recipe, tokenizer()), nullptr};
  }
  const LineRecipe lines{
      .text_field = options_.text_field,
      .chat_template = options_.chat_template,
      .end_of_text = recipe.end_of_text};
  auto masked = tokenise_lines(files, lines, recipe.tokenizer, tokenizer());
  return {name, std::move(masked.tokens), std::move(masked.mask)};
}

bool TextCorpus::has_masks() const {
  return std::ranges::any_of(
      sources_, [](const auto& source) { return source.mask != nullptr; });
}

void TextCorpus::number_samples() {
  const int64_t sequence = options_.sequence;
  for (auto& source : sources_) {
    const int64_t tokens = source.tokens.size();
    if (tokens == 0) {
      throw DataError(source.name + ": is empty; there is nothing to train on");
    }
    source.first_sample = num_samples_;
    source.num_samples = (tokens - 1) / sequence;
    if (source.num_samples == 0) {
      throw DataError(format(
          "{}: has {} tokens; one sample of [data] sequence={} takes {}; lower "
          "sequence to at most {} or add text",
          source.name, format_count(tokens), sequence, sequence + 1,
          std::max<int64_t>(tokens - 1, 1)));
    }
    num_samples_ += source.num_samples;
    num_tokens_ += tokens;
  }
}

/// The vocabulary is the one that is set, or the tokenizer's, or, for small
/// files without either, the ids up to the largest one.
void TextCorpus::find_vocabulary() {
  int64_t token_file_bytes = 0;
  for (const auto& source : sources_) {
    const auto kind = files_of(source.name, options_.format).kind;
    if (is_plain(kind)) continue;
    token_file_bytes += source.tokens.size() *
                        static_cast<int64_t>(token_bytes(source.tokens.type()));
  }
  const bool check = token_file_bytes <= kCheckedBytes;
  // The tokenizer was loaded if it was named or if plain text needed it.
  const int64_t known = tokenizer_ ? tokenizer_->vocab_size() : 0;
  if (options_.vocab_size > 0 && options_.vocab_size < known) {
    fail(
        "vocab_size", options_.vocab_size,
        format(
            "the tokenizer has {} tokens; set at least as many, or 0 to take "
            "them",
            known));
  }
  vocabulary_ = std::max(options_.vocab_size, known);
  if (vocabulary_ == 0 && !check) {
    throw ConfigError(
        "[data] neither tokenizer nor vocab_size says how many tokens there "
        "are, and the files are too large to look (more than 256 MiB); set "
        "one of them");
  }
  int64_t largest = -1;
  for (const auto& source : sources_) {
    if (!check) break;
    if (is_plain(files_of(source.name, options_.format).kind)) continue;
    largest = std::max(
        largest, source.tokens.largest(
                     vocabulary_ > 0 ? vocabulary_ : kLargestVocabulary));
  }
  if (vocabulary_ == 0) vocabulary_ = largest + 1;
  if (end_of_text_ >= vocabulary_) {
    fail(
        "end_of_text_id", end_of_text_,
        format(
            "the vocabulary has {} tokens; ids are below that", vocabulary_));
  }
}

std::string TextCorpus::describe() const {
  std::string text = format_count(num_tokens_) + " tokens";
  if (sources_.size() > 1) text += format(" of {} sources", sources_.size());
  return text;
}

std::vector<std::pair<std::string, std::string>>
TextCorpus::fingerprints() const {
  std::vector<std::pair<std::string, std::string>> all;
  for (const auto& source : sources_) {
    all.emplace_back(source.name, source.tokens.fingerprint());
    if (source.mask) {
      all.emplace_back(source.name + " mask", source.mask->fingerprint());
    }
  }
  return all;
}

size_t TextCorpus::source_of(int64_t sample) const {
  const auto after =
      std::ranges::upper_bound(sources_, sample, {}, &Source::first_sample);
  return static_cast<size_t>(after - sources_.begin()) - 1;
}

void TextCorpus::read(
    int64_t sample, int64_t* inputs, int64_t* targets,
    int64_t* documents) const {
  const Source& source = sources_[source_of(sample)];
  const int64_t sequence = options_.sequence;
  const int64_t begin = (sample - source.first_sample) * sequence;
  thread_local std::vector<int64_t> tokens;
  tokens.resize(static_cast<size_t>(sequence) + 1);
  source.tokens.read(begin, sequence + 1, vocabulary_, tokens.data());
  const size_t bytes = static_cast<size_t>(sequence) * sizeof(int64_t);
  std::memcpy(inputs, tokens.data(), bytes);
  std::memcpy(targets, tokens.data() + 1, bytes);
  if (source.mask) {
    source.mask->read(begin + 1, sequence, /*vocabulary=*/2, tokens.data() + 1);
    for (int64_t i = 0; i < sequence; ++i) {
      if (tokens[static_cast<size_t>(i) + 1] == 0) targets[i] = kIgnored;
    }
    std::memcpy(tokens.data(), inputs, bytes);  // read again below
  }
  if (documents == nullptr) return;
  write_documents(source, begin, tokens.data(), targets, documents);
}

// Numbers the documents of a window from 0, and ignores the target that would
// cross a border: the first token of the next document.
void TextCorpus::write_documents(
    const Source& source, int64_t begin, const int64_t* tokens,
    int64_t* targets, int64_t* documents) const {
  const int64_t sequence = options_.sequence;
  // Positions in the window, after the first, where a document begins.
  std::vector<int64_t> borders;
  if (source.tokens.has_documents()) {
    for (const int64_t at :
         source.tokens.borders(begin, begin + sequence + 1)) {
      borders.push_back(at - begin);
    }
  } else {
    for (int64_t i = 0; i < sequence; ++i) {
      if (tokens[i] == end_of_text_) borders.push_back(i + 1);
    }
  }
  int64_t document = 0;
  auto next = borders.begin();
  for (int64_t i = 0; i < sequence; ++i) {
    if (next != borders.end() && *next == i) {
      ++document;
      ++next;
    }
    documents[i] = document;
  }
  for (const int64_t at : borders) targets[at - 1] = kIgnored;
}

Split TextCorpus::split(double holdout, uint64_t seed) const {
  Split all;
  for (const auto& source : sources_) {
    const Split part = split_samples(source.num_samples, holdout, seed);
    const auto append = [&](const auto& from, auto& to) {
      for (const int64_t sample : from) {
        to.push_back(source.first_sample + sample);
      }
    };
    append(part.train, all.train);
    append(part.holdout, all.holdout);
  }
  return all;
}

std::vector<int64_t> TextCorpus::training_order(
    std::vector<int64_t> samples, uint64_t seed, int64_t epoch,
    bool shuffle) const {
  const auto total = static_cast<int64_t>(samples.size());
  if (sources_.size() == 1 || total == 0) {
    return epoch_order(std::move(samples), seed, epoch, shuffle);
  }
  std::vector<std::vector<int64_t>> parts(sources_.size());
  for (const int64_t sample : samples) {
    parts[source_of(sample)].push_back(sample);
  }
  std::vector<double> weights;
  for (size_t s = 0; s < parts.size(); ++s) {
    if (parts[s].empty()) continue;
    weights.push_back(
        options_.weights.empty() ? static_cast<double>(parts[s].size())
                                 : options_.weights[s]);
  }
  std::erase_if(parts, [](const auto& part) { return part.empty(); });
  return blend_order(parts, blend_counts(total, weights), seed, epoch, shuffle);
}

}  // namespace echelon
