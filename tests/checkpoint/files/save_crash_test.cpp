// A save that is killed at each of its system calls, and one in which each
// fails: older checkpoints stay complete, and the next save succeeds.
#include <gmock/gmock.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "echelon/checkpoint/files/reader.h"
#include "echelon/error.h"
#include "tests/checkpoint/files/small_save.h"
#include "tests/support/error_text.h"
#include "tests/support/places.h"
#include "tests/support/temp_folder.h"

namespace echelon::save_crash_test {

namespace fs = std::filesystem;
using testing::AnyOf;
using testing::Contains;
using testing::ElementsAre;
using testing::IsEmpty;

/// Number `count` of the calls of that name that a process makes.
struct Call {
  std::string name;
  int count = 0;
};

// Calls that leave files as they are and do not fail because of a disk.
bool is_memory(const std::string& name) {
  static const std::set<std::string> kNames = {
      "brk",        "mmap",           "munmap",       "mprotect",
      "mremap",     "madvise",        "futex",        "clock_gettime",
      "getpid",     "rt_sigprocmask", "rt_sigaction", "set_robust_list",
      "rseq",       "clone3",         "clone",        "sched_yield",
      "exit_group", "exit",           "getrandom",    "access"};
  return kNames.contains(name);
}

// The calls in a log of `strace -f` from save_writer's first mark, or from the
// log's beginning, to its second.
enum class From { mark, begin };
std::vector<Call> calls_of_save(const fs::path& log, From from) {
  std::map<std::pair<std::string, std::string>, int> counts;
  std::set<std::pair<std::string, int>> seen;
  std::vector<Call> calls;
  bool saving = from == From::begin;
  std::ifstream in(log);
  for (std::string line; std::getline(in, line);) {
    const size_t begin = line.find_first_not_of(' ', line.find(' '));
    const size_t end = line.find('(', begin);
    if (end == std::string::npos || line[begin] == '<') continue;
    const std::string process = line.substr(0, line.find(' '));
    const std::string name = line.substr(begin, end - begin);
    const int count = ++counts[{process, name}];
    if (line.find("\"mark: save begins\"") != std::string::npos) saving = true;
    if (line.find("\"mark: save ends\"") != std::string::npos) saving = false;
    if (!saving || is_memory(name)) continue;
    if (seen.insert({name, count}).second) calls.push_back({name, count});
  }
  return calls;
}

// A folder where fsync is free: what a process leaves behind when it ends does
// not depend on the disk.
constexpr const char* kInMemory = "/dev/shm";
// A folder that survives a restart of the machine, so it is on a disk.
constexpr const char* kOnDisk = "/var/tmp";

std::string checkpoints_in(const char* place) {
  if (::access(place, W_OK) == 0) ::setenv("TMPDIR", place, 1);
  return "checkpoints";
}

class SaveCrash : public testing::Test {
 protected:
  explicit SaveCrash(const char* place = kInMemory)
      : name_(checkpoints_in(place)) {}

  void SetUp() override {
    if (std::system("strace -o /dev/null true >/dev/null 2>&1") != 0) {
      GTEST_SKIP() << "strace is not there, or may not trace here "
                      "(setup/packages.sh installs it)";
    }
    // Saving the third removes the first.
    save_small(temp_.path("before"), 50);
    save_small(temp_.path("before"), 100);
    fs::copy(temp_.path("before"), folder_, fs::copy_options::recursive);
    ASSERT_EQ(strace("-o '" + temp_.path("log") + "'"), 0) << error_;
    calls_ = calls_of_save(
        temp_.path("log"), only_.empty() ? From::mark : From::begin);
  }

  void reset() {
    fs::remove_all(folder_);
    fs::copy(temp_.path("before"), folder_, fs::copy_options::recursive);
  }

