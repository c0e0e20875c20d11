// doc/catalogue.md is what the catalogues have: every model and device, with
// sources.
//
// ECHELON_UPDATE_EXPECTED=1 writes the file anew; read it before you commit it.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>

#include "echelon/cluster/catalogue.h"
#include "echelon/cost/model_catalogue.h"
#include "tests/support/places.h"
#include "tests/support/temp_folder.h"

namespace echelon::cost::catalogue_page_test {

constexpr const char* kHead = R"(# Models and devices by name

These are the names that `--model` and `--cluster` accept. `tests/cost/catalogue_page_test.cpp` writes the tables from
the code, and fails when this page differs. `--model` also takes a Hugging Face `config.json` of another transformer;
a cluster file declares other devices ([clusters.md](clusters.md)).
)";

// The source of each model, by the beginning of its name.
constexpr std::pair<const char*, const char*> kSources[] = {
    {"gpt2", "Radford et al., 2019"},
    {"gpt3-5b", "NVIDIA NeMo's configuration of that name"},
    {"gpt3", "arXiv:2005.14165, table 2.1"},
    {"megatron", "arXiv:2104.04473, table 1"},
    {"mt-nlg", "arXiv:2201.11990"},
    {"zb-gpt", "arXiv:2401.10241, table 3"},
    {"mpt", "MosaicML's llm-foundry, its training configurations"},
    {"bloom", "arXiv:2211.05100"},
    {"llama-160m", "JackFram/llama-160m, config.json"},
    {"llama2", "arXiv:2307.09288"},
    {"llama", "arXiv:2407.21783, and the config.json of the weights"},
    {"mistral", "arXiv:2310.06825"},
    {"nemotron3", "NVIDIA's config of the weights"},
    {"nemotron4-15b", "arXiv:2402.16819"},
    {"nemotron4-340b", "arXiv:2406.11704"},
    {"qwen2.5", "arXiv:2412.15115"},
    {"qwen3", "arXiv:2505.09388"},
    {"mixtral", "arXiv:2401.04088, and the config.json of the weights"},
    {"grok1", "xai-org/grok-1"},
    {"gpt-oss", "arXiv:2508.10925"},
    {"deepseek-v2", "arXiv:2405.04434"},
    {"deepseek-v3", "arXiv:2412.19437"},
    {"kimi-k2", "arXiv:2507.20534"},
    {"resnet", "arXiv:1512.03385"},
    {"simple_cnn", "`doc/layers.md`"}};

std::string source_of(const std::string& name) {
  for (const auto& [beginning, source] : kSources) {
    if (name.starts_with(beginning)) return source;
  }
  ADD_FAILURE() << name << ": add where its sizes are from to kSources";
  return "";
}

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.5g", value);
  return text;
}

std::string millions(double value) {
  char text[32];
  const bool large = value >= 1e9;
  std::snprintf(
      text, sizeof(text), "%.4g %s", value / (large ? 1e9 : 1e6),
      large ? "B" : "M");
  return text;
}

std::string model_row(const ModelShape& model) {
  std::string row =
      "| " + model.name + " | " + millions(model.num_parameters());
  if (!model.transformer) {
    return row + " | " + std::to_string(model.layers.size()) +
           " | | | | | | | | " + source_of(model.name) + " |\n";
  }
  const TransformerShape& shape = *model.transformer;
  const auto add = [&](const std::string& cell) { row += " | " + cell; };
  add(std::to_string(shape.layers));
  add(std::to_string(shape.hidden));
  add(std::to_string(shape.heads));
  add(shape.latent ? "latent" : std::to_string(shape.key_value_heads()));
  add(std::to_string(shape.ffn_size()));
  add(shape.experts.experts > 0
          ? std::to_string(shape.experts.experts_per_token) + " of " +
                std::to_string(shape.experts.experts) + ", " +
                std::to_string(shape.experts.ffn) + " each"
          : "");
  add(std::to_string(shape.vocab) + (shape.tied ? ", tied" : ""));
  add(std::to_string(model.seq_len));
  add(source_of(model.name));
  return row + " |\n";
}

std::string models_table() {
  std::string table =
      "\n## Models\n\n"
      "| name | parameters | layers | hidden | heads | key-value heads | "
      "feed-forward | experts a token | vocabulary | tokens of a sample | "
      "source |\n"
      "|---|---|---|---|---|---|---|---|---|---|---|\n";
  for (const std::string& name : catalogue_names()) {
    table += model_row(find_model(name));
  }
  return table;
}

std::string device_row(const std::string& name) {
  const cluster::Device device = cluster::find_device(name);
  const cluster::Node node = cluster::usual_node(name);
  std::string row = "| " + name + " | " +
                    number(device.memory_bytes / double(1 << 30)) + " | " +
                    number(device.memory_bytes_per_second / 1e9);
  for (const cluster::Precision precision : cluster::kPrecisions) {
    const double peak = device.peak(precision);
    row += " | " + (peak > 0 ? number(peak / 1e12) : std::string());
  }
  row += " | " + std::to_string(node.num_devices);
  row += " | " + (node.num_devices > 1
                      ? node.inside.name + ", " +
                            number(node.inside.bytes_per_second / 1e9)
                      : std::string());
  row += " | " + node.network.name + ", " +
         number(node.network.bytes_per_second / 1e9);
  return row + " | " + device.source + " |\n";
}

std::string devices_table() {
  std::string table =
      "\n## Devices\n\n"
      "Memory is in GiB and GB/s. Peaks are dense, in TFLOP/s. Links are in "
      "GB/s of one device in one direction, inside a usual node and between "
      "nodes.\n\n| name | memory | memory rate";
  std::string line = "|---|---|---";
  for (const cluster::Precision precision : cluster::kPrecisions) {
    table += " | " + std::string(cluster::to_string(precision));
    line += "|---";
  }
  table += " | devices of a node | inside | network | source |\n" + line +
           "|---|---|---|---|\n";
  for (const std::string& name : cluster::device_names())
    table += device_row(name);
  return table;
}

TEST(CataloguePage, IsWhatTheCataloguesHave) {
  const auto path = source_path("doc/catalogue.md");
  const std::string text = kHead + models_table() + devices_table();
  if (std::getenv("ECHELON_UPDATE_EXPECTED") != nullptr) {
    std::ofstream(path, std::ios::binary) << text;
  }
  EXPECT_EQ(read_file(path), text)
      << "ECHELON_UPDATE_EXPECTED=1 writes it anew";
}

}  // namespace echelon::cost::catalogue_page_test
