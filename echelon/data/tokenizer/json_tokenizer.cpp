// A text becomes tokens in five steps: added tokens that match the raw text
// split it into parts; each part is normalised; added tokens that match
// normalised text split it again; the pre-tokenizer splits the rest into words;
// the model encodes word by word. The post-processor's tokens go around the
// result.
//
// The parser refuses what it does not know, key by key, since a component that
// is left out would change tokens silently.
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>

#include "echelon/data/tokenizer/bpe.h"
#include "echelon/data/tokenizer/components.h"
#include "echelon/data/tokenizer/json_fields.h"
#include "echelon/data/tokenizer/tokenizer.h"
#include "echelon/data/tokenizer/unicode.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

using detail::Fields;
using detail::is_space;
using detail::next_character;
using nlohmann::json;

constexpr size_t kMostBytes = size_t{1} << 28;
constexpr int kMostDepth = 32;

struct AddedToken {
  TokenId id = 0;
  std::string content;
  bool single_word = false;  // does not match within a word
  bool lstrip = false;       // includes the white space before it
  bool rstrip = false;       // includes the white space after it
  bool normalized = true;    // matches in the normalised text
};

/// Tokens that are matched in a text before it is split into words, such as
/// "<|endoftext|>", runs of spaces, names.
class AddedTokens {
 public:
  /// A part of a text: a token, or (id -1) the text between tokens.
  struct Part {
    size_t begin = 0;
    size_t end = 0;
    TokenId id = -1;
  };

  void add(AddedToken token);

  /// Splits a text at the leftmost and then longest matches. The parts cover
  /// the text, and none is empty.
  std::vector<Part> split(std::string_view text) const;

 private:
  const AddedToken* match(std::string_view rest) const;

  std::map<std::string, AddedToken, std::less<>> tokens_;  // by content
  // The lengths of those that begin with each byte.
  std::array<std::set<size_t, std::greater<>>, 256> lengths_;
};

/// The beginning of the character that ends at `at`.
size_t character_before(std::string_view text, size_t at) {
  do {
    --at;
  } while (at > 0 && (static_cast<uint8_t>(text[at]) & 0xc0) == 0x80);
  return at;
}

bool word_at(std::string_view text, size_t at) {
  return at < text.size() && detail::is_word(next_character(text, at));
}

void AddedTokens::add(AddedToken token) {
  lengths_[static_cast<uint8_t>(token.content[0])].insert(token.content.size());
  const std::string content = token.content;
  tokens_.emplace(content, std::move(token));
}

const AddedToken* AddedTokens::match(std::string_view rest) const {
  for (const size_t length : lengths_[static_cast<uint8_t>(rest[0])]) {
    if (length > rest.size()) continue;
    const auto found = tokens_.find(rest.substr(0, length));
    if (found != tokens_.end()) return &found->second;
  }
  return nullptr;
}

std::vector<AddedTokens::Part> AddedTokens::split(std::string_view text) const {
  std::vector<Part> parts;
  size_t done = 0;  // bytes covered by parts
  for (size_t at = 0; at < text.size();) {
    const AddedToken* token = match(text.substr(at));
    if (token == nullptr) {
      ++at;
      continue;
    }
    size_t begin = at;
    size_t end = at + token->content.size();
    at = end;
    if (token->single_word &&
        ((begin > 0 && word_at(text, character_before(text, begin))) ||
         word_at(text, end))) {
      continue;
    }
    if (token->lstrip) {
      // White space of the previous token stays with that token.
      while (begin > done) {
        const size_t before = character_before(text, begin);
        size_t next = before;
        if (!is_space(next_character(text, next))) break;
        begin = std::max(before, done);
      }
    }
    if (token->rstrip) {
      for (size_t next = end; next < text.size(); end = next) {
        if (!is_space(next_character(text, next))) break;
      }
    }
    if (done < begin) parts.push_back({done, begin, -1});
    parts.push_back({begin, end, token->id});
    done = end;
  }
  if (done < text.size()) parts.push_back({done, text.size(), -1});
  return parts;
}

struct Parts {
  // Functions are empty where the file has no such component.
  detail::Normalizer normalizer;
  detail::PreTokenizer pre_tokenizer;
  detail::Decoder decoder;
  std::unique_ptr<detail::Bpe> model;
  AddedTokens raw;                   // match before the text is normalised
  AddedTokens normalized;            // match in the normalised text
  std::vector<TokenId> front, back;  // added around a text
  std::unordered_map<std::string, TokenId> ids;
  std::vector<std::string> names;  // by id; "" where there is no token
};

