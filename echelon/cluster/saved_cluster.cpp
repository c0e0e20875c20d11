#include "echelon/cluster/saved_cluster.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdlib>
#include <string>
#include <system_error>

#include "echelon/cluster/cluster_file.h"

namespace echelon {
namespace {

std::filesystem::path configuration_folder() {
  // The convention: a path that is not absolute counts as not set.
  const char* set = std::getenv("XDG_CONFIG_HOME");
  if (set && std::filesystem::path(set).is_absolute()) return set;
  const char* home = std::getenv("HOME");
  if (!home || *home == '\0') return {};
  return std::filesystem::path(home) / ".config";
}

std::string host_name() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) return "here";
  std::string text = name.data();
  text.resize(std::min(text.size(), text.find('.')));
  for (char& c : text) {
    if (!std::isalnum(static_cast<unsigned char>(c)) && c != '-') c = '_';
  }
  return text.empty() ? "here" : text;
}

}  // namespace

std::filesystem::path saved_cluster_path(int64_t ranks) {
  const auto folder = configuration_folder();
  if (folder.empty()) return {};
  return folder / "echelon" / "clusters" /
         (host_name() + "-" + std::to_string(ranks) + ".toml");
}

std::optional<Cluster> saved_cluster(int64_t ranks) {
  const auto path = saved_cluster_path(ranks);
  std::error_code error;
  if (path.empty() || !std::filesystem::exists(path, error))
    return std::nullopt;
  return read_cluster(path);
}

}  // namespace echelon
