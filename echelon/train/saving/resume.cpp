// Candidates are tried in their order, the latest first. A checkpoint is used
// by all ranks or by none: each rank reads the manifest, the ranks exchange
// what is wrong, and load_state() fails on every rank if it fails on one.
// Damaged checkpoints of the run itself are set aside, since training will save
// their steps again.
#include "echelon/train/saving/resume.h"

#include <algorithm>
#include <cstdio>
#include <sstream>
#include <utility>

#include "echelon/checkpoint/files/reader.h"
#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/train/saving/saved_state.h"

namespace echelon {
namespace {

// The lines of a table as to_toml writes it: "name = …".
std::vector<std::string>
lines_of_table(const std::string& toml, const std::string& table) {
  std::vector<std::string> lines;
  std::istringstream text(toml);
  bool inside = false;
  for (std::string line; std::getline(text, line);) {
    if (!line.empty() && line[0] == '[') {
      inside = line == "[" + table + "]";
    } else if (inside && !line.empty() && line[0] != '#') {
      lines.push_back(line);
    }
  }
  return lines;
}

std::string key_of(const std::string& line) {
  return line.substr(0, line.find(' '));
}

std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

std::string value_of(const std::string& line) {
  const size_t equals = line.find(" = ");
  return equals == std::string::npos ? line : line.substr(equals + 3);
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

// Compares lines "key = value" and returns "PLACE key = value, then VALUE" for
// those of `now` that are not in `then`. Where a key occurs twice, first lines
// are compared with first ones.
std::vector<std::string> changes(
    const std::string& place, std::vector<std::string> now,
    std::vector<std::string> then) {
  std::erase_if(now, [&](const auto& line) {
    const auto same = std::find(then.begin(), then.end(), line);
    if (same == then.end()) return false;
    then.erase(same);
    return true;
  });
  std::vector<std::string> lines;
  for (const auto& line : now) {
    const auto before = std::find_if(
        then.begin(), then.end(),
        [&](const auto& other) { return key_of(other) == key_of(line); });
    const bool known = before != then.end();
    lines.push_back(format(
        "{} {}, then {}", place, line,
        (known ? value_of(*before) : "not set")));
    if (known) then.erase(before);
  }
  return lines;
}

// Lists the changed settings that decide which samples a step sees.
std::vector<std::string> changes_of_samples(
    const CheckpointManifest& manifest, const Job& job,
    const std::string& samples) {
  std::vector<std::string> lines;
  if (manifest.seed != job.train.seed) {
    lines.push_back(
        format("[train] seed = {}, then {}", job.train.seed, manifest.seed));
  }
  const auto more =
      changes("data:", lines_of(samples), lines_of(manifest.data));
  lines.insert(lines.end(), more.begin(), more.end());
  return lines;
}

void check_same_samples(
    const CheckpointManifest& manifest, const Job& job,
    const std::string& samples, const std::string& place) {
  const std::string what =
      join(changes_of_samples(manifest, job, samples), "; ");
  if (what.empty() || job.checkpoint.force) return;
  throw CheckpointError(
      place + ": " + what +
      ": the samples would not be those that it has not seen yet; set "
      "checkpoint.force = true to resume all the same, or checkpoint.resume = "
      "\"never\" to start from step 0");
}

// Training will save the steps of these checkpoints again.
void make_room(const std::vector<CheckpointPlace>& damaged) {
  for (const auto& place : damaged) {
    std::fprintf(
        stderr, "warning: %s is now %s\n", place.path.c_str(),
        set_aside(place).filename().c_str());
  }
}

// Whether `named` is neither the run nor one of its checkpoints.
bool names_others(
    const std::filesystem::path& named, const std::filesystem::path& run,
    const std::vector<CheckpointPlace>& own) {
  std::error_code ignored;
  const auto is = [&](const std::filesystem::path& path) {
    return std::filesystem::equivalent(named, path, ignored);
  };
  return !is(run) && !is(run / "checkpoints") &&
         std::none_of(own.begin(), own.end(), [&](const auto& one) {
           return is(one.path);
         });
}

}  // namespace

Resume find_resume(const Job& job, const std::filesystem::path& folder) {
  Resume resume;
  const std::string& from = job.checkpoint.resume;
  if (from == "never") return resume;
  resume.candidates = list_checkpoints(folder / "checkpoints");
  resume.own = !resume.candidates.empty();
  if (from == "auto") return resume;
  if (resume.own) {
    resume.instead_of_others = names_others(from, folder, resume.candidates);
    return resume;
  }
  resume.candidates = find_checkpoints(from);
  return resume;
}

std::string describe_samples(const Job& job, const TrainingData& data) {
  std::ostringstream text;
  for (const auto& line : lines_of_table(to_toml(job), "data")) {
    const std::string key = key_of(line);
    if (key == "workers" || key == "prefetch") continue;
    text << line << "\n";
  }
  text << "samples = " << data.train_samples.size()
       << "\nheld_out = " << data.holdout_samples.size() << "\n";
  return text.str();
}

std::vector<std::string> differences(
    const CheckpointManifest& manifest, const Job& job,
    const std::string& samples, int64_t total_steps) {
  std::vector<std::string> lines;
  const auto differ = [&](const std::string& what, const std::string& now,
                          const std::string& then) {
    if (then != now)
      lines.push_back(format("{}: {}, then {}", what, now, then));
  };
  differ("layout", to_string(job.layout), manifest.layout);
  differ(
      "ranks", std::to_string(job.layout.num_ranks()),
      std::to_string(manifest.ranks));
  differ(
      "steps of the learning rate's schedule", std::to_string(total_steps),
      std::to_string(manifest.total_steps));
  const auto add = [&](const std::vector<std::string>& more) {
    lines.insert(lines.end(), more.begin(), more.end());
  };
  add(changes_of_samples(manifest, job, samples));
  if (job.train.compress == Compression::powersgd) {
    lines.emplace_back(
        "[train] compress = \"powersgd\": what it left out of earlier sums is "
        "forgotten");
  }
  const std::string now = to_toml(job);
  for (const char* table :
       {"model", "shard", "memory", "precision", "optimizer"}) {
    add(changes(
        format("[{}]", table), lines_of_table(now, table),
        lines_of_table(manifest.config, table)));
  }
  return lines;
}

Resumed resume(
    const Resume& from, const Job& job, TrainingState& state,
    const ModelSource& source, World& world, const MeshGroups& groups,
    const std::string& samples) {
  std::string last;
  std::vector<CheckpointPlace> damaged;
  for (const auto& place : from.candidates) {
    std::unique_ptr<CheckpointReader> reader;
    std::string damage;
    try {
      reader = std::make_unique<CheckpointReader>(place.path.string());
    } catch (const CheckpointError& error) {
      damage = error.what();
    }
    // Either all ranks can read it, or none uses it.
    const auto seen = world.exchange(damage);
    if (damage.empty()) damage = detail::first_failure(seen);
    if (damage.empty()) {
      check_same_samples(reader->manifest(), job, samples, place.path.string());
      check_state(reader->manifest(), source, state.optimizer());
      try {
        auto lines = load_state(state, *reader, source, world, groups);
        if (const auto& scale = reader->manifest().loss_scale) {
          state.load_loss_scale(
              {scale->scale, scale->good_steps, scale->overflows});
        }
        if (from.own && world.rank() == 0) make_room(damaged);
        return {reader->manifest(), place.path, std::move(lines)};
      } catch (const CheckpointError& error) {
        damage = error.what();  // on every rank
      }
    }
    last = damage;
    damaged.push_back(place);
    if (world.rank() == 0) {
      std::fprintf(
          stderr, "warning: %s is damaged and left out: %s\n",
          place.path.c_str(), first_line(damage).c_str());
    }
  }
  throw CheckpointError(format(
      "no checkpoint is intact, of {}; the last one: {}",
      from.candidates.size(), last));
}

}  // namespace echelon
