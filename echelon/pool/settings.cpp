// TOML's tables inside tables become one Document for each project, so that
// keys are bound and checked as those of a training configuration are.
#include "echelon/pool/settings.h"

#include <algorithm>
#include <utility>

#include "echelon/config/section.h"
#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/nearest.h"
#include "echelon/text/text_file.h"
#include "echelon/text/units.h"

namespace echelon::pool {
namespace {

using config::Document;
using config::Member;
using config::Value;

double seconds(std::chrono::milliseconds time) {
  return std::chrono::duration<double>(time).count();
}

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

[[noreturn]] void fail(const Member& member, const std::string& text) {
  throw ConfigError(member.place.text() + ": " + text);
}

// A table as a document whose errors name places of the file.
Document document_of(const std::string& title, const Member& table) {
  if (table.value.kind != Value::Kind::table) {
    fail(
        table, format(
                   "{} = {} is {}; it must be a table, [{}]", title,
                   config::shortened(table.value.text()),
                   table.value.kind_name(), title));
  }
  Document document;
  for (const Member& key : table.value.members) {
    document.set(title, key.name, key.value, key.place.text());
  }
  return document;
}

void read_pool(const Member* table, Settings& settings) {
  Document document =
      table == nullptr ? Document{} : document_of("pool", *table);
  auto section = document.section("pool", "how devices change hands");
  auto least = milliseconds(settings.rules.least_seconds);
  auto patience = milliseconds(settings.rules.patience_seconds);
  section.field(
      "devices", settings.devices,
      "plain slots; 0: the GPUs of the machine, or its cores",
      {.at_least = 0, .at_most = 1 << 20});
  section.field(
      "neighbours", settings.neighbours,
      "devices that are linked with each other; 0: all", {.at_least = 0});
  section.field(
      "min_runtime", least, "a job that runs for less is not stopped");
  section.field(
      "patience", patience,
      "a job that has waited longer gets what becomes idle");
  section.field(
      "usage_half_life", settings.usage_half_life,
      "after which past usage counts half; 0: it does not count");
  settings.rules.usage_factor = 1;
  section.field(
      "usage_factor", settings.rules.usage_factor,
      "how much past usage lowers a weight", {.at_least = 0});
  section.field(
      "grace", settings.grace, "what a job has from SIGTERM to SIGKILL");
  section.field(
      "group", settings.group, "a group of users that may talk to the pool");
  document.finish();
  settings.rules.least_seconds = seconds(least);
  settings.rules.patience_seconds = seconds(patience);
  if (settings.usage_half_life.count() == 0) settings.rules.usage_factor = 0;
}

struct Named {
  std::string parent;
  std::string place;
};

void read_project(const Member& table, Settings& settings, Named& named) {
  const std::string title = "project." + table.name;
  Document document = document_of(title, table);
  auto section = document.section(title, "a project");
  Project project{.name = table.name};
  Members members;
  int64_t limit = -1;
  section
      .field(
          "guaranteed", project.guaranteed,
          "devices that it gets whenever it asks for them", {.at_least = 0})
      .also("devices");
  section.field(
      "weight", project.weight, "its part of what is left", {.at_least = 0});
  section.field("limit", limit, "of its devices; -1: none", {.at_least = -1})
      .rule([&]() -> std::string {
        if (limit < 0 || limit >= project.guaranteed) return "";
        return format(
            "must be at least guaranteed = {}; raise it, or guarantee less",
            project.guaranteed);
      });
  section.field("parent", named.parent, "the project that it is a part of");
  section.field("users", members.users, "who may submit; empty: everyone");
  section.field("groups", members.groups, "groups of these users");
  document.finish();
  if (limit >= 0) project.limit = limit;
  named.place = format("{}: [{}]", table.place.text(), title);
  settings.projects.push_back(project);
  settings.members.push_back(members);
}

std::vector<std::string> names_of(const std::vector<Project>& projects) {
  std::vector<std::string> names;
  for (const Project& project : projects) names.push_back(project.name);
  return names;
}

void find_parents(Settings& settings, const std::vector<Named>& named) {
  const auto names = names_of(settings.projects);
  for (size_t p = 0; p < named.size(); ++p) {
    const auto& [parent, place] = named[p];
    if (parent.empty()) continue;
    const auto found = std::ranges::find(names, parent);
    if (found == names.end() || parent == names[p]) {
      throw ConfigError(format(
          "{} parent = {}: must be another project{}", place, in_quotes(parent),
          config::did_you_mean(parent, names)));
    }
    const auto at = static_cast<size_t>(found - names.begin());
    if (!named[at].parent.empty()) {
      throw ConfigError(format(
          "{} parent = {}: has a parent itself, {}; there are two levels",
          place, in_quotes(parent), in_quotes(named[at].parent)));
    }
    settings.projects[p].parent = static_cast<int>(at);
  }
}

// What children are guaranteed comes from their parent's guarantee, which is
// their sum where none is written.
void check_families(Settings& settings, const std::vector<Named>& named) {
  auto& projects = settings.projects;
  for (size_t p = 0; p < projects.size(); ++p) {
    int64_t sum = 0;
    for (const Project& child : projects) {
      if (child.parent == static_cast<int>(p)) sum += child.guaranteed;
    }
    if (sum <= projects[p].guaranteed) continue;
    if (projects[p].guaranteed > 0) {
      throw ConfigError(format(
          "{} guaranteed = {}: its projects are guaranteed {}; raise it, or "
          "guarantee them less",
          named[p].place, projects[p].guaranteed, sum));
    }
    if (sum > projects[p].limit) {
      throw ConfigError(format(
          "{} limit = {}: its projects are guaranteed {}; raise it, or "
          "guarantee them less",
          named[p].place, projects[p].limit, sum));
    }
    projects[p].guaranteed = sum;
  }
}

}  // namespace

Settings parse_settings(const std::string& text, const std::string& name) {
  const Value root = config::parse_nested_toml(text, name);
  Settings settings;
  const Member* pool = nullptr;
  const Member* projects = nullptr;
  for (const Member& member : root.members) {
    if (member.name == "pool") {
      pool = &member;
    } else if (member.name == "project") {
      projects = &member;
    } else {
      fail(
          member,
          format(
              "[{}]: unknown table{}; there are [pool] and [project.NAME]",
              config::shortened(member.name),
              config::did_you_mean(member.name, {"pool", "project"})));
    }
  }
  read_pool(pool, settings);
  if (projects == nullptr || projects->value.kind != Value::Kind::table ||
      projects->value.members.empty()) {
    throw ConfigError(
        name +
        ": has no project; write [project.vision] with guaranteed = 3 below "
        "it");
  }
  std::vector<Named> named;
  for (const Member& member : projects->value.members) {
    read_project(member, settings, named.emplace_back());
  }
  find_parents(settings, named);
  check_families(settings, named);
  return settings;
}

Settings read_settings(const std::string& path) {
  try {
    return parse_settings(read_text_file(path), path);
  } catch (const DataError& error) {
    throw ConfigError(format(
        "{}; name the file of the pool, as in `echelon pool start pool.toml`",
        error.what()));
  }
}

void check_capacity(
    const Settings& settings, const std::string& name, int64_t devices) {
  int64_t sum = 0;
  std::vector<std::string> parts;
  for (const Project& project : settings.projects) {
    if (project.parent >= 0 || project.guaranteed == 0) continue;
    sum += project.guaranteed;
    parts.push_back(format("{} {}", project.name, project.guaranteed));
  }
  if (sum <= devices) return;
  throw ConfigError(format(
      "{}: guaranteed devices are {} ({}), but the pool has {}; guarantee "
      "less, or start it with more --devices",
      name, sum, join(parts, " + "), devices));
}

int find_project(
    const std::vector<Project>& projects, const std::string& name) {
  const auto names = names_of(projects);
  const auto found = std::ranges::find(names, name);
  if (found == names.end()) {
    throw ConfigError(format(
        "--project {}: there is no such project{} (the pool has {})", name,
        config::did_you_mean(name, names), join(names, ", ")));
  }
  const auto at = static_cast<int>(found - names.begin());
  std::vector<std::string> children;
  for (const Project& project : projects) {
    if (project.parent == at) children.push_back(project.name);
  }
  if (!children.empty()) {
    throw ConfigError(format(
        "--project {}: has projects of its own; name one of them: {}", name,
        join(children, ", ")));
  }
  return at;
}

}  // namespace echelon::pool
