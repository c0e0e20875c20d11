#include "echelon/checkpoint/files/rank_file.h"

#include <gmock/gmock.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <cerrno>
#include <csignal>
#include <functional>

#include "echelon/checkpoint/format/hashes.h"
#include "echelon/error.h"
#include "tests/checkpoint/files/written_checkpoint.h"
#include "tests/checkpoint/small_disk.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace echelon::rank_file_test {
/// The call of fsync that fails, counted from 1; 0: none.
int failing_fsync = 0;
}  // namespace echelon::rank_file_test

/// Replaces the C library's.
extern "C" int fsync(int file) {
  int& failing = echelon::rank_file_test::failing_fsync;
  if (failing > 0 && --failing == 0) {
    errno = EIO;
    return -1;
  }
  return static_cast<int>(::syscall(SYS_fsync, file));
}

namespace echelon::rank_file_test {

using testing::HasSubstr;

TEST(RankFile, IsASafetensorsFileOfTheSlices) {
  TempFolder folder;
  Random random(1);
  const auto words = random_tensor("words", "F32", {7, 5}, random);
  const auto step = random_tensor("words/step", "I64", {}, random);
  const auto none = random_tensor("none", "BF16", {0, 3}, random);
  RankSlices rank;
  rank.add(words, {{0, 0}, {3, 5}});
  rank.add(step, {{}, {}});
  rank.add(words, {{3, 1}, {2, 4}});
  rank.add(none, {{0, 0}, {0, 3}});
  const RankPart part =
      write_rank_file(folder.path(), rank_file_name(12), rank.slices);

  EXPECT_EQ(part.file.name, "rank-00012.safetensors");
  EXPECT_EQ(
      names_in(folder.path()),
      (std::vector<std::string>{
          "rank-00012.part.json", "rank-00012.safetensors"}));
  const safetensors::File file(folder.path(part.file.name));
  ASSERT_EQ(file.tensors().size(), 4);
  for (size_t i = 0; i < rank.slices.size(); ++i) {
    const std::string key =
        i == 2 ? std::string("words#1") : rank.slices[i].name;
    SCOPED_TRACE(key);
    const auto& info = file.at(key);
    EXPECT_EQ(info.shape, rank.slices[i].box.sizes);
    EXPECT_EQ(info.dtype, rank.slices[i].dtype);
    const auto bytes = file.bytes(info);
    EXPECT_TRUE(std::equal(
        bytes.begin(), bytes.end(), rank.memory[i].begin(),
        rank.memory[i].end()));
    EXPECT_EQ(
        reinterpret_cast<uintptr_t>(bytes.data()) %
            safetensors::dtype_bytes(info.dtype),
        0);
  }
  ASSERT_EQ(part.tensors.size(), 3);
  EXPECT_EQ(part.tensors[0].name, "words");
  EXPECT_EQ(
      part.tensors[0].slices,
      (std::vector<SavedSlice>{
          {{{0, 0}, {3, 5}}, 0, "words"}, {{{3, 1}, {2, 4}}, 0, "words#1"}}));
  const ContentHash expected =
      hash_elements({7, 5}, {{0, 0}, {3, 5}}, rank.memory[0].data(), 4) +
      hash_elements({7, 5}, {{3, 1}, {2, 4}}, rank.memory[2].data(), 4);
  EXPECT_EQ(part.tensors[0].hash, expected);

  const std::string json = read_file(folder.path("rank-00012.part.json"));
  const RankPart read = parse_rank_part(json, "part");
  EXPECT_EQ(read.tensors, part.tensors);
  EXPECT_EQ(read.file, part.file);
}

TEST(RankFile, BlocksAreOfTheFile) {
  // Slices that end within, at and behind the ends of blocks.
  for (const int64_t numel :
       {int64_t{1}, kChecksumBlockBytes - 200, kChecksumBlockBytes,
        2 * kChecksumBlockBytes + 1}) {
    SCOPED_TRACE(numel);
    TempFolder folder;
    Random random(2);
    const RankSlices rank(
        {random_tensor("a", "U8", {numel}, random),
         random_tensor("b", "U8", {1000}, random)});
    const RankPart part =
        write_rank_file(folder.path(), "f.safetensors", rank.slices);
    const std::string file = read_file(folder.path("f.safetensors"));
    EXPECT_EQ(part.file.bytes, static_cast<int64_t>(file.size()));
    std::vector<std::string> blocks;
    for (size_t at = 0; at < file.size(); at += kChecksumBlockBytes) {
      blocks.push_back(checksum(
          file.data() + at,
          std::min<size_t>(kChecksumBlockBytes, file.size() - at)));
    }
    EXPECT_EQ(part.file.blocks, blocks);
  }
}

TEST(RankFile, WritesAFileWithoutSlices) {
  TempFolder folder;
  const RankPart part = write_rank_file(folder.path(), "f.safetensors", {});
  EXPECT_TRUE(part.tensors.empty());
  EXPECT_EQ(part.file.blocks.size(), 1);
  EXPECT_TRUE(
      safetensors::File(folder.path("f.safetensors")).tensors().empty());
}

TEST(RankFile, KeysDiffer) {
  TempFolder folder;
  Random random(3);
  const auto a = random_tensor("a", "F32", {4}, random);
  const auto taken = random_tensor("a#1", "F32", {1}, random);
  RankSlices rank;
  for (int64_t i = 0; i < 3; ++i) rank.add(a, {{i}, {1}});
  rank.add(taken, {{0}, {1}});
  const RankPart part =
      write_rank_file(folder.path(), "f.safetensors", rank.slices);
  const safetensors::File file(folder.path("f.safetensors"));
  std::vector<std::string> keys;
  for (const auto& slice : part.tensors[0].slices) keys.push_back(slice.key);
  EXPECT_EQ(keys, (std::vector<std::string>{"a", "a#2", "a#3"}));
  EXPECT_EQ(part.tensors[1].slices[0].key, "a#1");
  for (size_t i = 0; i < 4; ++i) {
    const auto bytes = file.bytes(file.at(i < 3 ? keys[i] : "a#1"));
    EXPECT_EQ(std::memcmp(bytes.data(), rank.memory[i].data(), 4), 0);
  }
}

TEST(RankFile, RefusesWrongSlices) {
  TempFolder folder;
  Random random(4);
  const RankSlices rank({random_tensor("a", "F32", {2, 3}, random)});
  const SliceBytes good = rank.slices[0];
  const auto refused = [&](const std::function<void(SliceBytes&)>& change) {
    SliceBytes changed = good;
    change(changed);
    return error_text<ConfigError>([&] {
      write_rank_file(folder.path(), "f.safetensors", {good, changed});
    });
  };
  EXPECT_THAT(
      refused([](auto& s) {
        s.box.offset = {1, 0};
      }),
      HasAll(
          "f.safetensors: tensor \"a\"",
          "[1, 0] of [2, 3] is not inside of its shape [2, 3]"));
  for (const Box& box :
       {Box{{0, -1}, {2, 3}}, Box{{0}, {6}}, Box{{INT64_MAX, 0}, {2, 3}},
        Box{{0, 0}, {2, -3}}, Box{{0, 0}, {2}}}) {
    EXPECT_THAT(
        refused([&](auto& s) { s.box = box; }), HasSubstr("is not inside"));
  }
  EXPECT_THAT(
      refused([](auto& s) { s.dtype = "I32"; }),
      HasSubstr("one slice is of F32 [2, 3] (parameter), another of I32"));
  EXPECT_THAT(
      refused([](auto& s) { s.kind = SavedKind::buffer; }),
      HasSubstr("all slices of a tensor must say the same"));
  EXPECT_THAT(
      refused([](auto& s) { s.bytes = s.bytes.first(20); }),
      HasSubstr("does not match its 20 bytes"));
  EXPECT_THAT(
      refused([](auto& s) { s.name = "b", s.dtype = "F99"; }),
      HasSubstr("unknown dtype \"F99\""));
  EXPECT_THAT(
      refused([](auto& s) { s.name = "__metadata__"; }),
      HasSubstr("name is taken"));
  EXPECT_TRUE(names_in(folder.path()).empty());
}

TEST(RankFile, OverwritesNothing) {
  TempFolder folder;
  Random random(5);
  const RankSlices rank({random_tensor("a", "F32", {2}, random)});
  const auto write = [&] {
    return error_text<CheckpointError>(
        [&] { write_rank_file(folder.path(), "f.safetensors", rank.slices); });
  };
  folder.write("f.safetensors", "old");
  EXPECT_THAT(write(), HasAll("f.safetensors", "exists"));
  EXPECT_EQ(read_file(folder.path("f.safetensors")), "old");
  // The part's file cannot be made: the other one is removed as well.
  std::filesystem::rename(
      folder.path("f.safetensors"), folder.path("f.part.json"));
  EXPECT_THAT(write(), HasAll("f.part.json", "exists"));
  EXPECT_EQ(names_in(folder.path()), (std::vector<std::string>{"f.part.json"}));
}

class RankFileErrors : public testing::Test {
 protected:
  /// Whether writing to `folder` throws `text` and leaves nothing there.
  bool fails(const std::string& folder, const std::string& text) {
    const std::string error = error_text<CheckpointError>(
        [&] { write_rank_file(folder, "f.safetensors", rank_.slices); });
    std::cout << error << std::endl;
    return error.find(text) != std::string::npos &&
           error.find(folder + "/f.safetensors") != std::string::npos &&
           error.find("it needs 10487") != std::string::npos &&
           error.find("are free in " + folder) != std::string::npos &&
           (!std::filesystem::exists(folder) || names_in(folder).empty());
  }
  /// Expects the same in a child with a file system of its own.
  void expect_failure_on_disk(
      const char* options, unsigned long flags, const std::string& text) {
    const std::string disk = folder_.make_folder("disk");
    const int status = in_child([&] {
      if (!mount_disk(disk, options, flags)) return 77;
      return fails(disk, text) ? 0 : 1;
    });
    if (status == 77) GTEST_SKIP() << "mounting a small disk needs root";
    EXPECT_EQ(status, 0);
  }

