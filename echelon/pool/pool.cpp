// What is decided is written to the store before it is done, so that a daemon
// that dies between the two leaves a job that its successor can tell apart: one
// that has an attempt, but no record of a keeper, has not begun.
#include "echelon/pool/pool.h"

#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iostream>
#include <set>
#include <sstream>
#include <thread>
#include <utility>

#include "echelon/error.h"
#include "echelon/launch/control.h"
#include "echelon/text/build_info.h"
#include "echelon/text/format.h"
#include "echelon/text/text_file.h"
#include "echelon/text/units.h"

namespace echelon::pool {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr milliseconds kSoon{50};
constexpr milliseconds kLater{1000};
constexpr double kDecideAgain = 2;  // seconds, while jobs wait
constexpr double kSaveUsage = 60;
// A launcher listens once it has checked its job.
constexpr seconds kListens{30};
constexpr seconds kResizes{60};
constexpr double kLongestYield = 300;

std::string base_name(const std::string& path) {
  return path.substr(path.rfind('/') + 1);
}

bool is_train(const std::vector<std::string>& command) {
  return command.size() > 1 && base_name(command[0]) == "echelon" &&
         command[1] == "train";
}

// `echelon train` and `echelon run` take the number of devices as -n, where the
// user has not written what the ranks are.
bool takes_ranks(const std::vector<std::string>& command) {
  if (command.size() < 2 || base_name(command[0]) != "echelon" ||
      (command[1] != "train" && command[1] != "run")) {
    return false;
  }
  return std::ranges::none_of(command, [](const std::string& word) {
    return word == "-n" || word.starts_with("-n=") || word == "--layout" ||
           word.starts_with("--layout=") ||
           word.find("{devices}") != std::string::npos;
  });
}

std::vector<std::string>
command_for(std::vector<std::string> command, size_t devices) {
  const std::string number = std::to_string(devices);
  if (takes_ranks(command)) {
    command.insert(command.begin() + 2, {"-n", number});
  }
  for (auto& word : command) {
    const std::string mark = "{devices}";
    for (size_t at; (at = word.find(mark)) != std::string::npos;) {
      word.replace(at, mark.size(), number);
    }
  }
  return command;
}

// In the thread that talks to a job.
template <class Outcome>
Outcome ask_for_size(
    const std::string& control, const std::vector<std::string>& devices,
    bool gpus, uid_t user) {
  using Clock = std::chrono::steady_clock;
  const auto began = Clock::now();
  const size_t count = devices.size();
  std::string request = format("resize {}", count);
  for (const auto& [name, value] : variables_of(gpus, devices)) {
    request += format(" {}={}", name, value);
  }
  bool sent = false;
  try {
    while (Clock::now() - began < (sent ? kResizes : kListens)) {
      const std::string answer = launch::ask_job(control, "status", user);
      size_t ranks = 0;
      std::string word;
      if (std::istringstream(answer) >> word >> ranks && ranks == count) {
        return {Outcome::Kind::done, ""};
      }
      if (!answer.empty() && !sent) {
        const std::string reply = launch::ask_job(control, request, user);
        sent = reply.starts_with("done");
        if (reply.starts_with("refused") &&
            reply.find("ask again") == std::string::npos) {
          return {Outcome::Kind::refused, reply.substr(reply.find(' ') + 1)};
        }
      }
      std::this_thread::sleep_for(milliseconds(20));
    }
  } catch (const Error& error) {
    return {Outcome::Kind::silent, error.what()};
  }
  return sent ? Outcome{Outcome::Kind::refused, "its new ranks did not start"}
              : Outcome{Outcome::Kind::silent, "it does not answer"};
}

}  // namespace

Pool::Pool(
    fs::path folder, Settings settings, PoolDevices devices,
    std::string page_url)
    : folder_(std::move(folder)),
      settings_(std::move(settings)),
      devices_(std::move(devices)),
      page_url_(std::move(page_url)),
      store_(folder_) {
  closed_ = store_.kept("closed") == "1";
  std::istringstream drained(store_.kept("drained"));
  for (std::string name; drained >> name;) drained_.push_back(name);
  load();
  std::istringstream usage(store_.kept("usage"));
  usage >> usage_at_;
  usage_.resize(settings_.projects.size());
  double value;
  for (std::string name; usage >> name >> value;) {
    for (size_t p = 0; p < usage_.size(); ++p) {
      if (settings_.projects[p].name == name) usage_[p] = value;
    }
  }
  usage_saved_ = counted_ = now();
  if (store_.kept("began").empty()) {
    store_.keep({{"began", format("{}", counted_)}});
  }
  std::istringstream(store_.kept("began")) >> began_;
}

