#include "echelon/data/tokenizer/components.h"

#include <charconv>
#include <utility>

#include "echelon/data/tokenizer/bpe.h"
#include "echelon/data/tokenizer/json_fields.h"

namespace echelon::detail {
namespace {

class Chain : public Decoder {
 public:
  explicit Chain(std::vector<std::unique_ptr<Decoder>> parts)
      : parts_(std::move(parts)) {}
  void apply(std::vector<std::string>& tokens) const override {
    for (const auto& part : parts_) part->apply(tokens);
  }

 private:
  std::vector<std::unique_ptr<Decoder>> parts_;
};

/// Leaves tokens with characters that do not stand for bytes as they are.
class ByteLevel : public Decoder {
 public:
  void apply(std::vector<std::string>& tokens) const override {
    std::string bytes;
    for (auto& token : tokens) {
      if (bytes_of_token(token, bytes)) token = bytes;
    }
  }
};

class ByteFallback : public Decoder {
 public:
  void apply(std::vector<std::string>& tokens) const override {
    for (auto& token : tokens) {
      if (token.size() != 6 || !token.starts_with("<0x") ||
          token.back() != '>') {
        continue;
      }
      uint8_t byte = 0;
      const char* end = token.data() + 5;
      const auto [stop, error] =
          std::from_chars(token.data() + 3, end, byte, 16);
      if (error == std::errc() && stop == end) {
        token = std::string(1, static_cast<char>(byte));
      }
    }
  }
};

class Fuse : public Decoder {
 public:
  void apply(std::vector<std::string>& tokens) const override {
    std::string all;
    for (const auto& token : tokens) all += token;
    tokens = {all};
  }
};

class Replace : public Decoder {
 public:
  Replace(Pattern pattern, std::string content)
      : pattern_(std::move(pattern)), content_(std::move(content)) {}
  void apply(std::vector<std::string>& tokens) const override {
    std::vector<Span> spans;
    for (auto& token : tokens) {
      spans.clear();
      // Patterns are for text: bytes of incomplete characters are skipped.
      if (valid_utf8(token) != token) continue;
      pattern_.split(token, spans);
      std::string out;
      for (const auto& span : spans) {
        out += span.match ? content_
                          : token.substr(span.begin, span.end - span.begin);
      }
      token = std::move(out);
    }
  }

 private:
  Pattern pattern_;
  std::string content_;
};

/// Removes up to so many copies of `content` from both ends.
class Strip : public Decoder {
 public:
  Strip(std::string content, int32_t start, int32_t stop)
      : content_(std::move(content)), start_(start), stop_(stop) {}
  void apply(std::vector<std::string>& tokens) const override {
    for (auto& token : tokens) {
      for (int32_t i = 0; i < start_ && token.starts_with(content_); ++i) {
        token.erase(0, content_.size());
      }
      for (int32_t i = 0; i < stop_ && token.ends_with(content_); ++i) {
        token.erase(token.size() - content_.size());
      }
    }
  }

 private:
  std::string content_;
  int32_t start_;
  int32_t stop_;
};

class Metaspace : public Decoder {
 public:
  Metaspace(std::string replacement, bool prepended)
      : replacement_(std::move(replacement)), prepended_(prepended) {}
  void apply(std::vector<std::string>& tokens) const override {
    for (size_t i = 0; i < tokens.size(); ++i) {
      const std::string space = i == 0 && prepended_ ? "" : " ";
      std::string out;
      for (size_t at = 0; at < tokens[i].size();) {
        const size_t found =
            std::min(tokens[i].find(replacement_, at), tokens[i].size());
        out.append(tokens[i], at, found - at);
        if (found == tokens[i].size()) break;
        out += space;
        at = found + replacement_.size();
      }
      tokens[i] = std::move(out);
    }
  }

 private:
  std::string replacement_;
  bool prepended_;
};

std::unique_ptr<Decoder> make_metaspace(Fields& fields) {
  const std::string replacement = fields.text("replacement");
  const bool prefix = fields.flag("add_prefix_space", true);
  fields.find("str_rep");
  fields.find("split");
  const std::string scheme =
      fields.text("prepend_scheme", prefix ? "always" : "never");
  if (replacement.empty()) fields.fail("\"replacement\" must not be empty");
  return std::make_unique<Metaspace>(replacement, scheme != "never");
}

}  // namespace

std::unique_ptr<Decoder>
make_decoder(const nlohmann::json& description, const std::string& place) {
  Fields fields(description, place);
  const std::string type = fields.text("type");
  std::unique_ptr<Decoder> made;
  if (type == "Sequence") {
    made = std::make_unique<Chain>(fields.components("decoders", make_decoder));
  } else if (type == "ByteLevel") {
    fields.flag("add_prefix_space", true);
    fields.flag("trim_offsets", true);
    fields.flag("use_regex", true);
    made = std::make_unique<ByteLevel>();
  } else if (type == "ByteFallback") {
    made = std::make_unique<ByteFallback>();
  } else if (type == "Fuse") {
    made = std::make_unique<Fuse>();
  } else if (type == "Replace") {
    Pattern pattern(fields.at("pattern"), fields.place("pattern"));
    made =
        std::make_unique<Replace>(std::move(pattern), fields.text("content"));
  } else if (type == "Strip") {
    const std::string content = fields.text("content");
    if (content.empty()) fields.fail("\"content\" must not be empty");
    const int32_t start = fields.number("start");
    made = std::make_unique<Strip>(content, start, fields.number("stop"));
  } else if (type == "Metaspace") {
    made = make_metaspace(fields);
  } else {
    fields.fail(
        "a decoder of type " + type +
        " is not known; there are Sequence, ByteLevel, ByteFallback, Fuse, "
        "Replace, Strip and Metaspace");
  }
  fields.end();
  return made;
}

}  // namespace echelon::detail