  // save_writer of step 200 under strace; its exit code, 128 + signal.
  int strace(const std::string& options) {
    // The leak sanitizer does not work under a tracer.
    const std::string line =
        "ASAN_OPTIONS=detect_leaks=0 strace -f -qq " + only_ + " " + options +
        " '" + test_program("save_writer") + "' '" + folder_.string() +
        "' 200 " + std::to_string(table_bytes_) + " 2>'" + temp_.path("error") +
        "'";
    const int status = std::system(line.c_str());
    error_ = read_file(temp_.path("error"));
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  int inject(const Call& call, const std::string& what) {
    return strace(
        "-o /dev/null -e trace=" + call.name + " -e inject=" + call.name + ":" +
        what + ":when=" + std::to_string(call.count));
  }

  std::vector<int64_t> verified_steps() {
    std::vector<int64_t> steps;
    for (const auto& place : list_checkpoints(folder_)) {
      EXPECT_THAT(verify_checkpoint(place.path.string()), IsEmpty())
          << place.path;
      steps.push_back(place.step);
    }
    return steps;
  }
  // What must hold at any time.
  std::vector<int64_t> whole_steps() {
    const auto steps = verified_steps();
    EXPECT_THAT(steps, Contains(100));
    const auto latest = latest_checkpoint(folder_);
    if (!latest) {
      ADD_FAILURE() << "no latest checkpoint";
      return steps;
    }
    EXPECT_THAT(steps, Contains(latest->step));
    EXPECT_THAT(latest->step, AnyOf(100, 200));
    // No complete checkpoint is lost.
    EXPECT_EQ(latest->step, steps.front());
    return steps;
  }
  std::vector<std::string> debris() {
    auto names = names_in(folder_);
    std::erase_if(names, [](const auto& name) { return name[0] != '.'; });
    return names;
  }
  // The next run of the same training.
  void save_next() {
    const CheckpointLock lock(folder_);
    const auto latest = latest_checkpoint(folder_)->step;
    save_small(folder_, latest + 100);
    keep_checkpoints(folder_, {});
    EXPECT_THAT(debris(), IsEmpty());
    EXPECT_THAT(verified_steps(), ElementsAre(latest + 100, latest));
    EXPECT_EQ(latest_checkpoint(folder_)->step, latest + 100);
  }

  // Kills it at each call; returns how often the new checkpoint existed then.
  int kill_at_each() {
    int after = 0;
    for (const auto& call : calls_) {
      SCOPED_TRACE(call.name + " " + std::to_string(call.count));
      reset();
      EXPECT_EQ(inject(call, "signal=KILL"), 128 + 9) << error_;
      const auto steps = whole_steps();
      if (steps.front() == 200) ++after;
      save_next();
      if (HasFailure()) break;
    }
    return after;
  }
  std::set<std::string> names() const {
    std::set<std::string> names;
    for (const auto& call : calls_) names.insert(call.name);
    return names;
  }

  const std::string name_;
  TempFolder temp_;
  fs::path folder_ = temp_.path(name_);
  std::string only_;  // which calls strace looks at; empty: all
  int64_t table_bytes_ = 0;
  std::vector<Call> calls_;
  std::string error_;
};

TEST_F(SaveCrash, KilledAtAnyCallLeavesCheckpointsComplete) {
  const int after = kill_at_each();
  for (const char* name :
       {"write", "fsync", "rename", "openat", "mkdir", "close", "flock"}) {
    EXPECT_THAT(names(), Contains(name));
  }
  const int count = static_cast<int>(calls_.size());
  EXPECT_GT(count - after, 30);
  EXPECT_GT(after, 3);
  RecordProperty("calls", count);
  std::cout << "killed at " << count << " calls of " << names().size()
            << " kinds; the new checkpoint was there after " << after << "\n";
}

// A machine that loses power keeps what was synced, so the order of the calls
// matters.
TEST_F(SaveCrash, SyncsEverythingBeforeNaming) {
  reset();
  ASSERT_EQ(strace("-y -o '" + temp_.path("log") + "'"), 0) << error_;
  std::vector<std::string> lines;
  std::ifstream in(temp_.path("log"));
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  // The number of the last line that has all of these.
  const auto last = [&](const std::vector<std::string>& words) {
    for (size_t i = lines.size(); i > 0; --i) {
      if (std::all_of(words.begin(), words.end(), [&](const auto& word) {
            return lines[i - 1].find(word) != std::string::npos;
          })) {
        return static_cast<int>(i);
      }
    }
    ADD_FAILURE() << "no call with " << testing::PrintToString(words);
    return 0;
  };
  const std::string partial = folder_.string() + "/.step-00000200.partial";
  const int named = last({"rename", partial + "\"", "/step-00000200\""});
  const int folder_done = last({"fsync(", "<" + partial + ">)"});
  for (const char* file :
       {"manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"}) {
    EXPECT_LT(last({"fsync(", "<" + partial + "/" + file + ">)"}), named);
    EXPECT_LT(last({"open", "O_CREAT", partial + "/" + file}), folder_done);
  }
  for (const char* part : {"rank-00000.part.json", "rank-00001.part.json"}) {
    EXPECT_LT(last({"unlink", part}), folder_done);
  }
  // The manifest comes last.
  EXPECT_LT(
      last({"fsync(", partial + "/rank-00001.safetensors>"}),
      last({"open", "O_CREAT", partial + "/manifest.json"}));
  EXPECT_LT(folder_done, named);
  EXPECT_LT(last({"fsync(", ".LATEST.new>"}), named);
  const int latest = last({"rename", ".LATEST.new\"", "/LATEST\""});
  EXPECT_LT(named, latest);
  const std::string sync_folder = "<" + folder_.string() + ">)";
  const auto synced_between = [&](int begin, int end) {
    for (int i = begin; i < end - 1; ++i) {
      const auto& line = lines[static_cast<size_t>(i)];
      if (line.find("fsync(") != std::string::npos &&
          line.find(sync_folder) != std::string::npos) {
        return true;
      }
    }
    return false;
  };
  EXPECT_TRUE(synced_between(named, latest));
  const int removed = last({"rename", "/step-00000050\"", ".removed\""});
  EXPECT_TRUE(synced_between(latest, removed));
  EXPECT_TRUE(
      synced_between(removed, last({"unlink", "step-00000050.removed"})));
}

// The calls that a checkpoint needs; others, such as closing a file that was
// only read, may fail.
const std::set<std::string> kMustSucceed = {
    "write", "pwrite64", "fsync",     "fdatasync", "rename",
    "mkdir", "flock",    "ftruncate", "unlinkat"};

class SaveError
    : public SaveCrash,
      public testing::WithParamInterface<std::pair<const char*, const char*>> {
};

TEST_P(SaveError, AtAnyCallIsReportedAndLeavesNothing) {
  const auto [name, text] = GetParam();
  int told = 0;
  for (const auto& call : calls_) {
    SCOPED_TRACE(call.name + " " + std::to_string(call.count));
    reset();
    const int code = inject(call, std::string("error=") + name);
    ASSERT_THAT(code, AnyOf(0, 3)) << error_;
    const auto steps = whole_steps();
    if (code == 0) {
      EXPECT_EQ(steps.front(), 200);
      EXPECT_FALSE(kMustSucceed.contains(call.name));
    } else {
      ++told;
      EXPECT_THAT(error_, HasAll(folder_.string(), text));
      // Only a checkpoint that is being removed may be left.
      for (const auto& left : debris()) {
        EXPECT_EQ(left, ".step-00000050.removed");
      }
    }
    save_next();
    if (HasFailure()) {
      ADD_FAILURE() << "exit code " << code << ": " << error_;
      break;
    }
  }
  std::cout << name << ": told of " << told << " of " << calls_.size()
            << " calls\n";
  EXPECT_GT(told, 30);
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, SaveError,
    testing::Values(
        std::pair("EIO", "Input/output error"),
        std::pair("ENOSPC", "No space left on device"),
        std::pair("EROFS", "Read-only file system")),
    [](const auto& info) { return std::string(info.param.first); });

constexpr int64_t kTableBytes = 2 * kChecksumBlockBytes + (1 << 20);

// A file of several blocks on a disk, written by a second thread that bypasses
// the page cache: the calls on that file.
class LargeSaveCrash : public SaveCrash {
 protected:
  LargeSaveCrash() : SaveCrash(kOnDisk) {
    table_bytes_ = kTableBytes;
    only_ = "-P '" + rank_file_ + "'";
  }
  void SetUp() override {
    SaveCrash::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    log_ = read_file(temp_.path("log"));
    if (!direct_was_set()) {
      GTEST_SKIP() << "no direct writes on the file system of " << kOnDisk;
    }
    for (const char* name : {"write", "fcntl", "ftruncate", "fsync"}) {
      EXPECT_THAT(names(), Contains(name)) << log_;
    }
    EXPECT_GE(count_of("write"), 9) << log_;
  }

