// The functions of text.h that tokenise plain text.
//
// The cached files are named by a hash of all that decides their tokens: the
// recipe, the tokenizer, and of each text its bytes, or, of a large one, its
// path, size, time and both ends. A changed text gets another name, so no
// cached file is ever written again. A text is encoded in pieces that end where
// no token reaches across.
#include <sys/stat.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <system_error>

#include "echelon/data/sources/parquet.h"
#include "echelon/data/sources/text.h"
#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/text_file.h"

namespace echelon {
namespace {

namespace fs = std::filesystem;

constexpr size_t kPieceBytes = size_t{1} << 20;
constexpr size_t kHashedBytes = size_t{64} << 20;  // of a complete file
constexpr size_t kEndsBytes = size_t{1} << 20;
constexpr size_t kAnnouncedBytes = size_t{64} << 20;
constexpr const char* kSums = ".sums";
constexpr const char* kMask = "-mask";
/// Increased when the same text and recipe give other tokens than before.
constexpr uint64_t kVersion = 1;

class Key {
 public:
  Key() { XXH3_128bits_reset(&state_); }

  void add(std::span<const std::byte> bytes) {
    add(uint64_t{bytes.size()});
    XXH3_128bits_update(&state_, bytes.data(), bytes.size());
  }
  void add(std::string_view text) { add(std::as_bytes(std::span(text))); }
  void add(uint64_t number) {
    XXH3_128bits_update(&state_, &number, sizeof(number));
  }
  std::string text() const {
    const XXH128_hash_t hash = XXH3_128bits_digest(&state_);
    return format("{:016x}{:016x}", hash.high64, hash.low64);
  }

 private:
  XXH3_state_t state_;
};

void add_file(Key& key, const MappedFile& file) {
  const auto bytes = file.bytes();
  if (bytes.size() <= kHashedBytes) {
    key.add(bytes);
    return;
  }
  struct stat status = {};
  ::stat(file.path().c_str(), &status);
  key.add(fs::absolute(file.path()).string());
  key.add(uint64_t{bytes.size()});
  key.add(static_cast<uint64_t>(status.st_mtim.tv_sec));
  key.add(static_cast<uint64_t>(status.st_mtim.tv_nsec));
  key.add(bytes.first(kEndsBytes));
  key.add(bytes.last(kEndsBytes));
}

std::string cache_key(
    const std::vector<std::unique_ptr<MappedFile>>& files,
    const TextRecipe& recipe) {
  Key key;
  key.add(kVersion);
  key.add(recipe.separator);
  key.add(static_cast<uint64_t>(recipe.end_of_text));
  key.add(recipe.tokenizer == "bytes" ? "bytes" : "file");
  if (recipe.tokenizer != "bytes") {
    key.add(MappedFile(recipe.tokenizer).bytes());
  }
  for (const auto& file : files) add_file(key, *file);
  return key.text();
}

std::string line_key(
    const std::vector<std::unique_ptr<MappedFile>>& files,
    const LineRecipe& recipe, const std::string& tokenizer) {
  Key key;
  key.add("lines");
  key.add(cache_key(
      files, {.tokenizer = tokenizer, .end_of_text = recipe.end_of_text}));
  key.add(recipe.text_field);
  key.add(to_string(recipe.chat_template));
  return key.text();
}

std::string_view text_of(const MappedFile& file) {
  const auto bytes = file.bytes();
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

class Encoding {
 public:
  Encoding(
      const Tokenizer& tokenizer, const TextRecipe& recipe, TokenWriter& writer)
      : tokenizer_(tokenizer),
        recipe_(recipe),
        writer_(writer),
        split_(find_text_split(tokenizer)) {}

  void add_file(const MappedFile& file) {
    std::string_view rest = text_of(file);
    file_ = &file;
    if (recipe_.separator.empty()) {
      add_document(rest);
      return;
    }
    while (true) {
      const size_t end = rest.find(recipe_.separator);
      add_document(rest.substr(0, end));
      if (end == std::string_view::npos) return;
      rest.remove_prefix(end + recipe_.separator.size());
    }
  }

 private:
  void add_document(std::string_view rest) {
    if (rest.empty()) return;
    while (!rest.empty()) {
      const size_t end = rest.size() <= kPieceBytes
                             ? rest.size()
                             : find_split(rest, kPieceBytes, split_);
      add_piece(rest.substr(0, end));
      rest.remove_prefix(end);
      if (split_ == TextSplit::at_space && !rest.empty()) rest.remove_prefix(1);
    }
    if (recipe_.end_of_text >= 0) {
      const auto end = static_cast<TokenId>(recipe_.end_of_text);
      writer_.add({&end, 1});
    }
    writer_.end_document();
  }

  void add_piece(std::string_view piece) {
    file_->check_size();
    try {
      writer_.add(tokenizer_.encode(piece));
    } catch (const DataError& error) {
      throw DataError(format(
          "{}: byte {} and on: {}", file_->path(),
          piece.data() - text_of(*file_).data(), error.what()));
    }
  }

  const Tokenizer& tokenizer_;
  const TextRecipe& recipe_;
  TokenWriter& writer_;
  TextSplit split_;
  const MappedFile* file_ = nullptr;
};

void announce(const std::vector<std::unique_ptr<MappedFile>>& files) {
  size_t bytes = 0;
  for (const auto& file : files) bytes += file->bytes().size();
  if (bytes < kAnnouncedBytes) return;
  std::fprintf(
      stderr, "tokenising %zu MiB of %s%s, this once\n", bytes >> 20,
      files.front()->path().c_str(), files.size() > 1 ? " …" : "");
}

/// The cached pair, or null when it is missing or damaged. The checksums are
/// written last: where they exist, the pair is complete.
std::unique_ptr<TokenFile> find_cached(const std::string& prefix) {
  std::error_code ignored;
  if (!fs::exists(prefix + kSums, ignored)) return nullptr;
  try {
    auto cached = std::make_unique<TokenFile>(prefix + ".bin", prefix + ".idx");
    cached->verify(read_text_file(prefix + kSums));
    return cached;
  } catch (const DataError& error) {
    std::fprintf(
        stderr, "warning: cached tokens are made anew: %s\n", error.what());
    return nullptr;
  }
}

}  // namespace

std::string token_cache_folder() {
  const fs::path cache = cache_folder();
  if (!cache.empty()) return (cache / "tokens").string();
  throw ConfigError(
      "neither ECHELON_CACHE, XDG_CACHE_HOME nor HOME is set; set "
      "ECHELON_CACHE to a folder where tokens may be kept");
}

size_t find_split(std::string_view text, size_t near, TextSplit split) {
  if (split == TextSplit::anywhere) return near;
  if (split == TextSplit::nowhere) return text.size();
  const auto letter = [&](size_t i) {
    return std::isalpha(static_cast<unsigned char>(text[i])) != 0;
  };
  const auto good = [&](size_t i) {
    return text[i] == ' ' && letter(i - 1) && letter(i + 1);
  };
  for (size_t i = near; i > near / 2 && i > 0; --i) {
    if (i + 1 < text.size() && good(i)) return i;
  }
  for (size_t i = near; i + 1 < text.size(); ++i) {
    if (good(i)) return i;
  }
  return text.size();
}

namespace {

using MappedFiles = std::vector<std::unique_ptr<MappedFile>>;

MappedFiles mapped_files(const std::vector<std::string>& files) {
  MappedFiles mapped;
  for (const auto& file : files) {
    mapped.push_back(std::make_unique<MappedFile>(file));
  }
  return mapped;
}

std::string prefix_in_cache(const std::string& key) {
  const std::string folder = token_cache_folder();
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) {
    throw DataError(
        folder + ": cannot be made: " + error.message() +
        "; set ECHELON_CACHE to a folder where tokens may be kept");
  }
  return folder + "/" + key;
}

// Opens a pair that was just written, and writes its checksums, which say that
// it is complete.
TokenFile with_sums(const std::string& prefix) {
  TokenFile made(prefix + ".bin", prefix + ".idx");
  const std::string sums = made.checksums();
  try {
    write_file_atomically(prefix + kSums, sums);
  } catch (const Error& full) {
    throw DataError(full.what());
  }
  made.verify(sums);
  return made;
}

// Writes the tokens of lines, and their mask.
class LineEncoding {
 public:
  LineEncoding(
      const Tokenizer& tokenizer, const LineRecipe& recipe,
      const std::string& prefix)
      : tokenizer_(tokenizer),
        recipe_(recipe),
        tokens_(prefix, tokenizer.vocab_size()),
        mask_(prefix + kMask, /*vocabulary=*/2) {}

