#include <CLI/CLI.hpp>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>

#include "echelon/cli/command_line.h"
#include "echelon/config/document.h"
#include "echelon/config/section.h"
#include "echelon/error.h"
#include "echelon/models/check_weights.h"
#include "echelon/models/hugging_face.h"

namespace echelon::cli {
namespace {

namespace fs = std::filesystem;

struct ImportArguments {
  std::string folder;
  std::string out;
};

config::Document document_of(ModelOptions options) {
  config::Document document;
  auto section = document.section("model", "what is trained");
  bind(section, options);
  document.finish();
  return document;
}

// The keys whose values are not the defaults.
std::string model_table(const ModelOptions& options) {
  const auto defaults = document_of({});
  const auto document = document_of(options);
  std::string text = "[model]\n";
  for (const auto& entry : document.entries()) {
    if (entry.value == defaults.entry("model." + entry.key).value) continue;
    text += entry.key + " = " + entry.value + "\n";
  }
  return text;
}

std::string in_toml(const fs::path& path) {
  return config::toml_text(std::string_view(path.string()));
}

void check_out(const fs::path& out) {
  std::error_code error;
  if (fs::exists(out, error) && !fs::is_empty(out, error)) {
    throw ConfigError(
        out.string() + ": is there already; name a new folder");
  }
  const auto parent = fs::absolute(out).parent_path();
  if (!fs::is_directory(parent, error)) {
    throw ConfigError(
        out.string() + ": there is no folder " + parent.string() +
        "; make it first");
  }
}

// The model of a folder, in the dtype that holds its weights.
ModelOptions model_of(
    const std::string& folder, std::vector<ParameterInfo>& parameters) {
  auto options =
      hugging_face::read_config((fs::path(folder) / "config.json").string());
  const auto list = [&] {
    return list_language_parameters(
        language_model_shape(options, options.vocab_size), options.dtype);
  };
  parameters = list();
  const WeightsSource weights(folder, base_prefix({parameters.front().name,
                                                   parameters.back().name}));
  for (const auto& [name, tensor] : weights.tensors()) {
    if (tensor.info->dtype == "F64") options.dtype = "float64";
  }
  parameters = list();
  return options;
}

void write_text(const fs::path& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary);
  out << text;
  if (!out.flush()) {
    throw CheckpointError(path.string() + ": cannot be written");
  }
}

int import_folder(const ImportArguments& arguments) {
  const fs::path out(arguments.out);
  check_out(out);
  std::vector<ParameterInfo> parameters;
  auto options = model_of(arguments.folder, parameters);
  check_weights(arguments.folder, parameters, arguments.folder);
  const WeightsSource weights(
      arguments.folder,
      base_prefix({parameters.front().name, parameters.back().name}));
  const auto tensors = hugging_face::owned_tensors(weights, parameters);

  const auto file = fs::absolute(out) / "checkpoints" / "last.safetensors";
  fs::create_directories(file.parent_path());
  safetensors::write(file.string(), tensors, {{"format", "pt"}});
  options.weights = file.string();
  std::string config = model_table(options);
  const auto tokenizer = fs::path(arguments.folder) / "tokenizer.json";
  std::error_code error;
  if (fs::exists(tokenizer, error)) {
    const auto copy = fs::absolute(out) / "tokenizer.json";
    fs::copy_file(tokenizer, copy);
    config += "\n[data]\nname = \"text\"\ntokenizer = " + in_toml(copy) + "\n";
  }
  write_text(out / "config.toml", config);
  std::cout << "wrote " << (out / "config.toml").string() << ": a "
            << options.name << " of " << num_parameters(parameters)
            << " parameters, with its weights\n"
            << "to train it, add what it reads ([data]) and how long ([train])\n";
  return 0;
}

}  // namespace

void add_import(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand(
      "import",
      "make a folder with a configuration and weights from a Hugging Face folder "
      "of a GPT-2 or Llama: config.json and safetensors files");
  command->footer(
      "echelon import path/to/gpt2 runs/gpt2\n"
      "echelon train runs/gpt2/config.toml …      after adding data to it");
  auto arguments = std::make_shared<ImportArguments>();
  command->add_option("FOLDER", arguments->folder, "the Hugging Face folder")
      ->required();
  command->add_option("OUT", arguments->out, "the folder to write")
      ->required();
  command->callback([&action, arguments] {
    action = [arguments] { return import_folder(*arguments); };
  });
}

}  // namespace echelon::cli