class JsonTokenizer : public Tokenizer {
 public:
  explicit JsonTokenizer(Parts parts) : parts_(std::move(parts)) {
    end_of_text_ = find_end_of_text(*this);
  }

  std::vector<TokenId>
  encode(std::string_view text, bool specials) const override {
    std::vector<TokenId> ids;
    if (specials) ids = parts_.front;
    const std::string valid = valid_utf8(text);
    for (const auto& part : parts_.raw.split(valid)) {
      if (part.id >= 0) {
        ids.push_back(part.id);
      } else {
        encode_raw(
            valid.substr(part.begin, part.end - part.begin), part.begin == 0,
            ids);
      }
    }
    if (specials) ids.insert(ids.end(), parts_.back.begin(), parts_.back.end());
    return ids;
  }

  std::string decode(std::span<const TokenId> ids) const override {
    std::vector<std::string> tokens;
    for (const TokenId id : ids) {
      const bool known = id >= 0 && id < vocab_size() &&
                         !parts_.names[static_cast<size_t>(id)].empty();
      if (!known) {
        throw DataError(format(
            "token {} is not in the tokenizer's {}-token vocabulary", id,
            vocab_size()));
      }
      tokens.push_back(parts_.names[static_cast<size_t>(id)]);
    }
    if (parts_.decoder) parts_.decoder(tokens);
    std::string text;
    for (size_t i = 0; i < tokens.size(); ++i) {
      if (i > 0 && !parts_.decoder) text += ' ';
      text += tokens[i];
    }
    return text;
  }

  int64_t vocab_size() const override {
    return static_cast<int64_t>(parts_.names.size());
  }
  std::optional<TokenId> find(const std::string& token) const override {
    const auto found = parts_.ids.find(token);
    if (found == parts_.ids.end()) return std::nullopt;
    return found->second;
  }
  std::optional<TokenId> end_of_text() const override { return end_of_text_; }

 private:
  void
  encode_raw(std::string text, bool first, std::vector<TokenId>& ids) const {
    if (parts_.normalizer) parts_.normalizer(text);
    const std::string_view view = text;
    for (const auto& part : parts_.normalized.split(view)) {
      if (part.id >= 0) {
        ids.push_back(part.id);
        continue;
      }
      detail::Pieces pieces;
      pieces.list.push_back(
          {view.substr(part.begin, part.end - part.begin),
           first && part.begin == 0});
      if (parts_.pre_tokenizer.apply) parts_.pre_tokenizer.apply(pieces);
      for (const auto& piece : pieces.list) {
        parts_.model->encode(piece.text, ids);
      }
    }
  }

  Parts parts_;
  std::optional<TokenId> end_of_text_;
};

/// Reads post-processors: the tokens that are added before and after a text.
class PostProcessor {
 public:
  explicit PostProcessor(Parts& parts) : parts_(parts) {}

  void read(const json& description, const std::string& place) {
    Fields fields(description, place);
    const std::string type = fields.text("type");
    if (type == "Sequence") {
      int64_t i = 0;
      for (const auto& part : fields.list("processors")) {
        read(part, format("{}[{}]", fields.place("processors"), i++));
      }
    } else if (type == "ByteLevel") {
      for (const char* key :
           {"add_prefix_space", "trim_offsets", "use_regex"}) {
        fields.flag(key, true);
      }
    } else if (type == "TemplateProcessing") {
      read_template(fields);
    } else if (type == "RobertaProcessing" || type == "BertProcessing") {
      fields.flag("trim_offsets", true);
      fields.flag("add_prefix_space", true);
      parts_.front.push_back(named_id(fields, "cls"));
      parts_.back.insert(parts_.back.begin(), named_id(fields, "sep"));
    } else {
      fields.fail(
          "a post-processor of type " + type +
          " is not known; there are Sequence, TemplateProcessing, ByteLevel, "
          "RobertaProcessing and BertProcessing");
    }
    fields.end();
  }

 private:
  TokenId checked(const Fields& fields, TokenId id) const {
    const auto at = static_cast<size_t>(id);
    if (at >= parts_.names.size() || parts_.names[at].empty()) {
      fields.fail(format("token {} is not in the vocabulary", id));
    }
    return id;
  }

  TokenId named_id(Fields& fields, const std::string& key) const {
    const json& pair = fields.list(key);
    if (pair.size() != 2) fields.fail("\"" + key + "\" must be [token, id]");
    return checked(fields, fields.as_number(key, pair[1]));
  }

