// Images in class folders: root/cat/1.jpg, root/dog/2.png.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace echelon {

struct ImageFile {
  std::string path;   // below the root: "cat/1.jpg"
  int64_t label = 0;  // index into classes
  /// Where it is within a file of several (image_shards.h); -1 bytes: all of
  /// it.
  int64_t offset = 0;
  int64_t bytes = -1;
};

struct ImageFolder {
  std::string root;
  std::vector<std::string> classes;  // folder names, ascending by their bytes
  std::vector<ImageFile> images;     // by class, then path, ascending by bytes
};

/// True for .jpg, .jpeg and .png, in any case.
bool has_image_extension(const std::string& name);

/// Finds the images of `root` without opening them. Each folder in `root` is a
/// class, with images at any depth. Names are bytes and need not be UTF-8;
/// those with a leading dot are ignored. Links to files and folders are
/// followed. Throws DataError for a folder that is missing or unreadable, a
/// loop of links, no class folder, or a class folder without images.
ImageFolder scan_image_folder(const std::string& root);

}  // namespace echelon
