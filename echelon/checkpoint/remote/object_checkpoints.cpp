// The copy of a manifest has a folder of the cache to itself, by the manifest's
// etag (storage/local_copy.h). The files are fetched into the same folder, each
// under another name until it is whole; so the folder becomes a checkpoint.
#include "echelon/checkpoint/remote/object_checkpoints.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <system_error>
#include <utility>

#include "echelon/checkpoint/files/folder_files.h"
#include "echelon/checkpoint/format/manifest.h"
#include "echelon/checkpoint/remote/remote_files.h"
#include "echelon/checkpoint/remote/remote_index.h"
#include "echelon/error.h"
#include "echelon/storage/local_copy.h"
#include "echelon/storage/object_store.h"
#include "echelon/text/check.h"
#include "echelon/text/file_descriptor.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

namespace fs = std::filesystem;
using storage::ObjectInfo;
using storage::ObjectStore;
using storage::StorageError;

struct Place {
  explicit Place(const std::string& url)
      : Place(storage::parse_object_url(url)) {}

  std::shared_ptr<ObjectStore> store;
  std::string key;  // without a slash at its end

 private:
  explicit Place(const storage::ObjectUrl& url)
      : store(std::make_shared<ObjectStore>(
            url.bucket, storage::read_settings())),
        key(url.key) {
    // A part must end where a block of a manifest does.
    ECHELON_CHECK(
        store->settings().part_bytes % kChecksumBlockBytes == 0, "parts of {}",
        store->settings().part_bytes);
  }
};

// A list says more than the answer to HEAD: whether the bucket is missing, and
// which right.
bool has_manifest(ObjectStore& store, const std::string& key) {
  const std::string manifest = key + "/" + folder_files::kManifest;
  const auto found = store.list(manifest, 1);
  return !found.empty() && found.front().key == manifest;
}

std::optional<int64_t> step_of_name(const std::string& name) {
  const auto step = step_of_remote(name);
  return step ? step : folder_files::step_of(name);
}

std::string last_name(const std::string& key) {
  return key.substr(key.rfind('/') + 1);  // npos + 1 is 0
}

// The checkpoints whose keys begin with `folder`, "…/checkpoints/".
ObjectCheckpoints find_in(ObjectStore& store, const std::string& folder) {
  std::map<std::string, bool> names;  // whether there is a manifest
  for (const auto& object : store.list(folder + "step-")) {
    const std::string rest = object.key.substr(folder.size());
    const size_t slash = std::min(rest.find('/'), rest.size());
    const std::string name = rest.substr(0, slash);
    if (!step_of_name(name)) continue;
    names[name] |= rest.substr(slash) == "/manifest.json";
  }
  ObjectCheckpoints found;
  found.folder = store.url(folder);
  found.folder.pop_back();
  const auto add = [&](const std::string& name, int64_t step) {
    found.checkpoints.push_back({store.url(folder + name), step});
    names.erase(name);
  };
  const auto latest =
      names.empty() ? std::nullopt : store.get(folder + folder_files::kLatest);
  const auto index = latest ? parse_remote_index(latest->text) : std::nullopt;
  if (index) {
    for (const auto& one : index->checkpoints) add(one.name, one.step);
  } else {
    // A copy of a folder, or one whose LATEST is gone.
    for (const auto& [name, whole] : std::map(names)) {
      if (whole) add(name, *step_of_name(name));
    }
    std::ranges::stable_sort(
        found.checkpoints, std::greater(), &ObjectCheckpoint::step);
  }
  for (const auto& [name, whole] : names) found.unfinished.push_back(name);
  return found;
}

