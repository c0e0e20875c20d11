#include "echelon/checkpoint/remote/remote_checkpoints.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <functional>
#include <set>
#include <utility>

#include "echelon/authentication/key.h"
#include "echelon/checkpoint/files/folder_files.h"
#include "echelon/checkpoint/format/manifest.h"
#include "echelon/checkpoint/remote/remote_files.h"
#include "echelon/error.h"
#include "echelon/storage/object_store.h"
#include "echelon/text/check.h"
#include "echelon/text/file_descriptor.h"
#include "echelon/text/format.h"
#include "echelon/text/text_file.h"

namespace echelon {
namespace {

namespace fs = std::filesystem;
using storage::kDamaged;
using storage::ObjectStore;
using storage::StorageError;

constexpr const char* kTakenOver = "another run has begun to write there";
constexpr const char* kMetrics = "metrics.jsonl";
constexpr const char* kProbe = ".check-";

// Eight hexadecimal digits that no other process has.
std::string new_mark() {
  std::string mark;
  for (const char c : authentication::random_bytes().substr(0, 4)) {
    mark += format("{:02x}", unsigned{static_cast<unsigned char>(c)});
  }
  return mark;
}

std::string this_writer(const std::string& mark) {
  char host[256] = "?";
  ::gethostname(host, sizeof(host) - 1);
  const std::time_t now = std::time(nullptr);
  std::tm utc = {};
  ::gmtime_r(&now, &utc);
  char since[32];
  std::strftime(since, sizeof(since), "%Y-%m-%d %H:%M:%S", &utc);
  return format(
      "{} process {} on host {} since {} UTC", mark, ::getpid(), host, since);
}

// The complete lines of a file that may be written to meanwhile.
std::string complete_lines(const fs::path& path) {
  std::error_code error;
  if (!fs::exists(path, error)) return "";
  std::string text = read_text_file(path);
  text.resize(text.rfind('\n') + 1);  // npos + 1 is 0
  return text;
}

}  // namespace

struct RemoteCheckpoints::State {
  State(const storage::ObjectUrl& place, storage::S3Settings settings)
      : store(place.bucket, std::move(settings)),
        folder(
            place.key.empty() ? "checkpoints/" : place.key + "/checkpoints/") {
    // A part must end where a block of a manifest does.
    ECHELON_CHECK(
        store.settings().part_bytes % kChecksumBlockBytes == 0, "parts of {}",
        store.settings().part_bytes);
  }
  std::string latest() const { return folder + folder_files::kLatest; }

