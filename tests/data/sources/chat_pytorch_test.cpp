// Conversations are the tokens, and the loss is on those of them, that
// apply_chat_template() of transformers gives.
#include <gtest/gtest.h>

#include <sstream>
#include <string>
#include <vector>

#include "echelon/data/sources/json_lines.h"
#include "tests/support/places.h"
#include "tests/support/python.h"
#include "tests/support/temp_folder.h"

namespace echelon::chat_pytorch_test {

std::vector<std::string> lines_of(const std::string& path) {
  std::istringstream text(read_file(path));
  std::vector<std::string> lines;
  for (std::string line; std::getline(text, line);) lines.push_back(line);
  return lines;
}

TEST(ChatTemplates, GiveTheTokensOfTransformers) {
  ECHELON_NEED_TRANSFORMERS();
  const TempFolder folder;
  run_python_script(
      "data/sources/chat_reference.py", {folder.path(), source_path()});
  const auto chats = lines_of(folder.path("chat.jsonl"));
  ASSERT_GT(chats.size(), 5u);
  for (const auto chat : {ChatTemplate::chatml, ChatTemplate::llama3}) {
    const std::string name = to_string(chat);
    const auto tokenizer = load_tokenizer(folder.path(name + ".json"));
    const auto expected = lines_of(folder.path(name + ".jsonl"));
    ASSERT_EQ(expected.size(), chats.size());
    for (size_t i = 0; i < chats.size(); ++i) {
      const auto ours =
          tokens_of_line(chats[i], {.chat_template = chat}, *tokenizer);
      const auto theirs = tokens_of_line(expected[i], {}, *tokenizer);
      EXPECT_EQ(ours.ids, theirs.ids) << name << " " << chats[i];
      EXPECT_EQ(ours.counts, theirs.counts) << name << " " << chats[i];
    }
  }
}

}  // namespace echelon::chat_pytorch_test
