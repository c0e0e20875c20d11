// Damage to the bytes of checkpoints on disk is found.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <functional>
#include <memory>
#include <set>

#include "echelon/checkpoint/files/reader.h"
#include "echelon/error.h"
#include "tests/checkpoint/files/written_checkpoint.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace echelon::damage_test {
/// Reads that reach this byte of a file fail; -1: none.
int64_t unreadable_byte = -1;
}  // namespace echelon::damage_test

/// Replaces the C library's.
extern "C" ssize_t pread(int file, void* to, size_t bytes, off_t offset) {
  const auto end = offset + static_cast<int64_t>(bytes);
  const int64_t unreadable = echelon::damage_test::unreadable_byte;
  if (unreadable >= offset && unreadable < end) {
    errno = EIO;
    return -1;
  }
  return ::syscall(SYS_pread64, file, to, bytes, offset);
}

namespace echelon::damage_test {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr int64_t kBlock = kChecksumBlockBytes;

/// Bytes of a file, changed in place.
class Bytes {
 public:
  explicit Bytes(const std::string& path)
      : fd_(::open(path.c_str(), O_RDWR | O_CLOEXEC)) {}
  ~Bytes() { ::close(fd_); }
  int64_t size() const { return ::lseek(fd_, 0, SEEK_END); }
  void flip(int64_t byte, int bit) {
    unsigned char value = 0;
    if (::pread(fd_, &value, 1, byte) != 1) throw std::runtime_error("pread");
    value ^= static_cast<unsigned char>(1 << bit);
    if (::pwrite(fd_, &value, 1, byte) != 1) throw std::runtime_error("pwrite");
  }
  void zero(int64_t begin, int64_t end) {
    const std::vector<char> zeros(static_cast<size_t>(end - begin), 0);
    if (::pwrite(fd_, zeros.data(), zeros.size(), begin) < 0) {
      throw std::runtime_error("pwrite");
    }
  }

 private:
  int fd_;
};

/// The first file has two blocks, the second has one.
class Damaged : public testing::Test {
 protected:
  Damaged() { write(folder_.path("step"), 1); }
  void write(const std::string& path, uint64_t seed) {
    Random random(seed);
    tensors_.clear();
    tensors_.push_back(random_tensor("first", "F32", {1000, 10}, random));
    tensors_.push_back(random_tensor("large", "F32", {1000, 1100}, random));
    tensors_.push_back(random_tensor("last", "F32", {100}, random));
    std::vector<RankSlices> ranks(2);
    ranks[0].add(tensors_[0], {{0, 0}, {600, 10}});
    ranks[1].add(tensors_[0], {{600, 0}, {400, 10}});
    ranks[0].add(tensors_[1], whole_box(tensors_[1].shape));
    ranks[1].add(tensors_[2], whole_box(tensors_[2].shape));
    manifest_ = write_checkpoint(path, ranks);
  }
  std::string file(const std::string& name) {
    return folder_.path("step/" + name);
  }
  std::vector<Damage> verify() {
    return verify_checkpoint(folder_.path("step"));
  }
  /// The error of reading all tensors; values read before it are compared.
  std::string read_all() {
    return error_text<CheckpointError>([&] {
      CheckpointReader reader(folder_.path("step"));
      for (const auto& tensor : tensors_) {
        std::vector<std::byte> bytes(tensor.bytes.size());
        reader.read(
            *reader.manifest().find(tensor.name), whole_box(tensor.shape),
            bytes.data());
        EXPECT_TRUE(bytes == tensor.bytes) << tensor.name;
      }
    });
  }
  /// The single damage, which reading all tensors finds as well.
  Damage only_damage() {
    const auto damages = verify();
    if (damages.size() != 1) {
      ADD_FAILURE() << damages.size() << " damages";
      return {};
    }
    EXPECT_THAT(damages[0].what, HasSubstr(file(damages[0].file)));
    EXPECT_THAT(read_all(), HasSubstr(file(damages[0].file)));
    return damages[0];
  }

