// Checkpoints that an address leads to, on moto's S3 server, and their copies.
#include "echelon/checkpoint/remote/object_checkpoints.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cstdlib>
#include <thread>

#include "echelon/checkpoint/files/folder_files.h"
#include "echelon/checkpoint/remote/remote_checkpoints.h"
#include "tests/checkpoint/files/small_save.h"
#include "tests/support/error_text.h"
#include "tests/support/s3_server.h"
#include "tests/support/temp_folder.h"

namespace echelon::object_checkpoints_test {

namespace fs = std::filesystem;
using storage::ObjectStore;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing_support::S3Server;

class ObjectCheckpointsTest : public testing::Test {
 protected:
  void SetUp() override {
    ECHELON_NEED_S3();
    server_ = S3Server::get();
    server_->set_environment(cache_.path());
    url_ = std::string("s3://models/") +
           testing::UnitTest::GetInstance()->current_test_info()->name();
  }
  fs::path local(int64_t step) {
    const auto path = checkpoint_path(folder_.path("run/checkpoints"), step);
    return fs::exists(path) ? path : save_small(path.parent_path(), step);
  }
  /// Saves as all ranks of a run do; returns the checkpoint's address.
  std::string save(int64_t step) {
    RemoteCheckpoints remote(url_, server_->settings());
    const auto name = remote_name(step, remote.claim(), 1);
    upload(step, "checkpoints/" + name, {"rank-00000", "rank-00001"});
    remote.publish(name, local(step), {.newest = 3}, "");
    return url_ + "/checkpoints/" + name;
  }
  /// Puts files of a step's checkpoint there, as another program would.
  void upload(
      int64_t step, const std::string& place,
      const std::vector<std::string>& beginnings) {
    for (const auto& entry : fs::directory_iterator(local(step))) {
      const std::string name = entry.path().filename();
      const auto is = [&](const std::string& one) {
        return name.starts_with(one);
      };
      if (std::ranges::any_of(beginnings, is)) {
        store().upload_file(entry.path(), key(place + "/" + name));
      }
    }
  }
  std::string key(const std::string& name) const {
    return url_.substr(std::string("s3://models/").size()) + "/" + name;
  }
  static ObjectStore& store() {
    static ObjectStore store("models", S3Server::get()->settings());
    return store;
  }
  /// The step of the copy, which must be whole.
  int64_t copied(const std::string& url) {
    const fs::path copy = local_checkpoint(url);
    EXPECT_THAT(copy.string(), HasSubstr(cache_.path()));
    EXPECT_THAT(verify_checkpoint(copy.string()), IsEmpty());
    const CheckpointReader reader(copy.string());
    EXPECT_EQ(
        reader.manifest(),
        CheckpointReader(local(reader.manifest().step).string()).manifest());
    return reader.manifest().step;
  }
  static std::string refused(const std::string& url) {
    return error_text([&] { local_checkpoint(url); });
  }
  /// How many requests for the ranks' files there were since set().
  int64_t fetched() const {
    return std::ranges::count_if(server_->requests(), [](const auto& line) {
      return line.starts_with("GET") && line.find("/rank-") != line.npos;
    });
  }
  void damage(const std::string& url, const std::string& file) {
    const std::string name =
        url.substr(std::string("s3://models/").size()) + "/" + file;
    std::string bytes = store().get(name)->text;
    bytes[bytes.size() / 2] ^= 1;
    store().put(name, bytes);
  }

