// Checkpoints on moto's S3 server: what a crash at any request leaves, two
// writers, damage.
#include "echelon/checkpoint/remote/remote_checkpoints.h"

#include <gmock/gmock.h>

#include <set>

#include "echelon/checkpoint/files/folder_files.h"
#include "echelon/checkpoint/files/reader.h"
#include "tests/checkpoint/files/small_save.h"
#include "tests/support/error_text.h"
#include "tests/support/s3_server.h"
#include "tests/support/temp_folder.h"

namespace echelon::remote_checkpoints_test {

namespace fs = std::filesystem;
using storage::ObjectStore;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing_support::S3Server;

const KeepRule kTwo{.newest = 2};

class RemoteCheckpointsTest : public testing::Test {
 protected:
  void SetUp() override {
    ECHELON_NEED_S3();
    server_ = S3Server::get();
    settings_ = server_->settings();
    settings_.part_bytes = kChecksumBlockBytes;
    place_ = testing::UnitTest::GetInstance()->current_test_info()->name();
  }
  std::string url() const { return "s3://models/" + place_; }
  std::unique_ptr<RemoteCheckpoints> open(int attempts = 3) const {
    auto settings = settings_;
    settings.attempts = attempts;
    return std::make_unique<RemoteCheckpoints>(url(), settings);
  }
  /// The local checkpoint of a step, which is made once. That of step 2 has a
  /// file of two parts.
  fs::path local(int64_t step, std::map<std::string, double> metrics = {}) {
    const auto path = checkpoint_path(checkpoints_, step);
    if (fs::exists(path)) return path;
    const int64_t table = step == 2 ? kChecksumBlockBytes + 1000 : 0;
    return save_small(checkpoints_, step, std::move(metrics), table);
  }
  /// What all ranks of a run do.
  void save(
      RemoteCheckpoints& remote, const std::string& mark, int64_t step,
      const KeepRule& rule = kTwo) {
    const auto path = local(step);
    const auto name = remote_name(step, mark, ++count_);
    for (int rank = 0; rank < 2; ++rank) {
      remote.upload(path / rank_file_name(rank), name);
    }
    remote.publish(name, path, rule, folder_.path("run/metrics.jsonl"));
  }
  /// The step that an empty machine gets, which must be whole; -1: none.
  int64_t fetched() {
    const TempFolder machine;
    const auto place = open()->fetch_newest(machine.path());
    if (!place) return -1;
    EXPECT_THAT(verify_checkpoint(place->path.string()), IsEmpty());
    EXPECT_EQ(
        CheckpointReader(place->path.string()).manifest(),
        CheckpointReader(local(place->step).string()).manifest());
    EXPECT_EQ(
        latest_checkpoint(machine.path("checkpoints"))->step, place->step);
    return place->step;
  }
  /// The folders that have any object.
  std::set<std::string> folders_there() const {
    std::set<std::string> names;
    const std::string begin = place_ + "/checkpoints/";
    for (const auto& one : ObjectStore("models", settings_).list(begin)) {
      const std::string rest = one.key.substr(begin.size());
      names.insert(rest.substr(0, rest.find('/')));
    }
    return names;
  }
  std::vector<int64_t> steps_there() const {
    std::vector<int64_t> steps;
    for (const auto& one : open()->list()) steps.push_back(one.step);
    return steps;
  }

