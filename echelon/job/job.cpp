// The overrides of the command line are written into the document before
// anything is bound to it, each with its flag. So a value is read and checked
// once, whoever set it, and an error names the flag. A layout given as a flag
// replaces all degrees of the file, and -n sets dp only where nobody gave a
// degree.
#include "echelon/job/job.h"

#include <algorithm>
#include <cctype>
#include <ctime>
#include <filesystem>
#include <sstream>
#include <string_view>

#include "echelon/error.h"
#include "echelon/options/bind.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

void bind_all(config::Document& document, Job& job) {
  document.also_called(other_names());
  const auto table = [&](const char* name, const char* help, auto& options) {
    auto section = document.section(name, help);
    bind(section, options);
  };
  table("model", "what is trained", job.model);
  table(
      "lora", "low-rank adapters that train in place of the model's parameters",
      job.model.lora);
  table("data", "what it is trained on", job.data);
  auto layout = document.section(
      "layout", "how many ranks along each axis of the mesh, and the pipeline");
  bind(layout, job.layout);
  bind(layout, job.pipeline);
  bind(layout, job.tensor);
  bind(layout, job.context);
  table(
      "shard", "what the ranks of fsdp shard, and when it is unsharded",
      job.shard);
  table("memory", "what is kept for backward, and where", job.memory);
  table(
      "precision", "number types of forward, backward and reductions",
      job.precision);
  table("optimizer", "how the parameters change", job.optimizer);
  table("train", "the loop", job.train);
  table("checkpoint", "when training is saved and resumed", job.checkpoint);
  table("elastic", "what a restarted job loses", job.elastic);
  table("comm", "how ranks talk to each other", job.comm);
}

void set_layout(config::Document& document, const std::string& text) {
  const Layout layout = parse_layout(text);
  const std::string flag = "--layout " + text;
  document.clear("layout", degree_keys());
  document.clear("layout", {"order"});
  const auto set = [&](std::string_view key, config::Value value) {
    document.set("layout", std::string(key), std::move(value), flag);
  };
  for (const Axis axis : kAxes) {
    const int64_t degree = layout.degree(axis);
    // dp says who set the layout, even when it is 1.
    if (degree == 1 && axis != Axis::dp_replicate) continue;
    set(short_name(axis), config::Value(degree));
  }
  if (layout.order != kAxes) {
    set("order", config::Value(order_names(layout.order)));
  }
}

// A length of the run that the command line sets replaces the file's, which may
// be the other of the two keys.
void keep_one_length(config::Document& document) {
  for (const auto& [key, other] :
       {std::pair("steps", "epochs"), std::pair("epochs", "steps")}) {
    const auto* mine = document.value("train", key);
    const auto* theirs = document.value("train", other);
    if (mine != nullptr && theirs != nullptr && !mine->place.flag.empty() &&
        theirs->place.flag.empty() && mine->text() != "0") {
      document.clear("train", {other});
    }
  }
}

void apply(config::Document& document, const Overrides& overrides) {
  for (const auto& assignment : overrides.set) document.set(assignment);
  keep_one_length(document);
  if (!overrides.layout.empty()) set_layout(document, overrides.layout);
  if (overrides.num_ranks > 0 && !document.has_keys("layout", degree_keys())) {
    document.set(
        "layout", "dp", config::Value(overrides.num_ranks),
        format("-n {}", overrides.num_ranks));
  }
  if (!overrides.ranks.empty()) {
    document.set(
        "train", "ranks", config::Value(overrides.ranks),
        "--ranks " + overrides.ranks);
  }
  if (overrides.overwrite) {
    document.set("train", "overwrite", config::Value(true), "--overwrite");
  }
  if (!overrides.resume.empty()) {
    document.set(
        "checkpoint", "resume", config::Value(overrides.resume),
        "--resume " + overrides.resume);
  }
}

// "learning_rate=0.1,seed=2": what sets one run of a sweep apart from others.
std::string settings_of_run(const Overrides& overrides) {
  std::string text = overrides.layout;
  for (const auto& assignment : overrides.set) {
    const size_t equals = assignment.find('=');
    const std::string key = assignment.substr(0, equals);
    if (key == "train.run" || key == "checkpoint.remote") continue;
    if (!text.empty()) text += ",";
    text += assignment.substr(key.rfind('.') + 1);
  }
  // One folder, whatever the values are.
  for (char& c : text) {
    const bool plain = std::isalnum(static_cast<unsigned char>(c)) ||
                       std::string_view("._=,+-").find(c) != std::string::npos;
    if (!plain) c = '-';
  }
  return text;
}

