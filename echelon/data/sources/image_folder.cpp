#include "echelon/data/sources/image_folder.h"

#include <dirent.h>
#include <sys/stat.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "echelon/error.h"

namespace echelon {
namespace {

enum class Kind { file, folder, other };

struct Entry {
  std::string name;
  Kind kind = Kind::other;
};

struct FolderId {
  dev_t device;
  ino_t inode;
  bool operator==(const FolderId&) const = default;
};

Kind kind_of(mode_t mode) {
  if (S_ISREG(mode)) return Kind::file;
  return S_ISDIR(mode) ? Kind::folder : Kind::other;
}

struct stat status_of(const std::string& path) {
  struct stat status = {};
  if (::stat(path.c_str(), &status) != 0) {
    throw DataError(
        path + ": cannot be read: " + std::strerror(errno) +
        (errno == ELOOP ? "; the links lead in a circle" : ""));
  }
  return status;
}

std::vector<Entry> list(const std::string& path) {
  struct Close {
    void operator()(DIR* folder) const { ::closedir(folder); }
  };
  const std::unique_ptr<DIR, Close> folder(::opendir(path.c_str()));
  if (!folder) {
    throw DataError(path + ": cannot be read: " + std::strerror(errno));
  }
  std::vector<Entry> entries;
  errno = 0;
  while (const dirent* item = ::readdir(folder.get())) {
    Entry entry{item->d_name};
    if (entry.name[0] == '.') continue;
    if (item->d_type == DT_REG) {
      entry.kind = Kind::file;
    } else if (item->d_type == DT_DIR) {
      entry.kind = Kind::folder;
    } else {
      entry.kind = kind_of(status_of(path + "/" + entry.name).st_mode);
    }
    entries.push_back(std::move(entry));
    errno = 0;
  }
  if (errno != 0) {
    throw DataError(path + ": cannot be read: " + std::strerror(errno));
  }
  std::ranges::sort(entries, {}, &Entry::name);
  return entries;
}

class Scan {
 public:
  explicit Scan(ImageFolder& found) : found_(found) {}

  void walk(const std::string& below, int64_t label) {
    const std::string path = found_.root + "/" + below;
    const struct stat status = status_of(path);
    const FolderId id{status.st_dev, status.st_ino};
    if (std::find(open_.begin(), open_.end(), id) != open_.end()) {
      throw DataError(path + ": contains itself; the links lead in a circle");
    }
    open_.push_back(id);
    for (const auto& entry : list(path)) {
      const std::string inside = below + "/" + entry.name;
      if (entry.kind == Kind::folder) {
        walk(inside, label);
      } else if (entry.kind == Kind::file && has_image_extension(entry.name)) {
        found_.images.push_back({inside, label});
      }
    }
    open_.pop_back();
  }

 private:
  ImageFolder& found_;
  std::vector<FolderId> open_;  // from the class folder to the current one
};

}  // namespace

bool has_image_extension(const std::string& name) {
  const size_t dot = name.rfind('.');
  if (dot == std::string::npos) return false;
  std::string extension = name.substr(dot + 1);
  for (char& c : extension) {
    c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return extension == "jpg" || extension == "jpeg" || extension == "png";
}

ImageFolder scan_image_folder(const std::string& root) {
  ImageFolder found;
  found.root = root;
  while (found.root.size() > 1 && found.root.back() == '/') {
    found.root.pop_back();
  }
  struct stat status = {};
  if (::stat(root.c_str(), &status) != 0) {
    throw DataError(
        root + ": no folder of images: " + std::strerror(errno) +
        "; [data] path must name a folder of class folders");
  }
  if (!S_ISDIR(status.st_mode)) {
    throw DataError(
        root + ": is a file; [data] path must name a folder of class folders");
  }
  for (const auto& entry : list(found.root)) {
    if (entry.kind != Kind::folder) continue;
    const auto label = static_cast<int64_t>(found.classes.size());
    const size_t before = found.images.size();
    Scan(found).walk(entry.name, label);
    if (found.images.size() == before) {
      throw DataError(
          found.root + "/" + entry.name +
          ": class folder without images (.jpg, .jpeg or .png); add some or "
          "remove the folder");
    }
    found.classes.push_back(entry.name);
  }
  if (found.classes.empty()) {
    throw DataError(
        root + ": has no class folders; images are expected as " + root +
        "/CLASS/NAME.jpg");
  }
  return found;
}

}  // namespace echelon
