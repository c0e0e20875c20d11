#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>

#include "echelon/cli/command_line.h"
#include "echelon/cli/terminal.h"
#include "echelon/cluster/catalogue.h"
#include "echelon/explain/explain.h"
#include "echelon/text/format.h"
#include "echelon/text/table.h"
#include "echelon/text/units.h"

namespace echelon::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kIndent = 14;  // where the texts below a heading begin

class ExplanationPrinter {
 public:
  ExplanationPrinter() {
    style_.columns = std::clamp<size_t>(style_.columns, 40, 120);
  }

  void heading(const explain::RunExplanation& run) {
    const std::string name = run.title.empty() ? "run" : run.title;
    const std::string layout = run.layout.empty() ? "" : ", " + run.layout;
    const bool fits = columns(name + layout) <= style_.columns;
    std::cout << style_.bold(name) << (fits ? layout : "") << "\n";
    if (!fits) std::cout << run.layout << "\n";
    std::cout << wrapped(figures(run), 0, style_.columns) << "\n";
  }

  void finding(size_t number, const explain::RunFinding& found) {
    const std::string title =
        std::to_string(number) + "  " +
        wrapped(explain::title_of(found), 3, style_.columns);
    std::cout << "\n" << style_.bold(title) << "\n";
    paragraph("Diagnosis", found.reason.diagnosis);
    paragraph("Fix", found.reason.fix);
    settings(found.settings);
    paragraph("Why", found.reason.why);
    if (found.gain_source != explain::GainSource::none)
      paragraph("Gain", explain::gain_text(found));
  }

  void prediction(const explain::RunExplanation& run) {
    if (run.predicted_seconds <= 0 || run.simulated) return;
    const std::string text = format(
        "Predicted on {}: {} a step; measured {}. {}", run.cluster,
        format_seconds(run.predicted_seconds), format_seconds(run.step_seconds),
        run.counted_layers ? "Layers as the run counted them."
                           : "Layers by formulas.");
    std::cout << "\n" << wrapped(text, 0, style_.columns) << "\n";
    if (run.parts.empty()) return;
    Rows rows = {{"   part of the step", "predicted", "measured"}};
    for (const auto& part : run.parts) {
      rows.push_back(
          {"   " + part.name, format_seconds(part.predicted),
           format_seconds(part.measured)});
    }
    std::cout << fitted(rows, style_.columns, true);
  }

  void nothing(const explain::RunExplanation& run) {
    std::string text =
        run.recorded_steps > 0
            ? "Nothing was found that held this run back."
            : "The metrics show nothing that held this run back.";
    if (!run.largest_wait.empty()) text += " " + run.largest_wait;
    std::cout << "\n" << prose(text, 0, style_.columns) << "\n";
  }

  void notes(const std::vector<std::string>& notes) {
    if (!notes.empty()) std::cout << "\n";
    for (const auto& note : notes) {
      std::cout << "note: " << prose(note, 6, style_.columns) << "\n";
    }
  }

 private:
  static std::string figures(const explain::RunExplanation& run) {
    std::string text = run.simulated ? "Simulated: " : "";
    text += format_seconds(run.step_seconds) + " a step";
    if (run.compute_share > 0) {
      text +=
          ", of which the ranks compute " + format_percent(run.compute_share);
    }
    if (run.recorded_steps > 0) {
      text += format(
          " ({} recorded, {})", counted(run.recorded_steps, "step"),
          counted(run.ranks, "rank"));
    }
    return text;
  }

  void settings(const std::vector<std::string>& settings) {
    for (const auto& line : split(explain::to_tables(settings))) {
      if (line.empty()) continue;
      std::cout << std::string(kIndent + 2, ' ') << line << "\n";
    }
  }

  void paragraph(const std::string& name, const std::string& text) {
    std::cout << "   " << style_.dim(name)
              << std::string(kIndent - 3 - name.size(), ' ')
              << prose(text, kIndent, style_.columns) << "\n";
  }

  Style style_ = terminal_style();
};

// By source.
constexpr const char* kGainSources[] = {
    "none", "measured", "replayed", "simulated"};

Json json_of(const explain::RunFinding& found) {
  Json json;
  json["fault"] = explain::to_string(found.fault);
  if (!found.axis.empty()) json["axis"] = found.axis;
  json["share"] = found.share;
  if (found.gain_source != explain::GainSource::none) json["gain"] = found.gain;
  json["gain_source"] = kGainSources[static_cast<size_t>(found.gain_source)];
  json["ranks"] = found.ranks;
  json["settings"] = found.settings;
  json["diagnosis"] = found.reason.diagnosis;
  json["fix"] = found.reason.fix;
  json["why"] = found.reason.why;
  return json;
}

void print_text(const explain::RunExplanation& run) {
  ExplanationPrinter printer;
  printer.heading(run);
  for (size_t i = 0; i < run.findings.size(); ++i) {
    printer.finding(i + 1, run.findings[i]);
  }
  if (run.findings.empty()) printer.nothing(run);
  printer.prediction(run);
  printer.notes(run.notes);
}

Json json_of(const explain::RunExplanation& run) {
  Json json;
  json["title"] = run.title;
  json["layout"] = run.layout;
  json["simulated"] = run.simulated;
  json["ranks"] = run.ranks;
  json["recorded_steps"] = run.recorded_steps;
  json["step_seconds"] = run.step_seconds;
  if (run.recorded_steps > 0) json["compute_share"] = run.compute_share;
  json["cluster"] = run.cluster;
  json["findings"] = Json::array();
  for (const auto& found : run.findings) {
    json["findings"].push_back(json_of(found));
  }
  if (run.predicted_seconds > 0) {
    json["predicted_seconds"] = run.predicted_seconds;
    json["layers"] = run.counted_layers ? "counted" : "formulas";
    json["parts"] = Json::array();
    for (const auto& part : run.parts) {
      json["parts"].push_back(
          {{"name", part.name},
           {"predicted", part.predicted},
           {"measured", part.measured}});
    }
  }
  json["notes"] = run.notes;
  return json;
}

struct ExplainArguments {
  std::string run;
  std::string cluster;
  bool json = false;
};

int explain(const ExplainArguments& arguments) {
  explain::ExplainOptions options;
  if (!arguments.cluster.empty()) {
    options.cluster = cluster::find_cluster(arguments.cluster);
  }
  const explain::RunExplanation run =
      explain::explain_run(arguments.run, options);
  if (arguments.json) {
    print_json(json_of(run), std::cout);
    return 0;
  }
  print_text(run);
  return 0;
}

}  // namespace

void add_explain(Command& root) {
  auto [command, arguments] = root.add(
      "explain", "what limited a run's speed, and which settings would help",
      "echelon explain runs/digits                       also while it runs\n"
      "echelon explain runs/digits --cluster here.toml   with measured "
      "bandwidths\n"
      "echelon explain elsewhere/timeline.json --json",
      explain);
  command.positional(
      "RUN", arguments.run, "a run's folder, or its timeline.json");
  command.option(
      "--cluster", arguments.cluster, "CLUSTER",
      "where fixes are simulated: a cluster file, or devices as in h100-sxm:8 "
      "(default: this machine)");
  command.flag("--json", arguments.json, "print JSON");
}

}  // namespace echelon::cli