  void read_template(Fields& fields) {
    std::unordered_map<std::string, std::vector<TokenId>> specials;
    const json& tokens = fields.at("special_tokens");
    if (!tokens.is_object()) fields.fail("special_tokens must be an object");
    for (const auto& item : tokens.items()) {
      Fields token(item.value(), fields.place("special_tokens"));
      token.text("id");
      token.find("tokens");
      for (const auto& id : token.list("ids")) {
        specials[item.key()].push_back(
            checked(token, token.as_number("ids", id)));
      }
      token.end();
    }
    fields.find("pair");
    std::vector<TokenId> front, back;
    bool behind = false;
    for (const auto& step : fields.list("single")) {
      Fields one(step, fields.place("single"));
      if (one.find("Sequence") != nullptr) {
        if (behind) fields.fail("\"single\" has the text twice");
        behind = true;
      } else {
        Fields special(one.at("SpecialToken"), one.place("SpecialToken"));
        const std::string id = special.text("id");
        special.find("type_id");
        special.end();
        if (!specials.contains(id)) {
          special.fail(id + " is not among the special_tokens");
        }
        auto& to = behind ? back : front;
        to.insert(to.end(), specials[id].begin(), specials[id].end());
      }
      one.end();
    }
    if (!behind) fields.fail("\"single\" does not have the text");
    // The tokens of a later processor are outside of those of earlier ones.
    parts_.front.insert(parts_.front.begin(), front.begin(), front.end());
    parts_.back.insert(parts_.back.end(), back.begin(), back.end());
  }

  Parts& parts_;
};

class Parser {
 public:
  Parser(const json& root, const std::string& path)
      : fields_(root, path), path_(path) {}

  Parts run() {
    const std::string version = fields_.text("version", "1.0");
    if (version != "1.0") {
      fields_.fail("is of version " + version + "; only 1.0 is known");
    }
    fields_.find("truncation");
    fields_.find("padding");
    if (const json* part = fields_.find("normalizer")) {
      parts_.normalizer =
          detail::make_normalizer(*part, fields_.place("normalizer"));
    }
    if (const json* part = fields_.find("pre_tokenizer")) {
      parts_.pre_tokenizer =
          detail::make_pre_tokenizer(*part, fields_.place("pre_tokenizer"));
    }
    if (const json* part = fields_.find("decoder")) {
      parts_.decoder = detail::make_decoder(*part, fields_.place("decoder"));
    }
    read_model();
    read_added_tokens();
    if (const json* part = fields_.find("post_processor")) {
      PostProcessor(parts_).read(*part, fields_.place("post_processor"));
    }
    fields_.end();
    return std::move(parts_);
  }

 private:
  void name(TokenId id, const std::string& token, const Fields& fields) {
    constexpr TokenId kMost = 1 << 24;
    if (id >= kMost) {
      fields.fail(format(
          "token \"{}\" has id {}; ids must be below {}", token, id, kMost));
    }
    const auto at = static_cast<size_t>(id);
    if (at >= parts_.names.size()) parts_.names.resize(at + 1);
    if (!parts_.names[at].empty() && parts_.names[at] != token) {
      fields.fail(format(
          "id {} is both \"{}\" and \"{}\"", id, parts_.names[at], token));
    }
    const auto [entry, is_new] = parts_.ids.emplace(token, id);
    if (!is_new && entry->second != id) {
      fields.fail(
          format("token \"{}\" has id {} and {}", token, entry->second, id));
    }
    parts_.names[at] = token;
  }

  void read_model() {
    Fields fields(fields_.at("model"), fields_.place("model"));
    // Old files have no type.
    const std::string type = fields.text(
        "type", fields.find("merges") != nullptr ? "BPE" : "unnamed");
    if (type != "BPE") {
      fields.fail(
          "a model of type " + type +
          " is not known; there is BPE (for Unigram use the SentencePiece "
          ".model file)");
    }
    detail::BpeModel model;
    const json* dropout = fields.find("dropout");
    if (dropout != nullptr && *dropout != 0.0) {
      fields.fail(
          "has dropout, which gives other tokens each time; set it to null");
    }
    model.unknown = fields.text("unk_token", "");
    model.continuing_prefix = fields.text("continuing_subword_prefix", "");
    model.end_suffix = fields.text("end_of_word_suffix", "");
    model.fuse_unknown = fields.flag("fuse_unk", false);
    model.byte_fallback = fields.flag("byte_fallback", false);
    model.ignore_merges = fields.flag("ignore_merges", false);
    model.in_bytes = parts_.pre_tokenizer.in_bytes;
    const json& vocab = fields.at("vocab");
    if (!vocab.is_object()) fields.fail("\"vocab\" must be an object");
    for (const auto& item : vocab.items()) {
      const TokenId id = fields.as_number(item.key(), item.value());
      if (item.key().empty()) fields.fail("\"vocab\" has an empty token");
      name(id, item.key(), fields);
      model.vocab.emplace(item.key(), id);
    }
    for (const auto& merge : fields.list("merges")) {
      model.merges.push_back(read_merge(fields, merge, model.merges.size()));
    }
    fields.end();
    parts_.model =
        std::make_unique<detail::Bpe>(std::move(model), fields_.place("model"));
  }