  void add_file(const MappedFile& file) {
    int64_t number = 0;
    std::string_view rest = text_of(file);
    if (is_parquet(rest)) {
      read_parquet(
          file.path(), ParquetRows::json,
          {recipe_.text_field, "messages", "tokens", "loss_mask"},
          [&](std::string_view row) { add_line(file, ++number, row); });
      return;
    }
    while (!rest.empty()) {
      const size_t end = rest.find('\n');
      add_line(file, ++number, rest.substr(0, end));
      rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
    }
  }

  // The mask first: where the tokens' checksums exist, both are complete.
  void finish() {
    mask_.finish();
    tokens_.finish();
  }

 private:
  void add_line(const MappedFile& file, int64_t number, std::string_view line) {
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) return;
    file.check_size();
    try {
      add(tokens_of_line(line, recipe_, tokenizer_));
    } catch (const DataError& error) {
      throw DataError(format("{}:{}: {}", file.path(), number, error.what()));
    }
  }
  void add(const LineTokens& line) {
    tokens_.add(line.ids);
    tokens_.end_document();
    mask_.add(std::vector<int32_t>(line.counts.begin(), line.counts.end()));
    mask_.end_document();
  }

  const Tokenizer& tokenizer_;
  const LineRecipe& recipe_;
  TokenWriter tokens_;
  TokenWriter mask_;
};

}  // namespace

TokenFile tokenise(
    const std::vector<std::string>& files, const TextRecipe& recipe,
    const Tokenizer& tokenizer) {
  const auto mapped = mapped_files(files);
  const std::string prefix = prefix_in_cache(cache_key(mapped, recipe));
  if (auto cached = find_cached(prefix)) return std::move(*cached);
  announce(mapped);
  TokenWriter writer(prefix, tokenizer.vocab_size());
  Encoding encoding(tokenizer, recipe, writer);
  for (const auto& file : mapped) encoding.add_file(*file);
  writer.finish();
  return with_sums(prefix);
}

MaskedTokens tokenise_lines(
    const std::vector<std::string>& files, const LineRecipe& recipe,
    const std::string& tokenizer_file, const Tokenizer& tokenizer) {
  const auto mapped = mapped_files(files);
  const std::string prefix =
      prefix_in_cache(line_key(mapped, recipe, tokenizer_file));
  if (auto tokens = find_cached(prefix)) {
    if (auto mask = find_cached(prefix + kMask)) {
      return {
          std::move(*tokens),
          std::make_shared<const TokenFile>(std::move(*mask))};
    }
  }
  announce(mapped);
  LineEncoding encoding(tokenizer, recipe, prefix);
  for (const auto& file : mapped) encoding.add_file(*file);
  encoding.finish();
  auto mask = std::make_shared<const TokenFile>(with_sums(prefix + kMask));
  return {with_sums(prefix), std::move(mask)};
}

}  // namespace echelon