  bool direct_was_set() const {
    const size_t flag = log_.find("|O_DIRECT");
    return flag != std::string::npos && log_[log_.find("= ", flag) + 2] == '0';
  }
  int count_of(const std::string& name) const {
    return static_cast<int>(std::count_if(
        calls_.begin(), calls_.end(),
        [&](const Call& call) { return call.name == name; }));
  }
  // The error is reported, and the next save succeeds.
  void expect_told(const std::string& text) {
    EXPECT_THAT(error_, HasAll(rank_file_, text));
    EXPECT_THAT(debris(), IsEmpty());
    EXPECT_EQ(whole_steps().front(), 100);
    save_next();
  }
  // With `what` at that call the save still succeeds.
  void expect_whole_after(const Call& call, const std::string& what) {
    SCOPED_TRACE(call.name + " " + std::to_string(call.count) + " " + what);
    reset();
    ASSERT_EQ(inject(call, what), 0) << error_;
    EXPECT_EQ(whole_steps().front(), 200);
  }

  const std::string rank_file_ =
      folder_.string() + "/.step-00000200.partial/rank-00000.safetensors";
  std::string log_;
};

TEST_F(LargeSaveCrash, KilledAtAnyCallLeavesCheckpointsComplete) {
  EXPECT_EQ(kill_at_each(), 0);
  std::cout << "killed at " << calls_.size() << " calls, " << count_of("write")
            << " of them writes\n";
}

TEST_F(LargeSaveCrash, AFailedWriteIsReported) {
  for (const auto& [name, text] :
       {std::pair("EIO", "Input/output error"),
        std::pair("ENOSPC", "No space left on device")}) {
    for (const auto& call : calls_) {
      if (call.name != "write" && call.name != "fsync") continue;
      SCOPED_TRACE(call.name + " " + std::to_string(call.count) + " " + name);
      reset();
      ASSERT_EQ(inject(call, std::string("error=") + name), 3) << error_;
      expect_told(text);
    }
  }
}

// Some file systems refuse the flag, some the write.
TEST_F(LargeSaveCrash, IsCompleteWithoutDirectWrites) {
  // The last write, of the remainder, is not direct.
  for (int i = 1; i < count_of("write"); ++i) {
    expect_whole_after({"write", i}, "error=EINVAL");
  }
  expect_whole_after({"ftruncate", 1}, "error=EPERM");
  // The first asks for the flags.
  expect_whole_after({"fcntl", 2}, "error=EINVAL");
}

// Older kernels have no direct writes there.
TEST(LargeSave, IsCompleteInMemory) {
  if (::access(kInMemory, W_OK) != 0) GTEST_SKIP() << "no " << kInMemory;
  const std::string name = checkpoints_in(kInMemory);
  const TempFolder temp;
  save_small(temp.path(name), 100, {}, kTableBytes);
  const auto places = list_checkpoints(temp.path(name));
  ASSERT_EQ(places.size(), 1);
  EXPECT_THAT(verify_checkpoint(places[0].path.string()), IsEmpty());
}

}  // namespace echelon::save_crash_test