  TempFolder folder_;
  Random random_;
  RankSlices rank_{{random_tensor("a", "U8", {1 << 20}, random_)}};
};

TEST_F(RankFileErrors, NoSuchFolder) {
  EXPECT_TRUE(fails(folder_.path("none"), "No such file"));
}

TEST_F(RankFileErrors, FullDisk) {
  expect_failure_on_disk("size=256k", 0, "No space left");
}

TEST_F(RankFileErrors, ReadOnlyDisk) {
  expect_failure_on_disk("", MS_RDONLY, "Read-only file system");
}

TEST_F(RankFileErrors, WriteThatFails) {
  // A limit on file sizes makes it fail on any disk.
  EXPECT_EQ(
      in_child([&] {
        ::signal(SIGXFSZ, SIG_IGN);
        const rlimit limit = {1 << 19, 1 << 19};
        ::setrlimit(RLIMIT_FSIZE, &limit);
        return fails(folder_.path(), "File too large") ? 0 : 1;
      }),
      0);
}

TEST_F(RankFileErrors, DiskThatLosesIt) {
  failing_fsync = 1;
  EXPECT_TRUE(fails(folder_.path(), "syncing it failed: Input/output error"));
  failing_fsync = 2;  // of the part's file
  EXPECT_THAT(
      error_text<CheckpointError>([&] {
        write_rank_file(folder_.path(), "f.safetensors", rank_.slices);
      }),
      HasAll("f.part.json: syncing it failed", "Input/"));
  EXPECT_TRUE(names_in(folder_.path()).empty());
  write_rank_file(folder_.path(), "f.safetensors", rank_.slices);
}

TEST_F(RankFileErrors, NoPermission) {
  const std::string closed = folder_.make_folder("closed");
  std::filesystem::permissions(
      closed,
      std::filesystem::perms::owner_read | std::filesystem::perms::owner_exec);
  const int status = in_child([&] {
    if (::geteuid() == 0 &&
        (::chmod(folder_.path().c_str(), 0755) != 0 ||
         ::chmod(closed.c_str(), 0555) != 0 || ::setuid(65534) != 0)) {
      return 77;
    }
    return fails(closed, "Permission denied") ? 0 : 1;
  });
  if (status == 77) GTEST_SKIP() << "cannot give up root's rights";
  EXPECT_EQ(status, 0);
}

}  // namespace echelon::rank_file_test
