#include "echelon/data/sources/text.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <numeric>

#include "echelon/data/sources/inspect.h"
#include "echelon/data/tokenizer/tokenizer.h"
#include "echelon/text/text_file.h"
#include "tests/data/sources/make_tokens.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace echelon::text_test {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::StartsWith;

class Text : public testing::Test {
 protected:
  void SetUp() override {
    ::setenv("ECHELON_CACHE", folder_.make_folder("cache").c_str(), 1);
  }

  DataOptions text(const std::string& name, int64_t sequence) const {
    DataOptions options{.name = DataKind::text, .sources = {name}};
    options.sequence = sequence;
    return options;
  }
  DataOptions tokens(
      const std::string& name, const std::vector<uint16_t>& ids,
      int64_t sequence) const {
    return text(folder_.write(name, raw_bytes(ids)), sequence);
  }
  size_t cached() const {
    const std::string folder = token_cache_folder();
    if (!fs::exists(folder)) return 0;
    return static_cast<size_t>(std::distance(
        fs::directory_iterator(folder), fs::directory_iterator()));
  }
  std::string config_error(const DataOptions& options) const {
    return error_text<ConfigError>([&] { inspect_data(options); });
  }
  std::string data_error(const DataOptions& options) const {
    return error_text<DataError>([&] { inspect_data(options); });
  }

  TempFolder folder_;
};

struct Window {
  std::vector<int64_t> inputs, targets, documents;
};

Window read(const TextCorpus& corpus, int64_t sample) {
  const auto n = static_cast<size_t>(corpus.sequence());
  Window window{
      std::vector<int64_t>(n), std::vector<int64_t>(n),
      std::vector<int64_t>(n)};
  corpus.read(
      sample, window.inputs.data(), window.targets.data(),
      corpus.respects_documents() ? window.documents.data() : nullptr);
  return window;
}

std::vector<uint16_t> ascending(uint16_t n) {
  std::vector<uint16_t> ids(n);
  std::iota(ids.begin(), ids.end(), uint16_t{0});
  return ids;
}

