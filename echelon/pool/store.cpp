// The jobs' fields that nobody searches by are one column of JSON. The schema's
// number is SQLite's user_version.
#include "echelon/pool/store.h"

#include <sqlite3.h>

#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string_view>

#include "echelon/error.h"
#include "echelon/text/build_info.h"
#include "echelon/text/format.h"

namespace echelon::pool {
namespace {

constexpr int kSchema = 2;
constexpr int kBusyMs = 5000;
constexpr const char* kFromVersion1 =
    "ALTER TABLE allocation ADD COLUMN names TEXT NOT NULL DEFAULT '';";
constexpr const char* kStates[] = {
    "waiting", "running", "done", "failed", "cancelled"};

constexpr const char* kTables =
    "CREATE TABLE job(id INTEGER PRIMARY KEY AUTOINCREMENT,"
    "  key TEXT NOT NULL UNIQUE, active INTEGER NOT NULL, body TEXT NOT NULL);"
    "CREATE INDEX job_active ON job(active);"
    "CREATE TABLE allocation(id INTEGER PRIMARY KEY, job INTEGER NOT NULL,"
    "  project TEXT NOT NULL, devices INTEGER NOT NULL, began REAL NOT NULL,"
    "  ended REAL NOT NULL, names TEXT NOT NULL DEFAULT '');"
    "CREATE INDEX allocation_job ON allocation(job, ended);"
    "CREATE INDEX allocation_ended ON allocation(ended);"
    "CREATE TABLE value(name TEXT PRIMARY KEY, text TEXT NOT NULL);";

std::string body_of(const JobRecord& job) {
  return nlohmann::json{
      {"project", job.project},
      {"user", job.user},
      {"user_name", job.user_name},
      {"command", job.command},
      {"environment", job.environment},
      {"folder", job.folder},
      {"least", job.least},
      {"most", job.most},
      {"kept", static_cast<int>(job.kept)},
      {"priority", job.priority},
      {"refused", job.refused},
      {"state", static_cast<int>(job.state)},
      {"given", job.given},
      {"used", job.used},
      {"attempt", job.attempt},
      {"cancelled", job.cancelled},
      {"exit_code", job.exit_code},
      {"yielded", job.yielded},
      {"submitted", job.submitted},
      {"waiting_since", job.waiting_since},
      {"not_before", job.not_before},
      {"started", job.started},
      {"stop_sent", job.stop_sent},
      {"ended", job.ended},
      {"note", job.note}}
      .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

JobRecord job_of(int64_t id, const std::string& key, const std::string& body) {
  const auto json = nlohmann::json::parse(body);
  JobRecord job{.id = id, .key = key};
  json.at("project").get_to(job.project);
  json.at("user").get_to(job.user);
  json.at("user_name").get_to(job.user_name);
  json.at("command").get_to(job.command);
  json.at("environment").get_to(job.environment);
  json.at("folder").get_to(job.folder);
  json.at("least").get_to(job.least);
  json.at("most").get_to(job.most);
  job.kept = static_cast<Kept>(json.at("kept").get<int>());
  json.at("priority").get_to(job.priority);
  json.at("refused").get_to(job.refused);
  job.state = static_cast<JobState>(json.at("state").get<int>());
  json.at("given").get_to(job.given);
  json.at("used").get_to(job.used);
  json.at("attempt").get_to(job.attempt);
  json.at("cancelled").get_to(job.cancelled);
  json.at("exit_code").get_to(job.exit_code);
  json.at("yielded").get_to(job.yielded);
  json.at("submitted").get_to(job.submitted);
  json.at("waiting_since").get_to(job.waiting_since);
  json.at("not_before").get_to(job.not_before);
  json.at("started").get_to(job.started);
  json.at("stop_sent").get_to(job.stop_sent);
  json.at("ended").get_to(job.ended);
  json.at("note").get_to(job.note);
  return job;
}

bool is_active(const JobRecord& job) {
  return job.state == JobState::waiting || job.state == JobState::running;
}

}  // namespace

std::string to_string(JobState state) {
  return kStates[static_cast<size_t>(state)];
}

class Store::Database {
 public:
  // A statement that is prepared once and run many times.
  class Statement {
   public:
    Statement(Database& database, const char* sql) : database_(database) {
      database.check(
          sqlite3_prepare_v2(database.handle_, sql, -1, &handle_, nullptr));
    }
    Statement(const Statement&) = delete;
    Statement& operator=(const Statement&) = delete;
    ~Statement() { sqlite3_finalize(handle_); }

