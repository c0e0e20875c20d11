#include "echelon/train/resume.h"

#include <cstdio>
#include <sstream>

#include "echelon/checkpoint/reader.h"
#include "echelon/error.h"
#include "echelon/train/saved_state.h"

namespace echelon {
namespace {

// "[data] name = …" and so on, as to_toml writes a table.
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

// Lines of `now` that are not in `then`.
std::vector<std::string>
changed_lines(const std::string& then, const std::string& now) {
  std::vector<std::string> changed;
  std::istringstream text(now);
  for (std::string line; std::getline(text, line);) {
    if (("\n" + then).find("\n" + line + "\n") == std::string::npos) {
      changed.push_back(line);
    }
  }
  return changed;
}

void check_same_samples(
    const CheckpointManifest& manifest, const Job& job,
    const std::string& samples, const std::string& place) {
  std::string what;
  if (manifest.seed != job.train.seed) {
    what = "train.seed = " + std::to_string(job.train.seed) + ", but " +
           std::to_string(manifest.seed) + " then";
  }
  for (const auto& line : changed_lines(manifest.data, samples)) {
    what += (what.empty() ? "" : "; ") + ("data " + line + " is new");
  }
  if (what.empty() || job.checkpoint.force) return;
  throw CheckpointError(
      place + ": " + what +
      ": the samples would not be those that it has not seen yet; set "
      "checkpoint.force = true to go on all the same, or checkpoint.resume = "
      "\"never\" to begin anew");
}

// Training comes to their steps again.
void make_room(const std::vector<CheckpointPlace>& damaged) {
  for (const auto& place : damaged) {
    std::fprintf(
        stderr, "warning: %s is now %s\n", place.path.c_str(),
        set_aside(place).filename().c_str());
  }
}

}  // namespace

Resume find_resume(const Job& job, const std::filesystem::path& folder) {
  Resume resume;
  const std::string& from = job.checkpoint.resume;
  if (from == "never") return resume;
  resume.candidates = list_checkpoints(folder / "checkpoints");
  resume.own = !resume.candidates.empty();
  if (resume.own || from == "auto") return resume;
  resume.candidates = find_checkpoints(from);
  return resume;
}

std::string describe_samples(const Job& job, int64_t train, int64_t holdout) {
  std::ostringstream text;
  for (const auto& line : lines_of_table(to_toml(job), "data")) {
    const std::string key = key_of(line);
    if (key == "workers" || key == "prefetch") continue;
    text << line << "\n";
  }
  text << "samples = " << train << "\nheld_out = " << holdout << "\n";
  return text.str();
}

std::vector<std::string> differences(
    const CheckpointManifest& manifest, const Job& job,
    const std::string& samples, int64_t total_steps) {
  std::vector<std::string> lines;
  const auto differ = [&](const std::string& what, const std::string& then,
                          const std::string& now) {
    if (then != now) lines.push_back(what + ": " + then + " then, " + now + " now");
  };
  differ("layout", manifest.layout, to_string(job.layout));
  differ("ranks", std::to_string(manifest.ranks),
         std::to_string(job.layout.num_ranks()));
  differ("seed", std::to_string(manifest.seed), std::to_string(job.train.seed));
  differ("steps of the learning rate's schedule",
         std::to_string(manifest.total_steps), std::to_string(total_steps));
  for (const auto& line : changed_lines(manifest.data, samples)) {
    lines.push_back("data: " + line);
  }
  if (job.train.compress == "powersgd") {
    lines.push_back(
        "[train] compress = \"powersgd\": what it left out of earlier sums is "
        "forgotten");
  }
  const std::string now = to_toml(job);
  for (const char* table :
       {"model", "shard", "memory", "precision", "optimizer"}) {
    const auto before = lines_of_table(manifest.config, table);
    for (const auto& line : lines_of_table(now, table)) {
      bool same = false;
      std::string then;
      for (const auto& other : before) {
        same |= other == line;
        if (key_of(other) == key_of(line)) then = other;
      }
      if (!same) {
        lines.push_back(
            std::string("[") + table + "] " + line +
            (then.empty() ? "" : ", then " + then));
      }
    }
  }
  return lines;
}

Resumed resume(
    const Resume& from,
    const Job& job,
    TrainingState& state,
    const ModelSource& source,
    World& world,
    const MeshGroups& groups,
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
    // All ranks see the same of it, or none goes on.
    const auto seen = world.exchange(damage);
    for (size_t rank = 0; rank < seen.size() && damage.empty(); ++rank) {
      if (!seen[rank].empty()) {
        damage = "rank " + std::to_string(rank) + ": " + seen[rank];
      }
    }
    if (damage.empty()) {
      check_same_samples(
          reader->manifest(), job, samples, place.path.string());
      check_state(reader->manifest(), source, state.optimizer());
      try {
        for (const auto& line :
             load_state(state, *reader, source, world, groups)) {
          if (world.rank() == 0) std::printf("  %s\n", line.c_str());
        }
        if (const auto& scale = reader->manifest().loss_scale) {
          state.load_loss_scale(
              {scale->scale, scale->good_steps, scale->overflows});
        }
        if (from.own && world.rank() == 0) make_room(damaged);
        return {reader->manifest(), place.path};
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
  throw CheckpointError(
      "no checkpoint is whole, of " + std::to_string(from.candidates.size()) +
      "; the last one: " + last);
}

}  // namespace echelon
