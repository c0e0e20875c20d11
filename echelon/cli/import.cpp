#include <filesystem>
#include <iostream>
#include <memory>

#include "echelon/architecture/check_weights.h"
#include "echelon/architecture/hugging_face.h"
#include "echelon/architecture/hugging_face_config.h"
#include "echelon/architecture/weights_source.h"
#include "echelon/checkpoint/format/foreign.h"
#include "echelon/checkpoint/weights/sharded_files.h"
#include "echelon/cli/command_line.h"
#include "echelon/cli/new_folder.h"
#include "echelon/config/document.h"
#include "echelon/error.h"
#include "echelon/options/bind.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

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

// The model of a folder, in a dtype that can hold its weights.
struct FolderModel {
  ModelOptions options;
  std::vector<ParameterInfo> parameters;
  std::unique_ptr<TensorSource> weights;
};

// Explains a folder without config.json, which may be of another format.
void check_kind(const fs::path& folder) {
  std::error_code error;
  if (fs::exists(folder / "config.json", error)) return;
  if (fs::exists(folder / "manifest.json", error)) {
    throw ConfigError(
        folder.string() +
        ": is a checkpoint of Echelon; `echelon train --resume` trains it "
        "further, `echelon export` writes it for other programs");
  }
  const auto foreign = foreign_checkpoint(folder);
  if (!foreign.empty()) {
    throw CheckpointError(
        folder.string() + ": is not a Hugging Face folder; " + foreign);
  }
  if (has_sharded_files(folder.string())) {
    throw CheckpointError(
        (folder / "config.json").string() +
        ": is missing; add the config.json of the model to these files of "
        "torch.distributed.checkpoint: `model.config.save_pretrained(FOLDER)` "
        "writes it");
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
    if (tensor.dtype == "F64") options.dtype = ModelDtype::float64;
  }
  model.parameters = list();
  check_weights(model.weights->tensors(), model.parameters, folder);
  return model;
}

// [data] of config.toml: samples that are as long as the model allows, and the
// folder's tokenizer, if it has one, which is copied.
std::string import_data(
    const fs::path& folder, const NewFolder& out, const fs::path& to,
    const ModelOptions& model) {
  std::string table = "\n[data]\nname = \"text\"\n";
  const int64_t usual = DataOptions{}.sequence;
  if (model.max_positions > 0 && model.max_positions < usual) {
    table += format("sequence = {}\n", model.max_positions);
  }
  std::error_code error;
  const auto tokenizer = folder / "tokenizer.json";
  if (!fs::exists(tokenizer, error)) return table;
  fs::copy_file(tokenizer, out.path() / "tokenizer.json", error);
  if (error) {
    throw CheckpointError(format(
        "{}: cannot be copied to {}: {}", tokenizer.string(), to.string(),
        error.message()));
  }
  return table + "tokenizer = " + in_toml(to / "tokenizer.json") + "\n";
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
  const auto data = import_data(arguments.folder, out, place, model.options);
  out.write("config.toml", model_table(model.options) + data);
  out.move_into_place();
  std::cout << format(
      "wrote {}: a {} of {}, with its weights\n"
      "to train it: echelon train {} --set data.path=FILE.txt --set "
      "train.steps=100 --set train.run=runs/tuned\n",
      (fs::path(arguments.out) / "config.toml").string(), model.options.name,
      counted(num_parameters(model.parameters), "parameter"),
      (fs::path(arguments.out) / "config.toml").string());
  return 0;
}

}  // namespace

void add_import(Command& root) {
  auto [command, arguments] = root.add(
      "import",
      "make a folder with a configuration and weights from a Hugging Face "
      "folder of a GPT-2, Llama, Mistral, Mixtral, Qwen 2 or Qwen 3: "
      "config.json and safetensors files, or the "
      "sharded files of torch.distributed.checkpoint",
      "echelon import path/to/gpt2 runs/gpt2\n"
      "echelon train runs/gpt2/config.toml --set data.path=a.txt --set "
      "train.epochs=1",
      import_folder);
  command.positional("FOLDER", arguments.folder, "the Hugging Face folder");
  command.positional("OUT", arguments.out, "the folder to write");
}

}  // namespace echelon::cli