  ObjectStore store;
  const std::string folder;  // the beginning of all keys
  std::string mark;
  RemoteIndex index;  // after claim()
  std::string etag;   // of LATEST; empty: there is none
};

struct RemoteCheckpoints::Read {
  RemoteIndex index;
  std::string etag;
};

RemoteCheckpoints::RemoteCheckpoints(const std::string& url)
    : RemoteCheckpoints(url, storage::read_settings()) {}

RemoteCheckpoints::RemoteCheckpoints(
    const std::string& url, const storage::S3Settings& settings)
    : url_(url),
      state_(
          std::make_unique<State>(storage::parse_object_url(url), settings)) {}

RemoteCheckpoints::~RemoteCheckpoints() = default;

void RemoteCheckpoints::cancel() {
  state_->store.cancel();
}

RemoteCheckpoints::Read RemoteCheckpoints::read_index() {
  const auto found = state_->store.get(state_->latest());
  if (found) {
    auto index = parse_remote_index(found->text);
    if (index) return {std::move(*index), found->etag};
    throw ConfigError(format(
        "{}: is not as a run writes it; remove it, and "
        "the newest whole checkpoint counts, or name another place",
        state_->store.url(state_->latest())));
  }
  // Somebody removed LATEST. What has a manifest was published once.
  Read all;
  for (const auto& object : state_->store.list(state_->folder)) {
    const std::string rest = object.key.substr(state_->folder.size());
    const size_t slash = std::min(rest.find('/'), rest.size());
    const std::string name = rest.substr(0, slash);
    const auto step = step_of_remote(name);
    if (!step || rest.substr(slash) != "/manifest.json") continue;
    all.index.checkpoints.push_back({.name = name, .step = *step});
  }
  std::ranges::stable_sort(
      all.index.checkpoints, std::greater(), &RemoteCheckpoint::step);
  return all;
}

void RemoteCheckpoints::check() {
  try {
    state_->store.list(state_->folder, 1);
    read_index();
    const std::string probe = state_->folder + kProbe + new_mark();
    state_->store.put(probe, "may this run write here?\n");
    state_->store.remove(probe);
  } catch (const StorageError& error) {
    throw ConfigError(error.what());
  }
}

std::vector<RemoteCheckpoint> RemoteCheckpoints::list() {
  return as_checkpoint_error([&] { return read_index().index.checkpoints; });
}

void RemoteCheckpoints::write_index(const RemoteIndex& index) {
  const auto put = state_->store.put(
      state_->latest(), to_text(index),
      {.if_absent = state_->etag.empty(), .if_match = state_->etag});
  if (!put) {
    std::string who;
    if (const auto now = state_->store.get(state_->latest())) {
      const auto other = parse_remote_index(now->text);
      if (other) who = format(" ({})", other->writer);
    }
    throw CheckpointError(format(
        "{}: {}{}, so this one ends here: the checkpoints of two runs must not "
        "mix; give each a [checkpoint] remote of its own",
        state_->store.url(state_->latest()), kTakenOver, who));
  }
  state_->etag = *put;
  state_->index = index;
}

std::string RemoteCheckpoints::claim() {
  return as_checkpoint_error([&] {
    constexpr int kTries = 5;  // two runs that begin at once
    state_->mark = new_mark();
    for (int i = 1;; ++i) {
      auto [index, etag] = read_index();
      state_->etag = etag;
      index.writer = this_writer(state_->mark);
      try {
        write_index(index);
        break;
      } catch (const CheckpointError&) {
        if (i == kTries) throw;
      }
    }
    state_->store.remove_unfinished(state_->folder);
    return state_->mark;
  });
}

void RemoteCheckpoints::upload(const fs::path& file, const std::string& name) {
  as_checkpoint_error([&] {
    state_->store.upload_file(
        file,
        format("{}{}/{}", state_->folder, name, file.filename().string()));
  });
}

void RemoteCheckpoints::publish(
    const std::string& name, const fs::path& from, const KeepRule& rule,
    const fs::path& metrics) {
  as_checkpoint_error([&] {
    const fs::path path = from / folder_files::kManifest;
    const std::string text = folder_files::read_file(path);
    const auto manifest = parse_manifest(text, path.string());
    const std::string folder = state_->folder + name + "/";
    if (const std::string lines = complete_lines(metrics); !lines.empty()) {
      state_->store.put(folder + kMetrics, lines);
    }
    const bool is_new =
        state_->store
            .put(folder + folder_files::kManifest, text, {.if_absent = true})
            .has_value();
    if (!is_new) {
      throw CheckpointError(format(
          "{}: is there already, and nothing is written over",
          state_->store.url(folder)));
    }
    RemoteIndex index = state_->index;
    RemoteCheckpoint added{.name = name, .step = manifest.step};
    const auto metric = manifest.metrics.find(rule.best);
    if (metric != manifest.metrics.end()) added.metric = metric->second;
    add(index, std::move(added), rule);
    write_index(index);
  });
  try {
    remove_others();
  } catch (const StorageError& error) {
    std::fprintf(
        stderr, "warning: an older checkpoint stays: %s\n", error.what());
  }
}

// Manifests first: what is half removed has none.
void RemoteCheckpoints::remove_others() {
  std::set<std::string> kept;
  for (const auto& one : state_->index.checkpoints) kept.insert(one.name);
  std::vector<std::string> gone;
  for (const auto& object : state_->store.list(state_->folder)) {
    const std::string rest = object.key.substr(state_->folder.size());
    const std::string name = rest.substr(0, rest.find('/'));
    const bool ours =
        step_of_remote(name).has_value() || name.starts_with(kProbe);
    if (ours && !kept.contains(name)) gone.push_back(object.key);
  }
  std::ranges::stable_partition(gone, [](const std::string& key) {
    return key.ends_with("/manifest.json");
  });
  for (const auto& key : gone) state_->store.remove(key);
}

void RemoteCheckpoints::discard_after(int64_t step) {
  RemoteIndex index = state_->index;
  const auto later = std::erase_if(
      index.checkpoints, [&](const auto& one) { return one.step > step; });
  if (later > 0) as_checkpoint_error([&] { write_index(index); });
}

void RemoteCheckpoints::clear() {
  claim();
  RemoteIndex index = state_->index;
  index.checkpoints.clear();
  as_checkpoint_error([&] {
    write_index(index);
    remove_others();
  });
}

std::optional<CheckpointPlace>
RemoteCheckpoints::fetch_newest(const fs::path& run) {
  const fs::path folder = run / "checkpoints";
  const auto own = list_checkpoints(folder);
  const int64_t newest = own.empty() ? -1 : own.front().step;
  std::string damage;
  for (const auto& one : list()) {
    if (one.step <= newest) return {};
    damage = as_checkpoint_error([&] { return fetch(one, run); });
    if (damage.empty()) {
      return CheckpointPlace{checkpoint_path(folder, one.step), one.step};
    }
    std::fprintf(
        stderr, "warning: %s/%s is damaged and left out: %s\n", url_.c_str(),
        one.name.c_str(), damage.c_str());
  }
  if (damage.empty()) return {};
  throw CheckpointError(
      format("no checkpoint in {} is intact; the last one: {}", url_, damage));
}

// Returns what is wrong with the checkpoint. Throws where the storage or the
// disk fails.
std::string
RemoteCheckpoints::fetch(const RemoteCheckpoint& one, const fs::path& run) {
  const fs::path folder = run / "checkpoints";
  const std::string from = state_->folder + one.name + "/";
  const std::string name = from + folder_files::kManifest;
  const auto text = state_->store.get(name);
  if (!text) return "it has no manifest.json";
  CheckpointManifest manifest;
  try {
    manifest = parse_manifest(text->text, state_->store.url(name));
  } catch (const CheckpointError& error) {
    return error.what();
  }
  const auto [objects, damage] = find_files(state_->store, from, manifest);
  if (!damage.empty()) return damage;
  say_fetching(url_, manifest);
  const fs::path partial =
      begin_checkpoint(folder, one.step, bytes_of(manifest));
  for (size_t i = 0; i < objects.size(); ++i) {
    const auto& file = manifest.files[i];
    const fs::path path = partial / file.name;
    const FileDescriptor to(
        ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    if (!to.is_open()) folder_files::fail(path, "making it", errno, file.bytes);
    try {
      download(state_->store, objects[i], file, to.fd());
    } catch (const StorageError& error) {
      abandon_checkpoint(folder, one.step);
      if (error.code() != kDamaged) throw;
      return error.what();
    }
  }
  folder_files::write_file(partial / folder_files::kManifest, text->text);
  std::error_code ignored;
  const auto metrics = fs::exists(run / kMetrics, ignored)
                           ? std::nullopt
                           : state_->store.get(from + kMetrics);
  if (metrics) write_file_atomically(run / kMetrics, metrics->text);
  adopt_checkpoint(folder, one.step);
  return "";
}

bool is_taken_over(const std::string& message) {
  return message.find(kTakenOver) != std::string::npos;
}

}  // namespace echelon
