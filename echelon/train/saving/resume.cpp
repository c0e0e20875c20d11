// Candidates are tried in their order, the latest first. A checkpoint is used
// by all ranks or by none: each rank reads the manifest, the ranks exchange
// what is wrong, and load_state() fails on every rank if it fails on one. A
// state that is not finite is as good as a damaged one: training would end in
// its first step, and again after each restart.
// Damaged checkpoints of the run itself are set aside, since training will save
// their steps again.
#include "echelon/train/saving/resume.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <utility>

#include "echelon/checkpoint/files/reader.h"
#include "echelon/checkpoint/remote/object_checkpoints.h"
#include "echelon/error.h"
#include "echelon/storage/settings.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"
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

// "[optimizer] learning_rate: was 0.1, now 0.01"
std::string was_now(
    const std::string& what, const std::string& was, const std::string& now) {
  return format("{}: was {}, now {}", what, was, now);
}

constexpr const char* kContents = "contents of ";
constexpr const char* kPosition = "position of the stream = ";

// Lists the changed settings that decide which samples a step sees.
std::vector<std::string> changes_of_samples(
    const CheckpointManifest& manifest, const Job& job,
    const std::string& samples) {
  std::vector<std::string> lines;
  if (manifest.seed != job.train.seed) {
    lines.push_back(was_now(
        "[train] seed", std::to_string(manifest.seed),
        std::to_string(job.train.seed)));
  }
  for (const auto& change : changed_settings(samples, manifest.data)) {
    // Checkpoints of earlier versions do not say what the files held.
    if (change.key.starts_with(kContents) && change.before == "not set") {
      continue;
    }
    lines.push_back(was_now("[data] " + change.key, change.before, change.now));
  }
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

// A text of check_state with the first of its tensors: a model of other sizes
// has hundreds.
std::string first_tensors(const std::string& text) {
  constexpr int64_t kShown = 12;
  size_t end = text.find('\n');
  for (int64_t i = 0; i < kShown && end != std::string::npos; ++i) {
    end = text.find('\n', end + 1);
  }
  if (end == std::string::npos) return text;
  const auto more =
      std::count(text.begin() + static_cast<long>(end), text.end(), '\n');
  return text.substr(0, end) + format("\n  and {} more", more);
}

// Throws unless adapters are added to the weights, and by the factor, that they
// were trained with: a checkpoint of adapters has neither.
void check_same_base(
    const CheckpointManifest& manifest, const Job& job,
    const std::string& place) {
  for (const auto& [table, key, now, before] :
       changed_settings(to_toml(job), manifest.config)) {
    const bool of_base = (table == "model" && key == "weights") ||
                         (table == "lora" && key == "alpha");
    if (!of_base) continue;
    throw CheckpointError(format(
        "{}: has adapters that were trained with [{}] {} = {}, and it is {} "
        "now; set it as before, or name another folder (--set train.run=…)",
        place, table, key, before, now));
  }
}

// Throws unless the checkpoint's tensors are those of this model and optimizer.
// Says which settings differ, if any do: they say more than tensors.
void check_same_model(
    const CheckpointManifest& manifest, const Job& job,
    const ModelSource& source, const Optimizer& optimizer,
    const std::string& place) {
  try {
    check_state(manifest, source, optimizer);
  } catch (const CheckpointError& error) {
    const std::set<std::string> without_effect = {
        "weights",         "dropout",    "dtype",       "cut",
        "balance",         "devices",    "norm_eps",    "device_bytes",
        "sync_batch_norm", "rope_theta", "rope_factor", "rope_scaling"};
    std::string lines;
    for (const auto& [table, key, now, before] :
         changed_settings(to_toml(job), manifest.config)) {
      const bool of_optimizer =
          table == "optimizer" && (key == "name" || key == "momentum");
      const bool of_model =
          (table == "model" && !without_effect.contains(key)) ||
          table == "lora";
      if (!of_optimizer && !of_model) continue;
      lines += format(
          "\n  [{}] {} = {}, the checkpoint has {}", table, key, now, before);
    }
    if (lines.empty()) throw CheckpointError(first_tensors(error.what()));
    throw CheckpointError(format(
        "{}: is of another model or optimizer; resume with its settings, or "
        "name another folder (--set train.run=…) for a run with these:{}",
        place, lines));
  }
  if (!source.unsaved.empty()) check_same_base(manifest, job, place);
}

std::string name_of(const CheckpointPlace& place, bool in_memory) {
  return in_memory ? format("the copy of step {} in memory", place.step)
                   : place.path.string();
}

// The run that checkpoint.resume names may have saved between the looks of two
// ranks.
void check_same_on_all(
    World& world, const CheckpointManifest& manifest,
    const std::string& named) {
  const auto seen =
      world.exchange(format("{} {}", manifest.step, manifest.content_hash));
  const bool same = std::ranges::all_of(
      seen, [&](const auto& one) { return one == seen.front(); });
  if (same) return;
  throw Error(format(
      "resume = \"{}\": ranks have found different checkpoints there; name one "
      "of them, or start again when that run saves no more",
      named));
}

// Training will save the steps of these checkpoints again.
void make_room(const std::vector<CheckpointPlace>& damaged) {
  for (const auto& place : damaged) {
    std::fprintf(
        stderr, "warning: %s is now %s\n", place.path.c_str(),
        set_aside(place).filename().c_str());
  }
}

// Names a parameter, or a state of the optimizer, of this rank that is not
// finite; empty when there is none.
std::string find_not_finite(
    const TrainingState& state, const ModelSource& source,
    torch::Device device) {
  const torch::NoGradGuard no_grad;
  std::vector<std::string> names;
  std::vector<torch::Tensor> finite;
  for (const auto& part : shards_to_load(state, source)) {
    // Buffers may hold infinities, as masks do.
    if (part.kind == SavedKind::buffer || !part.tensor.is_floating_point()) {
      continue;
    }
    const torch::Tensor all = part.tensor.contiguous();
    const auto add = [&](const torch::Tensor& values) {
      names.push_back(part.name);
      finite.push_back(at::isfinite(values).all().to(device));
    };
    if (all.dim() == 0) {
      add(all);
      continue;
    }
    for (const auto& [box, begin, strides] : part.boxes) {
      add(all.as_strided(box.sizes, strides, all.storage_offset() + begin));
    }
  }
  if (finite.empty()) return "";
  const auto flags = at::stack(finite).to(torch::kCPU);
  for (size_t i = 0; i < names.size(); ++i) {
    if (flags[static_cast<int64_t>(i)].item<bool>()) continue;
    return format("\"{}\" has a value that is not finite", names[i]);
  }
  return "";
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

namespace {

Resume find_on_disk(
    const CheckpointOptions& options, const std::filesystem::path& folder) {
  Resume resume;
  const std::string& from = options.resume;
  if (from == "never") return resume;
  resume.candidates = list_checkpoints(folder / "checkpoints");
  resume.own = !resume.candidates.empty();
  if (from == "auto") return resume;
  if (resume.own) {
    resume.instead_of_others = names_others(from, folder, resume.candidates);
    return resume;
  }
  resume.candidates = find_checkpoints(local_checkpoint(from));
  return resume;
}

void add_those_in_memory(
    Resume& resume, RestartMemory& memory,
    std::vector<CheckpointPlace> in_memory) {
  const int64_t newest = resume.own ? resume.candidates.front().step : -1;
  std::erase_if(in_memory, [&](const CheckpointPlace& place) {
    return place.step <= newest;
  });
  resume.in_memory = in_memory.size();
  resume.memory = &memory;
  resume.candidates.insert(
      resume.candidates.begin(), in_memory.begin(), in_memory.end());
}

}  // namespace

Resume find_resume(
    const CheckpointOptions& options, const std::filesystem::path& folder,
    RestartMemory* memory) {
  Resume resume = find_on_disk(options, folder);
  if (memory != nullptr) {
    add_those_in_memory(
        resume, *memory, checkpoints_in_memory(memory->index()));
  }
  return resume;
}

Resume find_before(
    const std::filesystem::path& folder, RestartMemory* memory, int64_t step) {
  const auto before = [&](std::vector<CheckpointPlace> places) {
    std::erase_if(
        places, [&](const auto& place) { return place.step >= step; });
    return places;
  };
  Resume resume;
  resume.candidates = before(list_checkpoints(folder / "checkpoints"));
  resume.own = !resume.candidates.empty();
  if (memory != nullptr) {
    add_those_in_memory(
        resume, *memory, before(checkpoints_in_memory(memory->index())));
  }
  return resume;
}

std::string describe_samples(const Job& job, const TrainingData& data) {
  std::ostringstream text;
  for (const auto& line : lines_of_table(to_toml(job), "data")) {
    const std::string key = key_of(line);
    if (key == "workers" || key == "prefetch") continue;
    text << line << "\n";
  }
  text << "samples = "
       << (data.train->is_stream()
               ? data.train->size()
               : static_cast<int64_t>(data.train_samples.size()))
       << "\nheld_out = " << data.holdout_samples.size() << "\n";
  const auto add_contents = [&](const Dataset& samples) {
    for (const auto& [name, sum] : samples.fingerprints()) {
      text << kContents << name << " = " << sum << "\n";
    }
  };
  add_contents(*data.train);
  if (data.holdout != data.train) add_contents(*data.holdout);
  return text.str();
}

std::string
with_position(const std::string& samples, const std::string& stream) {
  if (stream.empty()) return samples;
  try {
    return samples + kPosition + nlohmann::json(stream).dump() + "\n";
  } catch (const nlohmann::json::exception&) {
    throw ConfigError(
        "the position() of the data's stream is no text in UTF-8, which a "
        "checkpoint stores");
  }
}

std::string stream_position(const CheckpointManifest& manifest) {
  const size_t found = manifest.data.rfind(kPosition);
  if (found == std::string::npos) return {};
  const size_t begin = found + std::string_view(kPosition).size();
  const auto line =
      manifest.data.substr(begin, manifest.data.find('\n', begin) - begin);
  const auto json = nlohmann::json::parse(line, nullptr, false);
  if (json.is_string()) return json.get<std::string>();
  throw CheckpointError(format(
      "the checkpoint of step {} has a damaged position of its data's stream: "
      "{}",
      manifest.step, line));
}

std::vector<std::string> differences(
    const CheckpointManifest& manifest, const Job& job,
    const std::string& samples, int64_t total_steps) {
  std::vector<std::string> lines;
  const auto differ = [&](const std::string& what, const std::string& now,
                          const std::string& then) {
    if (then != now) lines.push_back(was_now(what, then, now));
  };
  differ("layout", to_string(job.layout), manifest.layout);
  differ(
      "ranks", std::to_string(job.layout.num_ranks()),
      std::to_string(manifest.ranks));
  differ(
      "steps of the learning rate's schedule", std::to_string(total_steps),
      std::to_string(manifest.total_steps));
  for (auto& line : changes_of_samples(manifest, job, samples)) {
    lines.push_back(std::move(line));
  }
  if (job.train.compress == Compression::powersgd) {
    lines.emplace_back(
        "[train] compress = \"powersgd\": what it left out of earlier sums is "
        "forgotten");
  }
  const std::set<std::string> tables = {
      "model", "shard", "memory", "precision", "optimizer"};
  for (const auto& [table, key, now, before] :
       changed_settings(to_toml(job), manifest.config)) {
    const bool batch = table == "train" && key == "batch";
    if (!batch && !tables.contains(table)) continue;
    lines.push_back(was_now(format("[{}] {}", table, key), before, now));
  }
  return lines;
}

Resumed resume(
    const Resume& from, const Job& job, TrainingState& state,
    const ModelSource& source, World& world, const MeshGroups& groups,
    const std::string& samples) {
  std::string last;  // damage
  std::vector<CheckpointPlace> damaged;
  for (size_t i = 0; i < from.candidates.size(); ++i) {
    const auto& place = from.candidates[i];
    const bool in_memory = i < from.in_memory;
    const std::string name = name_of(place, in_memory);
    std::unique_ptr<CheckpointReader> reader;
    std::string damage;
    try {
      reader = std::make_unique<CheckpointReader>(
          place.path.string(), /*threads=*/0,
          in_memory ? from.memory->remote() : OpenRemote());
    } catch (const CheckpointError& error) {
      damage = error.what();
    }
    // Either all ranks can read it, or none uses it.
    const auto seen = world.exchange(damage);
    if (damage.empty()) damage = detail::first_failure(seen);
    if (damage.empty()) {
      if (!from.own && !in_memory) {
        check_same_on_all(world, reader->manifest(), job.checkpoint.resume);
      }
      check_same_samples(reader->manifest(), job, samples, name);
      check_same_model(
          reader->manifest(), job, source, state.optimizer(), name);
      try {
        auto lines = load_state(state, *reader, source, world, groups);
        if (const auto& scale = reader->manifest().loss_scale) {
          state.load_loss_scale(
              {scale->scale, scale->good_steps, scale->overflows});
        }
        const auto bad =
            world.exchange(find_not_finite(state, source, world.device()));
        damage = detail::first_failure(bad);
        if (!damage.empty()) throw CheckpointError(damage);
        if (from.own && world.rank() == 0) make_room(damaged);
        return {
            reader->manifest(), place.path, from.own || in_memory, in_memory,
            std::move(lines)};
      } catch (const CheckpointError& error) {
        damage = error.what();  // on every rank
      }
    }
    last = damage;
    if (!in_memory) damaged.push_back(place);
    if (world.rank() == 0) {
      std::fprintf(
          stderr, "warning: %s is damaged and left out: %s\n", name.c_str(),
          first_line(damage).c_str());
    }
  }
  if (from.in_memory == from.candidates.size()) {
    if (from.memory != nullptr) from.memory->discard();
    throw Error(
        "no copy of the state in memory is intact; the next start goes on "
        "without: " +
        last);
  }
  throw CheckpointError(format(
      "no checkpoint is intact, of {}; the last one: {}",
      from.candidates.size(), last));
}

namespace {

// The address, not the path of its copy.
std::string place_of(const Resumed& resumed, const Job& job) {
  const std::string& named = job.checkpoint.resume;
  return !resumed.own && storage::is_object_url(named) ? named
                                                       : resumed.path.string();
}

}  // namespace

std::string describe(
    const Resumed& resumed, const Resume& from, const Job& job,
    const std::string& samples, int64_t total_steps) {
  const CheckpointManifest& manifest = resumed.manifest;
  std::vector<std::string> lines = {format(
      "resumes from step {} {}, saved with {} on {}", manifest.step,
      resumed.in_memory ? "in memory" : "of " + place_of(resumed, job),
      manifest.layout, counted(manifest.ranks, "rank"))};
  const auto add = [&](const std::string& line) {
    lines.push_back("  " + line);
  };
  if (from.instead_of_others) {
    add("the run has checkpoints of its own, and no longer needs " +
        job.checkpoint.resume);
  }
  for (const auto& line : resumed.lines) add(line);
  for (const auto& line : differences(manifest, job, samples, total_steps)) {
    add(line);
  }
  if (manifest.step >= total_steps) {
    add(format(
        "the run has all its {}; raise train.steps or train.epochs to "
        "continue, or set another train.run",
        counted(total_steps, "step")));
  }
  return join(lines, "\n");
}

}  // namespace echelon
