#include "echelon/text/plain.h"

#include <gtest/gtest.h>

namespace echelon::plain_test {

TEST(Plain, ReplacesWhatCommandsATerminal) {
  EXPECT_EQ(plain("\x1b[2Jx\ny\x7f"), "?[2Jx?y?");
  EXPECT_EQ(plain("a\nb\tc\r", "\n\t"), "a\nb\tc?");
  EXPECT_EQ(plain(std::string_view("\0z", 2)), "?z");
  // U+009B begins a command like ESC [ does, as U+0080 to U+009F all may.
  EXPECT_EQ(plain("\u009b2J\u0080"), "?2J?");
}

TEST(Plain, KeepsTextAndReplacesWhatIsNone) {
  const std::string text = "Größe \u00a0 \u4e2d \U0001f600";
  EXPECT_EQ(plain(text), text);
  EXPECT_EQ(
      plain("a\x9b"
            "2J"),
      "a?2J");
  EXPECT_EQ(plain("end\xe4\xb8"), "end??");
  EXPECT_EQ(plain(""), "");
}

TEST(Plain, WordsOfAShell) {
  EXPECT_EQ(shell_word("runs/first"), "runs/first");
  EXPECT_EQ(shell_word(""), "''");
  EXPECT_EQ(shell_word("a b"), "'a b'");
  EXPECT_EQ(shell_word("it's $HOME"), "'it'\\''s $HOME'");
}

}  // namespace echelon::plain_test