  S3Server* server_ = nullptr;
  std::string url_;
  TempFolder folder_;
  TempFolder cache_;
};

TEST_F(ObjectCheckpointsTest, AnAddressOfEachKind) {
  EXPECT_EQ(local_checkpoint("plain/path"), "plain/path");
  const std::string one = save(1), two = save(2);
  for (const std::string end : {"", "/", "/checkpoints", "/checkpoints/"}) {
    EXPECT_EQ(copied(url_ + end), 2) << end;
  }
  EXPECT_EQ(copied(one), 1);
  EXPECT_EQ(copied(two + "/"), 2);
  const auto found = find_object_checkpoints(url_);
  EXPECT_EQ(found.folder, url_ + "/checkpoints");
  ASSERT_EQ(found.checkpoints.size(), 2u);
  EXPECT_EQ(found.checkpoints[0].url, two);
  EXPECT_EQ(found.checkpoints[1].step, 1);
}

TEST_F(ObjectCheckpointsTest, WhatAnotherProgramHasCopied) {
  const std::vector<std::string> all = {"manifest", "rank"};
  upload(1, "run/checkpoints/step-00000001", all);
  upload(2, "run/checkpoints/step-00000002", all);
  store().put(key("run/checkpoints/LATEST"), "step-00000002\n");
  EXPECT_EQ(copied(url_ + "/run"), 2);
  EXPECT_EQ(copied(url_ + "/run/checkpoints/step-00000001"), 1);
  upload(3, "good", all);
  EXPECT_EQ(copied(url_ + "/good"), 3);
  EXPECT_EQ(find_object_checkpoints(url_ + "/good").checkpoints[0].step, 3);
}

TEST_F(ObjectCheckpointsTest, IsFetchedOnceByAHost) {
  save(2);
  server_->set("");
  std::vector<std::thread> ranks;
  std::vector<fs::path> paths(4);
  for (auto& path : paths) {
    ranks.emplace_back([&] { path = local_checkpoint(url_); });
  }
  for (auto& rank : ranks) rank.join();
  for (const auto& path : paths) EXPECT_EQ(path, paths[0]);
  EXPECT_EQ(fetched(), 2);
  // A file that was cut off is fetched again, and no other.
  fs::resize_file(paths[0] / "rank-00001.safetensors", 100);
  EXPECT_EQ(copied(url_), 2);
  EXPECT_EQ(fetched(), 3);
}

TEST_F(ObjectCheckpointsTest, ListsNothingButManifests) {
  const std::string two = save(2);
  server_->set("");
  const auto one = find_object_checkpoints(url_).checkpoints.front();
  const fs::path folder = copy_manifest(one);
  EXPECT_EQ(
      CheckpointReader(local(2).string()).manifest(),
      parse_manifest(read_file(folder / "manifest.json"), "copy"));
  EXPECT_EQ(fetched(), 0);
  EXPECT_FALSE(fs::exists(folder / "rank-00000.safetensors"));
}

TEST_F(ObjectCheckpointsTest, ItsFilesAreVerifiedWhereTheyAre) {
  const std::string two = save(2);
  const auto verified = [&] {
    const auto one = find_object_checkpoints(url_).checkpoints.front();
    const auto manifest =
        parse_manifest(read_file(copy_manifest(one) / "manifest.json"), "copy");
    std::vector<std::string> said;
    for (const auto& damage : verify_files(manifest, one.url, files_of(one))) {
      said.push_back(damage.what);
    }
    return said;
  };
  EXPECT_THAT(verified(), IsEmpty());
  EXPECT_EQ(copied(url_), 2);  // a copy is not what is asked for
  damage(two, "rank-00001.safetensors");
  EXPECT_THAT(
      verified(), ElementsAre(HasSubstr(two + "/rank-00001.safetensors: ")));
  store().remove(key(two.substr(url_.size() + 1) + "/rank-00000.safetensors"));
  EXPECT_THAT(
      verified(), ElementsAre(
                      AllOf(
                          HasSubstr(two + "/rank-00000.safetensors"),
                          HasSubstr("no such object")),
                      HasSubstr("rank-00001.safetensors: ")));
}

TEST_F(ObjectCheckpointsTest, ADamagedOneIsLeftOut) {
  save(1);
  const std::string two = save(2);
  // On the way, once: it is read again.
  server_->set("only=/rank-0000&at=1&many=1&mode=answer");
  EXPECT_EQ(copied(url_), 2);
  server_->set("");
  const std::string three = save(3);
  damage(three, "rank-00000.safetensors");
  EXPECT_EQ(copied(url_), 2);
  EXPECT_THAT(
      refused(three),
      AllOf(HasSubstr(three + ": is damaged"), HasSubstr("checksum")));
  store().remove(
      key(three.substr(url_.size() + 1) + "/rank-00001.safetensors"));
  EXPECT_THAT(refused(three), HasSubstr("rank-00001.safetensors is missing"));
  store().remove(key(three.substr(url_.size() + 1) + "/manifest.json"));
  EXPECT_EQ(copied(url_), 2);
}

TEST_F(ObjectCheckpointsTest, AHalfFinishedUpload) {
  const std::string part = "checkpoints/step-00000004-1f3ac27b-1";
  upload(1, part, {"rank"});
  EXPECT_THAT(
      refused(url_),
      AllOf(
          HasSubstr(url_ + "/checkpoints: has no whole checkpoint"),
          HasSubstr("step-00000004-1f3ac27b-1, an upload that was not")));
  EXPECT_THAT(
      refused(url_ + "/" + part),
      AllOf(
          HasSubstr(part + ": has no manifest.json"),
          HasSubstr("not finished")));
  // Beside whole ones it is only named; one without its place in LATEST too.
  const std::string two = save(2);
  upload(1, part, {"rank"});
  upload(3, "checkpoints/step-00000005-1f3ac27b-2", {"rank", "manifest"});
  EXPECT_EQ(copied(url_), 2);
  EXPECT_THAT(
      find_object_checkpoints(url_).unfinished,
      ElementsAre("step-00000004-1f3ac27b-1", "step-00000005-1f3ac27b-2"));
}

TEST_F(ObjectCheckpointsTest, SaysWhatIsWrong) {
  EXPECT_THAT(
      refused(url_), AllOf(
                         HasSubstr(url_ + ": there is no checkpoint"),
                         HasSubstr("aws s3 ls " + url_ + "/")));
  EXPECT_THAT(refused("s3://missing/first"), HasSubstr("404 NoSuchBucket"));
  EXPECT_THAT(refused("s3://M/first"), HasSubstr("s3://BUCKET/"));
  save(2);
  for (const auto& entry : server_->environment("none")) {
    const size_t equals = entry.find('=');
    ::setenv(
        entry.substr(0, equals).c_str(), entry.substr(equals + 1).c_str(), 1);
  }
  EXPECT_THAT(
      refused(url_), AllOf(
                         HasSubstr(url_), HasSubstr("403 AccessDenied"),
                         HasSubstr("allow s3:ListBucket")));
  ::setenv("AWS_ACCESS_KEY_ID", "", 1);
  ::setenv("AWS_SECRET_ACCESS_KEY", "", 1);
  ::setenv("HOME", folder_.path().c_str(), 1);
  EXPECT_THAT(refused(url_), HasSubstr("there are no keys for S3"));
}

// The reader ends at each of its requests. The next one gets all of it.
TEST_F(ObjectCheckpointsTest, ACrashAtAnyRequest) {
  save(2);
  int at = 0;
  for (bool ended = false; !ended;) {
    const TempFolder machine;
    server_->set_environment(machine.path());
    ::setenv("AWS_MAX_ATTEMPTS", "1", 1);
    server_->set("at=" + std::to_string(++at) + "&many=0&mode=before");
    bool thrown = false;
    try {
      local_checkpoint(url_);
    } catch (const Error& error) {
      thrown = true;
      EXPECT_THAT(error.what(), HasSubstr("no answer"));
    }
    ended = static_cast<int>(server_->requests().size()) < at;
    EXPECT_EQ(thrown, !ended) << at;
    server_->set("");
    const fs::path copy = local_checkpoint(url_);
    EXPECT_THAT(verify_checkpoint(copy.string()), IsEmpty()) << at;
  }
  EXPECT_GT(at, 8);
}

}  // namespace echelon::object_checkpoints_test
