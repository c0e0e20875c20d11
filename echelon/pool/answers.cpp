// What users ask of a pool, and what it tells them.
#include <grp.h>
#include <pwd.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "echelon/error.h"
#include "echelon/pool/history.h"
#include "echelon/pool/pool.h"
#include "echelon/text/build_info.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon::pool {
namespace {

std::string name_of_user(int64_t user) {
  const passwd* entry = ::getpwuid(static_cast<uid_t>(user));
  return entry == nullptr ? std::to_string(user) : entry->pw_name;
}

bool is_in_group(const Peer& peer, const std::string& name) {
  const passwd* user = ::getpwuid(static_cast<uid_t>(peer.user));
  std::vector<gid_t> groups = {static_cast<gid_t>(peer.group)};
  if (user != nullptr) {
    int count = 256;
    groups.resize(static_cast<size_t>(count));
    ::getgrouplist(
        user->pw_name, static_cast<gid_t>(peer.group), groups.data(), &count);
    groups.resize(static_cast<size_t>(std::max(count, 0)));
  }
  const group* wanted = ::getgrnam(name.c_str());
  return wanted != nullptr &&
         std::ranges::find(groups, wanted->gr_gid) != groups.end();
}

bool is_member(const Members& members, const Peer& peer) {
  if (members.users.empty() && members.groups.empty()) return true;
  const std::string name = name_of_user(peer.user);
  return std::ranges::find(members.users, name) != members.users.end() ||
         std::ranges::any_of(members.groups, [&](const std::string& group) {
           return is_in_group(peer, group);
         });
}

// Whether the peer may change everybody's jobs.
bool is_owner(const Peer& peer) {
  return peer.user == 0 || peer.user == static_cast<int64_t>(::geteuid());
}

std::string command_text(const std::vector<std::string>& command) {
  return join(command, " ");
}

std::string size_text(int64_t least, int64_t most) {
  return least == most ? std::to_string(least) : format("{}..{}", least, most);
}

std::string kept_text(Kept kept) {
  switch (kept) {
    case Kept::all:
      return "guaranteed";
    case Kept::least:
      return "min_guaranteed";
    case Kept::none:
      break;
  }
  return "preemptible";
}

int64_t whole(const nlohmann::ordered_json& json, const char* key) {
  return json.at(key).get<int64_t>();
}

void check_range(int64_t least, int64_t most) {
  if (least >= 1 && most >= least) return;
  throw ConfigError(format(
      "-n {}: must be a number of devices, or LEAST..MOST as in 2..8",
      size_text(least, most)));
}

}  // namespace

Pool::Json Pool::answer(const Json& request, const Peer& peer) {
  const auto version = request.value("version", "");
  if (version != build_info::kVersion) {
    throw ConfigError(format(
        "the pool's daemon is of echelon {}, and this program of {}; use the "
        "same, or stop the daemon and start it with this one: jobs go on",
        build_info::kVersion, version));
  }
  const auto command = request.value("command", "");
  if (command == "submit") return submit(request, peer);
  if (command == "list") return list(request);
  if (command == "status") return status(request);
  if (command == "cancel") return cancel(request, peer);
  if (command == "resize") return resize(request, peer);
  if (command == "why") return why(request);
  if (command == "drain") return drain(request, peer);
  if (command == "history") return history(request);
  if (command == "page") return page(request);
  if (command == "metrics") return {{"text", metrics()}};
  if (command == "page_url") {
    if (page_url_.empty()) {
      throw ConfigError(
          "the pool shows no page; `echelon pool start --page 9465` does, and "
          "`echelon pool page FILE.html` writes one");
    }
    return {{"url", page_url_}};
  }
  throw ConfigError(format("the pool knows no request \"{}\"", command));
}

// What could never start is refused now.
void Pool::check_sizes(const JobRecord& job) const {
  const int at = find_project(settings_.projects, job.project);
  const Project& project = settings_.projects[static_cast<size_t>(at)];
  const auto refuse = [&](const std::string& owner, const char* what,
                          int64_t most, const char* way_out) {
    throw ConfigError(format(
        "-n {}: {} has {} {}; {}", size_text(job.least, job.most), owner, what,
        counted(most, "device"), way_out));
  };
  const auto total = static_cast<int64_t>(devices_.all.size());
  if (job.least > total) refuse("the pool", "only", total, "ask for fewer");
  if (job.least > project.limit) {
    refuse(project.name, "a limit of", project.limit, "ask for fewer");
  }
  if (project.parent >= 0) {
    const Project& parent =
        settings_.projects[static_cast<size_t>(project.parent)];
    if (job.least > parent.limit) {
      refuse(parent.name, "a limit of", parent.limit, "ask for fewer");
    }
  }
  if (job.kept != Kept::none && job.least > project.guaranteed) {
    refuse(
        project.name, "a guarantee of", project.guaranteed,
        "ask for fewer, or say --preemptible to borrow");
  }
}

