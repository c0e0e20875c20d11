// Finds and lists checkpoints, makes and removes them. A process may die at any
// of these calls: whatever is called step-… is complete.
//
//   begin     removes debris, makes .step-N.partial
//   complete  reads the ranks' parts, syncs the files, writes the manifest,
//             syncs
//   publish   writes .LATEST.new, renames .step-N.partial to step-N, syncs the
//             folder, renames .LATEST.new to LATEST, syncs the folder
//   keep      renames step-M to .step-M.removed, syncs, removes
#include "echelon/checkpoint/files/folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <ctime>
#include <exception>
#include <functional>
#include <set>
#include <thread>
#include <utility>

#include "echelon/checkpoint/files/folder_files.h"
#include "echelon/checkpoint/files/rank_file.h"
#include "echelon/checkpoint/format/foreign.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {

namespace fs = std::filesystem;
using namespace folder_files;

fs::path checkpoint_path(const fs::path& folder, int64_t step) {
  return folder / step_name(step);
}

fs::path partial_checkpoint(const fs::path& folder, int64_t step) {
  return folder / ("." + step_name(step) + ".partial");
}

namespace {

// Lists the entries with a checkpoint's name that have a manifest, or those
// that have none, the newest first.
std::vector<CheckpointPlace>
places_in(const fs::path& folder, bool with_manifest) {
  std::vector<CheckpointPlace> found;
  std::error_code error;
  fs::directory_iterator entries(folder, error);
  if (error == std::errc::no_such_file_or_directory) return found;
  for (; !error && entries != fs::directory_iterator();
       entries.increment(error)) {
    const auto& path = entries->path();
    const auto step = step_of(path.filename().string());
    if (step && is_checkpoint(path) == with_manifest) {
      found.push_back({path, *step});
    }
  }
  if (error) fail(folder, "listing the folder", error.value());
  std::ranges::sort(found, std::greater(), &CheckpointPlace::step);
  return found;
}

}  // namespace

std::vector<CheckpointPlace> list_checkpoints(const fs::path& folder) {
  return places_in(folder, /*with_manifest=*/true);
}

std::vector<CheckpointPlace> list_incomplete(const fs::path& folder) {
  return places_in(folder, /*with_manifest=*/false);
}

std::optional<CheckpointPlace> latest_checkpoint(const fs::path& folder) {
  for (const char* file : {kNextLatest, kLatest}) {
    const auto step = named_step(folder / file);
    if (!step) continue;
    const auto path = checkpoint_path(folder, *step);
    if (is_checkpoint(path)) return CheckpointPlace{path, *step};
  }
  const auto all = list_checkpoints(folder);
  if (all.empty()) return {};
  return all.front();
}

std::vector<fs::path> list_others(const fs::path& folder) {
  std::vector<fs::path> found;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename().string();
    if (is_debris(name) || name.starts_with(kAside)) {
      found.push_back(entry.path());
    }
  }
  std::sort(found.begin(), found.end());
  return found;
}

namespace {

// The latest first, then the others as they are listed.
std::vector<CheckpointPlace> in_order_of_trial(const fs::path& folder) {
  auto all = list_checkpoints(folder);
  if (all.empty()) return all;
  const auto latest = latest_checkpoint(folder);
  const auto first = std::find_if(
      all.begin(), all.end(),
      [&](const auto& place) { return latest && place.step == latest->step; });
  if (first != all.end()) std::rotate(all.begin(), first, first + 1);
  return all;
}

// The step of a checkpoint with any name, such as a copy.
int64_t saved_step(const fs::path& checkpoint) {
  if (const auto step = step_of(checkpoint.filename().string())) return *step;
  const auto path = checkpoint / kManifest;
  return parse_manifest(read_file(path), path.string()).step;
}

bool has_unfinished(const fs::path& folder) {
  const auto others = list_others(folder);
  return std::any_of(others.begin(), others.end(), [](const auto& path) {
    return is_debris(path.filename().string());
  });
}

// "path", not "path/", so that the last component is its name.
fs::path without_slash(fs::path path) {
  path = path.lexically_normal();
  return path.has_filename() || !path.has_parent_path() ? path
                                                        : path.parent_path();
}

// "; PATH is a folder of …" where another program's files are recognised, else
// nothing.
std::string what_else(const fs::path& path) {
  const auto foreign = foreign_checkpoint(path);
  return foreign.empty() ? "" : "; " + foreign;
}

}  // namespace

