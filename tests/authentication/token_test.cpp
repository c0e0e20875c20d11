#include "echelon/authentication/token.h"

#include <gmock/gmock.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <thread>
#include <vector>

#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace echelon::authentication::token_test {

using testing::HasSubstr;
using testing::Not;

const std::string kToken =
    "00112233445566778899aabbccddeeff0123456789abcdef0123456789abcdef";

class TokenFile : public testing::Test {
 protected:
  void SetUp() override {
    const char* set = std::getenv("ECHELON_TOKEN");
    if (set != nullptr) before_ = set;
    ::unsetenv("ECHELON_TOKEN");
    ::setenv("XDG_CONFIG_HOME", folder_.path().c_str(), 1);
  }
  void TearDown() override {
    ::setenv("ECHELON_TOKEN", before_.c_str(), 1);
    ::unsetenv("XDG_CONFIG_HOME");
  }
  std::string file(const std::string& text, mode_t mode = 0600) const {
    const std::string path = folder_.write("mine", text);
    ::chmod(path.c_str(), mode);
    return path;
  }
  static std::string refusal(const std::string& path) {
    return error_text<ConfigError>([&] { read_token(path); });
  }
  std::string own() const { return folder_.path("echelon/token"); }

  const TempFolder folder_;
  std::string before_;
};

TEST_F(TokenFile, IsReadWithOrWithoutTheEndOfALine) {
  for (const auto& text : {kToken, kToken + "\n"}) {
    const std::string path = file(text);
    const Token token = read_token(path);
    EXPECT_EQ(token.key.to_hex(), kToken);
    EXPECT_EQ(token.source, "the file " + path);
    EXPECT_FALSE(token.made);
  }
}

TEST_F(TokenFile, TheUsersOwnIsMadeForItsOwnerAlone) {
  const Token made = read_token("");
  EXPECT_TRUE(made.made);
  EXPECT_EQ(made.source, "the file " + own());
  struct stat info {};
  ASSERT_EQ(::stat(own().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0600u);
  const Token read = read_token("");
  EXPECT_FALSE(read.made);
  EXPECT_EQ(read.key.to_hex(), made.key.to_hex());
}

TEST_F(TokenFile, IsMadeOnceByManyAtOnce) {
  std::vector<std::string> keys(8);
  std::atomic<int> made{0};
  std::vector<std::thread> threads;
  for (auto& key : keys) {
    threads.emplace_back([&] {
      const Token token = read_token("");
      key = token.key.to_hex();
      if (token.made) ++made;
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(made, 1);
  EXPECT_EQ(std::set<std::string>(keys.begin(), keys.end()).size(), 1u);
  EXPECT_EQ(
      names_in(folder_.path("echelon")), std::vector<std::string>{"token"});
}

TEST_F(TokenFile, AFileThatIsGivenIsNotMade) {
  EXPECT_THAT(
      refusal(folder_.path("none")), HasAll("no token file", "openssl rand"));
  EXPECT_FALSE(std::filesystem::exists(folder_.path("none")));
}

TEST_F(TokenFile, OthersMayNeitherReadNorWriteIt) {
  for (const mode_t mode : {0640, 0604, 0620, 0602}) {
    EXPECT_THAT(
        refusal(file(kToken, mode)),
        HasAll("others can read or write it", "chmod 600"));
  }
  // Nor the user's own.
  read_token("");
  ::chmod(own().c_str(), 0644);
  EXPECT_THAT(refusal(""), HasAll(own(), "mode 644"));
}

TEST_F(TokenFile, BelongsToTheUser) {
  const std::string path = file(kToken);
  if (::chown(path.c_str(), 12345, static_cast<gid_t>(-1)) != 0) {
    GTEST_SKIP() << "needs root, to give a file away";
  }
  EXPECT_THAT(refusal(path), HasSubstr("belongs to user 12345"));
}

TEST_F(TokenFile, HasATokenInIt) {
  EXPECT_THAT(refusal(file("")), HasSubstr("is empty"));
  for (const std::string& text :
       {kToken.substr(1), kToken + "0", kToken + "\n\n", " " + kToken,
        kToken.substr(1) + "x", kToken + "\r\n", std::string("\n")}) {
    const std::string error = refusal(file(text));
    EXPECT_THAT(error, HasSubstr("64 hexadecimal digits")) << text;
    EXPECT_THAT(error, Not(HasSubstr(kToken.substr(1, 8))));
  }
  EXPECT_THAT(refusal(folder_.path()), HasSubstr("is a folder"));
  ASSERT_EQ(::mkfifo(folder_.path("pipe").c_str(), 0600), 0);
  EXPECT_THAT(refusal(folder_.path("pipe")), HasSubstr("is not a file"));
}

TEST_F(TokenFile, TheVariableStandsInForTheUsersOwn) {
  ::setenv("ECHELON_TOKEN", kToken.c_str(), 1);
  EXPECT_EQ(read_token("").key.to_hex(), kToken);
  EXPECT_FALSE(std::filesystem::exists(own()));
  const std::string other(64, 'a');
  EXPECT_EQ(read_token(file(other)).key.to_hex(), other);
  ::setenv("ECHELON_TOKEN", kToken.substr(1).c_str(), 1);
  const std::string error = refusal("");
  EXPECT_THAT(error, HasAll("ECHELON_TOKEN", "64 hexadecimal digits"));
  EXPECT_THAT(error, Not(HasSubstr(kToken.substr(1, 8))));
}

TEST_F(TokenFile, AHomeThatIsNoneIsReported) {
  folder_.write("echelon", "a file where the folder would be");
  EXPECT_THAT(refusal(""), HasAll(own(), "Not a directory"));
}

}  // namespace echelon::authentication::token_test
