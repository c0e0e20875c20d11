#include <CLI/CLI.hpp>
#include <filesystem>
#include <iostream>
#include <memory>

#include "echelon/architecture/check_weights.h"
#include "echelon/architecture/hugging_face.h"
#include "echelon/architecture/mapped_tensors.h"
#include "echelon/checkpoint/format/foreign.h"
#include "echelon/checkpoint/weights/sharded_files.h"
#include "echelon/cli/command_line.h"
#include "echelon/cli/new_folder.h"
#include "echelon/config/document.h"
#include "echelon/config/section.h"
#include "echelon/error.h"

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

// The model of a folder, in the dtype that holds its weights.
struct FolderModel {
  ModelOptions options;
  std::vector<ParameterInfo> parameters;
  std::unique_ptr<TensorSource> weights;
};

// What has no config.json is not always a Hugging Face folder that lacks it.
void check_kind(const fs::path& folder) {
  std::error_code error;
  if (fs::exists(folder / "config.json", error)) return;
  if (fs::exists(folder / "manifest.json", error)) {
    throw ConfigError(
        folder.string() +
        ": is a checkpoint of Echelon's own; `echelon train --resume` goes on "
        "from it, `echelon export` writes it for other programs");
  }
  const auto foreign = foreign_checkpoint(folder);
  if (!foreign.empty()) {
    throw CheckpointError(
        folder.string() + ": is no Hugging Face folder; " + foreign);
  }
  if (has_sharded_files(folder.string())) {
    throw CheckpointError(
        (folder / "config.json").string() +
        ": is missing; beside these files of torch.distributed.checkpoint put "
        "the "
        "config.json of their model, which "
        "`model.config.save_pretrained(FOLDER)` writes");
  }
}

std::unique_ptr<TensorSource>
open_weights(const std::string& folder, const std::string& prefix) {
  if (!has_sharded_files(folder)) {
    return std::make_unique<MappedTensors>(WeightsSource(folder, prefix));
  }
  return std::make_unique<ShardedFiles>(folder, [&](const std::string& name) {
    return name_in_model(name, prefix);
  });
}

FolderModel model_of(const std::string& folder) {
  check_kind(folder);
  FolderModel model;
  auto& options = model.options;
  options =
      hugging_face::read_config((fs::path(folder) / "config.json").string());
  const auto list = [&] {
    return list_language_parameters(
        language_model_shape(options, options.vocab_size), options.dtype);
  };
  model.parameters = list();
  model.weights = open_weights(
      folder,
      base_prefix(
          {model.parameters.front().name, model.parameters.back().name}));
  for (const auto& tensor : model.weights->tensors()) {
    if (tensor.dtype == "F64") options.dtype = "float64";
  }
  model.parameters = list();
  check_weights(model.weights->tensors(), model.parameters, folder);
  return model;
}

// Copies the folder's tokenizer, if it has one; the lines of config.toml for
// it.
std::string copy_tokenizer(
    const fs::path& folder, const NewFolder& out, const fs::path& to) {
  std::error_code error;
  const auto tokenizer = folder / "tokenizer.json";
  if (!fs::exists(tokenizer, error)) return "";
  fs::copy_file(tokenizer, out.path() / "tokenizer.json", error);
  if (error) {
    throw CheckpointError(
        tokenizer.string() + ": cannot be copied to " + to.string() + ": " +
        error.message());
  }
  return "\n[data]\nname = \"text\"\ntokenizer = " +
         in_toml(to / "tokenizer.json") + "\n";
}

int import_folder(const ImportArguments& arguments) {
  NewFolder out(arguments.out);
  auto model = model_of(arguments.folder);
  const auto tensors =
      hugging_face::owned_tensors(*model.weights, model.parameters);
  fs::create_directory(out.path() / "checkpoints");
  const fs::path file = "checkpoints/last.safetensors";
  write_tensors(
      (out.path() / file).string(), *model.weights, tensors,
      {{"format", "pt"}});
  const auto place = fs::absolute(arguments.out).lexically_normal();
  model.options.weights = (place / file).string();
  const auto data = copy_tokenizer(arguments.folder, out, place);
  out.write("config.toml", model_table(model.options) + data);
  out.move_into_place();
  std::cout
      << "wrote " << (fs::path(arguments.out) / "config.toml").string()
      << ": a " << model.options.name << " of "
      << num_parameters(model.parameters) << " parameters, with its weights\n"
      << "to train it, add what it reads ([data]) and how long ([train])\n";
  return 0;
}

}  // namespace

void add_import(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand(
      "import",
      "make a folder with a configuration and weights from a Hugging Face "
      "folder "
      "of a GPT-2 or Llama: config.json and safetensors files, also those that "
      "torch.distributed.checkpoint writes from many ranks");
  command->footer(
      "echelon import path/to/gpt2 runs/gpt2\n"
      "echelon train runs/gpt2/config.toml …      after adding data to it");
  auto arguments = std::make_shared<ImportArguments>();
  command->add_option("FOLDER", arguments->folder, "the Hugging Face folder")
      ->required();
  command->add_option("OUT", arguments->out, "the folder to write")->required();
  command->callback([&action, arguments] {
    action = [arguments] { return import_folder(*arguments); };
  });
}

}  // namespace echelon::cli
