#include "echelon/data/tokenizer/tokenizer.h"

#include <gmock/gmock.h>
#include <sys/stat.h>

#include <algorithm>
#include <random>

#include "echelon/data/tokenizer/unicode.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace echelon::tokenizer_test {

using testing::ElementsAre;
using testing::HasSubstr;

/// A byte-pair encoder of few tokens; `more` is added before its model.
std::string
description(const std::string& more = "", const std::string& model = "") {
  return R"({"version": "1.0", )" + more + R"("model": {"type": "BPE", )" +
         model + R"(
    "vocab": {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4, "bc": 5, "?": 6,
              "▁": 7, "▁a": 8, "é": 9},
    "merges": ["b c", "a b", ["a", "bc"], "▁ a"]}})";
}

std::vector<TokenId> encode(const std::string& json, const std::string& text) {
  return parse_json_tokenizer(json, "t.json")->encode(text);
}

std::string parse_error(const std::string& json) {
  return error_text<DataError>([&] { parse_json_tokenizer(json, "t.json"); });
}

TEST(Bpe, MergesTheFirstRuleFirst) {
  EXPECT_THAT(encode(description(), "abc"), ElementsAre(4));
  EXPECT_THAT(encode(description(), "abab"), ElementsAre(3, 3));
  EXPECT_THAT(encode(description(), "bcabc"), ElementsAre(5, 4));
  EXPECT_THAT(encode(description(), "é"), ElementsAre(9));
  EXPECT_TRUE(encode(description(), "").empty());
}

/// The definition: join the leftmost pair of the first rule that applies.
std::vector<std::string> join_by_rules(
    const std::string& word,
    const std::vector<std::pair<std::string, std::string>>& rules) {
  std::vector<std::string> parts;
  for (const char c : word) parts.emplace_back(1, c);
  while (true) {
    size_t best = rules.size(), where = 0;
    for (size_t i = 0; i + 1 < parts.size(); ++i) {
      const auto rule = static_cast<size_t>(
          std::find(
              rules.begin(), rules.end(), std::pair(parts[i], parts[i + 1])) -
          rules.begin());
      if (rule < best) best = rule, where = i;
    }
    if (best == rules.size()) return parts;
    parts[where] += parts[where + 1];
    parts.erase(parts.begin() + static_cast<ptrdiff_t>(where) + 1);
  }
}

TEST(Bpe, ShortAndLongWordsFollowTheRules) {
  std::mt19937 random(3);
  for (int round = 0; round < 20; ++round) {
    std::vector<std::string> tokens = {"a", "b", "c"};
    std::vector<std::pair<std::string, std::string>> rules;
    while (rules.size() < 40) {
      const std::pair rule(
          tokens[random() % tokens.size()], tokens[random() % tokens.size()]);
      if (rule.first.size() + rule.second.size() > 8 ||
          std::find(rules.begin(), rules.end(), rule) != rules.end()) {
        continue;
      }
      rules.push_back(rule);
      const std::string joined = rule.first + rule.second;
      if (std::find(tokens.begin(), tokens.end(), joined) == tokens.end()) {
        tokens.push_back(joined);
      }
    }
    std::shuffle(rules.begin(), rules.end(), random);
    std::string vocab, merges;
    for (size_t i = 0; i < tokens.size(); ++i) {
      vocab += (i > 0 ? ", \"" : "\"") + tokens[i] + "\": " + std::to_string(i);
    }
    for (const auto& [left, right] : rules) {
      merges += (merges.empty() ? "\"" : ", \"") + left + " " + right + "\"";
    }
    const auto tokenizer = parse_json_tokenizer(
        R"({"model": {"vocab": {)" + vocab + R"(}, "merges": [)" + merges +
            "]}}",
        "t.json");
    for (const size_t length : {3, 10, 31, 48, 49, 300}) {
      for (int i = 0; i < 5; ++i) {
        std::string word;
        while (word.size() < length) {
          word += static_cast<char>('a' + random() % 3);
        }
        std::vector<std::string> parts;
        for (const TokenId id : tokenizer->encode(word)) {
          parts.push_back(tokens[static_cast<size_t>(id)]);
        }
        EXPECT_EQ(parts, join_by_rules(word, rules)) << word;
        EXPECT_EQ(tokenizer->encode(word), tokenizer->encode(word));
      }
    }
  }
}