Pool::Json Pool::submit(const Json& request, const Peer& peer) {
  JobRecord job;
  job.key = request.at("key").get<std::string>();
  if (const auto known = store_.find_job(job.key); !known.empty()) {
    return {{"job", known[0].id}, {"state", to_string(known[0].state)}};
  }
  job.project = request.at("project").get<std::string>();
  const int at = find_project(settings_.projects, job.project);
  job.user = peer.user;
  job.user_name = name_of_user(peer.user);
  if (!is_member(settings_.members[static_cast<size_t>(at)], peer) &&
      !is_owner(peer)) {
    throw ConfigError(format(
        "--project {}: {} is not in it; its users and groups are in the "
        "pool's file",
        job.project, job.user_name));
  }
  if (::geteuid() != 0 && peer.user != static_cast<int64_t>(::geteuid())) {
    throw ConfigError(format(
        "this pool runs jobs of {} alone; root can start one for all users",
        name_of_user(static_cast<int64_t>(::geteuid()))));
  }
  job.command = request.at("words").get<std::vector<std::string>>();
  job.environment = request.at("environment").get<std::vector<std::string>>();
  job.folder = request.at("folder").get<std::string>();
  job.least = whole(request, "least");
  job.most = whole(request, "most");
  job.kept = static_cast<Kept>(whole(request, "kept"));
  job.priority = whole(request, "priority");
  check_range(job.least, job.most);
  if (job.command.empty()) throw ConfigError("no command is named");
  check_sizes(job);
  job.submitted = job.waiting_since = now();
  job.id = store_.add(job);
  jobs_[job.id].job = job;
  changed_ = true;
  return {{"job", job.id}, {"state", to_string(job.state)}};
}

Pool::Json Pool::describe(const JobRecord& job, const std::string& why) const {
  const bool runs = !job.used.empty();
  std::string state = to_string(job.state);
  if (job.cancelled && runs) state = "ending";
  if (!runs && !job.given.empty()) state = "starting";
  Json json = {
      {"job", job.id},
      {"project", job.project},
      {"user", job.user_name},
      {"state", state},
      {"devices", job.used.size()},
      {"given", job.given.size()},
      {"least", job.least},
      {"most", job.most},
      {"kept", kept_text(job.kept)},
      {"priority", job.priority},
      {"device_names", job.used},
      {"attempt", job.attempt},
      {"submitted", job.submitted},
      {"waiting_since", job.waiting_since},
      {"started", job.started},
      {"ended", job.ended},
      {"command", command_text(job.command)},
      {"folder", job.folder},
      {"log", (folder_of(job) / "own" / "output").string()}};
  if (job.exit_code >= 0) json["exit_code"] = job.exit_code;
  if (!job.note.empty()) json["note"] = job.note;
  if (!why.empty()) json["why"] = why;
  return json;
}

Pool::Json Pool::list(const Json& request) const {
  Json jobs = Json::array();
  for (const auto& [id, live] : jobs_) {
    jobs.push_back(describe(live.job, live.why));
  }
  const int64_t ended = request.value("ended", int64_t{0});
  for (const JobRecord& job : store_.ended_jobs(ended)) {
    jobs.push_back(describe(job, ""));
  }
  return {{"jobs", jobs}};
}

