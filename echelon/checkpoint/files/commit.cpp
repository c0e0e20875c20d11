// How a checkpoint comes to be. Whatever it is that ends the process, at
// whichever of these calls: what is called step-… is whole.
#include <algorithm>
#include <exception>
#include <string>
#include <vector>

#include "echelon/checkpoint/files/folder.h"
#include "echelon/checkpoint/files/folder_files.h"
#include "echelon/checkpoint/files/rank_file.h"
#include "echelon/error.h"

namespace echelon {

namespace fs = std::filesystem;
using namespace folder_files;

namespace {

// A crash between the two renames of publish() has left LATEST a step behind.
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
      "or "
      "give this run a folder of its own ([train] run)");
}

void check_space(const fs::path& folder, int64_t needed_bytes) {
  const int64_t free = free_bytes(folder);
  if (free < 0 || free >= needed_bytes) return;
  throw CheckpointError(
      folder.string() + ": a checkpoint needs " + std::to_string(needed_bytes) +
      " bytes, but " + std::to_string(free) +
      " are free there; make room, or keep fewer ([checkpoint] keep)");
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
    throw CheckpointError(
        path.string() + ": rank " + std::to_string(rank) + " of " +
        std::to_string(ranks) + " has not written its part");
  }
  auto part = parse_rank_part(read_file(path), path.string());
  if (part.file.name != rank_file_name(rank)) {
    throw CheckpointError(
        path.string() + ": is about " + part.file.name + ", not about " +
        rank_file_name(rank));
  }
  const auto file = partial / part.file.name;
  const auto bytes = fs::file_size(file, error);
  if (error) fail(file, "looking at it", error.value());
  if (bytes != static_cast<uintmax_t>(part.file.bytes)) {
    throw CheckpointError(
        file.string() + ": has " + std::to_string(bytes) + " bytes, but rank " +
        std::to_string(rank) + " wrote " + std::to_string(part.file.bytes));
  }
  return part;
}

// The manifest beside the ranks' files, all of it on the disk, and nothing
// else.
void complete(
    const fs::path& partial, CheckpointManifest& manifest, int64_t ranks) {
  std::vector<RankPart> parts;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    parts.push_back(read_part(partial, rank, ranks));
  }
  manifest.ranks = ranks;
  add_parts(manifest, parts);
  // Ranks of other hosts did so too; of what this one sees it must be true.
  for (const auto& file : manifest.files) sync_file(partial / file.name);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    remove_path(part_path(partial, rank));
  }
  write_file(partial / kManifest, to_json(manifest));
  sync_folder(partial);
}

// Takes back what publish() did. Nothing throws: an error is on its way.
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
    // LATEST leads nowhere then, and readers take the newest.
  }
}

void publish(const fs::path& folder, int64_t step) {
  const auto path = checkpoint_path(folder, step);
  const auto named = named_step(folder / kLatest);
  const std::string former = named ? step_name(*named) + "\n" : "";
  check_absent(folder, step);
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

void abandon_checkpoint(const fs::path& folder, int64_t step) {
  std::error_code ignored;
  fs::remove_all(partial_checkpoint(folder, step), ignored);
  const auto next = folder / kNextLatest;
  const auto named = named_step(next);
  if (!named || !is_checkpoint(checkpoint_path(folder, *named))) {
    fs::remove(next, ignored);
  }
}

}  // namespace echelon