std::vector<CheckpointPlace> find_checkpoints(const fs::path& given) {
  const auto path = without_slash(given);
  std::error_code error;
  const auto kind = fs::status(path, error).type();
  if (kind == fs::file_type::not_found) {
    throw CheckpointError(path.string() + ": there is no such folder");
  }
  if (kind != fs::file_type::directory) {
    throw CheckpointError(
        path.string() +
        ": is a file; a checkpoint is a folder such as "
        "RUN/checkpoints/step-00000100, and RUN leads to its newest" +
        what_else(path));
  }
  if (is_debris(path.filename().string())) {
    throw CheckpointError(
        path.string() +
        ": is what a crash or a running save has left, and no checkpoint; "
        "whole ones are called step-…");
  }
  if (is_checkpoint(path)) return {{path, saved_step(path)}};
  for (const auto& folder : {path, path / "checkpoints"}) {
    if (auto found = in_order_of_trial(folder); !found.empty()) return found;
  }
  for (const auto& folder : {path, path / "checkpoints"}) {
    if (!has_unfinished(folder)) continue;
    throw CheckpointError(
        folder.string() +
        ": has no whole checkpoint, only one that was not finished");
  }
  throw CheckpointError(
      path.string() +
      ": has no checkpoint: neither manifest.json nor a folder step-… nor "
      "checkpoints/step-…" +
      what_else(path));
}

namespace {

// ------------------------------------------------------- making and removing

// A crash between the two renames of publish() leaves LATEST a step behind.
void finish_latest(const fs::path& folder) {
  const auto step = named_step(folder / kNextLatest);
  if (!step || !is_checkpoint(checkpoint_path(folder, *step))) return;
  rename_path(folder / kNextLatest, folder / kLatest);
}

void remove_debris(const fs::path& folder) {
  finish_latest(folder);
  std::vector<fs::path> debris;
  std::error_code error;
  fs::directory_iterator entries(folder, error);
  for (; !error && entries != fs::directory_iterator();
       entries.increment(error)) {
    const auto& path = entries->path();
    if (is_debris(path.filename().string())) debris.push_back(path);
  }
  if (error) fail(folder, "listing the folder", error.value());
  for (const auto& path : debris) remove_path(path);
}

void check_absent(const fs::path& folder, int64_t step) {
  const auto path = checkpoint_path(folder, step);
  std::error_code error;
  const auto kind = fs::symlink_status(path, error).type();
  if (kind == fs::file_type::not_found) return;
  if (error) fail(path, "looking at it", error.value());
  throw CheckpointError(
      path.string() +
      ": is there already, and checkpoints are never overwritten; remove it, "
      "or give this run a folder of its own ([train] run)");
}

void check_space(const fs::path& folder, int64_t needed_bytes) {
  const int64_t free = free_bytes(folder);
  if (free < 0 || free >= needed_bytes) return;
  throw CheckpointError(format(
      "{}: a checkpoint needs {} bytes, but {} are free there; make room, or "
      "keep fewer ([checkpoint] keep)",
      folder.string(), needed_bytes, free));
}

fs::path part_path(const fs::path& partial, int64_t rank) {
  auto path = partial / rank_file_name(rank);
  return path.replace_extension(".part.json");
}

RankPart read_part(const fs::path& partial, int64_t rank, int64_t ranks) {
  const auto path = part_path(partial, rank);
  std::error_code error;
  const bool there = fs::exists(path, error);
  if (error) fail(path, "looking at it", error.value());
  if (!there) {
    throw CheckpointError(format(
        "{}: rank {} of {} has not written its part", path.string(), rank,
        ranks));
  }
  auto part = parse_rank_part(read_file(path), path.string());
  if (part.file.name != rank_file_name(rank)) {
    throw CheckpointError(format(
        "{}: is about {}, not about {}", path.string(), part.file.name,
        rank_file_name(rank)));
  }
  const auto file = partial / part.file.name;
  const auto bytes = fs::file_size(file, error);
  if (error) fail(file, "looking at it", error.value());
  if (bytes != static_cast<uintmax_t>(part.file.bytes)) {
    throw CheckpointError(format(
        "{}: has {} bytes, but rank {} wrote {}", file.string(), bytes, rank,
        part.file.bytes));
  }
  return part;
}

// Leaves the ranks' files and the manifest in the folder, all on disk, and
// nothing else.
void complete(
    const fs::path& partial, CheckpointManifest& manifest, int64_t ranks) {
  std::vector<RankPart> parts;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    parts.push_back(read_part(partial, rank, ranks));
  }
  manifest.ranks = ranks;
  add_parts(manifest, parts);
  // The ranks synced them on their hosts; what this host sees must be on disk
  // too.
  for (const auto& file : manifest.files) sync_file(partial / file.name);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    remove_path(part_path(partial, rank));
  }
  write_file(partial / kManifest, to_json(manifest));
  sync_folder(partial);
}

