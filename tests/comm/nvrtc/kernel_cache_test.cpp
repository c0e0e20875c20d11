#include "echelon/comm/nvrtc/kernel_cache.h"

#include <gmock/gmock.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/temp_folder.h"

namespace echelon::kernel_cache_test {

namespace fs = std::filesystem;
using nvrtc::KernelCache;
using nvrtc::KernelRecipe;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::SizeIs;

KernelRecipe recipe() {
  return {
      .source = "the source",
      .architecture = "sm_90",
      .compiler = "NVRTC 13.0",
      .options = {"--std=c++17"}};
}

// A process: what it compiled, loaded and said.
class Process {
 public:
  explicit Process(const fs::path& folder)
      : cache_(
            folder, [this](const std::string& text) { said.push_back(text); }) {
  }

  bool load(const KernelRecipe& recipe, const std::string& code = "code") {
    return cache_.load(
        recipe,
        [&] {
          ++compiled;
          return code;
        },
        [&](const std::string& loaded) {
          asked.push_back(loaded);
          return loaded != refused;
        });
  }
  fs::path entry() const { return cache_.path_of(recipe()); }

  int compiled = 0;
  std::vector<std::string> asked;  // code that the driver was given
  std::vector<std::string> said;
  std::string refused = "no code";

 private:
  KernelCache cache_;
};

class KernelCacheTest : public testing::Test {
 protected:
  // What is in the entry's place after a process has filled it.
  fs::path filled() {
    Process first(folder());
    EXPECT_TRUE(first.load(recipe(), "code"));
    return first.entry();
  }
  // The next process compiles again, and the one after it does not.
  void expect_made_anew() {
    Process next(folder());
    EXPECT_TRUE(next.load(recipe(), "code"));
    EXPECT_EQ(next.compiled, 1);
    EXPECT_THAT(next.asked, ElementsAre("code"));
    EXPECT_THAT(next.said, SizeIs(0));
    Process last(folder());
    EXPECT_TRUE(last.load(recipe(), "code"));
    EXPECT_EQ(last.compiled, 0);
    EXPECT_THAT(last.asked, ElementsAre("code"));
  }
  fs::path folder() const { return temporary_.path("a/kernels"); }

