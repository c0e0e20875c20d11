#include "echelon/deploy/projects.h"

#include <algorithm>
#include <map>

#include "echelon/config/value.h"
#include "echelon/deploy/names.h"
#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/nearest.h"
#include "echelon/text/text_file.h"

namespace echelon::deploy {
namespace {

using config::Member;
using config::Value;

[[noreturn]] void refuse(const config::Place& place, const std::string& text) {
  throw ConfigError(format("{}: {}", place.text(), text));
}

int64_t count_of(const Member& member, int64_t least = 0) {
  if (member.value.kind != Value::Kind::integer ||
      member.value.integer < least) {
    refuse(
        member.place, format(
                          "{} = {}: must be a whole number, {} or more",
                          member.name, member.value.text(), least));
  }
  return member.value.integer;
}

double weight_of(const Member& member) {
  const Value& value = member.value;
  const double weight = value.kind == Value::Kind::integer
                            ? static_cast<double>(value.integer)
                            : value.real;
  const bool number =
      value.kind == Value::Kind::integer || value.kind == Value::Kind::real;
  if (!number || !(weight >= 0)) {
    refuse(
        member.place,
        format("weight = {}: must be a number, 0 or more", value.text()));
  }
  return weight;
}

Project project_of(const Member& table) {
  static const std::vector<std::string> keys = {
      "guaranteed", "weight", "limit", "parent", "users", "groups"};
  Project project{.name = table.name};
  check_dns_label(table.place.text() + ": project", project.name, 63);
  if (table.value.kind != Value::Kind::table) {
    refuse(
        table.place,
        format("{}: is a table, as in [project.{}]", table.name, table.name));
  }
  for (const Member& member : table.value.members) {
    if (member.name == "guaranteed" || member.name == "devices") {
      project.guaranteed = count_of(member);
    } else if (member.name == "limit") {
      project.limit = count_of(member, -1);
    } else if (member.name == "weight") {
      project.weight = weight_of(member);
    } else if (member.name == "parent") {
      project.parent = member.value.string;
    } else if (member.name != "users" && member.name != "groups") {
      refuse(
          member.place, format(
                            "unknown key {} of a project; {} are known{}",
                            in_quotes(member.name), join(keys, ", "),
                            config::did_you_mean(member.name, keys)));
    }
  }
  if (project.limit >= 0 && project.limit < project.guaranteed) {
    refuse(
        table.place,
        format(
            "[project.{}] limit = {}, but guaranteed = {}; raise one or "
            "lower the other",
            project.name, project.limit, project.guaranteed));
  }
  return project;
}

// Throws unless the guaranteed devices of a project's parts fit in its own. A
// parent that says nothing has as many as its parts.
void check_tree(std::vector<Project>& projects, const std::string& path) {
  std::vector<std::string> names;
  for (const auto& project : projects) names.push_back(project.name);
  std::map<std::string, int64_t> parts;
  for (const auto& project : projects) {
    if (project.parent.empty()) continue;
    if (std::ranges::find(names, project.parent) == names.end()) {
      throw ConfigError(format(
          "{}: [project.{}] parent = {}: there is no such project{}", path,
          project.name, in_quotes(project.parent),
          config::did_you_mean(project.parent, names)));
    }
    parts[project.parent] += project.guaranteed;
  }
  for (auto& project : projects) {
    const Project* above = &project;
    for (size_t steps = 0; !above->parent.empty(); ++steps) {
      if (steps > projects.size()) {
        throw ConfigError(format(
            "{}: [project.{}] is a part of itself by its parents; take one of "
            "them out",
            path, project.name));
      }
      above = &*std::ranges::find(projects, above->parent, &Project::name);
    }
    const auto part = parts.find(project.name);
    if (part == parts.end()) continue;
    if (project.guaranteed == 0) project.guaranteed = part->second;
    if (part->second > project.guaranteed) {
      throw ConfigError(format(
          "{}: [project.{}] guaranteed = {}, but its parts are guaranteed {}; "
          "raise it or lower theirs",
          path, project.name, project.guaranteed, part->second));
    }
  }
}

}  // namespace

std::vector<Project> read_projects(const std::string& path) {
  std::string text;
  try {
    text = read_text_file(path);
  } catch (const DataError& error) {
    throw ConfigError(format("--pool {}", error.what()));
  }
  const Value file = config::parse_nested_toml(text, path);
  std::vector<Project> projects;
  int64_t total = 0;
  for (const Member& member : file.members) {
    if (member.value.kind != Value::Kind::table) continue;
    // The other keys of [pool] are about one server.
    for (const Member& inner : member.value.members) {
      if (member.name == "project") projects.push_back(project_of(inner));
      if (member.name == "pool" && inner.name == "devices") {
        total = count_of(inner);
      }
    }
  }
  if (projects.empty()) {
    throw ConfigError(format(
        "--pool {}: has no project; a table [project.vision] with guaranteed = "
        "3 "
        "is one",
        path));
  }
  check_tree(projects, path);
  int64_t guaranteed = 0;
  for (const auto& project : projects) {
    if (project.parent.empty()) guaranteed += project.guaranteed;
  }
  if (total > 0 && guaranteed > total) {
    throw ConfigError(format(
        "{}: the projects are guaranteed {} devices, but [pool] devices = {}; "
        "lower "
        "a project's",
        path, guaranteed, total));
  }
  return projects;
}

}  // namespace echelon::deploy
