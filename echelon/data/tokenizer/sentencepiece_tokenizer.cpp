#include <sentencepiece_processor.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>

#include "echelon/data/tokenizer/tokenizer.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

class SentencePiece : public Tokenizer {
 public:
  explicit SentencePiece(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) {
      throw DataError(
          path + ": cannot be read: " + std::strerror(errno) +
          "; [data] tokenizer must name a file");
    }
    const std::string content(std::istreambuf_iterator<char>(file), {});
    const auto status = processor_.LoadFromSerializedProto(content);
    if (!status.ok()) {
      throw DataError(
          path + ": is not a SentencePiece model: " + status.ToString());
    }
    size_ = processor_.GetPieceSize();
  }

  std::vector<TokenId>
  encode(std::string_view text, bool specials) const override {
    std::vector<TokenId> ids;
    const std::string valid = valid_utf8(text);
    check(processor_.Encode(valid, &ids));
    if (specials && processor_.bos_id() >= 0) {
      ids.insert(ids.begin(), processor_.bos_id());
    }
    return ids;
  }

  std::string decode(std::span<const TokenId> ids) const override {
    std::string text;
    std::vector<TokenId> run;
    const auto flush = [&] {
      std::string part;
      check(processor_.Decode(run, &part));
      text += part;
      run.clear();
    };
    for (const TokenId id : ids) {
      if (id < 0 || id >= size_) {
        throw DataError(format(
            "token {} is not in the tokenizer's {}-token vocabulary", id,
            size_));
      }
      if (!processor_.IsControl(id)) {
        run.push_back(id);
        continue;
      }
      flush();
      text += processor_.IdToPiece(id);
    }
    flush();
    return text;
  }

  int64_t vocab_size() const override { return size_; }
  std::optional<TokenId> find(const std::string& token) const override {
    const TokenId id = processor_.PieceToId(token);
    if (id < 0 || id >= size_ || processor_.IdToPiece(id) != token) {
      return std::nullopt;
    }
    return id;
  }
  std::optional<TokenId> end_of_text() const override {
    const TokenId id = processor_.eos_id();
    if (id < 0) return std::nullopt;
    return id;
  }

 private:
  template <typename Status>
  static void check(const Status& status) {
    if (!status.ok()) {
      throw DataError("SentencePiece: " + status.ToString());
    }
  }

  sentencepiece::SentencePieceProcessor processor_;
  int64_t size_ = 0;
};

}  // namespace

std::unique_ptr<Tokenizer> load_sentencepiece(const std::string& path) {
  return std::make_unique<SentencePiece>(path);
}

}  // namespace echelon