TEST_F(Text, WindowsFollowEachOtherAndTargetsAreOneAhead) {
  const auto options = tokens("a.bin", ascending(14), 4);
  const TextCorpus corpus(options);
  ASSERT_EQ(corpus.num_samples(), 3);  // the 14th token is too few for a 4th
  EXPECT_EQ(corpus.vocabulary(), 14);
  EXPECT_THAT(read(corpus, 0).inputs, ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(read(corpus, 0).targets, ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(read(corpus, 2).inputs, ElementsAre(8, 9, 10, 11));
  EXPECT_THAT(read(corpus, 2).targets, ElementsAre(9, 10, 11, 12));
  const DataFacts facts = inspect_data(options);
  EXPECT_EQ(facts.num_samples, 3);
  EXPECT_EQ(facts.num_holdout, 1);
  EXPECT_EQ(facts.classes, 14);
  EXPECT_THAT(facts.sample_shape, ElementsAre(4));
  EXPECT_EQ(facts.describe, "14 tokens, vocabulary 14, 3 samples of 4");
}

TEST_F(Text, OneMoreTokenMakesOneMoreWindow) {
  EXPECT_EQ(TextCorpus(tokens("a.bin", ascending(12), 4)).num_samples(), 2);
  EXPECT_EQ(TextCorpus(tokens("a.bin", ascending(13), 4)).num_samples(), 3);
}

TEST_F(Text, PlainTextIsBytesWithAnEndAfterEachFile) {
  folder_.write("doc/b.txt", "xyz");
  folder_.write("doc/a.txt", "\xff!");
  folder_.write("doc/empty.txt", "");
  const TextCorpus corpus(text(folder_.path("doc/*.txt"), 3));
  EXPECT_EQ(corpus.vocabulary(), 257);
  ASSERT_EQ(corpus.num_tokens(), 7);
  EXPECT_THAT(read(corpus, 0).inputs, ElementsAre(0xff, '!', 256));
  EXPECT_THAT(read(corpus, 1).inputs, ElementsAre('x', 'y', 'z'));
  EXPECT_THAT(read(corpus, 1).targets, ElementsAre('y', 'z', 256));
}

TEST_F(Text, ASeparatorSplitsAFileIntoDocuments) {
  auto options = text(folder_.write("a.txt", "--ab--cd----e--"), 7);
  options.document_separator = "--";
  options.documents = Documents::respected;
  const TextCorpus corpus(options);
  ASSERT_EQ(corpus.num_tokens(), 8);
  const Window window = read(corpus, 0);
  EXPECT_THAT(window.inputs, ElementsAre('a', 'b', 256, 'c', 'd', 256, 'e'));
  EXPECT_THAT(window.documents, ElementsAre(0, 0, 0, 1, 1, 1, 2));
  EXPECT_THAT(window.targets, ElementsAre('b', 256, -100, 'd', 256, -100, 256));
}

TEST_F(Text, BordersOfIndexedDocuments) {
  folder_.write("t.bin", raw_bytes(ascending(9)));
  folder_.write(
      "t.idx", make_index(8, {2, 3, 3, 1}, {0, 4, 10, 16}, {0, 1, 3, 4}));
  for (const char* name : {"t.bin", "t.idx", "t"}) {
    auto options = text(folder_.path(name), 4);
    EXPECT_THAT(read(TextCorpus(options), 0).targets, ElementsAre(1, 2, 3, 4));
    options.documents = Documents::respected;
    const TextCorpus corpus(options);
    EXPECT_THAT(read(corpus, 0).documents, ElementsAre(0, 0, 1, 1));
    EXPECT_THAT(read(corpus, 0).targets, ElementsAre(1, -100, 3, 4));
    // The border is right after the window, before its last target.
    EXPECT_THAT(read(corpus, 1).documents, ElementsAre(0, 0, 0, 0));
    EXPECT_THAT(read(corpus, 1).targets, ElementsAre(5, 6, 7, -100));
  }
}

TEST_F(Text, BordersOfPlainTokensAreEndsOfText) {
  auto options = tokens("a.bin", {1, 9, 9, 2, 3, 9, 4}, 3);
  options.documents = Documents::respected;
  EXPECT_THAT(config_error(options), HasSubstr("set end_of_text_id"));
  options.end_of_text_id = 9;
  const TextCorpus corpus(options);
  EXPECT_THAT(read(corpus, 0).documents, ElementsAre(0, 0, 1));
  EXPECT_THAT(read(corpus, 0).targets, ElementsAre(9, -100, -100));
  EXPECT_THAT(read(corpus, 1).documents, ElementsAre(0, 0, 0));
  EXPECT_THAT(read(corpus, 1).targets, ElementsAre(3, 9, -100));
  options.end_of_text_id = 10;
  EXPECT_THAT(config_error(options), HasSubstr("end_of_text_id=10: the voc"));
}

TEST_F(Text, TokensOutsideOfTheVocabularyAreFoundBeforeRanksStart) {
  auto options = tokens("a.bin", {1, 2, 3, 4, 500, 6, 7}, 2);
  options.vocab_size = 400;
  EXPECT_THAT(
      data_error(options),
      HasAll("a.bin: token 4 (byte 8) is 500", "the vocabulary has 400"));
  options.vocab_size = 501;
  EXPECT_EQ(inspect_data(options).classes, 501);
  options.tokenizer = "bytes";
  EXPECT_EQ(inspect_data(options).classes, 501);
  options.vocab_size = 200;
  EXPECT_THAT(
      config_error(options),
      HasSubstr("vocab_size=200: the tokenizer has 257 tokens"));
  options.vocab_size = 0;
  EXPECT_THAT(data_error(options), HasSubstr("the vocabulary has 257"));
}

TEST_F(Text, RefusesTextsThatCannotTrain) {
  for (const auto& [options, part] :
       std::vector<std::pair<DataOptions, std::string>>{
           {tokens("e.bin", {}, 4), "e.bin: is empty"},
           {text(folder_.write("e.txt", ""), 4), "is empty"},
           {text(folder_.path("none.txt"), 4), "none.txt: cannot be read"},
           {text(folder_.path("*.none"), 4),
            "*.none: the pattern matches no file"},
           {text(folder_.path("nowhere/*.txt"), 4),
            "nowhere/*.txt: the pattern matches no file"},
           {text(folder_.path(), 4), "FOLDER/*.txt"},
           {text(folder_.write("o.bin", "123"), 1), "no multiple of the 2"}}) {
    EXPECT_THAT(data_error(options), HasSubstr(part));
  }
  EXPECT_THAT(
      data_error(tokens("s.bin", ascending(8), 8)),
      HasAll(
          "s.bin: has 8 tokens; one sample of [data] sequence=8 takes 9",
          "at most 7"));
  if (::geteuid() != 0) {
    const auto path = folder_.write("secret.txt", "text");
    fs::permissions(path, fs::perms::none);
    EXPECT_THAT(data_error(text(path, 2)), HasSubstr("Permission denied"));
  }
}

TEST_F(Text, RefusesWrongSettings) {
  const auto good = tokens("a.bin", ascending(20), 4);
  const std::pair<void (*)(DataOptions&), const char*> cases[] = {
      {[](auto& o) { o.sources.clear(); }, "needs path or sources"},
      {[](auto& o) { o.path = "b.bin"; }, "path and sources are both"},
      {[](auto& o) { o.sequence = 0; }, "sequence=0"},
      {[](auto& o) {
         o.weights = {1, 2};
       },
       "weights has 2 numbers for 1 source;"},
      {[](auto& o) { o.weights = {0}; }, "weights holds 0"},
      {[](auto& o) { o.token_bytes = 3; }, "token_bytes=3"},
      {[](auto& o) { o.tokenizer = "words"; }, "tokenizer=\"words\""}};
  for (const auto& [change, part] : cases) {
    auto options = good;
    change(options);
    EXPECT_THAT(config_error(options), HasSubstr(part));
  }
}

TEST_F(Text, TheFormatMayBeSet) {
  const auto path = folder_.write("tokens", raw_bytes(ascending(5)));
  auto options = text(path, 4);
  EXPECT_EQ(TextCorpus(options).num_tokens(), 11);  // bytes, and the end
  options.format = TextFormat::tokens;
  EXPECT_EQ(TextCorpus(options).num_tokens(), 5);
  options = text(folder_.write("a.bin", raw_bytes<uint32_t>({70000, 1})), 1);
  options.token_bytes = 4;
  EXPECT_EQ(TextCorpus(options).vocabulary(), 70001);
}

TEST_F(Text, LinesOfJsonAreDocuments) {
  auto options = text(
      folder_.write(
          "a.jsonl",
          "{\"text\": \"ab\"}\n\n{\"id\": 7, \"text\": \"c\\u00e9\"}\r\n"),
      6);
  options.documents = Documents::respected;
  const TextCorpus corpus(options);
  EXPECT_EQ(corpus.num_tokens(), 3 + 4);
  const auto window = read(corpus, 0);
  EXPECT_THAT(window.inputs, ElementsAre('a', 'b', 256, 'c', 0xc3, 0xa9));
  EXPECT_THAT(window.targets, ElementsAre('b', 256, -100, 0xc3, 0xa9, 256));
  EXPECT_THAT(window.documents, ElementsAre(0, 0, 0, 1, 1, 1));
  options.text_field = "body";
  EXPECT_THAT(data_error(options), HasSubstr("a text \"body\""));
}

// The loss is on what the assistant says and on the end of its turn.
TEST_F(Text, ConversationsCountTheAssistantsTokens) {
  const std::string path = folder_.write(
      "chat.jsonl",
      "{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}, "
      "{\"role\": \"assistant\", \"content\": \" Yo\"}]}\n");
  const auto parts = [&](ChatTemplate chat) {
    const LineTokens line = tokens_of_line(
        read_text_file(path), {.chat_template = chat}, ByteTokenizer());
    std::pair<std::string, std::string> both;  // all, and what counts
    for (size_t i = 0; i < line.ids.size(); ++i) {
      both.first += static_cast<char>(line.ids[i]);
      if (line.counts.at(i) == 1) both.second += static_cast<char>(line.ids[i]);
    }
    return both;
  };
  EXPECT_EQ(
      parts(ChatTemplate::chatml),
      std::pair(
          std::string("<|im_start|>user\nHi<|im_end|>\n"
                      "<|im_start|>assistant\n Yo<|im_end|>\n"),
          std::string(" Yo<|im_end|>")));
  EXPECT_EQ(
      parts(ChatTemplate::llama3),
      std::pair(
          std::string(
              "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi"
              "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nYo"
              "<|eot_id|>"),
          std::string("Yo<|eot_id|>")));

  const TextCorpus corpus(text(path, 65));
  EXPECT_TRUE(corpus.has_masks());
  const auto window = read(corpus, 0);
  std::string counted;
  for (const int64_t target : window.targets) {
    if (target >= 0) counted += static_cast<char>(target);
  }
  EXPECT_EQ(counted, " Yo<|im_end|>");
  EXPECT_EQ(window.inputs[1], '|') << "inputs stay";
  // The second time both come from the cache.
  EXPECT_EQ(cached(), 6u);
  EXPECT_EQ(read(TextCorpus(text(path, 65)), 0).targets, window.targets);
  EXPECT_EQ(cached(), 6u);
  auto other = text(path, 65);
  other.chat_template = ChatTemplate::llama3;
  EXPECT_NE(read(TextCorpus(other), 0).targets, window.targets);
}

TEST_F(Text, ALineThatDoesNotParseIsNamed) {
  const auto error = [&](const std::string& line) {
    const std::string path =
        folder_.write("bad.jsonl", "{\"text\": \"fine\"}\n" + line + "\n");
    const auto text_of = data_error(text(path, 4));
    EXPECT_THAT(text_of, HasSubstr(path + ":2: ")) << line;
    return text_of;
  };
  EXPECT_THAT(error("{\"text\": "), HasSubstr("is no JSON: syntax error"));
  EXPECT_THAT(error("[1]"), HasSubstr("is no object with \"messages\""));
  EXPECT_THAT(
      error("{\"messages\": [{\"role\": \"asistant\", \"content\": \"x\"}]}"),
      HasSubstr("did you mean \"assistant\"?"));
  EXPECT_THAT(
      error("{\"messages\": [{\"role\": \"user\"}]}"),
      HasSubstr("message 1 has no \"content\" that is a text"));
  EXPECT_THAT(
      error("{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}]}"),
      HasSubstr("no message has the role \"assistant\""));
  EXPECT_THAT(
      error("{\"tokens\": [1, 2, 3], \"loss_mask\": [0, 1]}"),
      HasSubstr("\"loss_mask\" has 2 numbers for 3 tokens"));
  EXPECT_THAT(
      error("{\"tokens\": [1, 300]}"),
      HasSubstr("\"tokens\" has 300; expected whole numbers from 0 to 256"));
}

TEST_F(Text, AMaskBesideTokensHasANumberForEach) {
  const auto options = tokens("masked.bin", ascending(9), 4);
  folder_.write("masked.mask", std::string("\1\0\0\1\1\0\1\1\1", 9));
  const TextCorpus corpus(options);
  EXPECT_THAT(read(corpus, 0).targets, ElementsAre(-100, -100, 3, 4));
  EXPECT_THAT(read(corpus, 1).targets, ElementsAre(-100, 6, 7, 8));
  folder_.write("masked.mask", std::string("\1\0\0\1", 4));
  EXPECT_THAT(
      data_error(options), HasSubstr(
                               "has 4 numbers, but " +
                               folder_.path("masked.bin") + " has 9 tokens"));
}

TEST_F(Text, IsTokenisedOnce) {
  const auto path = folder_.write("a.txt", "some text");
  TextCorpus{text(path, 2)};
  EXPECT_EQ(cached(), 3);
  const auto long_ago = fs::file_time_type() + std::chrono::hours(1);
  for (const auto& entry : fs::directory_iterator(token_cache_folder())) {
    fs::last_write_time(entry.path(), long_ago);
  }
  TextCorpus{text(path, 3)};
  for (const auto& entry : fs::directory_iterator(token_cache_folder())) {
    EXPECT_EQ(fs::last_write_time(entry.path()), long_ago) << "not made anew";
  }
  TextCorpus{text(folder_.write("copy.txt", "some text"), 2)};
  EXPECT_EQ(cached(), 3) << "the same text is the same tokens";
  folder_.write("a.txt", "same size");
  EXPECT_EQ(read(TextCorpus(text(path, 2)), 0).inputs[1], 'a');
  EXPECT_EQ(cached(), 6);
  auto options = text(path, 2);
  options.document_separator = " ";
  TextCorpus{options};
  options.end_of_text_id = 0;
  EXPECT_EQ(read(TextCorpus(options), 2).inputs[0], 0);
  EXPECT_EQ(cached(), 12);
  for (const auto& entry : fs::directory_iterator(token_cache_folder())) {
    fs::resize_file(entry.path(), 5);
  }
  EXPECT_EQ(read(TextCorpus(text(path, 2)), 0).inputs[1], 'a')
      << "a damaged one is made anew";
}

TEST_F(Text, AFlippedBitOfCachedTokensIsFound) {
  const auto path = folder_.write("a.txt", "some text");
  TextCorpus{text(path, 2)};
  std::map<std::string, std::string> whole;
  for (const auto& entry : fs::directory_iterator(token_cache_folder())) {
    whole[entry.path()] = read_file(entry.path());
  }
  ASSERT_EQ(whole.size(), 3u);
  for (const auto& [name, bytes] : whole) {
    SCOPED_TRACE(name);
    // A low bit of a token, of a count, of a digit.
    std::string damaged = bytes;
    const size_t at = name.ends_with(".idx") ? 26 : bytes.size() - 2;
    damaged[at] = static_cast<char>(damaged[at] ^ 1);
    std::ofstream(name) << damaged;
    testing::internal::CaptureStderr();
    TextCorpus{text(path, 2)};
    EXPECT_THAT(
        testing::internal::GetCapturedStderr(),
        StartsWith("warning: cached tokens are made anew: "));
    for (const auto& [other, expected] : whole) {
      EXPECT_EQ(read_file(other), expected) << other;
    }
  }
}

TEST_F(Text, OtherContentsHaveAnotherFingerprint) {
  const auto of = [&](const std::string& written, const char* name) {
    return TextCorpus(text(folder_.write(name, written), 2)).fingerprints();
  };
  for (const char* name : {"a.txt", "a.bin"}) {
    const auto first = of("some text.", name);
    ASSERT_EQ(first.size(), 1u);
    EXPECT_EQ(first[0].first, folder_.path(name));
    EXPECT_NE(of("same size.", name), first);
    EXPECT_EQ(of("some text.", name), first);
  }
}

TEST_F(Text, PiecesOfLongTextsHaveTheSameTokens) {
  std::string long_text;
  for (int i = 0; long_text.size() < 3u << 20; ++i) {
    long_text += std::to_string(i) + " words ";
  }
  const TextCorpus corpus(text(folder_.write("long.txt", long_text), 1000));
  ASSERT_EQ(corpus.num_tokens(), static_cast<int64_t>(long_text.size()) + 1);
  for (int64_t sample = 0; sample < corpus.num_samples(); ++sample) {
    const auto inputs = read(corpus, sample).inputs;
    const std::string part(inputs.begin(), inputs.end());
    ASSERT_EQ(part, long_text.substr(static_cast<size_t>(sample) * 1000, 1000));
  }
}

TEST_F(Text, FindsPlacesToSplit) {
  EXPECT_EQ(find_split("abcdef", 3, TextSplit::anywhere), 3);
  EXPECT_EQ(find_split("ab cd ef", 6, TextSplit::before_space), 5);
  EXPECT_EQ(find_split("ab  cd. ef g", 9, TextSplit::before_space), 10);
  EXPECT_EQ(find_split("ab cd ef", 6, TextSplit::nowhere), 8);
  EXPECT_EQ(find_split("abcdefgh", 3, TextSplit::at_space), 8);
}

TEST_F(Text, HoldsOutAPartOfEachSource) {
  auto options = tokens("a.bin", ascending(41), 2);
  options.sources.push_back(folder_.write("b.bin", raw_bytes(ascending(11))));
  const TextCorpus corpus(options);
  ASSERT_EQ(corpus.num_samples(), 25);
  const Split split = corpus.split(0.2, 7);
  EXPECT_EQ(split.train.size(), 20);
  EXPECT_EQ(split.holdout.size(), 5);
  const auto of_second = std::count_if(
      split.holdout.begin(), split.holdout.end(),
      [](int64_t sample) { return sample >= 20; });
  EXPECT_EQ(of_second, 1);
  const DataFacts facts = inspect_data(options);
  EXPECT_EQ(facts.num_train, 20);
  EXPECT_EQ(facts.num_holdout, 5);
  EXPECT_THAT(facts.describe, StartsWith("52 tokens of 2 sources"));
  // Samples of the second source follow those of the first.
  EXPECT_THAT(read(corpus, 20).inputs, ElementsAre(0, 1));
  EXPECT_THAT(read(corpus, 19).inputs, ElementsAre(38, 39));
}

TEST_F(Text, SeparateHoldout) {
  auto options = tokens("a.bin", ascending(41), 2);
  options.holdout_path = folder_.write("h.bin", raw_bytes(ascending(7)));
  EXPECT_EQ(inspect_data(options).num_train, 20);
  EXPECT_EQ(inspect_data(options).num_holdout, 3);
}

TEST_F(Text, OneSourceHasTheOrderOfAnyDataSet) {
  const TextCorpus corpus(tokens("a.bin", ascending(41), 2));
  std::vector<int64_t> samples(20);
  std::iota(samples.begin(), samples.end(), 0);
  EXPECT_EQ(
      corpus.training_order(samples, 5, 3, true),
      epoch_order(samples, 5, 3, true));
}

TEST_F(Text, BlendsByWeight) {
  auto options = tokens("a.bin", ascending(201), 2);  // 100 samples
  options.sources.push_back(folder_.write("b.bin", raw_bytes(ascending(41))));
  options.weights = {1, 3};
  const TextCorpus corpus(options);
  std::vector<int64_t> samples(120);
  std::iota(samples.begin(), samples.end(), 0);
  std::map<int64_t, int> seen;
  for (int64_t epoch = 0; epoch < 10; ++epoch) {
    const auto order = corpus.training_order(samples, 5, epoch, true);
    ASSERT_EQ(order.size(), 120);
    double second = 0;
    for (size_t k = 0; k < order.size(); ++k) {
      ++seen[order[k]];
      if (order[k] >= 100) ++second;
      EXPECT_LT(std::abs(second - 0.75 * static_cast<double>(k + 1)), 1);
    }
  }
  // 300 of 100 samples and 900 of 20: each sample comes equally often.
  for (int64_t sample = 0; sample < 120; ++sample) {
    EXPECT_EQ(seen[sample], sample < 100 ? 3 : 45) << sample;
  }
  options.weights = {1000, 1};
  EXPECT_THAT(
      error_text<ConfigError>(
          [&] { TextCorpus(options).training_order(samples, 5, 0, true); }),
      HasSubstr("source 1 would get none"));
}

TEST(TokenizerOfBytes, DecodesWhatItEncodes) {
  const ByteTokenizer tokenizer;
  const std::string text("a\0\xff\xc3", 4);
  const auto ids = tokenizer.encode(text, false);
  EXPECT_THAT(ids, ElementsAre('a', 0, 0xff, 0xc3));
  EXPECT_EQ(tokenizer.decode(ids), text);
  const std::vector<TokenId> end = {'b', 256};
  EXPECT_EQ(tokenizer.decode(end), "b<|endoftext|>");
  EXPECT_EQ(tokenizer.find("<|endoftext|>"), 256);
  EXPECT_EQ(find_end_of_text(tokenizer), 256);
  EXPECT_EQ(find_text_split(tokenizer), TextSplit::anywhere);
  const std::vector<TokenId> wrong = {257};
  EXPECT_THROW(tokenizer.decode(wrong), DataError);
}

TEST(Utf8, BadPartsAreReplaced) {
  EXPECT_EQ(valid_utf8("a\xc3\xa9z"), "a\xc3\xa9z");
  const std::string bad = "\xef\xbf\xbd", a = "a";
  EXPECT_EQ(valid_utf8("\xff" + a), bad + a);
  EXPECT_EQ(valid_utf8("\xc3" + a), bad + a);
  EXPECT_EQ(valid_utf8("\xe2\x82" + a), bad + a) << "one for a beginning";
  EXPECT_EQ(valid_utf8("\xed\xa0\x80"), bad + bad + bad) << "a surrogate";
  EXPECT_EQ(valid_utf8("\xf4\x90\x80\x80"), bad + bad + bad + bad);
  EXPECT_EQ(valid_utf8("\xc0\xaf"), bad + bad) << "longer than needed";
  EXPECT_EQ(valid_utf8("\xf0\x9f\x98"), bad);
}

TEST(Utf8, FindsIncompleteCharacters) {
  EXPECT_EQ(whole_characters(""), 0);
  EXPECT_EQ(whole_characters("ab"), 2);
  EXPECT_EQ(whole_characters("a\xc3"), 1);
  EXPECT_EQ(whole_characters("a\xc3\xa9"), 3);
  EXPECT_EQ(whole_characters("a\xf0\x9f\x98"), 1);
  EXPECT_EQ(whole_characters("a\xf0\x9f\x98\x80"), 5);
  EXPECT_EQ(whole_characters("a\xff"), 2) << "nothing completes it";
  EXPECT_EQ(whole_characters("a\xc3\xa9\x80"), 4);
  EXPECT_EQ(whole_characters("\xed\xa0"), 2) << "never a character";
}

}  // namespace echelon::text_test