  TempFolder folder_;
  std::vector<WholeTensor> tensors_;
  CheckpointManifest manifest_;
  const std::string a_ = rank_file_name(0);
  const std::string b_ = rank_file_name(1);
};

TEST_F(Damaged, IsIntactAtFirst) {
  EXPECT_TRUE(verify().empty());
  EXPECT_EQ(read_all(), "no error");
}

TEST_F(Damaged, EachOfAThousandFlipsIsFound) {
  Random random(7);
  std::vector<std::unique_ptr<Bytes>> files;
  for (const auto& name : {a_, b_, std::string("manifest.json")}) {
    files.push_back(std::make_unique<Bytes>(file(name)));
  }
  int by_verify = 0, by_reading = 0;
  for (int flip = 0; flip < 1000; ++flip) {
    // Headers and the manifest are small: each file gets its share.
    Bytes& target = *files[static_cast<size_t>(flip % 3)];
    const int64_t size = target.size();
    const int64_t byte = random_below(
        random, flip % 2 == 0 ? size : std::min<int64_t>(size, 1000));
    const int bit = static_cast<int>(random_below(random, 8));
    target.flip(byte, bit);
    std::vector<Damage> damages;
    const bool refused =
        error_text<CheckpointError>([&] { damages = verify(); }) != "no error";
    by_verify += refused || damages.size() == 1 ? 1 : 0;
    by_reading += read_all() != "no error" ? 1 : 0;
    target.flip(byte, bit);
  }
  EXPECT_EQ(by_verify, 1000);
  EXPECT_EQ(by_reading, 1000);
  EXPECT_TRUE(verify().empty());
}

TEST_F(Damaged, FlippedBitIsNamed) {
  Bytes(file(a_)).flip(kBlock + 1000, 3);
  const Damage damage = only_damage();
  EXPECT_EQ(damage.file, a_);
  EXPECT_EQ(damage.tensor, "large");
  EXPECT_EQ(damage.offset, kBlock);
  EXPECT_THAT(
      damage.what,
      HasAll(
          a_ + ": tensor \"large\", at byte 4194304, is damaged",
          "bytes 4194304 to " + std::to_string(manifest_.files[0].bytes),
          "the manifest says " + manifest_.files[0].blocks[1]));
  EXPECT_EQ(read_all(), damage.what);
  // Other blocks can still be read.
  CheckpointReader reader(folder_.path("step"));
  std::vector<std::byte> bytes(tensors_[0].bytes.size());
  reader.read(
      *reader.manifest().find("first"), whole_box({1000, 10}), bytes.data());
  EXPECT_TRUE(bytes == tensors_[0].bytes);
}

TEST_F(Damaged, FlippedBitBehindTheHeaderIsNamedByTensor) {
  Bytes(file(b_)).flip(2000, 0);
  const Damage damage = only_damage();
  EXPECT_EQ(damage.tensor, "first");
  EXPECT_THAT(damage.what, HasSubstr("(and 1 more, up to \"last\")"));
}

TEST_F(Damaged, HeaderIsNamed) {
  Bytes(file(a_)).flip(20, 0);
  const Damage damage = only_damage();
  EXPECT_EQ(damage.offset, 0);
  EXPECT_THAT(
      damage.what,
      HasAll(
          "is damaged", "it holds 2 parts of tensors, \"first\" and others"));
}

TEST_F(Damaged, ZeroedBlock) {
  Bytes(file(a_)).zero(kBlock, manifest_.files[0].bytes);
  const Damage damage = only_damage();
  EXPECT_EQ(damage.tensor, "large");
  EXPECT_THAT(damage.what, HasSubstr("they are all zero"));
}

TEST_F(Damaged, Truncated) {
  std::filesystem::resize_file(file(a_), kBlock + 100);
  const Damage damage = only_damage();
  EXPECT_EQ(damage.tensor, "large");
  EXPECT_EQ(damage.offset, kBlock + 100);
  EXPECT_THAT(
      damage.what, HasAll(
                       "tensor \"large\", at byte 4194404, is cut off",
                       "4194404 bytes long, the manifest says " +
                           std::to_string(manifest_.files[0].bytes)));
  std::filesystem::resize_file(file(a_), 0);
  EXPECT_EQ(only_damage().offset, 0);
  std::filesystem::resize_file(file(a_), manifest_.files[0].bytes);
  EXPECT_EQ(verify().size(), 2);
}

TEST_F(Damaged, TruncatedWhileItIsRead) {
  CheckpointReader reader(folder_.path("step"));
  std::filesystem::resize_file(file(a_), kBlock + 100);
  std::vector<std::byte> bytes(tensors_[1].bytes.size());
  EXPECT_THAT(
      error_text<CheckpointError>([&] {
        reader.read(
            *reader.manifest().find("large"), whole_box(tensors_[1].shape),
            bytes.data());
      }),
      HasAll(file(a_), "is cut off"));
}

TEST_F(Damaged, Longer) {
  std::ofstream(file(b_), std::ios::app) << "x";
  const Damage damage = only_damage();
  EXPECT_EQ(damage.offset, manifest_.files[1].bytes);
  EXPECT_THAT(damage.what, HasSubstr("bytes long, the manifest says"));
}

TEST_F(Damaged, Unreadable) {
  unreadable_byte = kBlock + 5;
  const Damage damage = only_damage();
  unreadable_byte = -1;
  EXPECT_EQ(damage.file, a_);
  EXPECT_EQ(damage.tensor, "large");
  EXPECT_EQ(damage.offset, kBlock);
  EXPECT_THAT(damage.what, HasSubstr("cannot be read: Input/output error"));
}

TEST_F(Damaged, Missing) {
  std::filesystem::remove(file(b_));
  const Damage damage = only_damage();
  EXPECT_EQ(damage.file, b_);
  EXPECT_EQ(damage.tensor, "first");
  EXPECT_THAT(
      damage.what,
      HasSubstr("is missing; it holds 2 parts of tensors, \"first\""));
  std::filesystem::create_directory(file(b_));
  EXPECT_THAT(only_damage().what, HasSubstr("is not a file"));
}

TEST_F(Damaged, Swapped) {
  // Files of the same length, as those of ranks with even shards are.
  TempFolder folder;
  Random random(3);
  const auto tensor = random_tensor("even", "F32", {4, 500'000}, random);
  std::vector<RankSlices> ranks(2);
  for (int64_t rank = 0; rank < 2; ++rank) {
    ranks[static_cast<size_t>(rank)].add(tensor, {{2 * rank, 0}, {2, 500'000}});
  }
  const auto manifest = write_checkpoint(folder.path(), ranks);
  ASSERT_EQ(manifest.files[0].bytes, manifest.files[1].bytes);
  std::filesystem::rename(folder.path(a_), folder.path("x"));
  std::filesystem::rename(folder.path(b_), folder.path(a_));
  std::filesystem::rename(folder.path("x"), folder.path(b_));
  const auto damages = verify_checkpoint(folder.path());
  ASSERT_EQ(damages.size(), 2);
  EXPECT_THAT(
      damages[0].what,
      HasAll(a_ + ": tensor \"even\"", "they are block 0 of " + b_));
  EXPECT_THAT(
      damages[1].what,
      HasAll(b_ + ": tensor \"even\"", "they are block 0 of " + a_));
}

TEST_F(Damaged, SwappedOfDifferentLengths) {
  std::filesystem::rename(file(a_), file("x"));
  std::filesystem::rename(file(b_), file(a_));
  std::filesystem::rename(file("x"), file(b_));
  std::set<std::string> names;
  for (const auto& damage : verify()) names.insert(damage.file);
  EXPECT_THAT(names, ElementsAre(a_, b_));
  EXPECT_THAT(read_all(), HasSubstr("the manifest says"));
}

TEST_F(Damaged, Stale) {
  const auto now = tensors_;
  write(folder_.path("older"), 2);
  tensors_ = now;
  std::filesystem::copy_file(
      folder_.path("older/" + a_), file(a_),
      std::filesystem::copy_options::overwrite_existing);
  const auto damages = verify();
  ASSERT_EQ(damages.size(), 2);
  EXPECT_EQ(damages[0].tensor, "first");
  EXPECT_EQ(damages[1].tensor, "large");
  EXPECT_THAT(damages[0].what, HasAll(file(a_), "another checkpoint"));
  EXPECT_THAT(read_all(), HasSubstr(file(a_)));
}

TEST_F(Damaged, HeaderThatContradictsTheManifest) {
  // The file was written by someone else, so all checksums hold.
  const auto with =
      [&](const std::function<void(CheckpointManifest&)>& change) {
        CheckpointManifest changed = manifest_;
        change(changed);
        changed.content_hash = content_hash(changed);
        write_manifest(folder_.path("step"), changed);
        return only_damage().what;
      };
  EXPECT_THAT(
      with([](auto& m) { m.tensors[1].slices[0].key = "big"; }),
      HasAll("tensor \"large\"", "has no key \"big\""));
  EXPECT_THAT(
      with([](auto& m) { m.tensors[1].dtype = "I32"; }),
      HasSubstr("its header says F32 [1000, 1100] for key \"large\", the "
                "manifest I32 [1000, 1100]"));
  EXPECT_THAT(
      with([](auto& m) {
        m.tensors[1].shape = {1100, 1000};
        m.tensors[1].slices[0].box.sizes = {1100, 1000};
      }),
      HasSubstr("the manifest F32 [1100, 1000]"));
  EXPECT_THAT(
      with([](auto& m) { m.tensors.erase(m.tensors.begin() + 2); }),
      HasSubstr("has the key \"last\", which the manifest does not name"));
}

}  // namespace echelon::damage_test
