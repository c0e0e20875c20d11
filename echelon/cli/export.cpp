#include <CLI/CLI.hpp>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>

#include "echelon/cli/arguments.h"
#include "echelon/cli/command_line.h"
#include "echelon/error.h"
#include "echelon/models/check_weights.h"
#include "echelon/models/hugging_face.h"

namespace echelon::cli {
namespace {

namespace fs = std::filesystem;

struct ExportArguments {
  std::string run;
  std::string out;
  std::string format = "safetensors";
  std::string max_shard_bytes = "5000000000";
};

void check_run(const std::string& run) {
  std::error_code error;
  if (!fs::exists(fs::path(run) / "config.toml", error)) {
    throw ConfigError(
        run +
        ": is no run folder, it has no config.toml; name the folder that "
        "`echelon train` wrote");
  }
}

void check_parent(const std::string& out) {
  std::error_code error;
  const fs::path parent = fs::absolute(out).parent_path();
  if (!fs::is_directory(parent, error)) {
    throw ConfigError(
        out + ": there is no folder " + parent.string() + "; make it first");
  }
}

void check_file(const std::string& out) {
  check_parent(out);
  std::error_code error;
  if (fs::is_directory(out, error)) {
    throw ConfigError(
        out + ": is a folder; name a file, as in model.safetensors");
  }
}

void check_folder(const std::string& out) {
  check_parent(out);
  std::error_code error;
  if (fs::exists(out, error) &&
      !(fs::is_directory(out, error) && fs::is_empty(out, error))) {
    throw ConfigError(out + ": is there already; name a new folder");
  }
}

void write_text(const fs::path& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary);
  out << text;
  if (!out.flush()) {
    throw CheckpointError(path.string() + ": cannot be written");
  }
}

// The language model of a run, with the vocabulary that its weights have.
LanguageModelShape
shape_of(const ModelOptions& options, const WeightsSource& weights) {
  if (!is_language_model(options)) {
    throw ConfigError(
        "[model] name=\"" + options.name +
        "\": transformers has gpt and llama models of Echelon's; leave out "
        "--format huggingface");
  }
  const auto words =
      list_language_layers(language_model_shape(options, 1)).front() +
      ".weight";
  const auto* table = weights.find(words);
  if (table == nullptr || table->info->shape.size() != 2) {
    throw DataError(weights.path() + ": has no matrix \"" + words + "\"");
  }
  return language_model_shape(options, table->info->shape[0]);
}

// What AutoTokenizer needs beside config.json.
void copy_tokenizer(
    const std::string& tokenizer,
    const LanguageModelShape& shape,
    const fs::path& out) {
  const fs::path source(tokenizer);
  std::error_code error;
  if (source.extension() != ".json" || !fs::exists(source, error)) return;
  fs::copy_file(source, out / "tokenizer.json");
  write_text(
      out / "tokenizer_config.json",
      "{\n  \"tokenizer_class\": \"PreTrainedTokenizerFast\",\n"
      "  \"model_max_length\": " +
          std::to_string(shape.max_positions) + "\n}\n");
}

int export_hugging_face(const ExportArguments& arguments) {
  check_run(arguments.run);
  check_folder(arguments.out);
  const int64_t max_shard_bytes = parse_count(
      "--max-shard-bytes",
      arguments.max_shard_bytes,
      1,
      int64_t{1} << 60);
  const fs::path run(arguments.run);
  const Job job = load_job((run / "config.toml").string());
  const auto path = run / "checkpoints" / "last.safetensors";
  std::error_code error;
  if (!fs::exists(path, error)) {
    throw DataError(
        "export: " + arguments.run +
        " has no checkpoints/last.safetensors; a run writes it when it ends");
  }
  const WeightsSource weights(path.string());
  const auto shape = shape_of(job.model, weights);
  const auto parameters = list_language_parameters(shape, job.model.dtype);
  check_weights(path.string(), parameters, path.string());
  const auto tensors = hugging_face::owned_tensors(weights, parameters);

  hugging_face::ConfigText text{.dtype = job.model.dtype};
  if (job.data.end_of_text_id >= 0) text.end_of_text = job.data.end_of_text_id;
  const fs::path out(arguments.out);
  fs::create_directories(out);
  write_text(out / "config.json", hugging_face::write_config(shape, text));
  write_text(
      out / "generation_config.json", hugging_face::generation_config(text));
  copy_tokenizer(job.data.tokenizer, shape, out);
  const auto files =
      hugging_face::write_weights(tensors, out.string(), max_shard_bytes);
  std::cout << "wrote " << arguments.out << ": config.json, "
            << (files.size() == 1
                    ? files[0]
                    : std::to_string(files.size() - 1) + " shards of weights")
            << "; " << num_parameters(parameters) << " parameters\n";
  return 0;
}

int export_run(const ExportArguments& arguments) {
  if (arguments.format == "huggingface") return export_hugging_face(arguments);
  if (arguments.format != "safetensors") {
    throw ConfigError(
        "--format " + arguments.format +
        ": must be safetensors or huggingface");
  }
  check_run(arguments.run);
  check_file(arguments.out);
  become_echelon_train({"export", arguments.run, arguments.out});
}

}  // namespace

void add_export(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand(
      "export",
      "write a run's weights as one safetensors file, or a gpt or llama as a "
      "folder that Hugging Face's transformers loads");
  command->footer(
      "echelon export runs/first first.safetensors\n"
      "echelon export runs/gpt gpt-folder --format huggingface");
  auto arguments = std::make_shared<ExportArguments>();
  command->add_option("RUN", arguments->run, "the run folder")->required();
  command->add_option("OUT", arguments->out, "the file or folder to write")
      ->required();
  command
      ->add_option(
          "--format",
          arguments->format,
          "safetensors: one file (the default); huggingface: a folder with "
          "config.json")
      ->type_name("safetensors|huggingface");
  command
      ->add_option(
          "--max-shard-bytes",
          arguments->max_shard_bytes,
          "huggingface: weights of more bytes are written as several files; "
          "5000000000 unless set")
      ->type_name("BYTES");
  command->callback([&action, arguments] {
    action = [arguments] { return export_run(*arguments); };
  });
}

}  // namespace echelon::cli