    template <class... Values>
    Statement& bind(const Values&... values) {
      int at = 0;
      (bind_one(++at, values), ...);
      return *this;
    }
    // Whether there is a row.
    bool step() {
      const int code = sqlite3_step(handle_);
      if (code != SQLITE_ROW && code != SQLITE_DONE) {
        sqlite3_reset(handle_);
        database_.check(code);
      }
      return code == SQLITE_ROW;
    }
    void run() {
      while (step()) {
      }
    }
    int64_t integer(int column) const {
      return sqlite3_column_int64(handle_, column);
    }
    double real(int column) const {
      return sqlite3_column_double(handle_, column);
    }
    std::string text(int column) const {
      const auto* bytes = sqlite3_column_text(handle_, column);
      const auto size =
          static_cast<size_t>(sqlite3_column_bytes(handle_, column));
      return bytes == nullptr
                 ? std::string()
                 : std::string(reinterpret_cast<const char*>(bytes), size);
    }

   private:
    void bind_one(int at, int64_t value) {
      database_.check(sqlite3_bind_int64(handle_, at, value));
    }
    void bind_one(int at, double value) {
      database_.check(sqlite3_bind_double(handle_, at, value));
    }
    void bind_one(int at, const std::string& value) {
      database_.check(sqlite3_bind_text(
          handle_, at, value.data(), static_cast<int>(value.size()),
          SQLITE_TRANSIENT));
    }

    Database& database_;
    sqlite3_stmt* handle_ = nullptr;
  };

  // Undone unless it is committed.
  class Transaction {
   public:
    explicit Transaction(Database& database) : database_(database) {
      database.run("BEGIN IMMEDIATE");
    }
    Transaction(const Transaction&) = delete;
    Transaction& operator=(const Transaction&) = delete;
    ~Transaction() {
      if (!done_) {
        sqlite3_exec(database_.handle_, "ROLLBACK", nullptr, nullptr, nullptr);
      }
    }
    void commit() {
      database_.run("COMMIT");
      done_ = true;
    }

   private:
    Database& database_;
    bool done_ = false;
  };

  explicit Database(std::filesystem::path path) : path_(std::move(path)) {
    try {
      check(sqlite3_open_v2(
          path_.c_str(), &handle_,
          SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_NOFOLLOW,
          nullptr));
      sqlite3_busy_timeout(handle_, kBusyMs);
      run("PRAGMA journal_mode = WAL");
      run("PRAGMA synchronous = FULL");
      make_tables();
    } catch (...) {
      sqlite3_close(handle_);
      throw;
    }
  }
  Database(const Database&) = delete;
  Database& operator=(const Database&) = delete;
  ~Database() { sqlite3_close(handle_); }

  void run(const char* sql) {
    check(sqlite3_exec(handle_, sql, nullptr, nullptr, nullptr));
  }
  int64_t last_id() const { return sqlite3_last_insert_rowid(handle_); }

 private:
  void make_tables() {
    int version = 0;
    {
      Statement statement(*this, "PRAGMA user_version");
      if (statement.step()) version = static_cast<int>(statement.integer(0));
    }
    if (version == kSchema) return;
    if (version != 0 && version != 1) {
      throw ConfigError(format(
          "{}: was written by another version of Echelon (its format is {}, "
          "that of {} is {}); start the pool with that version, or in another "
          "--folder",
          path_.string(), version, build_info::kVersion, kSchema));
    }
    Transaction transaction(*this);
    run(version == 1 ? kFromVersion1 : kTables);
    run(format("PRAGMA user_version = {}", kSchema).c_str());
    transaction.commit();
  }

  void check(int code) {
    if (code == SQLITE_OK || code == SQLITE_ROW || code == SQLITE_DONE) return;
    const std::string text =
        handle_ == nullptr ? sqlite3_errstr(code) : sqlite3_errmsg(handle_);
    if (code == SQLITE_FULL || (code & 0xff) == SQLITE_IOERR) {
      throw Error(format(
          "{}: cannot be written ({}); free some space on its disk: until "
          "then the pool takes no job and starts none, and those that run go "
          "on",
          path_.string(), text));
    }
    throw Error(format("{}: {}", path_.string(), text));
  }