Pool::~Pool() = default;

double Pool::now() {
  return std::chrono::duration<double>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

fs::path Pool::folder_of(const JobRecord& job) const {
  return folder_ / "jobs" / std::to_string(job.id);
}

Attempt Pool::attempt_of(const JobRecord& job) const {
  return {folder_of(job), job.attempt};
}

void Pool::say(const std::string& text) const {
  std::cerr << "echelon pool: " << text << std::endl;
}

void Pool::save(const std::vector<const JobRecord*>& jobs) {
  store_.update(jobs, now());
}

// What the store says is true; what was being done is found out again.
void Pool::load() {
  std::map<int64_t, Live> loaded;
  for (JobRecord& job : store_.active_jobs()) {
    const int64_t id = job.id;
    Live& live = loaded[id];
    if (const auto old = jobs_.find(id); old != jobs_.end()) {
      live.spawned = old->second.spawned;
      live.resize = std::move(old->second.resize);
      live.before = old->second.before;
      live.wanted = old->second.wanted;
      live.killed = old->second.killed;
    }
    live.job = std::move(job);
    live.unsure = !live.job.used.empty() && is_resizable(live.job);
    const auto known =
        std::ranges::find(settings_.projects, live.job.project, &Project::name);
    if (known == settings_.projects.end()) {
      // Its project has left the file: nobody can submit to it any more.
      settings_.projects.push_back({.name = live.job.project, .weight = 0});
      settings_.members.push_back({.users = {""}});
      usage_.push_back(0);
    }
  }
  jobs_ = std::move(loaded);
  changed_ = true;
}

std::vector<int> Pool::files() const {
  std::vector<int> files;
  for (const auto& [id, live] : jobs_) {
    if (live.found.keeper.is_open()) files.push_back(live.found.keeper.fd());
  }
  return files;
}

void Pool::reap() {
  while (::waitpid(-1, nullptr, WNOHANG) > 0) {
  }
}

void Pool::count_use() {
  const double time = now();
  const double passed = std::max(0.0, time - counted_);
  for (const auto& [id, live] : jobs_) {
    counts_[live.job.project].device_seconds +=
        passed * static_cast<double>(live.job.used.size());
  }
  counted_ = time;
}

milliseconds Pool::work() {
  try {
    count_use();
    if (failed_) load();
    reap();
    find_ends();
    for (auto& [id, live] : jobs_) take_outcome(live);
    const bool waits = std::ranges::any_of(
        jobs_, [](const auto& one) { return one.second.job.given.empty(); });
    if (changed_ || (waits && now() - decided_ > kDecideAgain)) decide_again();
    bool soon = false;
    for (auto& [id, live] : jobs_) {
      act(live);
      soon |= live.job.given != live.job.used || live.resize.valid();
    }
    if (failed_) say("all is well again");
    failed_ = false;
    return soon ? kSoon : kLater;
  } catch (const std::exception& error) {
    // Mostly a full disk. What was not saved was not done.
    if (!failed_) say(error.what());
    failed_ = true;
    return kLater;
  }
}

void Pool::find_ends() {
  std::vector<int64_t> done;
  for (auto& [id, live] : jobs_) {
    JobRecord& job = live.job;
    if (job.used.empty()) continue;
    if (live.found.keeper.is_open()) {
      pollfd file{live.found.keeper.fd(), POLLIN, 0};
      if (::poll(&file, 1, 0) == 0) continue;
    }
    live.found = find(attempt_of(job));
    switch (live.found.kind) {
      case Found::Kind::running: {
        // A keeper that has ended and was not reaped yet still counts.
        pollfd file{live.found.keeper.fd(), POLLIN, 0};
        if (::poll(&file, 1, 0) != 0) live.found.keeper.close();
        break;
      }
      case Found::Kind::absent:
        if (live.spawned > 0 && ::kill(live.spawned, 0) == 0) break;
        if (call_off(attempt_of(job))) give_back(live, "");
        break;
      case Found::Kind::ended:
        finish(live, live.found.exit_code);
        break;
      case Found::Kind::lost:
        finish(live, 128 + SIGKILL);
        break;
      case Found::Kind::rebooted:
        give_back(live, "the machine was started again");
        break;
    }
    if (job.state != JobState::waiting && job.state != JobState::running) {
      done.push_back(id);
    }
  }
  for (const int64_t id : done) jobs_.erase(id);
}

// The attempt did nothing, or what it did is lost: it waits.
void Pool::give_back(Live& live, const std::string& note) {
  JobRecord& job = live.job;
  job.used.clear();
  job.given.clear();
  job.note = note;
  job.state = JobState::waiting;
  job.waiting_since = now();
  if (job.cancelled) {
    job.state = JobState::cancelled;
    job.ended = now();
  }
  save(live);
  live.spawned = -1;
  live.found = Found{};
  changed_ = true;
}

void Pool::finish(Live& live, int code) {
  constexpr int kDone = 0, kYields = static_cast<int>(ExitCode::preempted);
  JobRecord& job = live.job;
  const bool asked = job.stop_sent > 0;
  job.used.clear();
  job.exit_code = code;
  job.note.clear();
  if (job.cancelled || code == kDone || (!asked && code != kYields)) {
    job.state = job.cancelled   ? JobState::cancelled
                : code == kDone ? JobState::done
                                : JobState::failed;
    job.given.clear();
    job.ended = now();
    if (live.found.kind == Found::Kind::lost) {
      job.note = "its keeper was killed, and its processes with it";
    } else if (job.state == JobState::failed) {
      job.note = format("it ended with exit code {}", code);
    }
  } else {
    job.state = JobState::waiting;
    job.waiting_since = now();
    if (asked) {
      job.yielded = 0;
      // It may have been stopped to start again on fewer devices.
    } else {
      job.given.clear();
      job.yielded += 1;
      const double pause = std::min(
          kLongestYield,
          std::pow(
              2.0, static_cast<double>(std::min<int64_t>(job.yielded, 10))));
      job.not_before = now() + pause;
      job.note = format("it ended with code {} by itself", code);
    }
  }
  save(live);
  if (job.ended > 0) {
    ++counts_[job.project].ended[static_cast<size_t>(job.state)];
  }
  live.found = Found{};
  live.spawned = -1;
  live.killed = live.unsure = false;
  live.resize = {};
  changed_ = true;
}

State Pool::state_of() const {
  State state;
  state.now = now();
  state.rules = settings_.rules;
  state.starts = !closed_;
  state.projects = settings_.projects;
  for (size_t p = 0; p < usage_.size(); ++p)
    state.projects[p].usage = usage_[p];
  std::map<std::string, int> numbers;
  for (const PoolDevice& device : devices_.all) {
    numbers[device.name] = static_cast<int>(state.devices.size());
    state.devices.push_back(
        {.group = device.group,
         .usable = std::ranges::find(drained_, device.name) == drained_.end()});
  }
  for (const auto& [id, live] : jobs_) {
    const JobRecord& job = live.job;
    if (job.cancelled) continue;
    if (job.given.empty() && job.not_before > state.now) continue;
    Job made{
        .id = id,
        .least = job.least,
        .most = job.most,
        .kept = job.kept,
        .priority = job.priority,
        .submitted = job.submitted,
        .waiting_since = job.waiting_since,
        .started = job.used.empty() ? state.now : job.started,
        .refused = job.refused};
    made.project = static_cast<int>(
        std::ranges::find(settings_.projects, job.project, &Project::name) -
        settings_.projects.begin());
    for (const auto& name : job.given) {
      // A device that the machine no longer has is one to leave.
      const auto [at, is_new] =
          numbers.emplace(name, static_cast<int>(state.devices.size()));
      if (is_new) state.devices.push_back({.usable = false});
      made.devices.push_back(at->second);
    }
    // Growing would cost such a job a new start.
    if (!job.used.empty() && !job.given.empty() && !is_train(job.command)) {
      made.most = std::max(
          made.least,
          std::min(made.most, static_cast<int64_t>(job.given.size())));
    }
    state.jobs.push_back(std::move(made));
  }
  return state;
}

void Pool::decide_again() {
  const double time = now();
  if (settings_.usage_half_life.count() > 0) {
    const double age = usage_at_ > 0 ? std::max(0.0, time - usage_at_) : 0;
    const double half_life =
        std::chrono::duration<double>(settings_.usage_half_life).count();
    for (size_t p = 0; p < usage_.size(); ++p) {
      usage_[p] *= std::exp2(-age / half_life);
      if (p < held_.size()) {
        usage_[p] += age * static_cast<double>(std::max<int64_t>(
                               0, held_[p] - settings_.projects[p].guaranteed));
      }
    }
    if (time - usage_saved_ > kSaveUsage) {
      std::string text = format("{}", time);
      for (size_t p = 0; p < usage_.size(); ++p) {
        text += format(" {} {}", settings_.projects[p].name, usage_[p]);
      }
      store_.keep({{"usage", text}});
      usage_saved_ = time;
    }
  }
  usage_at_ = time;
  const State state = state_of();
  const Decision decision = decide(state);
  std::vector<JobRecord> changed;
  for (const Order& order : decision.orders) {
    JobRecord job = jobs_.at(state.jobs[order.job].id).job;
    job.given.clear();
    for (const int device : order.devices) {
      job.given.push_back(devices_.all.at(static_cast<size_t>(device)).name);
    }
    if (order.kind == Order::Kind::stop && job.used.empty()) {
      job.waiting_since = time;
    }
    changed.push_back(std::move(job));
  }
  std::vector<const JobRecord*> pointers;
  for (const JobRecord& job : changed) pointers.push_back(&job);
  if (!pointers.empty()) save(pointers);
  for (const Order& order : decision.orders) {
    ProjectCounts& counts =
        counts_[jobs_.at(state.jobs[order.job].id).job.project];
    counts.stopped += order.kind == Order::Kind::stop ? 1 : 0;
    counts.shrunk += order.kind == Order::Kind::shrink ? 1 : 0;
  }
  for (JobRecord& job : changed) jobs_.at(job.id).job = std::move(job);
  for (auto& [id, live] : jobs_) live.why.clear();
  for (const Waiting& waiting : decision.waiting) {
    jobs_.at(state.jobs[waiting.job].id).why = text_of(state, waiting);
  }
  for (auto& [id, live] : jobs_) {
    if (live.job.given.empty() && live.job.not_before > time) {
      live.why = format(
          "it may start again in {}",
          format_seconds(std::ceil(live.job.not_before - time)));
    }
  }
  held_ = decision.held;
  fair_ = decision.fair_share;
  changed_ = false;
  decided_ = time;
}

bool Pool::is_free(const Live& live, const Names& devices) const {
  return std::ranges::none_of(jobs_, [&](const auto& other) {
    return &other.second != &live &&
           std::ranges::any_of(other.second.job.used, [&](const auto& name) {
             return std::ranges::find(devices, name) != devices.end();
           });
  });
}

// Whether its project and the parent stay below their limits with it, while
// jobs that were told to end still use devices.
bool Pool::has_room(const JobRecord& job) const {
  const auto& projects = settings_.projects;
  const auto index_of = [&](const std::string& name) {
    return std::ranges::find(projects, name, &Project::name) - projects.begin();
  };
  const auto own = static_cast<size_t>(index_of(job.project));
  const int parent = projects[own].parent;
  auto in_own = static_cast<int64_t>(job.given.size());
  int64_t in_parent = in_own;
  for (const auto& [id, live] : jobs_) {
    if (id == job.id || live.job.used.empty()) continue;
    const auto at = static_cast<size_t>(index_of(live.job.project));
    const auto count = static_cast<int64_t>(live.job.used.size());
    if (at == own) in_own += count;
    if (parent >= 0 && projects[at].parent == parent) in_parent += count;
  }
  return in_own <= projects[own].limit &&
         (parent < 0 ||
          in_parent <= projects[static_cast<size_t>(parent)].limit);
}

bool Pool::is_resizable(const JobRecord& job) const {
  return is_train(job.command);
}

// The name of its launcher's control socket, which it writes down; empty: it
// has not.
std::string Pool::control_of(const JobRecord& job) const {
  std::ifstream file(
      folder_of(job) / "own" / format("control-{}", job.attempt));
  std::string name;
  file >> name;
  return name.size() < 100 ? name : "";
}

void Pool::act(Live& live) {
  JobRecord& job = live.job;
  if (job.used.empty()) {
    if (!job.given.empty() && is_free(live, job.given) && has_room(job)) {
      start(live);
    }
    return;
  }
  if (job.given.empty() || job.stop_sent > 0) {
    stop(live);
  } else if (job.given != job.used || live.unsure) {
    change_size(live);
  }
}

void Pool::start(Live& live) {
  JobRecord job = live.job;
  job.attempt += 1;
  job.used = job.given;
  job.state = JobState::running;
  job.started = now();
  job.stop_sent = 0;
  const fs::path folder = folder_of(job);
  const fs::path own = folder / "own";
  Program program{
      .command = command_for(job.command, job.used.size()),
      .environment = job.environment,
      .folder = job.folder,
      .user = job.user,
      .log = (own / "output").string()};
  auto variables = variables_of(devices_.gpus, job.used);
  variables.emplace_back("ECHELON_POOL", folder_.string());
  variables.emplace_back("ECHELON_POOL_JOB", std::to_string(job.id));
  variables.emplace_back(
      "ECHELON_POOL_CONTROL",
      (own / format("control-{}", job.attempt)).string());
  for (const auto& [name, value] : variables) {
    std::erase_if(program.environment, [&](const std::string& variable) {
      return variable.starts_with(name + "=");
    });
    program.environment.push_back(name + "=" + value);
  }
  fs::create_directories(own);
  // Its user writes there, and nowhere else in the pool's folder.
  if (::geteuid() == 0 && ::chown(
                              own.c_str(), static_cast<uid_t>(job.user),
                              static_cast<gid_t>(-1)) != 0) {
    throw Error(format("cannot give {} to its user", own.string()));
  }
  write_program(attempt_of(job), program);
  save({&job});
  counts_[job.project].waits.add(std::max(0.0, now() - job.waiting_since));
  live.job = job;
  live.killed = false;
  live.unsure = false;
  live.found = Found{};
  live.spawned = start_keeper(attempt_of(job));
}

void Pool::stop(Live& live) {
  JobRecord& job = live.job;
  if (!live.found.keeper.is_open()) return;  // it has not begun yet
  const double grace = std::chrono::duration<double>(settings_.grace).count();
  if (job.stop_sent == 0) {
    job.stop_sent = now();
    save(live);
    ask_to_end(live.found);
  } else if (!live.killed && now() - job.stop_sent > grace) {
    say(format(
        "job {} of {} did not end within {} of SIGTERM, and is killed", job.id,
        job.user_name, format_seconds(grace)));
    kill_all(live.found);
    live.killed = true;
  }
}

void Pool::change_size(Live& live) {
  JobRecord& job = live.job;
  if (live.resize.valid()) return;
  if (!is_resizable(job)) {
    // It saves, ends, and starts again on what it was given.
    stop(live);
    return;
  }
  const std::string control = control_of(job);
  if (control.empty()) {
    const double listens = std::chrono::duration<double>(kListens).count();
    if (now() - job.started > listens) stop(live);
    return;
  }
  const bool grows = job.given.size() > job.used.size();
  if (grows && !(is_free(live, job.given) && has_room(job))) return;
  live.before = job.used;
  live.wanted = job.given;
  live.unsure = false;
  if (grows) {
    JobRecord claimed = job;
    claimed.used = job.given;
    save({&claimed});
    job = claimed;
  }
  std::promise<Outcome> promise;
  live.resize = promise.get_future();
  std::thread([promise = std::move(promise), control, devices = live.wanted,
               gpus = devices_.gpus,
               user = static_cast<uid_t>(job.user)]() mutable {
    promise.set_value(ask_for_size<Outcome>(control, devices, gpus, user));
  }).detach();
}

void Pool::take_outcome(Live& live) {
  if (!live.resize.valid() ||
      live.resize.wait_for(seconds(0)) != std::future_status::ready) {
    return;
  }
  const Outcome outcome = live.resize.get();
  JobRecord job = live.job;
  if (job.used.empty()) return;
  const bool grew = live.wanted.size() > live.before.size();
  switch (outcome.kind) {
    case Outcome::Kind::done:
      job.used = live.wanted;
      job.note.clear();
      break;
    case Outcome::Kind::refused: {
      job.refused.push_back(static_cast<int64_t>(live.wanted.size()));
      job.note = format(
          "it cannot run on {}: {}", live.wanted.size(),
          outcome.text.substr(0, outcome.text.find('\n')));
      job.used = live.before;
      if (job.given.empty()) break;
      // The next smaller number; the rest is for whoever waits for it.
      if (grew) {
        if (job.given == live.wanted) job.given = live.before;
      } else {
        int64_t count = static_cast<int64_t>(job.given.size());
        while (count >= job.least &&
               std::ranges::find(job.refused, count) != job.refused.end()) {
          --count;
        }
        job.given.resize(count >= job.least ? static_cast<size_t>(count) : 0);
      }
      break;
    }
    case Outcome::Kind::silent:
      // It ends, or has no socket: it starts again on what it was given.
      job.used = live.before;
      job.note = outcome.text;
      live.job = job;
      save(live);
      if (live.found.keeper.is_open() && job.given != job.used) stop(live);
      return;
  }
  save({&job});
  live.job = job;
  changed_ = true;
}

}  // namespace echelon::pool
