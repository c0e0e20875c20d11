// Objects on moto's S3 server, which checks signatures and rights, with lost
// connections and damaged bytes.
#include "echelon/storage/object_store.h"

#include <fcntl.h>
#include <gmock/gmock.h>

#include <filesystem>
#include <random>
#include <thread>

#include "echelon/storage/local_copy.h"
#include "echelon/text/file_descriptor.h"
#include "tests/support/error_text.h"
#include "tests/support/s3_server.h"
#include "tests/support/temp_folder.h"

namespace echelon::object_store_test {

using storage::ObjectStore;
using storage::S3Settings;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using testing_support::free_port;
using testing_support::S3Server;

constexpr int64_t kPart = 64 << 10;

std::string random_bytes(size_t size) {
  std::mt19937 random(7);
  std::string bytes(size, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

class ObjectStoreTest : public testing::Test {
 protected:
  void SetUp() override {
    ECHELON_NEED_S3();
    server_ = S3Server::get();
    settings_ = server_->settings();
    settings_.part_bytes = kPart;
    settings_.connections = 3;
    store_ = std::make_unique<ObjectStore>("models", settings_);
    // Each test has keys of its own.
    name_ = testing::UnitTest::GetInstance()->current_test_info()->name();
  }
  std::string key(const std::string& name) const { return name_ + "/" + name; }
  std::string content(const std::string& name) {
    const auto found = store_->get(key(name));
    return found ? found->text : "(absent)";
  }
  /// What another store says when it lists.
  std::string refused(const S3Settings& settings, const char* bucket) {
    return error_text([&] { ObjectStore(bucket, settings).list("runs/"); });
  }

  S3Server* server_ = nullptr;
  S3Settings settings_;
  std::unique_ptr<ObjectStore> store_;
  std::string name_;
  TempFolder folder_;
};

TEST_F(ObjectStoreTest, SmallObjects) {
  EXPECT_FALSE(store_->get(key("a")));
  EXPECT_FALSE(store_->find(key("a")));
  const auto etag = store_->put(key("a"), "one");
  ASSERT_TRUE(etag);
  EXPECT_EQ(store_->get(key("a"))->text, "one");
  EXPECT_EQ(store_->get(key("a"))->etag, *etag);
  EXPECT_EQ(store_->find(key("a"))->bytes, 3);
  // Whatever a key is made of, path and signature agree.
  const std::string odd = "b c+d&e=f/ü~'(1)%41";
  store_->put(key(odd), "two");
  EXPECT_EQ(content(odd), "two");
  std::vector<std::string> keys;
  for (const auto& one : store_->list(key(""))) keys.push_back(one.key);
  EXPECT_THAT(keys, ElementsAre(key("a"), key(odd)));
  store_->remove(key("a"));
  store_->remove(key("a"));
  EXPECT_EQ(content("a"), "(absent)");
}

TEST_F(ObjectStoreTest, ALongListComesInPages) {
  server_->fill(key("x"), 2003);
  const auto all = store_->list(key(""));
  ASSERT_EQ(all.size(), 2003u);
  for (size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(
        all[i].key, key("x") + std::to_string(100'000 + i).replace(0, 1, ""));
  }
  EXPECT_EQ(store_->list(key(""), 2).size(), 2u);
}

TEST_F(ObjectStoreTest, ConditionsDecideBetweenWriters) {
  const auto first = store_->put(key("a"), "one", {.if_absent = true});
  ASSERT_TRUE(first);
  EXPECT_FALSE(store_->put(key("a"), "other", {.if_absent = true}));
  const auto second = store_->put(key("a"), "two", {.if_match = *first});
  ASSERT_TRUE(second);
  EXPECT_FALSE(store_->put(key("a"), "other", {.if_match = *first}));
  EXPECT_FALSE(store_->put(key("gone"), "other", {.if_match = *first}));
  EXPECT_EQ(content("a"), "two");
}

// The retry finds what the attempt has done whose answer was lost.
TEST_F(ObjectStoreTest, ALostAnswerIsNoOtherWriter) {
  const auto first = store_->put(key("a"), "one");
  server_->set("at=1&mode=after");
  const auto second = store_->put(key("a"), "two", {.if_match = *first});
  ASSERT_TRUE(second);
  EXPECT_EQ(store_->get(key("a"))->etag, *second);
  server_->set("at=1&mode=after");
  EXPECT_TRUE(store_->put(key("b"), "new", {.if_absent = true}));
}

TEST_F(ObjectStoreTest, FilesOfEverySize) {
  for (const size_t size :
       {size_t{0}, size_t{1}, size_t{kPart}, size_t{kPart} + 1,
        size_t{5 * kPart + 17}}) {
    const std::string bytes = random_bytes(size);
    store_->upload_file(folder_.write("from", bytes), key("file"));
    const auto object = store_->find(key("file"));
    ASSERT_TRUE(object);
    EXPECT_EQ(object->bytes, static_cast<int64_t>(size));
    const std::string to = folder_.write("to", "");
    const FileDescriptor file(::open(to.c_str(), O_RDWR | O_TRUNC));
    store_->download(*object, file.fd());
    EXPECT_TRUE(read_file(to) == bytes) << size;
  }
}

// Every request of an upload in parts is lost once, before or after the server
// has done it, or answered by "slow down".
TEST_F(ObjectStoreTest, LostConnectionsAreTriedAgain) {
  const std::string bytes = random_bytes(3 * kPart + 5);
  const std::string from = folder_.write("from", bytes);
  for (const char* mode : {"before", "after", "busy"}) {
    for (int at = 1; at <= 6; ++at) {
      const std::string name = mode + std::to_string(at);
      server_->set("at=" + std::to_string(at) + "&mode=" + mode);
      store_->upload_file(from, key(name));
      ASSERT_TRUE(content(name) == bytes) << name;
    }
  }
}

TEST_F(ObjectStoreTest, DamageOnTheWayIsNoticed) {
  const std::string bytes = random_bytes(2 * kPart);
  const std::string from = folder_.write("from", bytes);
  server_->set("at=2&mode=upload");  // once: the part is sent again
  store_->upload_file(from, key("file"));
  EXPECT_TRUE(content("file") == bytes);
  server_->set("at=1&many=0&mode=upload");
  EXPECT_THAT(
      error_text([&] { store_->upload_file(from, key("bad")); }),
      HasSubstr("other bytes than were sent"));
  EXPECT_THAT(
      error_text([&] { store_->put(key("small"), "text"); }),
      HasSubstr("other bytes than were sent"));
  server_->set("");
  EXPECT_EQ(content("bad"), "(absent)");
}

TEST_F(ObjectStoreTest, DownloadsAreReadAgainWhileTheyAreDamaged) {
  const std::string bytes = random_bytes(2 * kPart);
  store_->upload_file(folder_.write("from", bytes), key("file"));
  const auto object = *store_->find(key("file"));
  const std::string to = folder_.write("to", "");
  const FileDescriptor file(::open(to.c_str(), O_RDWR));
  const auto is_intact = [&](int64_t offset, std::span<const std::byte> part) {
    return std::memcmp(bytes.data() + offset, part.data(), part.size()) == 0;
  };
  server_->set("at=1&many=1&mode=answer");
  store_->download(object, file.fd(), is_intact);
  EXPECT_TRUE(read_file(to) == bytes);
  server_->set("at=1&many=0&mode=answer");
  EXPECT_THAT(
      error_text([&] { store_->download(object, file.fd(), is_intact); }),
      HasSubstr("do not have their checksum"));
  server_->set("");
  store_->put(key("small"), "text");
  server_->set("at=1&many=1&mode=answer");
  EXPECT_EQ(content("small"), "text");
  server_->set("at=1&many=0&mode=answer");
  EXPECT_THAT(
      error_text([&] { store_->get(key("small")); }), HasSubstr("the MD5"));
  server_->set("");
  store_->put(key("file"), "replaced");
  EXPECT_THAT(
      error_text([&] { store_->download(object, file.fd()); }),
      HasSubstr("was replaced"));
}

TEST_F(ObjectStoreTest, UnfinishedUploadsAreRemoved) {
  const std::string from = folder_.write("from", random_bytes(3 * kPart));
  settings_.attempts = 1;
  ObjectStore mortal("models", settings_);
  server_->set("at=3&many=0");
  EXPECT_THAT(
      error_text([&] { mortal.upload_file(from, key("file")); }),
      HasSubstr("no answer"));
  server_->set("");
  store_->remove_unfinished(key(""));
  EXPECT_THAT(server_->requests(), testing::Contains(HasSubstr("DELETE")));
  server_->set("");
  store_->remove_unfinished(key(""));
  EXPECT_THAT(server_->requests(), Not(testing::Contains(HasSubstr("DELETE"))));
}

TEST_F(ObjectStoreTest, RefusalsSayWhatToDoAndAreNotTriedAgain) {
  S3Settings wrong = settings_;
  wrong.secret_key = "hidden";
  server_->set("");
  EXPECT_THAT(
      refused(wrong, "models"),
      AllOf(
          HasSubstr("s3://models/runs/"),
          HasSubstr("403 SignatureDoesNotMatch"), HasSubstr("correct the keys"),
          Not(HasSubstr("hidden"))));
  EXPECT_EQ(server_->requests().size(), 1u);
  wrong = settings_;
  wrong.access_key = "AKIAUNKNOWN";
  EXPECT_THAT(refused(wrong, "models"), HasSubstr("InvalidAccessKeyId"));
  EXPECT_THAT(
      refused(settings_, "missing"),
      AllOf(HasSubstr("404 NoSuchBucket"), HasSubstr("make the bucket")));
  EXPECT_THAT(
      refused(server_->settings("none"), "models"),
      AllOf(HasSubstr("403 AccessDenied"), HasSubstr("allow s3:ListBucket")));
  server_->set("at=1&mode=skew");
  EXPECT_THAT(
      refused(settings_, "models"),
      AllOf(
          HasSubstr("RequestTimeTooSkewed"), HasSubstr("clock"),
          HasSubstr("120 minutes ahead of")));
  server_->set("at=1&many=0&mode=busy");
  EXPECT_THAT(
      refused(settings_, "models"),
      AllOf(HasSubstr("503 SlowDown"), HasSubstr("6 attempts")));
  EXPECT_EQ(server_->requests().size(), 6u);
}

TEST_F(ObjectStoreTest, AnEndpointThatDoesNotAnswer) {
  S3Settings wrong = settings_;
  wrong.endpoint = "http://127.0.0.1:" + std::to_string(free_port());
  EXPECT_THAT(
      refused(wrong, "models"),
      AllOf(HasSubstr("no answer"), HasSubstr("AWS_ENDPOINT_URL")));
}

// Copies in the cache, by several at once.
TEST_F(ObjectStoreTest, LocalCopies) {
  server_->set_environment(folder_.path());
  const std::string url = "s3://models/" + key("tokens.bin");
  EXPECT_EQ(storage::local_copy("plain/path"), "plain/path");
  EXPECT_FALSE(storage::exists_there(url));
  EXPECT_THAT(
      error_text([&] { storage::local_copy(url); }),
      AllOf(HasSubstr(url), HasSubstr("no such object")));
  const std::string bytes = random_bytes(200'000);
  store_->put(key("tokens.bin"), bytes);
  EXPECT_TRUE(storage::exists_there(url));
  server_->set("");
  std::vector<std::string> paths(4);
  std::vector<std::thread> readers;
  for (auto& path : paths) {
    readers.emplace_back([&path, &url] { path = storage::local_copy(url); });
  }
  for (auto& reader : readers) reader.join();
  for (const auto& path : paths) EXPECT_EQ(path, paths[0]);
  EXPECT_TRUE(read_file(paths[0]) == bytes);
  EXPECT_THAT(paths[0], testing::EndsWith("/tokens.bin"));
  int fetched = 0;
  for (const auto& line : server_->requests())
    fetched += line.starts_with("GET");
  EXPECT_EQ(fetched, 1);
  // One that was cut off, as by a full disk, is fetched again.
  std::filesystem::resize_file(paths[0], 1000);
  EXPECT_EQ(storage::local_copy(url), paths[0]);
  EXPECT_TRUE(read_file(paths[0]) == bytes);
  // A damaged one does not stay, another version is another copy.
  store_->put(key("tokens.bin"), bytes + "2");
  server_->set("at=2&mode=answer");
  EXPECT_THAT(error_text([&] { storage::local_copy(url); }), HasSubstr("MD5"));
  server_->set("");
  const std::string second = storage::local_copy(url);
  EXPECT_NE(second, paths[0]);
  EXPECT_TRUE(read_file(second) == bytes + "2");
}

// A reader ends at each of its requests; what it leaves is no copy. The object
// comes in two parts.
TEST_F(ObjectStoreTest, ALocalCopyAfterACrashAtAnyRequest) {
  const std::string bytes = random_bytes((16 << 20) + 100);
  ObjectStore("models", server_->settings())
      .upload_file(folder_.write("from", bytes), key("data.bin"));
  const std::string url = "s3://models/" + key("data.bin");
  int at = 0;
  for (bool ended = false; !ended;) {
    const TempFolder cache;
    server_->set_environment(cache.path());
    ::setenv("AWS_MAX_ATTEMPTS", "1", 1);
    server_->set("at=" + std::to_string(++at) + "&many=0&mode=before");
    const std::string said = error_text([&] { storage::local_copy(url); });
    ended = static_cast<int>(server_->requests().size()) < at;
    EXPECT_EQ(said.find("no answer") == std::string::npos, ended) << said;
    server_->set("");
    EXPECT_TRUE(read_file(storage::local_copy(url)) == bytes) << at;
  }
  EXPECT_EQ(at, 4);
}

}  // namespace echelon::object_store_test
