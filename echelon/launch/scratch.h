// Where the ranks of one job leave their error reports.
#pragma once

#include <string>

namespace echelon::launch {

/// A folder of our own for the ranks' error files; removed when destroyed.
class ScratchFolder {
 public:
  ScratchFolder();
  ~ScratchFolder();
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace echelon::launch
