// Images in tar files, as WebDataset writes them: members a/001.jpg and
// a/001.cls are one sample, and the latter has its class as a number.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/data/sources/image_folder.h"

namespace echelon {

struct TarMember {
  std::string name;
  int64_t offset = 0;  // of its content in the file
  int64_t bytes = 0;
};

/// The regular files of a tar file (ustar, GNU or pax), in its order, from its
/// headers alone. Throws DataError, which names file and offset, for what is no
/// tar file or ends early.
std::vector<TarMember> list_tar(const std::string& path);

/// Whether `path` names tar files: it ends in .tar.
bool is_shards(const std::string& path);

/// The images of the files that `pattern` names ("shards/*.tar"), by file and
/// then in its order. Members of one sample stand one behind the other; those
/// that are neither an image nor .cls are passed over. ImageFolder::root is
/// empty, and classes are the numbers from 0 to the largest. Throws DataError
/// for a sample without an image or a class.
ImageFolder scan_image_shards(const std::string& pattern);

}  // namespace echelon
