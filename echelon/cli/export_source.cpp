#include "echelon/cli/export_source.h"

#include <filesystem>

#include "echelon/error.h"
#include "echelon/models/mapped_tensors.h"

namespace echelon::cli {
namespace {

namespace fs = std::filesystem;

bool is_there(const fs::path& path) {
  std::error_code error;
  return fs::exists(path, error);
}

}  // namespace

ExportSource open_export_source(const std::string& place) {
  const fs::path folder(place);
  if (!is_there(folder / "config.toml")) {
    throw ConfigError(
        place +
        ": is no run folder, it has no config.toml; name the folder that "
        "`echelon train` wrote");
  }
  const auto weights = folder / "checkpoints" / "last.safetensors";
  if (!is_there(weights)) {
    throw DataError(
        place +
        " has no checkpoints/last.safetensors; a run writes it when it ends");
  }
  ExportSource source;
  source.name = weights.string();
  source.job = load_job((folder / "config.toml").string());
  source.tensors =
      std::make_unique<MappedTensors>(WeightsSource(source.name));
  return source;
}

}  // namespace echelon::cli