TEST(Bpe, UnknownCharacters) {
  EXPECT_THAT(
      error_text<DataError>([] { encode(description(), "axb"); }),
      HasSubstr("no token for \"x\""));
  const std::string unknown = R"("unk_token": "?", )";
  EXPECT_THAT(
      encode(description("", unknown), "axxb"), ElementsAre(0, 6, 6, 1));
  EXPECT_THAT(
      encode(description("", unknown + R"("fuse_unk": true, )"), "axxb"),
      ElementsAre(0, 6, 1));
}

TEST(JsonTokenizer, AddedTokensAndTheirFlags) {
  const auto with = [](const std::string& flags) {
    return description(
        R"("added_tokens": [{"id": 10, "content": "<x>", )" + flags + "}], ",
        R"("unk_token": "?", )");
  };
  const std::string raw = R"("normalized": false)";
  EXPECT_THAT(encode(with(raw), "a<x>b"), ElementsAre(0, 10, 1));
  EXPECT_THAT(encode(with(raw), "a <x> b"), ElementsAre(0, 6, 10, 6, 1));
  EXPECT_THAT(
      encode(with(raw + R"(, "lstrip": true)"), "a <x> b"),
      ElementsAre(0, 10, 6, 1));
  EXPECT_THAT(
      encode(with(raw + R"(, "rstrip": true)"), "a <x> b"),
      ElementsAre(0, 6, 10, 1));
  EXPECT_THAT(
      encode(with(raw + R"(, "single_word": true)"), "a<x>b <x>"),
      ElementsAre(0, 6, 6, 6, 1, 6, 10));
}

TEST(JsonTokenizer, TheLongestOfManyAddedTokensMatches) {
  std::string added;
  for (int i = 0; i < 20'000; ++i) {
    added += (i > 0 ? ", " : "") + std::string(R"({"id": )") +
             std::to_string(100 + i) + R"(, "content": "<)" +
             std::to_string(i) + R"("})";
  }
  const auto tokenizer = parse_json_tokenizer(
      description(
          R"("added_tokens": [)" + added + "], ", R"("unk_token": "?", )"),
      "t.json");
  EXPECT_THAT(
      tokenizer->encode("a<19999<7<12345"),
      ElementsAre(0, 100 + 19'999, 107, 100 + 12'345));
}

TEST(JsonTokenizer, TokensAroundAText) {
  const auto tokenizer = parse_json_tokenizer(
      description(
          R"("post_processor": {"type": "TemplateProcessing", "single":
          [{"SpecialToken": {"id": "s", "type_id": 0}},
           {"Sequence": {"id": "A", "type_id": 0}},
           {"SpecialToken": {"id": "e", "type_id": 0}}], "pair": [],
          "special_tokens": {"s": {"id": "s", "ids": [6, 7], "tokens": []},
                             "e": {"id": "e", "ids": [2], "tokens": []}}}, )"),
      "t.json");
  EXPECT_THAT(tokenizer->encode("ab", true), ElementsAre(6, 7, 3, 2));
  EXPECT_THAT(tokenizer->encode("ab"), ElementsAre(3));
}

TEST(JsonTokenizer, FindsTokensAndTheEndOfText) {
  const auto tokenizer = parse_json_tokenizer(
      description(R"("added_tokens": [{"id": 12, "content": "</s>"}], )"),
      "t.json");
  EXPECT_EQ(tokenizer->vocab_size(), 13);
  EXPECT_EQ(tokenizer->find("abc"), 4);
  EXPECT_EQ(tokenizer->find("abcd"), std::nullopt);
  EXPECT_EQ(tokenizer->end_of_text(), 12);
  const std::vector<TokenId> gap = {11};
  EXPECT_THAT(
      error_text<DataError>([&] { tokenizer->decode(gap); }),
      HasSubstr("token 11 is not in"));
  EXPECT_EQ(
      parse_json_tokenizer(description(), "t.json")->end_of_text(),
      std::nullopt);
}