// What is wrong with a checkpoint; throws where the storage or the disk fails.
// `folder` becomes that of the copy.
std::string copy_whole(const ObjectCheckpoint& one, fs::path& folder) {
  const Place place(one.url);
  ObjectStore& store = *place.store;
  if (!has_manifest(store, place.key)) return "it has no manifest.json";
  folder = copy_manifest(one);
  const fs::path path = folder / folder_files::kManifest;
  CheckpointManifest manifest;
  try {
    manifest = parse_manifest(
        folder_files::read_file(path), one.url + "/" + folder_files::kManifest);
  } catch (const CheckpointError& error) {
    return error.what();
  }
  const FileDescriptor lock = storage::lock_copies(folder);
  const auto is_copied = [&](const SavedFile& file) {
    std::error_code error;
    const auto bytes = fs::file_size(folder / file.name, error);
    return !error && bytes == static_cast<uintmax_t>(file.bytes);
  };
  if (std::ranges::all_of(manifest.files, is_copied)) return "";
  const auto [objects, damage] = find_files(store, place.key + "/", manifest);
  if (!damage.empty()) return damage;
  say_fetching(one.url, manifest);
  for (size_t i = 0; i < objects.size(); ++i) {
    const SavedFile& file = manifest.files[i];
    if (is_copied(file)) continue;
    const fs::path part = folder / (file.name + ".part");
    const FileDescriptor to(
        ::open(part.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
    const auto refuse = [&](const char* doing, int error) {
      folder_files::fail(part, doing, error, file.bytes);
    };
    if (!to.is_open()) refuse("making it", errno);
    if (const int error = ::posix_fallocate(to.fd(), 0, file.bytes);
        file.bytes > 0 && error != 0 && error != EOPNOTSUPP &&
        error != EINVAL) {
      ::unlink(part.c_str());
      refuse("reserving its bytes", error);
    }
    try {
      download(store, objects[i], file, to.fd());
    } catch (const StorageError& error) {
      ::unlink(part.c_str());
      if (error.code() != storage::kDamaged) throw;
      return error.what();
    }
    if (::fsync(to.fd()) != 0) refuse("synchronising it", errno);
    folder_files::rename_path(part, folder / file.name);
  }
  return "";
}

class ObjectFile : public RemoteFile {
 public:
  ObjectFile(std::shared_ptr<ObjectStore> store, const std::string& key)
      : store_(std::move(store)) {
    auto object = as_checkpoint_error([&] { return store_->find(key); });
    if (!object) {
      throw CheckpointError(store_->url(key) + ": there is no such object");
    }
    object_ = std::move(*object);
  }
  int64_t size() const override { return object_.bytes; }
  void read(int64_t offset, std::span<std::byte> to) override {
    as_checkpoint_error([&] { store_->read(object_, offset, to); });
  }

 private:
  std::shared_ptr<ObjectStore> store_;
  ObjectInfo object_;
};

}  // namespace

ObjectCheckpoints find_object_checkpoints(const std::string& url) {
  const Place place(url);
  ObjectStore& store = *place.store;
  const std::string begin = place.key.empty() ? "" : place.key + "/";
  return as_checkpoint_error([&]() -> ObjectCheckpoints {
    if (!begin.empty() && has_manifest(store, place.key)) {
      ObjectCheckpoint one{store.url(place.key)};
      if (const auto step = step_of_name(last_name(place.key))) {
        one.step = *step;
      } else {
        const fs::path path = copy_manifest(one) / folder_files::kManifest;
        one.step = parse_manifest(folder_files::read_file(path), one.url).step;
      }
      return {
          .folder = one.url.substr(0, one.url.rfind('/')),
          .checkpoints = {one}};
    }
    for (const std::string& folder : {begin + "checkpoints/", begin}) {
      auto found = find_in(store, folder);
      if (!found.checkpoints.empty()) return found;
      if (found.unfinished.empty()) continue;
      throw CheckpointError(format(
          "{}: has no whole checkpoint, only {}, an upload that was not "
          "finished",
          found.folder, found.unfinished.back()));
    }
    if (!begin.empty() && step_of_name(last_name(place.key)) &&
        !store.list(begin, 1).empty()) {
      throw CheckpointError(format(
          "{}: has no manifest.json: it is an upload that was not finished, or "
          "that is being removed; `echelon checkpoint list {}` names the whole "
          "ones",
          url, store.url(place.key.substr(0, place.key.rfind('/')))));
    }
    throw CheckpointError(format(
        "{}: there is no checkpoint: neither manifest.json nor "
        "checkpoints/step-… below it; aws s3 ls {}/ shows what there is",
        url, store.url(place.key)));
  });
}

fs::path copy_manifest(const ObjectCheckpoint& checkpoint) {
  try {
    return fs::path(storage::local_copy(
                        checkpoint.url + "/" + folder_files::kManifest))
        .parent_path();
  } catch (const DataError& error) {
    throw CheckpointError(error.what());
  }
}

OpenRemote files_of(const ObjectCheckpoint& checkpoint) {
  const Place place(checkpoint.url);
  return [place](const std::string& name) -> std::unique_ptr<RemoteFile> {
    return std::make_unique<ObjectFile>(place.store, place.key + "/" + name);
  };
}

fs::path local_checkpoint(const std::string& path) {
  if (!storage::is_object_url(path)) return path;
  const auto found = find_object_checkpoints(path);
  std::string damage;
  for (const auto& one : found.checkpoints) {
    fs::path folder;
    damage = as_checkpoint_error([&] { return copy_whole(one, folder); });
    if (damage.empty()) return folder;
    if (found.checkpoints.size() == 1) break;
    std::fprintf(
        stderr, "warning: %s is damaged and left out: %s\n", one.url.c_str(),
        damage.c_str());
  }
  throw CheckpointError(
      found.checkpoints.size() == 1
          ? format("{}: is damaged: {}", found.checkpoints[0].url, damage)
          : format(
                "no checkpoint in {} is intact; the last one: {}", found.folder,
                damage));
}

}  // namespace echelon
