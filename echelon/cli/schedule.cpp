#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iostream>
#include <memory>

#include "echelon/cli/arguments.h"
#include "echelon/cli/command_line.h"
#include "echelon/cli/help.h"
#include "echelon/cli/schedule_print.h"
#include "echelon/cli/terminal.h"
#include "echelon/error.h"
#include "echelon/schedule/check.h"
#include "echelon/schedule/csv.h"
#include "echelon/schedule/options.h"
#include "echelon/text/nearest.h"

namespace echelon::cli {
namespace {

const std::vector<std::string> kFormats = {"text", "csv", "json", "html"};

struct ScheduleArguments {
  std::string kind;
  std::string stages;
  std::string microbatches;
  std::string per_rank;
  std::string file;
  std::string format = "text";
  std::string output;
  bool json = false;
};

std::string joined(const std::vector<std::string>& words, const char* between) {
  std::string text;
  for (const auto& word : words) text += (text.empty() ? "" : between) + word;
  return text;
}

int32_t
number(const std::string& flag, const std::string& text, int32_t otherwise) {
  if (text.empty()) return otherwise;
  return static_cast<int32_t>(parse_count(flag, text, 1, kMaxScheduleCells));
}

Schedule generated(const ScheduleArguments& arguments) {
  if (arguments.stages.empty()) {
    throw ConfigError(
        "echelon schedule: --stages is missing: how many pipeline ranks, as in "
        "--kind 1f1b --stages 4 --microbatches 8; or name a --file");
  }
  ScheduleOptions options;
  if (!arguments.kind.empty()) options.kind = arguments.kind;
  options.ranks = number("--stages", arguments.stages, 1);
  options.microbatches = number(
      "--microbatches", arguments.microbatches,
      static_cast<int32_t>(
          std::min(int64_t{2} * options.ranks, kMaxScheduleCells)));
  options.stages_per_rank = number("--per-rank", arguments.per_rank, 0);
  return make_schedule(options);
}

Schedule read(const ScheduleArguments& arguments) {
  for (const auto& [flag, value] :
       {std::pair("--kind", arguments.kind),
        std::pair("--stages", arguments.stages),
        std::pair("--microbatches", arguments.microbatches),
        std::pair("--per-rank", arguments.per_rank)}) {
    if (value.empty()) continue;
    throw ConfigError(
        "echelon schedule: " + std::string(flag) + " " + value +
        " beside --file " + arguments.file +
        ": the file says it; leave one out");
  }
  return read_schedule_csv(arguments.file);
}

std::string format_of(const ScheduleArguments& arguments) {
  if (arguments.json) {
    if (arguments.format != "text" && arguments.format != "json") {
      throw ConfigError(
          "echelon schedule: --json beside --format " + arguments.format +
          ": leave one out");
    }
    return "json";
  }
  if (std::find(kFormats.begin(), kFormats.end(), arguments.format) ==
      kFormats.end()) {
    throw ConfigError(
        "--format " + arguments.format + ": must be one of " +
        joined(kFormats, ", ") +
        config::did_you_mean(arguments.format, kFormats));
  }
  return arguments.format;
}

void print(
    const Schedule& schedule, const std::string& format, const TextStyle& style,
    std::ostream& out) {
  if (format == "text") print_schedule_text(schedule, style, out);
  if (format == "csv") write_schedule_csv(schedule, out);
  if (format == "json") print_schedule_json(schedule, out);
  if (format == "html") print_schedule_html(schedule, out);
}

TextStyle terminal_style() {
  TextStyle style{.colours = has_colours(1)};
  style.columns = terminal_columns(style.columns);
  return style;
}

void print_to_file(
    const Schedule& schedule, const std::string& format,
    const std::string& path) {
  std::ofstream file(path, std::ios::binary);
  if (file) print(schedule, format, {}, file);
  file.close();
  if (!file) {
    throw ConfigError(
        "--output " + path + ": cannot be written: " + std::strerror(errno));
  }
}

int schedule(const ScheduleArguments& arguments) {
  const std::string format = format_of(arguments);
  const Schedule schedule =
      arguments.file.empty() ? generated(arguments) : read(arguments);
  check(schedule);
  if (arguments.output.empty()) {
    print(schedule, format, terminal_style(), std::cout);
  } else {
    print_to_file(schedule, format, arguments.output);
  }
  return 0;
}

}  // namespace

void add_schedule(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand(
      "schedule",
      "print and check the order in which a pipeline's ranks compute, its "
      "bubble and what its stages store");
  command->footer(
      "echelon schedule --kind 1f1b --stages 4 --microbatches 8\n"
      "echelon schedule --kind interleaved --stages 4 --per-rank 2 "
      "--microbatches 8\n"
      "echelon schedule --kind zb-v --stages 4 --format html --output "
      "zb-v.html\n"
      "echelon schedule --kind gpipe --stages 2 --format csv --output "
      "mine.csv\n"
      "echelon schedule --file mine.csv");
  auto arguments = std::make_shared<ScheduleArguments>();
  const auto option = [&](const char* name, std::string& value,
                          const char* help, const std::string& type) {
    command->add_option(name, value, help)->type_name(type);
  };
  option(
      "--kind", arguments->kind, "which schedule (1f1b)",
      joined(schedule_kinds(), "|"));
  option(
      "--stages", arguments->stages,
      "pipeline ranks, each of which holds a stage of the model or --per-rank",
      "RANKS");
  option(
      "--microbatches", arguments->microbatches,
      "parts of a batch that follow each other (twice the ranks)", "NUMBER");
  option(
      "--per-rank", arguments->per_rank,
      "stages that each rank holds, so that the model has RANKS * NUMBER (what "
      "the kind takes: 2 for interleaved, breadth_first, zb-v and dualpipev, "
      "else 1)",
      "NUMBER");
  option(
      "--file", arguments->file,
      "a schedule as CSV, in place of a generated one: a row for each rank, "
      "cells such as 0F1, 0B1, 0I1 and 0W1",
      "F.csv");
  option(
      "--format", arguments->format, "what to print (text)",
      joined(kFormats, "|"));
  option(
      "--output", arguments->output, "write it there, not to the terminal",
      "FILE");
  command->add_flag("--json", arguments->json, "the same as --format json");
  command->callback([&action, arguments] {
    action = [arguments] { return schedule(*arguments); };
  });
}

}  // namespace echelon::cli