Pool::Json Pool::overview() const {
  Json projects = Json::array();
  std::vector<int64_t> used(settings_.projects.size());
  std::vector<int64_t> waiting(settings_.projects.size());
  int64_t in_use = 0;
  for (const auto& [id, live] : jobs_) {
    const auto count = static_cast<int64_t>(live.job.used.size());
    in_use += count;
    for (size_t p = 0; p < used.size(); ++p) {
      if (settings_.projects[p].name != live.job.project) continue;
      used[p] += count;
      if (count == 0 && live.job.given.empty()) ++waiting[p];
      if (const int parent = settings_.projects[p].parent; parent >= 0) {
        used[static_cast<size_t>(parent)] += count;
      }
    }
  }
  // Each after its parent.
  std::vector<size_t> order;
  const auto add_all_of = [&](int parent, const auto& self) -> void {
    for (size_t p = 0; p < used.size(); ++p) {
      if (settings_.projects[p].parent != parent) continue;
      order.push_back(p);
      self(static_cast<int>(p), self);
    }
  };
  add_all_of(-1, add_all_of);
  for (const size_t p : order) {
    const Project& project = settings_.projects[p];
    Json json = {{"project", project.name},
                 {"guaranteed", project.guaranteed},
                 {"in_use", used[p]},
                 {"fair_share", p < fair_.size() ? fair_[p] : 0},
                 {"waiting", waiting[p]},
                 {"weight", project.weight}};
    if (project.limit != kNoLimit) json["limit"] = project.limit;
    if (project.parent >= 0) {
      json["parent"] =
          settings_.projects[static_cast<size_t>(project.parent)].name;
    }
    projects.push_back(json);
  }
  return {
      {"devices", devices_.all.size()},
      {"gpus", devices_.gpus},
      {"idle", static_cast<int64_t>(devices_.all.size()) - in_use},
      {"drained", closed_},
      {"drained_devices", drained_},
      {"projects", projects}};
}

Pool::Json Pool::status(const Json& request) const {
  if (!request.contains("job")) return overview();
  const int64_t id = whole(request, "job");
  if (const auto found = jobs_.find(id); found != jobs_.end()) {
    return describe(found->second.job, found->second.why);
  }
  const auto ended = store_.find_job(id);
  if (ended.empty()) {
    throw ConfigError(format(
        "job {}: there is no such job; `echelon pool list --all` shows them",
        id));
  }
  return describe(ended[0], "");
}

Pool::Live& Pool::own_job(const Json& request, const Peer& peer) {
  const int64_t id = whole(request, "job");
  const auto found = jobs_.find(id);
  if (found == jobs_.end()) {
    const auto state = status(request).at("state").get<std::string>();
    throw ConfigError(format("job {}: has ended: {}", id, state));
  }
  Live& live = found->second;
  if (live.job.user != peer.user && !is_owner(peer)) {
    throw ConfigError(format(
        "job {}: is of {}; its user and root may change it", id,
        live.job.user_name));
  }
  return live;
}

Pool::Json Pool::cancel(const Json& request, const Peer& peer) {
  Live& live = own_job(request, peer);
  const bool runs = !live.job.used.empty();
  live.job.cancelled = true;
  live.job.given.clear();
  live.why.clear();
  if (!runs) {
    live.job.state = JobState::cancelled;
    live.job.ended = now();
  }
  save(live);
  changed_ = true;
  const int64_t id = live.job.id;
  if (!runs) {
    constexpr auto kCancelled = static_cast<size_t>(JobState::cancelled);
    ++counts_[live.job.project].ended[kCancelled];
    jobs_.erase(id);
  }
  return {{"job", id}, {"state", runs ? "ending" : "cancelled"}};
}

Pool::Json Pool::resize(const Json& request, const Peer& peer) {
  Live& live = own_job(request, peer);
  JobRecord changed = live.job;
  changed.least = whole(request, "least");
  changed.most = whole(request, "most");
  check_range(changed.least, changed.most);
  check_sizes(changed);
  changed.refused.clear();
  save({&changed});
  live.job = changed;
  changed_ = true;
  return {
      {"job", changed.id}, {"least", changed.least}, {"most", changed.most}};
}

Pool::Json Pool::why(const Json& request) const {
  const Json json = status(request);
  const auto id = whole(request, "job");
  std::string text = json.value("why", "");
  if (text.empty()) {
    const auto state = json.at("state").get<std::string>();
    const int64_t devices = whole(json, "devices");
    if (state == "starting") {
      const Live& live = jobs_.at(id);
      text = format(
          "it has been given {}, and starts when {}",
          counted(whole(json, "given"), "device"),
          is_free(live, live.job.given)
              ? format(
                    "jobs of {} that were told to end have left room below its "
                    "limit",
                    live.job.project)
              : std::string("those that use them have left"));
    } else if (devices > 0) {
      text = format("it runs on {}", counted(devices, "device"));
      if (whole(json, "given") != devices) {
        text += format(", and changes to {}", whole(json, "given"));
      }
    } else {
      text =
          state +
          (json.contains("note") ? ": " + json["note"].get<std::string>() : "");
    }
  } else if (json.contains("note")) {
    text += "; " + json["note"].get<std::string>();
  }
  return {{"job", id}, {"state", json["state"]}, {"why", text}};
}