  /// "a b" or ["a", "b"].
  static std::pair<std::string, std::string>
  read_merge(const Fields& fields, const json& merge, size_t number) {
    const std::string what = format("merges[{}]", number);
    if (merge.is_array() && merge.size() == 2) {
      return {fields.as_text(what, merge[0]), fields.as_text(what, merge[1])};
    }
    if (merge.is_string()) {
      const auto text = merge.get<std::string>();
      const size_t space = text.find(' ');
      if (space != std::string::npos &&
          text.find(' ', space + 1) == std::string::npos) {
        return {text.substr(0, space), text.substr(space + 1)};
      }
    }
    fields.fail(what + " must be two tokens: \"a b\" or [\"a\", \"b\"]");
  }

  void read_added_tokens() {
    const json* list = fields_.find("added_tokens");
    if (list == nullptr) return;
    if (!list->is_array()) fields_.fail("\"added_tokens\" must be a list");
    int64_t i = 0;
    for (const auto& item : *list) {
      Fields fields(item, format("{}[{}]", fields_.place("added_tokens"), i++));
      AddedToken token;
      token.id = fields.number("id");
      token.content = fields.text("content");
      token.single_word = fields.flag("single_word", false);
      token.lstrip = fields.flag("lstrip", false);
      token.rstrip = fields.flag("rstrip", false);
      const bool special = fields.flag("special", false);
      token.normalized = fields.flag("normalized", !special);
      fields.end();
      if (token.content.empty()) fields.fail("\"content\" must not be empty");
      name(token.id, token.content, fields);
      if (token.normalized && parts_.normalizer) {
        parts_.normalizer(token.content);
      }
      if (token.content.empty()) continue;
      auto& to = token.normalized ? parts_.normalized : parts_.raw;
      to.add(std::move(token));
    }
  }

  Fields fields_;
  std::string path_;
  Parts parts_;
};

/// Refuses files that are nested too deeply or have a key twice in an object.
class Watch {
 public:
  explicit Watch(const std::string& path) : path_(path) {}

  bool operator()(int depth, json::parse_event_t event, const json& value) {
    if (depth > kMostDepth) {
      throw DataError(
          format("{}: is nested more than {} deep", path_, kMostDepth));
    }
    if (event == json::parse_event_t::object_start) keys_.emplace_back();
    if (event == json::parse_event_t::object_end) keys_.pop_back();
    if (event == json::parse_event_t::key) {
      const auto& key = value.get_ref<const std::string&>();
      if (!keys_.back().insert(key).second) {
        throw DataError(
            format("{}: has \"{}\" twice in one object", path_, key));
      }
    }
    return true;
  }

 private:
  const std::string& path_;
  std::vector<std::set<std::string>> keys_;
};

}  // namespace

std::unique_ptr<Tokenizer>
parse_json_tokenizer(std::string_view content, const std::string& path) {
  json root;
  try {
    root = json::parse(content.begin(), content.end(), Watch(path));
  } catch (const json::exception& error) {
    throw DataError(path + ": is not JSON: " + json_reason(error));
  }
  return std::make_unique<JsonTokenizer>(Parser(root, path).run());
}

std::unique_ptr<Tokenizer> load_json_tokenizer(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw DataError(
        path + ": cannot be read: " + std::strerror(errno) +
        "; [data] tokenizer must name a file");
  }
  std::string content;
  std::vector<char> part(size_t{1} << 16);
  while (file.read(part.data(), static_cast<std::streamsize>(part.size())),
         file.gcount() > 0) {
    content.append(part.data(), static_cast<size_t>(file.gcount()));
    if (content.size() > kMostBytes) {
      throw DataError(path + ": is larger than 256 MiB; no tokenizer is");
    }
  }
  return parse_json_tokenizer(content, path);
}

}  // namespace echelon