TEST(JsonTokenizer, NamesUnknownComponents) {
  for (
      const auto& [json, part] :
      std::vector<std::pair<std::string, std::string>>{
          {"{", "t.json: is not JSON"},
          {"[]", "t.json: must be an object"},
          {"{}", "has no \"model\""},
          {description(R"("extra": 1, )"), "t.json: \"extra\" is not known"},
          {description(R"("version": "1.0", )"), "has \"version\" twice"},
          {description(R"("normalizer": {"type": "Nmt"}, )"),
           "t.json.normalizer: a normalizer of type Nmt is not known"},
          {description(
               R"("pre_tokenizer": {"type": "Sequence", "pretokenizers":
             [{"type": "ByteLevel"}, {"type": "Whitespace"}]}, )"),
           "ByteLevel must be the last"},
          {description(R"("decoder": {"type": "WordPiece"}, )"),
           "a decoder of type WordPiece"},
          {description(R"("post_processor": {"type": "Other"}, )"),
           "a post-processor of type Other"},
          {R"({"model": {"type": "Unigram", "vocab": []}})",
           "use the SentencePiece .model"},
          {description("", R"("dropout": 0.1, )"), "dropout"},
          {description(
               R"("pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a"},
             "behavior": "Isolated"}, )"),
           "pre_tokenizer.pattern: the pattern (a is wrong"},
          {description(
               R"("pre_tokenizer": {"type": "Split", "pattern": {"Regex": "a"},
             "behavior": "Merged"}, )"),
           "behavior Merged"}}) {
    EXPECT_THAT(parse_error(json), HasSubstr(part));
  }
  EXPECT_THAT(
      parse_error(description(
          R"("pre_tokenizer": {"type": "Sequence", "pretokenizers":
             [{"type": "Whitespace"}, {"type": "BertPreTokenizer"}]}, )")),
      HasAll(
          "t.json.pre_tokenizer.pretokenizers[1]: ",
          "BertPreTokenizer is not known"));
}

TEST(JsonTokenizer, NamesContradictions) {
  const auto model = [](const std::string& vocab, const std::string& merges) {
    return R"({"model": {"vocab": )" + vocab + R"(, "merges": )" + merges +
           "}}";
  };
  for (const auto& [json, part] :
       std::vector<std::pair<std::string, std::string>>{
           {model(R"({"a": 0, "b": 1})", R"(["a b"])"),
            "merges[0]: \"a\" and \"b\": \"ab\" is not in the vocabulary"},
           {model(R"({"a": 0})", R"(["ab"])"), "merges[0] must be two tokens"},
           {model(R"({"a": 0, "b": 0})", "[]"), "id 0 is both"},
           {model(R"({"a": -1})", "[]"), "\"a\" is -1"},
           {model(R"({"a": 2000000000})", "[]"), "ids must be below"},
           {description("", R"("unk_token": "none", )"),
            "unk_token \"none\" is not in"},
           {description(R"("added_tokens": [{"id": 11, "content": "ab"}], )"),
            "token \"ab\" has id 3 and 11"},
           {description(R"("added_tokens": [{"id": 3, "content": "<x>"}], )"),
            "id 3 is both"}}) {
    EXPECT_THAT(parse_error(json), HasSubstr(part));
  }
}

TEST(LoadTokenizer, ByName) {
  EXPECT_EQ(load_tokenizer("bytes")->vocab_size(), 257);
  EXPECT_THAT(
      error_text<ConfigError>([] { load_tokenizer("words"); }),
      HasSubstr("tokenizer=\"words\": must be \"bytes\""));
  const TempFolder folder;
  for (const auto& [name, part] :
       {std::pair<std::string, const char*>(
            "/none/t.json", "/none/t.json: cannot be read"),
        {"/none/t.model", "/none/t.model: cannot be read"},
        {folder.write("t.model", "no model"),
         "t.model: is not a SentencePiece model"},
        {folder.write("e.model", ""),
         "e.model: is not a SentencePiece model"}}) {
    EXPECT_THAT(
        error_text<DataError>([&] { load_tokenizer(name); }), HasSubstr(part));
  }
  folder.write("t.json", description());
  EXPECT_EQ(load_tokenizer(folder.path("t.json"))->vocab_size(), 10);
}

