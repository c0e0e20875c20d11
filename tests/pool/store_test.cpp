#include "echelon/pool/store.h"

#include <gmock/gmock.h>
#include <sqlite3.h>

#include "echelon/error.h"
#include "tests/checkpoint/small_disk.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace echelon::pool::store_test {

using testing::ElementsAre;
using testing::IsEmpty;
using testing::SizeIs;

JobRecord some_job(const std::string& key) {
  return {
      .key = key,
      .project = "vision",
      .user_name = "anna",
      .command = {"echelon", "train"},
      .environment = {"A=\xff"},  // not UTF-8
      .least = 2,
      .most = 4,
      .kept = Kept::none,
      .submitted = 12.5};
}

void run_sql(const TempFolder& folder, const char* sql) {
  sqlite3* handle = nullptr;
  ASSERT_EQ(sqlite3_open(folder.path("pool.db").c_str(), &handle), SQLITE_OK);
  EXPECT_EQ(sqlite3_exec(handle, sql, nullptr, nullptr, nullptr), SQLITE_OK);
  sqlite3_close(handle);
}

TEST(PoolStore, JobsComeBackAsTheyWere) {
  const TempFolder folder;
  int64_t id = 0;
  {
    Store store(folder.path());
    id = store.add(some_job("a"));
    JobRecord job = store.find_job("a").at(0);
    job.used = {"GPU-1", "GPU-2"};
    job.given = job.used;
    job.state = JobState::running;
    job.refused = {3};
    store.update({&job}, 20);
    EXPECT_GT(store.add(some_job("b")), id);
  }
  Store store(folder.path());
  const auto jobs = store.active_jobs();
  ASSERT_THAT(jobs, SizeIs(2));
  EXPECT_EQ(jobs[0].id, id);
  EXPECT_THAT(jobs[0].used, ElementsAre("GPU-1", "GPU-2"));
  EXPECT_THAT(jobs[0].refused, ElementsAre(3));
  EXPECT_EQ(jobs[0].state, JobState::running);
  EXPECT_EQ(jobs[0].submitted, 12.5);
  EXPECT_EQ(jobs[1].key, "b");
}

TEST(PoolStore, AKeyHasOneJob) {
  const TempFolder folder;
  Store store(folder.path());
  store.add(some_job("a"));
  EXPECT_THROW(store.add(some_job("a")), Error);
  EXPECT_THAT(store.active_jobs(), SizeIs(1));
}

TEST(PoolStore, TheHistoryHasWhatWasUsed) {
  const TempFolder folder;
  Store store(folder.path());
  JobRecord job = some_job("a");
  job.id = store.add(job);
  job.used = {"0", "1"};
  store.update({&job}, 100);
  store.update({&job}, 110);  // nothing has changed
  job.used = {"0"};
  store.update({&job}, 120);
  job.used.clear();
  job.state = JobState::done;
  store.update({&job}, 150);
  EXPECT_THAT(store.active_jobs(), IsEmpty());
  EXPECT_THAT(store.ended_jobs(9), SizeIs(1));
  const auto all = store.history(0);
  ASSERT_THAT(all, SizeIs(2));
  EXPECT_EQ(all[0].devices, 2);
  EXPECT_THAT(all[0].names, ElementsAre("0", "1"));
  EXPECT_EQ(all[0].began, 100);
  EXPECT_EQ(all[0].ended, 120);
  EXPECT_EQ(all[1].devices, 1);
  EXPECT_EQ(all[1].ended, 150);
  EXPECT_THAT(store.history(130), SizeIs(1));
}

// The first version did not say which devices a job had.
TEST(PoolStore, AnEarlierVersionsFileIsTakenOver) {
  const TempFolder folder;
  { Store store(folder.path()); }
  run_sql(
      folder,
      "ALTER TABLE allocation DROP COLUMN names;"
      "INSERT INTO allocation VALUES(1, 7, 'vision', 2, 100, 150);"
      "PRAGMA user_version = 1");
  const Store store(folder.path());
  const auto all = store.history(0);
  ASSERT_THAT(all, SizeIs(1));
  EXPECT_EQ(all[0].devices, 2);
  EXPECT_EQ(all[0].ended, 150);
  EXPECT_THAT(all[0].names, IsEmpty());
}

TEST(PoolStore, AnotherVersionsFileIsLeftAlone) {
  const TempFolder folder;
  { Store store(folder.path()); }
  run_sql(folder, "PRAGMA user_version = 7");
  EXPECT_THAT(
      error_text<ConfigError>([&] { Store store(folder.path()); }),
      HasAll("pool.db", "another version of Echelon", "its format is 7"));
}

// What cannot be written is said, and nothing is half there.
TEST(PoolStore, AFullDiskLosesNothing) {
  const TempFolder folder;
  constexpr int kNoDisk = 77;
  const int code = in_child([&] {
    if (!mount_disk(folder.path(), "size=256k")) return kNoDisk;
    Store store(folder.path());
    const int64_t id = store.add(some_job("a"));
    JobRecord large = some_job("b");
    large.environment.assign(1000, std::string(1000, 'x'));
    const std::string text = error_text([&] { store.add(large); });
    const auto jobs = store.active_jobs();
    const bool whole = jobs.size() == 1 && jobs[0].id == id &&
                       text.find("cannot be written") != std::string::npos &&
                       text.find("free some space") != std::string::npos;
    // A smaller one still has room.
    return whole && store.add(some_job("c")) > id ? 0 : 1;
  });
  if (code == kNoDisk) GTEST_SKIP() << "needs root, to mount a small disk";
  EXPECT_EQ(code, 0);
}

TEST(PoolStore, NamedValuesAreKept) {
  const TempFolder folder;
  {
    Store store(folder.path());
    EXPECT_EQ(store.kept("closed"), "");
    store.keep({{"closed", "1"}});
    store.keep({{"closed", "0"}, {"drained", "GPU-1"}});
  }
  Store store(folder.path());
  EXPECT_EQ(store.kept("closed"), "0");
  EXPECT_EQ(store.kept("drained"), "GPU-1");
}

}  // namespace echelon::pool::store_test
