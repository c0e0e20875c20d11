// Compares ids and texts with those of Python's `tokenizers` and
// `sentencepiece`, line by line.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <sstream>

#include "echelon/data/tokenizer/tokenizer.h"
#include "tests/support/places.h"
#include "tests/support/python.h"
#include "tests/support/temp_folder.h"

namespace echelon::tokenizer_pytorch_test {

std::vector<std::string> records(const std::string& path, size_t width) {
  const std::string bytes = read_file(path);
  std::vector<std::string> all;
  for (size_t at = 0; at < bytes.size();) {
    uint32_t count = 0;
    std::memcpy(&count, bytes.data() + at, sizeof(count));
    at += sizeof(count);
    all.push_back(bytes.substr(at, count * width));
    at += count * width;
  }
  return all;
}

std::vector<TokenId> ids_of(const std::string& record) {
  std::vector<TokenId> ids(record.size() / sizeof(TokenId));
  std::memcpy(ids.data(), record.data(), record.size());
  return ids;
}

std::string printed(const std::vector<TokenId>& ids) {
  std::string text;
  for (const TokenId id : ids) text += std::to_string(id) + " ";
  return text;
}

std::vector<TokenId> sorted(std::vector<TokenId> ids) {
  std::sort(ids.begin(), ids.end());
  return ids;
}

class Reference : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    if (pytorch_python().empty()) return;
    folder_ = new TempFolder;
    times_ = new std::string(run_python_script(
        "data/tokenizer/tokenizer_reference.py",
        {folder_->path(), source_path()}));
  }
  static void TearDownTestSuite() {
    delete folder_;
    delete times_;
  }

  /// `ties`: counts lines with the same tokens in another order.
  int compare(
      const std::string& name, const std::string& suffix, bool ties = false) {
    int reordered = 0;
    const auto tokenizer = load_tokenizer(folder_->path(name + suffix));
    const auto lines = records(folder_->path("lines.bin"), 1);
    EXPECT_GT(lines.size(), 10000);
    for (const bool specials : {false, true}) {
      const auto expected =
          records(folder_->path(name + (specials ? ".full" : ".ids")), 4);
      EXPECT_EQ(expected.size(), lines.size());
      int wrong = 0;
      for (size_t i = 0; i < lines.size() && wrong < 5; ++i) {
        const auto ids = tokenizer->encode(lines[i], specials);
        const auto right = ids_of(expected[i]);
        if (ids == right) continue;
        if (ties && sorted(ids) == sorted(right)) {
          ++reordered;
          continue;
        }
        ++wrong;
        ADD_FAILURE() << name << " line " << i << ": " << lines[i] << "\nis  "
                      << printed(ids) << "\nnot " << printed(right);
      }
    }
    const auto texts = records(folder_->path(name + ".text"), 1);
    const auto expected = records(folder_->path(name + ".ids"), 4);
    int wrong = 0;
    for (size_t i = 0; i < lines.size() && wrong < 5; ++i) {
      const auto text = tokenizer->decode(ids_of(expected[i]));
      // Python's libraries print different numbers of U+FFFD for bytes that
      // are not text.
      if (valid_utf8(text) != text || text == texts[i]) continue;
      ++wrong;
      ADD_FAILURE() << name << " line " << i << ": "
                    << printed(ids_of(expected[i])) << "\nis  " << text
                    << "\nnot " << texts[i];
    }
    return reordered;
  }

  static inline TempFolder* folder_ = nullptr;
  static inline std::string* times_ = nullptr;
};

TEST_F(Reference, Tokenizers) {
  ECHELON_NEED_PYTHON();
  for (const char* name :
       {"gpt2", "llama3", "qwen2", "o200k", "llama2", "llama2_metaspace",
        "mixed", "fused", "spaced", "prefixed"}) {
    compare(name, ".json");
  }
}

TEST_F(Reference, SentencePiece) {
  ECHELON_NEED_PYTHON();
  compare("sp_bpe", ".model");
  // The two versions of the library choose different segmentations of the same
  // score: "))" ")" or ")" "))".
  const int reordered = compare("sp_unigram", ".model", true);
  std::printf("unigram: %d lines with ties\n", reordered);
  EXPECT_LT(reordered, 300);
}

TEST_F(Reference, SplitTextsKeepTheirIds) {
  ECHELON_NEED_PYTHON();
  const std::map<std::string, TextSplit> cuts = {
      {"gpt2", TextSplit::before_space},
      {"llama3", TextSplit::before_space},
      {"qwen2", TextSplit::before_space},
      {"llama2", TextSplit::at_space},
      {"mixed", TextSplit::before_space}};
  for (const auto& [name, cut] : cuts) {
    EXPECT_EQ(
        find_text_split(*load_tokenizer(folder_->path(name + ".json"))), cut)
        << name;
  }
  EXPECT_EQ(
      find_text_split(*load_tokenizer(folder_->path("sp_bpe.model"))),
      TextSplit::before_space)
      << "it makes one space of several";
}

/// Prints the speed, without asserting it.
TEST_F(Reference, Speed) {
  ECHELON_NEED_PYTHON();
  std::istringstream times(*times_);
  const auto texts = records(folder_->path("speed.bin"), 1);
  size_t bytes = 0;
  for (const auto& text : texts) bytes += text.size();
  std::string name;
  for (double python = 0; times >> name >> python;) {
    const auto tokenizer = load_tokenizer(folder_->path(name + ".json"));
    size_t tokens = 0;
    double own = 1e9;
    for (int run = 0; run < 3; ++run) {
      const auto begin = std::chrono::steady_clock::now();
      tokens = 0;
      for (const auto& text : texts) tokens += tokenizer->encode(text).size();
      own = std::min(
          own, std::chrono::duration<double>(
                   std::chrono::steady_clock::now() - begin)
                   .count());
    }
    const double megabytes = static_cast<double>(bytes) * 1e-6;
    std::printf(
        "%s: %.1f MB/s, Python's tokenizers %.1f MB/s: %.1f times (%zu "
        "tokens)\n",
        name.c_str(), megabytes / own, megabytes / python, python / own,
        tokens);
  }
}

}  // namespace echelon::tokenizer_pytorch_test
