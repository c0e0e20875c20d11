// A pool between requests: its jobs, and what is done to bring them to what was
// decided.
//
// Each job has devices that the scheduler gave it, and devices that its
// processes use. A job starts when nobody uses what it was given; one that was
// given less shrinks through its control socket, or else gets SIGTERM and
// starts again.
#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <future>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "echelon/pool/devices.h"
#include "echelon/pool/keeper.h"
#include "echelon/pool/metrics.h"
#include "echelon/pool/settings.h"
#include "echelon/pool/store.h"

namespace echelon::pool {

/// Who asks, by SO_PEERCRED.
struct Peer {
  int64_t user = 0;
  int64_t group = 0;
};

class Pool {
 public:
  using Json = nlohmann::ordered_json;

  /// Reads the jobs of `folder` and finds those that run. `page_url`: where its
  /// page is; empty: nowhere.
  Pool(
      std::filesystem::path folder, Settings settings, PoolDevices devices,
      std::string page_url = "");
  ~Pool();

  /// The answer to one request. Throws ConfigError or Error.
  Json answer(const Json& request, const Peer& peer);

  /// Takes note of ends and answers, decides, and acts. Returns after how long
  /// it wants to be called again, at the latest.
  std::chrono::milliseconds work();

  /// Files that are readable when work() has something to do.
  std::vector<int> files() const;

 private:
  // An answer of a job that was asked to change its number of ranks.
  struct Outcome {
    enum class Kind { done, refused, silent };
    Kind kind = Kind::silent;
    std::string text;
  };
  struct Live {
    JobRecord job;
    Found found;                      // its keeper, while it uses devices
    pid_t spawned = -1;               // a keeper that this daemon has started
    std::future<Outcome> resize;      // asked for
    std::vector<std::string> before;  // used before it was asked to grow
    std::vector<std::string> wanted;  // what it was asked for
    bool unsure = false;  // found, and not yet asked how many ranks it has
    bool killed = false;
    std::string why;  // it waits
  };
  using Names = std::vector<std::string>;

  static double now();  // seconds since 1970

  // --- Requests (answers.cpp)
  Json submit(const Json& request, const Peer& peer);
  Json list(const Json& request) const;
  Json status(const Json& request) const;
  Json overview() const;
  Json cancel(const Json& request, const Peer& peer);
  Json resize(const Json& request, const Peer& peer);
  Json why(const Json& request) const;
  Json drain(const Json& request, const Peer& peer);
  Json history(const Json& request) const;
  Json page(const Json& request) const;
  std::string metrics();
  double first_second(const Json& request) const;
  Json describe(const JobRecord& job, const std::string& why) const;
  Live& own_job(const Json& request, const Peer& peer);
  void check_sizes(const JobRecord& job) const;

  // --- Work (pool.cpp)
  void load();
  void reap();
  void count_use();
  void find_ends();
  void finish(Live& live, int code);
  void give_back(Live& live, const std::string& note);
  void decide_again();
  State state_of() const;
  void act(Live& live);
  void start(Live& live);
  void stop(Live& live);
  void change_size(Live& live);
  void take_outcome(Live& live);
  bool is_free(const Live& live, const Names& devices) const;
  bool has_room(const JobRecord& job) const;
  bool is_resizable(const JobRecord& job) const;
  std::string control_of(const JobRecord& job) const;
  std::filesystem::path folder_of(const JobRecord& job) const;
  Attempt attempt_of(const JobRecord& job) const;
  void save(const std::vector<const JobRecord*>& jobs);
  void save(Live& live) { save({&live.job}); }
  void say(const std::string& text) const;

  std::filesystem::path folder_;
  Settings settings_;
  PoolDevices devices_;
  std::string page_url_;
  Store store_;
  std::map<int64_t, Live> jobs_;
  std::vector<std::string> drained_;  // devices
  bool closed_ = false;               // no job starts
  bool changed_ = true;               // since the last decision
  bool failed_ = false;               // the last work() could not be saved
  double decided_ = 0;                // when
  std::vector<double> usage_;         // of each project
  double usage_at_ = 0, usage_saved_ = 0;
  std::vector<int64_t> held_, fair_;             // of each project, as decided
  std::map<std::string, ProjectCounts> counts_;  // by project
  double counted_ = 0;                           // when
  double began_ = 0;                             // when the pool had no past
};

}  // namespace echelon::pool
