#include "echelon/predict/counted_layers.h"

#include <system_error>

#include "echelon/cost/model_shape.h"
#include "echelon/cost/strategy.h"
#include "echelon/error.h"

namespace echelon::predict {
namespace {

bool computes_layers_together(const Layout& layout) {
  return layout.tp > 1 || layout.cp > 1 || layout.ep > 1;
}

// The table of a configuration with all of its values.
std::string table_of(const Job& job, const std::string& name) {
  const std::string text = "\n" + to_toml(job);
  const size_t begin = text.find("\n[" + name + "]\n");
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find("\n[", begin + 1) - begin);
}

}  // namespace

bool counts_layers(const Layout& layout, bool on_processor, bool own_layers) {
  return own_layers || (on_processor && !computes_layers_together(layout));
}

std::optional<cost::ModelShape>
read_counted_layers(const std::filesystem::path& folder) {
  const auto path = folder / kCountedLayersFile;
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) return std::nullopt;
  return cost::read_counted_model(path);
}

Configured configured_as_counted(
    const cost::ModelShape& layers, const Job& counted_for, const Job& job) {
  const bool counted_alike = job.layout.tp == layers.layer_ranks &&
                             job.layout.cp == 1 && job.layout.ep == 1;
  if (!counted_alike) {
    throw ConfigError(
        to_string(job.layout) +
        ": its layers were counted for other ranks that compute a layer "
        "together");
  }
  for (const char* table : {"model", "precision"}) {
    if (table_of(job, table) == table_of(counted_for, table)) continue;
    throw ConfigError(
        "[" + std::string(table) +
        "]: its layers were counted with other values");
  }
  Configured made{.model = layers, .strategy = configured_strategy(job)};
  if (cost::num_stages(made.strategy) !=
      cost::num_stages(configured_strategy(counted_for))) {
    for (cost::CountedLayer& layer : made.model.layers) layer.stage = -1;
  }
  return made;
}

}  // namespace echelon::predict