  std::filesystem::path path_;
  sqlite3* handle_ = nullptr;
};

namespace {

template <class Statement>
std::vector<JobRecord> jobs_of(Statement& statement) {
  std::vector<JobRecord> jobs;
  while (statement.step()) {
    jobs.push_back(
        job_of(statement.integer(0), statement.text(1), statement.text(2)));
  }
  return jobs;
}

}  // namespace

Store::Store(const std::filesystem::path& folder)
    : database_(std::make_unique<Database>(folder / "pool.db")) {}

Store::~Store() = default;

int64_t Store::add(const JobRecord& job) {
  Database::Transaction transaction(*database_);
  Database::Statement insert(
      *database_, "INSERT INTO job(key, active, body) VALUES(?, 1, ?)");
  insert.bind(job.key, body_of(job)).run();
  const int64_t id = database_->last_id();
  transaction.commit();
  return id;
}

void Store::update(const std::vector<const JobRecord*>& jobs, double now) {
  Database::Transaction transaction(*database_);
  for (const JobRecord* job : jobs) {
    Database::Statement update(
        *database_, "UPDATE job SET active = ?, body = ? WHERE id = ?");
    update.bind(int64_t{is_active(*job)}, body_of(*job), job->id).run();
    const auto devices = static_cast<int64_t>(job->used.size());
    const std::string names = join(job->used, " ");
    Database::Statement open(
        *database_, "SELECT names FROM allocation WHERE job = ? AND ended = 0");
    const bool is_open = open.bind(job->id).step();
    if (is_open ? open.text(0) == names : devices == 0) continue;
    Database::Statement close(
        *database_,
        "UPDATE allocation SET ended = ? WHERE job = ? AND ended = 0");
    close.bind(now, job->id).run();
    if (devices == 0) continue;
    Database::Statement begin(
        *database_,
        "INSERT INTO allocation(job, project, devices, began, ended, names) "
        "VALUES(?, ?, ?, ?, 0, ?)");
    begin.bind(job->id, job->project, devices, now, names).run();
  }
  transaction.commit();
}

std::vector<JobRecord> Store::active_jobs() const {
  Database::Statement statement(
      *database_, "SELECT id, key, body FROM job WHERE active = 1 ORDER BY id");
  return jobs_of(statement);
}

std::vector<JobRecord> Store::ended_jobs(int64_t most) const {
  Database::Statement statement(
      *database_,
      "SELECT id, key, body FROM job WHERE active = 0 ORDER BY id DESC LIMIT "
      "?");
  return jobs_of(statement.bind(most));
}

std::vector<JobRecord> Store::find_job(int64_t id) const {
  Database::Statement statement(
      *database_, "SELECT id, key, body FROM job WHERE id = ?");
  return jobs_of(statement.bind(id));
}

std::vector<JobRecord> Store::find_job(const std::string& key) const {
  Database::Statement statement(
      *database_, "SELECT id, key, body FROM job WHERE key = ?");
  return jobs_of(statement.bind(key));
}

std::vector<Allocation> Store::history(double since) const {
  Database::Statement statement(
      *database_,
      "SELECT job, project, devices, began, ended, names FROM allocation "
      "WHERE ended = 0 OR ended > ? ORDER BY began");
  statement.bind(since);
  std::vector<Allocation> all;
  while (statement.step()) {
    std::istringstream words(statement.text(5));
    all.push_back(
        {.job = statement.integer(0),
         .project = statement.text(1),
         .devices = statement.integer(2),
         .names = {std::istream_iterator<std::string>(words), {}},
         .began = statement.real(3),
         .ended = statement.real(4)});
  }
  return all;
}

void Store::keep(
    const std::vector<std::pair<std::string, std::string>>& values) {
  Database::Transaction transaction(*database_);
  for (const auto& [name, text] : values) {
    Database::Statement statement(
        *database_,
        "INSERT INTO value(name, text) VALUES(?, ?) "
        "ON CONFLICT(name) DO UPDATE SET text = excluded.text");
    statement.bind(name, text).run();
  }
  transaction.commit();
}

std::string Store::kept(const std::string& name) const {
  Database::Statement statement(
      *database_, "SELECT text FROM value WHERE name = ?");
  return statement.bind(name).step() ? statement.text(0) : "";
}

}  // namespace echelon::pool