std::string time_now() {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  ::localtime_r(&now, &local);
  char text[32];
  const size_t size = std::strftime(text, sizeof text, "%Y%m%d-%H%M%S", &local);
  return {text, size};
}

// Fills in {name}, {time} and {set}. An empty value takes the mark before it
// along: "digits-{set}" is "digits" without --layout and --set.
void fill_in(
    std::string& run, const std::string& key, const Job& job,
    const std::string& path, const Overrides& overrides) {
  for (size_t at = 0; (at = run.find('{', at)) != std::string::npos;) {
    const size_t end = run.find('}', at);
    const std::string name =
        end == std::string::npos ? "" : run.substr(at + 1, end - at - 1);
    std::string value;
    if (name == "name") {
      value = std::filesystem::path(path).stem().string();
    } else if (name == "time") {
      value = time_now();
    } else if (name == "set") {
      value = settings_of_run(overrides);
    } else {
      throw ConfigError(format(
          "{}: \"{}\" is none of {{name}}, {{time}} and {{set}}",
          job.document.where(key),
          run.substr(at, end == std::string::npos ? end : end - at + 1)));
    }
    size_t begin = at;
    const bool mark = at > 0 && std::string_view("-_.").find(run[at - 1]) !=
                                    std::string::npos;
    if (value.empty() && mark) --begin;
    run.replace(begin, end + 1 - begin, value);
    at = begin + value.size();
    if (value.empty() && at == run.size() && (at == 0 || run[at - 1] == '/')) {
      throw ConfigError(
          job.document.where(key) +
          ": names no folder without --layout or --set; put {name} in front "
          "of {set}");
    }
  }
}

Job bound(config::Document document) {
  Job job;
  bind_all(document, job);
  document.finish();
  job.document = std::move(document);
  return job;
}

}  // namespace

bool shards_parameters(const Job& job) {
  return job.layout.dp_shard > 1 || in_16_bits(job.precision.compute) ||
         job.memory.offload != Offload::none ||
         (job.precision.reduce != ReduceDtype::same &&
          job.layout.data_ranks() * job.layout.cp > 1);
}

bool adds_gradients(const Job& job) {
  const bool low = in_16_bits(job.precision.compute);
  const bool passes = job.train.accumulate > 1 || job.layout.pp > 1;
  // Ranks of cp have other tokens of the same samples.
  return job.layout.data_ranks() * job.layout.cp > 1 || (low && passes);
}

Job load_job(const std::string& path, const Overrides& overrides) {
  auto document = config::Document::read(path);
  apply(document, overrides);
  Job job = bound(std::move(document));
  fill_in(job.train.run, "train.run", job, path, overrides);
  fill_in(job.checkpoint.remote, "checkpoint.remote", job, path, overrides);
  return job;
}

Job parse_job(const std::string& text, const std::string& name) {
  return bound(config::Document::parse(text, name));
}

config::Document describe(Job job) {
  config::Document document;
  bind_all(document, job);
  document.finish();
  return document;
}

namespace {

struct Setting {
  std::string table, key, value;
  bool operator==(const Setting&) const = default;
};

std::vector<Setting> settings_in(const std::string& text) {
  std::vector<Setting> all;
  std::string table;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.empty() || line[0] == '#') continue;
    const size_t equals = line.find(" = ");
    if (line[0] == '[') {
      table = line.substr(1, line.size() - 2);
    } else if (equals != std::string::npos) {
      all.push_back({table, line.substr(0, equals), line.substr(equals + 3)});
    }
  }
  return all;
}

}  // namespace

std::vector<SettingChange>
changed_settings(const std::string& now, const std::string& before) {
  std::vector<Setting> here = settings_in(now);
  std::vector<Setting> there = settings_in(before);
  std::erase_if(here, [&](const Setting& setting) {
    const auto same = std::ranges::find(there, setting);
    if (same == there.end()) return false;
    there.erase(same);
    return true;
  });
  std::vector<SettingChange> changes;
  for (const Setting& one : here) {
    const auto old = std::ranges::find_if(there, [&](const Setting& other) {
      return other.table == one.table && other.key == one.key;
    });
    const bool known = old != there.end();
    changes.push_back(
        {one.table, one.key, one.value, known ? old->value : "not set"});
    if (known) there.erase(old);
  }
  return changes;
}

std::string to_toml(const Job& job) {
  return describe(job).to_toml();
}

}  // namespace echelon