Pool::Json Pool::drain(const Json& request, const Peer& peer) {
  if (!is_owner(peer)) {
    throw ConfigError(
        "drain: only root, and who started the pool, may drain it");
  }
  const bool undo = request.value("undo", false);
  const auto device = request.value("device", "");
  if (device.empty()) {
    store_.keep({{"closed", undo ? "0" : "1"}});
    closed_ = !undo;
  } else {
    std::vector<std::string> names;
    for (const auto& one : devices_.all) names.push_back(one.name);
    if (std::ranges::find(names, device) == names.end()) {
      throw ConfigError(format(
          "drain {}: the pool has no such device (it has {})", device,
          join(names, ", ")));
    }
    auto drained = drained_;
    std::erase(drained, device);
    if (!undo) drained.push_back(device);
    store_.keep({{"drained", join(drained, " ")}});
    drained_ = drained;
  }
  changed_ = true;
  return {{"drained", closed_}, {"drained_devices", drained_}};
}

// Where a history begins: not before the pool did.
double Pool::first_second(const Json& request) const {
  return std::max(request.value("since", 0.0), began_);
}

Pool::Json Pool::history(const Json& request) const {
  const double since = first_second(request);
  const auto allocated = store_.history(since);
  const PoolUse use = use_of(
      allocated, settings_.projects, static_cast<int64_t>(devices_.all.size()),
      since, now());
  Json projects = Json::array();
  for (const ProjectUse& one : use.projects) {
    Json steps = Json::array();
    for (const auto& [time, devices] : one.steps) {
      steps.push_back(Json::array({time, devices}));
    }
    projects.push_back(
        {{"project", one.name},
         {"is_parent", one.is_parent},
         {"device_hours", one.device_seconds / 3600},
         {"borrowed_hours", one.borrowed_seconds / 3600},
         {"use", steps}});
  }
  Json allocations = Json::array();
  for (const Allocation& one : allocated) {
    allocations.push_back(
        {{"job", one.job},
         {"project", one.project},
         {"devices", one.devices},
         {"names", one.names},
         {"began", one.began},
         {"ended", one.ended}});
  }
  return {
      {"since", since},
      {"until", use.until},
      {"devices", devices_.all.size()},
      {"used_hours", use.used_seconds / 3600},
      {"idle_hours", use.idle_seconds / 3600},
      {"projects", projects},
      {"allocations", allocations}};
}

// All that page.h draws.
Pool::Json Pool::page(const Json& request) const {
  Json names = Json::array();
  for (const PoolDevice& device : devices_.all) names.push_back(device.name);
  char host[256] = "";
  ::gethostname(host, sizeof host - 1);
  return {
      {"host", host},
      {"device_names", names},
      {"now", overview()},
      {"jobs", list(Json::object()).at("jobs")},
      {"history", history(request)}};
}

std::string Pool::metrics() {
  count_use();
  const Json now_held = overview();
  PoolFigures figures{
      .devices = static_cast<int64_t>(devices_.all.size()),
      .idle = whole(now_held, "idle"),
      .drained = static_cast<int64_t>(drained_.size())};
  for (const Json& one : now_held.at("projects")) {
    ProjectFigures project{
        .name = one.at("project").get<std::string>(),
        .guaranteed = whole(one, "guaranteed"),
        .in_use = whole(one, "in_use"),
        .fair_share = whole(one, "fair_share"),
        .waiting = whole(one, "waiting")};
    for (const Project& other : settings_.projects) {
      project.is_parent |=
          other.parent >= 0 &&
          settings_.projects[static_cast<size_t>(other.parent)].name ==
              project.name;
    }
    for (const auto& [id, live] : jobs_) {
      const JobRecord& job = live.job;
      if (job.project != project.name) continue;
      if (!job.used.empty()) {
        ++project.running;
      } else if (job.given.empty()) {
        project.longest_wait =
            std::max(project.longest_wait, now() - job.waiting_since);
      }
    }
    project.counts = counts_[project.name];
    figures.projects.push_back(std::move(project));
  }
  return metric_page(figures);
}

}  // namespace echelon::pool
