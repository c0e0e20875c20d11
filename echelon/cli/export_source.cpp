#include "echelon/cli/export_source.h"

#include <filesystem>

#include "echelon/checkpoint/checkpoint_tensors.h"
#include "echelon/checkpoint/folder.h"
#include "echelon/error.h"
#include "echelon/models/mapped_tensors.h"

namespace echelon::cli {
namespace {

namespace fs = std::filesystem;

bool is_there(const fs::path& path) {
  std::error_code error;
  return fs::exists(path, error);
}

ExportSource open_checkpoint(const std::vector<CheckpointPlace>& places) {
  std::string way_out;
  if (places.size() > 1) {
    way_out = "; `echelon export " + places[1].path.string() +
              " …` writes the one before it";
  }
  ExportSource source;
  source.name = places[0].path.string();
  try {
    auto tensors = std::make_unique<CheckpointTensors>(
        std::make_unique<CheckpointReader>(source.name), way_out);
    source.job = [config = tensors->manifest().config, name = source.name] {
      return parse_job(config, name + "/manifest.json: config");
    };
    source.tensors = std::move(tensors);
  } catch (const CheckpointError& error) {
    throw CheckpointError(error.what() + way_out);
  }
  return source;
}

// What a run that had no checkpoints, or an import, has left.
ExportSource open_last_weights(const fs::path& run) {
  ExportSource source;
  source.name = (run / "checkpoints/last.safetensors").string();
  source.tensors =
      std::make_unique<MappedTensors>(WeightsSource(source.name));
  source.job = [config = (run / "config.toml").string()] {
    return load_job(config);
  };
  return source;
}

}  // namespace

ExportSource open_export_source(const std::string& place) {
  const fs::path run(place);
  const bool only_weights = is_there(run / "config.toml") &&
                            is_there(run / "checkpoints/last.safetensors") &&
                            list_checkpoints(run / "checkpoints").empty();
  if (only_weights) return open_last_weights(run);
  return open_checkpoint(find_checkpoints(run));
}

}  // namespace echelon::cli