// Undoes publish(). Throws nothing: an error is being handled.
void take_back(
    const fs::path& folder, int64_t step, const std::string& former) {
  std::error_code ignored;
  fs::rename(
      checkpoint_path(folder, step), partial_checkpoint(folder, step), ignored);
  if (named_step(folder / kLatest) != step) return;
  try {
    if (former.empty()) {
      remove_path(folder / kLatest);
    } else {
      write_file(folder / kNextLatest, former);
      rename_path(folder / kNextLatest, folder / kLatest);
    }
  } catch (const Error&) {
    // LATEST then names nothing, and readers take the newest.
  }
}

void publish(const fs::path& folder, int64_t step) {
  const auto path = checkpoint_path(folder, step);
  const auto named = named_step(folder / kLatest);
  const std::string former = named ? step_name(*named) + "\n" : "";
  check_absent(folder, step);
  std::error_code ignored;
  if (fs::is_directory(fs::symlink_status(folder / kLatest, ignored))) {
    set_aside({folder / kLatest});  // a file cannot replace a folder
  }
  write_file(folder / kNextLatest, step_name(step) + "\n");
  rename_path(partial_checkpoint(folder, step), path);
  try {
    sync_folder(folder);
    rename_path(folder / kNextLatest, folder / kLatest);
    sync_folder(folder);
  } catch (const Error& error) {
    take_back(folder, step, former);
    if (!is_checkpoint(path)) throw;
    throw CheckpointError(
        std::string(error.what()) + "; " + path.string() +
        " could not be taken back and stays");
  }
}

// ----------------------------------------------------------------- the lock

// `echelon job` reads it, to ask a job where it is.
std::string owner_text() {
  char name[256] = "?";
  ::gethostname(name, sizeof(name) - 1);
  std::string host = name;
  const char* job = std::getenv("SLURM_JOB_ID");
  const char* node = std::getenv("SLURMD_NODENAME");
  if (job != nullptr && node != nullptr) {
    host = format("{} of Slurm job {}", node, job);
  }
  // As the manifests of `echelon deploy` give them.
  const char* pod = std::getenv("POD_NAME");
  const char* name_space = std::getenv("POD_NAMESPACE");
  if (pod != nullptr && name_space != nullptr) {
    host += format(" of pod {}/{}", name_space, pod);
  }
  const std::time_t now = std::time(nullptr);
  std::tm utc = {};
  ::gmtime_r(&now, &utc);
  char since[32];
  std::strftime(since, sizeof(since), "%Y-%m-%d %H:%M:%S", &utc);
  return format(
      "process {} on host {} since {} UTC\n", ::getpid(), host, since);
}

std::string read_owner(int file) {
  char text[512];
  const ssize_t bytes = ::pread(file, text, sizeof(text), 0);
  std::string owner(text, static_cast<size_t>(bytes > 0 ? bytes : 0));
  owner = owner.substr(0, owner.find('\n'));
  for (char& c : owner) {
    if (static_cast<unsigned char>(c) < ' ') c = '?';
  }
  return owner.empty() ? "a process that has not said its name yet" : owner;
}

[[noreturn]] void refuse(const fs::path& path, int error) {
  fail(
      path, "locking it, so that two runs do not write into one folder,",
      error);
}

// A process that was killed releases the lock a moment later.
constexpr auto kDying = std::chrono::seconds(2);

// Locks the open file with flock's `operation`, or closes it and throws.
void lock_or_close(
    const fs::path& path, int file, int operation, bool waits = true) {
  const auto deadline = std::chrono::steady_clock::now() +
                        (waits ? kDying : std::chrono::seconds(0));
  while (::flock(file, operation | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    const int error = errno;
    if (error == EWOULDBLOCK && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      continue;
    }
    const std::string owner = read_owner(file);
    ::close(file);
    if (error != EWOULDBLOCK) refuse(path, error);
    throw CheckpointError(
        path.parent_path().string() + ": " + owner +
        " writes here; wait until it ends, or give this run a folder of its "
        "own ([train] run)");
  }
}

// ------------------------------------------------------------ what is kept

// Adds to `stay` the best by the rule's metric, the newest of equals, and those
// whose metric cannot be read.
void keep_best(
    const std::vector<CheckpointPlace>& newest_first, const KeepRule& rule,
    std::set<int64_t>& stay) {
  const CheckpointPlace* best = nullptr;
  double best_value = 0;
  for (const auto& place : newest_first) {
    const auto path = place.path / kManifest;
    CheckpointManifest manifest;
    try {
      manifest = parse_manifest(read_file(path), path.string());
    } catch (const CheckpointError&) {
      stay.insert(place.step);
      continue;
    }
    const auto metric = manifest.metrics.find(rule.best);
    if (metric == manifest.metrics.end() || std::isnan(metric->second)) {
      continue;
    }
    const double value =
        rule.best_is_largest ? -metric->second : metric->second;
    if (best != nullptr && value >= best_value) continue;
    best = &place;
    best_value = value;
  }
  if (best != nullptr) stay.insert(best->step);
}

}  // namespace