  TempFolder temporary_;
};

TEST_F(KernelCacheTest, TheNextProcessDoesNotCompile) {
  const std::string code("co\0de\n", 6);
  Process first(folder());
  EXPECT_TRUE(first.load(recipe(), code));
  EXPECT_EQ(first.compiled, 1);
  Process next(folder());
  EXPECT_TRUE(next.load(recipe(), "other"));
  EXPECT_EQ(next.compiled, 0);
  EXPECT_THAT(next.asked, ElementsAre(code));
}

TEST_F(KernelCacheTest, OnlyTheUserReadsAndWritesIt) {
  const auto entry = filled();
  struct stat status = {};
  ASSERT_EQ(::stat(entry.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600);
  ASSERT_EQ(::stat(folder().c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0700);
}

TEST_F(KernelCacheTest, AnotherRecipeHasAnotherEntry) {
  filled();
  std::vector<KernelRecipe> others(5, recipe());
  others[0].source = "another source";
  others[1].architecture = "sm_100";
  others[2].compiler = "NVRTC 13.1";
  others[3].options = {};
  others[4].options = {"--std=c++17", "-G"};
  for (const auto& other : others) {
    Process process(folder());
    EXPECT_TRUE(process.load(other, "other"));
    EXPECT_EQ(process.compiled, 1);
    EXPECT_THAT(process.asked, ElementsAre("other"));
  }
  EXPECT_THAT(names_in(folder()), SizeIs(6));
  // Where one part ends and the next begins counts.
  auto shifted = recipe();
  shifted.source = "the sources";
  shifted.architecture = "m_90";
  EXPECT_NE(
      Process(folder()).entry(), KernelCache(folder(), {}).path_of(shifted));
}

TEST_F(KernelCacheTest, ADamagedEntryIsMadeAnew) {
  const auto entry = filled();
  const auto text = read_file(entry);
  for (size_t i = 0; i < text.size(); ++i) {
    auto damaged = text;
    damaged[i] ^= 1;
    std::ofstream(entry, std::ios::binary) << damaged;
    expect_made_anew();
  }
}

TEST_F(KernelCacheTest, AnEntryThatIsCutOffOrLongerIsMadeAnew) {
  const auto entry = filled();
  const auto text = read_file(entry);
  for (size_t size = 0; size < text.size(); ++size) {
    std::ofstream(entry, std::ios::binary) << text.substr(0, size);
    expect_made_anew();
  }
  std::ofstream(entry, std::ios::binary) << text << "x";
  expect_made_anew();
}

TEST_F(KernelCacheTest, AnEntryOfAnotherRecipeInItsPlaceIsMadeAnew) {
  const auto entry = filled();
  auto other = recipe();
  other.architecture = "sm_80";
  Process process(folder());
  process.load(other, "of sm_80");
  fs::rename(KernelCache(folder(), {}).path_of(other), entry);
  expect_made_anew();
}

TEST_F(KernelCacheTest, AFileThatOthersMayWriteIsNotLoaded) {
  const auto entry = filled();
  for (const mode_t mode : {0620, 0602, 0666}) {
    ASSERT_EQ(::chmod(entry.c_str(), mode), 0);
    expect_made_anew();
    struct stat status = {};
    ASSERT_EQ(::stat(entry.c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 0777, 0600);
  }
}

TEST_F(KernelCacheTest, AFileOfAnotherUserIsNotLoaded) {
  const auto entry = filled();
  if (::geteuid() != 0 || ::chown(entry.c_str(), 65534, 65534) != 0) {
    GTEST_SKIP() << "only root can give a file away";
  }
  expect_made_anew();
}

TEST_F(KernelCacheTest, ALinkIsNotFollowed) {
  const auto entry = filled();
  const auto elsewhere = temporary_.path("elsewhere");
  fs::rename(entry, elsewhere);
  fs::create_symlink(elsewhere, entry);
  expect_made_anew();
}

TEST_F(KernelCacheTest, WhatTheDriverRefusesIsMadeAnew) {
  filled();
  Process process(folder());
  process.refused = "code";
  EXPECT_TRUE(process.load(recipe(), "new code"));
  EXPECT_THAT(process.asked, ElementsAre("code", "new code"));
  Process next(folder());
  EXPECT_TRUE(next.load(recipe()));
  EXPECT_THAT(next.asked, ElementsAre("new code"));
}

TEST_F(KernelCacheTest, WhatIsRefusedOrFailsIsNotKept) {
  Process process(folder());
  process.refused = "code";
  EXPECT_FALSE(process.load(recipe(), "code"));
  KernelCache cache(folder(), {});
  EXPECT_THROW(
      cache.load(
          recipe(),
          []() -> std::string { throw std::runtime_error("out of memory"); },
          [](const std::string&) { return true; }),
      std::runtime_error);
  EXPECT_THROW(
      cache.load(
          recipe(), [] { return "code"; },
          [](const std::string&) -> bool {
            throw std::runtime_error("out of memory");
          }),
      std::runtime_error);
  EXPECT_FALSE(fs::exists(process.entry()));
}

// A file where the folder would be: also root cannot write there.
TEST_F(KernelCacheTest, AFolderThatCannotBeWrittenIsSaidOnce) {
  temporary_.write("a", "no folder");
  Process process(folder());
  EXPECT_TRUE(process.load(recipe(), "code"));
  EXPECT_TRUE(process.load(recipe(), "code"));
  EXPECT_EQ(process.compiled, 2);
  ASSERT_THAT(process.said, SizeIs(1));
  EXPECT_THAT(process.said[0], HasSubstr(folder().string()));
  EXPECT_THAT(process.said[0], HasSubstr("Not a directory"));
  EXPECT_THAT(process.said[0], HasSubstr("ECHELON_CACHE"));
}

TEST_F(KernelCacheTest, WithoutAFolderNothingIsKeptOrSaid) {
  Process process({});
  EXPECT_TRUE(process.load(recipe()));
  EXPECT_EQ(process.compiled, 1);
  EXPECT_THAT(process.said, SizeIs(0));
}

TEST_F(KernelCacheTest, SeveralWritersAndReadersAtOnce) {
  const std::string code(100000, 'c');
  std::atomic<int> wrong = 0;
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 8; ++rank) {
    ranks.emplace_back([&] {
      for (int i = 0; i < 20; ++i) {
        Process process(folder());
        const bool loaded = process.load(recipe(), code);
        const bool right = loaded && process.asked.size() == 1 &&
                           process.asked[0] == code && process.said.empty();
        if (!right) ++wrong;
        if (i % 4 == 0) fs::remove(process.entry());
      }
    });
  }
  for (auto& rank : ranks) rank.join();
  EXPECT_EQ(wrong, 0);
  Process(folder()).load(recipe(), code);
  EXPECT_THAT(names_in(folder()), SizeIs(1));  // no temporary file stays
}

TEST(KernelCacheFolder, IsInTheUsersCache) {
  const char* before = std::getenv("ECHELON_CACHE");
  const std::string old = before != nullptr ? before : "";
  ::setenv("ECHELON_CACHE", "/somewhere", 1);
  EXPECT_EQ(nvrtc::kernel_cache_folder(), "/somewhere/kernels");
  if (before != nullptr) {
    ::setenv("ECHELON_CACHE", old.c_str(), 1);
  } else {
    ::unsetenv("ECHELON_CACHE");
  }
}

}  // namespace echelon::kernel_cache_test