/// split_words() against ICU's matcher.
TEST(Regex, ShortcutsSplitAsThePatternsDo) {
  const std::string modern =
      "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|"
      "\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|"
      "\\s+(?!\\S)|\\s+";
  std::string single = modern;
  single.erase(single.find("{1,3}"), 5);
  std::vector<std::string> parts = {" ",  "  ",       "\n",           "\r",
                                    "\t", "\xc2\xa0", "\xe2\x80\xa8", "a",
                                    "Zz", "\xc3\xa9", "\xd1\x8f"};
  parts.insert(
      parts.end(),
      {"1", "22", "\xc2\xbd", "\xd9\xa3", "'", "'s", "'LL", "'\xc5\xbf", "'re",
       "'V", "!", "?.", "_", "\xf0\x9f\x98\x80", "\xcc\x81", "\xe2\x80\x8d"});
  std::mt19937 random(11);
  for (const auto& pattern :
       {std::string(detail::kGpt2Pattern), modern, single}) {
    const detail::Regex fast(pattern, "here");
    const detail::Regex slow(pattern, "here", false);
    for (int i = 0; i < 20000; ++i) {
      std::string text;
      for (size_t n = random() % 12; n > 0; --n) {
        text += parts[random() % parts.size()];
      }
      std::vector<detail::Span> a, b;
      fast.split(text, a);
      slow.split(text, b);
      const auto ends = [](const auto& spans) {
        std::vector<size_t> list;
        for (const auto& span : spans) {
          list.push_back(span.end);
          EXPECT_TRUE(span.match);
        }
        return list;
      };
      ASSERT_EQ(ends(a), ends(b)) << pattern << " on " << text;
    }
  }
}

TEST(Regex, EndlessBacktrackingIsAnError) {
  const std::string text = std::string(60, 'a') + "!";
  for (const char* pattern : {"(a+)+$", "(?:a|a?)+b"}) {
    std::vector<detail::Span> spans;
    const detail::Regex regex(pattern, "t.json: pattern");
    EXPECT_THAT(
        error_text<DataError>([&] { regex.split(text, spans); }),
        HasAll(
            "t.json: pattern: its pattern takes more than 2060 thousand steps "
            "on a text of 61 bytes; write it without"));
    // A text on which it does not backtrack is split.
    spans.clear();
    regex.split("xyz", spans);
    EXPECT_EQ(spans.size(), 1u);
  }
}

TEST(Regex, FollowsTheDialectOfRuby) {
  const auto words = [](const std::string& pattern, const std::string& text) {
    std::vector<detail::Span> spans;
    detail::Regex(pattern, "here").split(text, spans);
    std::vector<std::string> list;
    for (const auto& span : spans) {
      list.push_back(
          (span.match ? "" : "-") +
          text.substr(span.begin, span.end - span.begin));
    }
    return list;
  };
  EXPECT_THAT(words("^b", "b\nb"), ElementsAre("b", "-\n", "b"));
  EXPECT_THAT(words("[\\h]+", "xff"), ElementsAre("-x", "ff"));
  EXPECT_THAT(
      words("\\s", "a\vb\xc2\x85"), ElementsAre("-a", "\v", "-b", "\xc2\x85"));
  EXPECT_THAT(
      words("\\w+", "x_\xc2\xb2\xe2\x93\xb9\xf0\x9d\x92\xb3"),
      ElementsAre("x_\xc2\xb2", "-\xe2\x93\xb9", "\xf0\x9d\x92\xb3"));
  EXPECT_THAT(
      error_text<DataError>([&] { words("a{1,2}+", "a"); }),
      HasSubstr("here: the pattern a{1,2}+ has }+"));
}

TEST(LoadTokenizer, APipeOrAFolderIsRefused) {
  const TempFolder folder;
  for (const char* name : {"pipe.json", "pipe.model"}) {
    ASSERT_EQ(::mkfifo(folder.path(name).c_str(), 0600), 0);
    EXPECT_THAT(
        error_text<DataError>([&] { load_tokenizer(folder.path(name)); }),
        HasSubstr("is no regular file; [data] tokenizer must name a file"));
  }
}

}  // namespace echelon::tokenizer_test