  S3Server* server_ = nullptr;
  storage::S3Settings settings_;
  std::string place_;
  TempFolder folder_;
  const fs::path checkpoints_ = folder_.path("run/checkpoints");
  int64_t count_ = 0;
};

TEST_F(RemoteCheckpointsTest, AnEmptyMachineGetsTheNewest) {
  EXPECT_EQ(fetched(), -1);
  const auto remote = open();
  remote->check();
  const auto mark = remote->claim();
  folder_.write("run/metrics.jsonl", "{\"step\": 1}\n{\"step\"");
  save(*remote, mark, 1);
  EXPECT_EQ(fetched(), 1);
  save(*remote, mark, 2);
  EXPECT_EQ(fetched(), 2);
  const TempFolder machine;
  open()->fetch_newest(machine.path());
  EXPECT_EQ(read_file(machine.path("metrics.jsonl")), "{\"step\": 1}\n");
  // One that is as new has no need of it.
  server_->set("");
  EXPECT_FALSE(open()->fetch_newest(machine.path()));
  EXPECT_EQ(server_->requests().size(), 1u);
}

// The saver ends at each of its requests, before or after the server has done
// it. An empty machine then gets the checkpoint before or the new one, whole,
// and a save that was reported is never lost.
TEST_F(RemoteCheckpointsTest, ACrashAtAnyRequest) {
  for (const char* mode : {"before", "after"}) {
    bool ended = false;
    int at = 0;
    while (!ended) {
      place_ = std::string("crash-") + mode + std::to_string(++at);
      SCOPED_TRACE(place_);
      {
        const auto first = open();
        save(*first, first->claim(), 1);
      }
      const auto victim = open(1);
      server_->set("at=" + std::to_string(at) + "&many=0&mode=" + mode);
      bool saved = false;
      try {
        save(*victim, victim->claim(), 2);
        saved = true;
      } catch (const CheckpointError&) {
      }
      ended = static_cast<int>(server_->requests().size()) < at;
      server_->set("");
      const int64_t step = fetched();
      if (saved) {
        ASSERT_EQ(step, 2);
      } else {
        ASSERT_TRUE(step == 1 || step == 2) << step;
      }
      // Nothing that LATEST names was left out.
      ASSERT_EQ(step, steps_there().front());
      // The next process goes on, and removes what the crash has left.
      const auto next = open();
      save(*next, next->claim(), 3);
      ASSERT_EQ(fetched(), 3);
      std::set<std::string> named = {"LATEST"};
      for (const auto& one : next->list()) named.insert(one.name);
      ASSERT_EQ(named.size(), 3u);
      ASSERT_EQ(folders_there(), named);
      ASSERT_LT(at, 40);
    }
    EXPECT_GT(at, 10);
  }
}

TEST_F(RemoteCheckpointsTest, OfTwoWritersOneIsTold) {
  const auto first = open();
  const auto first_mark = first->claim();
  save(*first, first_mark, 1);
  const auto second = open();
  const auto second_mark = second->claim();
  const std::string told =
      error_text<CheckpointError>([&] { save(*first, first_mark, 3); });
  EXPECT_TRUE(is_taken_over(told)) << told;
  EXPECT_THAT(
      told, AllOf(HasSubstr(second_mark), HasSubstr("remote of its own")));
  EXPECT_EQ(fetched(), 1);
  save(*second, second_mark, 2);
  EXPECT_EQ(fetched(), 2);
  EXPECT_TRUE(is_taken_over(
      error_text<CheckpointError>([&] { first->discard_after(0); })));
  EXPECT_THAT(steps_there(), ElementsAre(2, 1));
}

TEST_F(RemoteCheckpointsTest, KeepsWhatTheRuleKeeps) {
  const KeepRule rule{.newest = 2, .best = "loss"};
  const auto remote = open();
  const auto mark = remote->claim();
  for (const auto& [step, loss] : std::vector<std::pair<int64_t, double>>{
           {1, 0.5}, {2, 0.1}, {3, 0.2}, {4, 0.3}, {5, 0.4}}) {
    local(step, {{"loss", loss}});
    save(*remote, mark, step, rule);
  }
  EXPECT_THAT(steps_there(), ElementsAre(5, 4, 2));
  EXPECT_EQ(folders_there().size(), 4u);
  remote->discard_after(4);
  EXPECT_THAT(steps_there(), ElementsAre(4, 2));
  EXPECT_EQ(fetched(), 4);
  open()->clear();
  EXPECT_THAT(steps_there(), IsEmpty());
  EXPECT_THAT(folders_there(), ElementsAre("LATEST"));
}

TEST_F(RemoteCheckpointsTest, ADamagedOneIsLeftOut) {
  const auto remote = open();
  const auto mark = remote->claim();
  save(*remote, mark, 1);
  save(*remote, mark, 2);
  // On the way, once: it is read again.
  server_->set("at=5&many=1&mode=answer");
  EXPECT_EQ(fetched(), 2);
  server_->set("");
  ObjectStore store("models", settings_);
  const auto damage = [&](const std::string& file, int64_t step) {
    for (const auto& one : store.list(place_)) {
      const bool of_step = one.key.find("/" + folder_files::step_name(step)) !=
                           std::string::npos;
      if (!of_step || !one.key.ends_with(file)) continue;
      std::string bytes = store.get(one.key)->text;
      bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 1);
      store.put(one.key, bytes);
    }
  };
  damage("rank-00000.safetensors", 2);
  EXPECT_EQ(fetched(), 1);
  damage("manifest.json", 1);
  const TempFolder machine;
  EXPECT_THAT(
      error_text<CheckpointError>(
          [&] { open()->fetch_newest(machine.path()); }),
      HasSubstr("is intact"));
  EXPECT_THAT(list_checkpoints(machine.path("checkpoints")), IsEmpty());
}

TEST_F(RemoteCheckpointsTest, AMissingFileAndAMissingLatest) {
  const auto remote = open();
  const auto mark = remote->claim();
  save(*remote, mark, 1);
  save(*remote, mark, 2);
  ObjectStore store("models", settings_);
  store.remove(place_ + "/checkpoints/LATEST");
  EXPECT_EQ(fetched(), 2);
  for (const auto& one : store.list(place_)) {
    if (one.key.find("-" + mark + "-2/rank-00001") != std::string::npos) {
      store.remove(one.key);
    }
  }
  EXPECT_EQ(fetched(), 1);
  const auto next = open();
  save(*next, next->claim(), 3);
  EXPECT_EQ(fetched(), 3);
  store.put(place_ + "/checkpoints/LATEST", "step-00000009\n");
  EXPECT_THAT(
      error_text<ConfigError>([&] { open()->check(); }),
      HasSubstr("is not as a run writes it"));
}

TEST_F(RemoteCheckpointsTest, IsCheckedBeforeAnythingStarts) {
  const auto refused = [&](const std::string& url, const std::string& user) {
    auto settings = server_->settings(user);
    return error_text<ConfigError>(
        [&] { RemoteCheckpoints(url, settings).check(); });
  };
  EXPECT_THAT(refused(url(), "none"), HasSubstr("403 AccessDenied"));
  EXPECT_THAT(refused("s3://missing/x", "all"), HasSubstr("404 NoSuchBucket"));
  EXPECT_THAT(refused("s3:/models", "all"), HasSubstr("s3://BUCKET/NAME"));
  open()->check();
  EXPECT_THAT(folders_there(), IsEmpty());
}

}  // namespace echelon::remote_checkpoints_test