fs::path
begin_checkpoint(const fs::path& folder, int64_t step, int64_t needed_bytes) {
  make_folder(folder);
  remove_debris(folder);
  check_absent(folder, step);
  check_space(folder, needed_bytes);
  const auto partial = partial_checkpoint(folder, step);
  make_folder(partial);
  return partial;
}

fs::path commit_checkpoint(
    const fs::path& folder, CheckpointManifest manifest, int64_t ranks) {
  const int64_t step = manifest.step;
  try {
    complete(partial_checkpoint(folder, step), manifest, ranks);
    publish(folder, step);
  } catch (...) {
    abandon_checkpoint(folder, step);
    throw;
  }
  return checkpoint_path(folder, step);
}

fs::path adopt_checkpoint(const fs::path& folder, int64_t step) {
  const auto partial = partial_checkpoint(folder, step);
  try {
    for (const auto& entry : fs::directory_iterator(partial)) {
      sync_file(entry.path());
    }
    sync_folder(partial);
    publish(folder, step);
  } catch (...) {
    abandon_checkpoint(folder, step);
    throw;
  }
  return checkpoint_path(folder, step);
}

void abandon_checkpoint(const fs::path& folder, int64_t step) {
  std::error_code ignored;
  fs::remove_all(partial_checkpoint(folder, step), ignored);
  const auto next = folder / kNextLatest;
  const auto named = named_step(next);
  if (!named || !is_checkpoint(checkpoint_path(folder, *named))) {
    fs::remove(next, ignored);
  }
}

std::vector<CheckpointPlace>
keep_checkpoints(const fs::path& folder, const KeepRule& rule) {
  const auto all = list_checkpoints(folder);
  std::set<int64_t> stay;
  const auto newest = static_cast<size_t>(std::max<int64_t>(2, rule.newest));
  for (size_t i = 0; i < std::min(newest, all.size()); ++i) {
    stay.insert(all[i].step);
  }
  if (const auto latest = latest_checkpoint(folder)) stay.insert(latest->step);
  if (!rule.best.empty() && all.size() > stay.size()) {
    keep_best(all, rule, stay);
  }
  std::vector<CheckpointPlace> gone;
  for (const auto& place : all) {
    if (!stay.contains(place.step)) gone.push_back(place);
  }
  // Renamed first, so that no half removed folder has a checkpoint's name.
  for (const auto& place : gone) {
    const auto removed = removed_path(folder, place.step);
    remove_path(removed);
    rename_path(place.path, removed);
  }
  if (!gone.empty()) sync_folder(folder);
  for (const auto& place : gone) remove_path(removed_path(folder, place.step));
  return gone;
}

fs::path set_aside(const CheckpointPlace& checkpoint) {
  const auto folder = checkpoint.path.parent_path();
  const auto name = kAside + checkpoint.path.filename().string();
  auto path = folder / name;
  std::error_code error;
  for (int copy = 2; fs::exists(fs::symlink_status(path, error)); ++copy) {
    path = folder / (format("{}-{}", name, copy));
  }
  rename_path(checkpoint.path, path);
  sync_folder(folder);
  return path;
}

CheckpointLock::CheckpointLock(const fs::path& folder, bool waits) {
  make_folder(folder);
  const auto path = folder / kLock;
  file_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (file_ < 0) fail(path, "opening it", errno);
  lock_or_close(path, file_, LOCK_EX, waits);
  const std::string owner = owner_text();
  if (::ftruncate(file_, 0) != 0 ||
      ::pwrite(file_, owner.data(), owner.size(), 0) !=
          static_cast<ssize_t>(owner.size())) {
    const int error = errno;
    ::close(file_);
    fail(path, "writing it", error);
  }
}

CheckpointLock::~CheckpointLock() {
  // The file stays: a process that has just opened it would lock a removed
  // file.
  ::close(file_);
}

void check_unlocked(const fs::path& folder) {
  const auto path = folder / kLock;
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0 && (errno == ENOENT || errno == ENOTDIR)) return;
  if (file < 0) fail(path, "opening it", errno);
  lock_or_close(path, file, LOCK_SH);
  ::close(file);
}

}  // namespace echelon
