// Copies of objects that are read as files.
#pragma once

#include <filesystem>
#include <string>

#include "echelon/text/file_descriptor.h"

namespace echelon::storage {

/// `path` itself, unless it is s3://…: then the path of a copy in the user's
/// cache, which keeps the object's name. It is fetched when the cache has not
/// this version of the object, by one process of the host, and becomes visible
/// when it is whole and equal to what the storage says of it (length, etag, MD5
/// where the storage gives one). Its time is that of the object.
///
/// Throws ConfigError for a wrong address or missing keys, and DataError when
/// the object is missing, refused or damaged, or the disk is full: the message
/// begins with the address.
std::string local_copy(const std::string& path);

/// Waits until no other process fetches into a folder of copies. None does
/// until the file is closed. Throws DataError.
FileDescriptor lock_copies(const std::filesystem::path& folder);

/// Whether there is such a file or object. Throws as local_copy.
bool exists_there(const std::string& path);

}  // namespace echelon::storage
