#include "echelon/cli/plan_text.h"

#include <algorithm>
#include <cmath>
#include <iostream>
#include <nlohmann/json.hpp>

#include "echelon/cli/terminal.h"
#include "echelon/cost/framework.h"
#include "echelon/planner/configuration.h"
#include "echelon/planner/reasons.h"
#include "echelon/planner/search_key.h"
#include "echelon/text/format.h"
#include "echelon/text/table.h"
#include "echelon/text/units.h"

namespace echelon::cli {
namespace {

std::string gib(double bytes) {
  return format_number(bytes / (1 << 30)) + " GiB";
}

std::string parameters_text(double parameters) {
  if (parameters >= 1e9) return format_number(parameters / 1e9) + " billion";
  return format_number(parameters / 1e6) + " million";
}

std::string cluster_text(const cluster::Cluster& cluster) {
  std::string text;
  for (const auto& group : cluster.groups) {
    text += format(
        "{}{} x {}", text.empty() ? "" : " + ",
        format_count(group.count * group.node.num_devices),
        group.node.device.name);
    if (group.count > 1) {
      text += format(
          " in {} of {}", counted(group.count, "node"),
          format_count(group.node.num_devices));
    }
  }
  return text;
}

// A part of the step, such as the communication of an axis.
struct Part {
  std::string name;
  double seconds = 0;
  double hidden_seconds = 0;  // communication that computation hides
};

std::vector<Part> parts_of(const cost::StepEstimate& step) {
  std::vector<Part> parts = {
      {"matmuls", step.parts.matrix},
      {"memory-bound operators", step.parts.memory},
      {"recompute", step.parts.recompute}};
  for (size_t i = 0; i < kAxes.size(); ++i) {
    const double hidden =
        std::max(0.0, step.communication[i] - step.parts.exposed[i]);
    parts.push_back(
        {format("{} communication", short_name(kAxes[i])),
         step.parts.exposed[i], hidden});
  }
  parts.push_back({"bubble", step.parts.bubble});
  parts.push_back({"optimizer", step.parts.optimizer});
  parts.push_back({"other", step.parts.other});
  std::erase_if(parts, [&](const Part& part) {
    return part.seconds < 5e-4 * step.step_seconds &&
           part.hidden_seconds < 5e-4 * step.step_seconds;
  });
  return parts;
}

const timeline::MemoryByKind& fullest_rank(const cost::MemoryEstimate& memory) {
  return memory.ranks[static_cast<size_t>(memory.fullest())];
}

class PlanPrinter {
 public:
  explicit PlanPrinter(const planner::PlanRequest& request)
      : request_(request) {
    style_.columns = std::min<size_t>(style_.columns, 120);
  }

  void heading(const planner::PlanResult& result) {
    const auto& model = request_.model;
    const int64_t seq = request_.seq_len > 0 ? request_.seq_len : model.seq_len;
    const std::string job = format(
        ", {} parameters{}, batch {}", parameters_text(model.num_parameters()),
        model.transformer ? ", sequences of " + counted(seq, "token") : "",
        format_count(request_.global_batch));
    const std::string lines = wrapped(model.name + job, 0, style_.columns);
    const size_t bold = lines.starts_with(model.name) ? model.name.size() : 0;
    std::cout << style_.bold(lines.substr(0, bold)) << lines.substr(bold)
              << "\n";
    const std::string place = format(
        "{}, {}, {}", cluster_text(request_.cluster),
        cluster::to_string(request_.precision), request_.framework);
    std::cout << wrapped(place, 0, style_.columns) << "\n";
    expert_load(result);
    if (result.considered == 0) return;
    const std::string searched = format(
        "{} {}: {} cannot fit, {} are slower by the bound, {} estimated, {} "
        "simulated",
        format_count(result.considered),
        result.considered == 1 ? "strategy" : "strategies",
        format_count(result.pruned), format_count(result.pruned_slow),
        counted(result.estimated, "step"), format_count(result.simulated));
    std::cout << style_.dim(wrapped(searched, 0, style_.columns)) << "\n";
    if (request_.free_share <= 0) return;
    const std::string free = format_percent(request_.free_share) +
                             " of each device's memory stays free (--free)";
    std::cout << wrapped(free, 0, style_.columns) << "\n";
  }

  // How uneven experts are in the best plan that shares them.
  void expert_load(const planner::PlanResult& result) const {
    for (const auto& plan : result.plans) {
      const int64_t ep = plan.strategy.layout.ep;
      const double busiest = request_.model.expert_load.of_busiest_rank(ep);
      if (busiest <= 1) continue;
      const std::string text = format(
          "with ep={}, the busiest rank has {:.3g} times the mean of tokens "
          "(--expert-load)",
          ep, busiest);
      std::cout << wrapped(text, 0, style_.columns) << "\n";
      return;
    }
  }

  // A row for each layout.
  void table(const std::vector<planner::Plan>& plans) {
    title(plans.size() > 1 ? "The best layouts" : "The best layout");
    Rows rows = {{"", "layout", "a step", "MFU", "memory of a device"}};
    const bool priced = plans[0].cost_per_step > 0;
    if (priced) rows[0].push_back("cost of a step");
    for (size_t i = 0; i < plans.size(); ++i) {
      const planner::Plan& plan = plans[i];
      std::string layout = to_string(plan.strategy.layout);
      if (plan.devices != request_.cluster.num_devices()) {
        layout += " (" + counted(plan.devices, "device") + ")";
      }
      rows.push_back(
          {"  " + std::to_string(i + 1), layout,
           format_seconds(plan.step.step_seconds),
           format_percent(plan.step.model_flops_utilisation),
           gib(plan.step.memory.peak_bytes())});
      if (priced) rows.back().push_back(format_number(plan.cost_per_step));
    }
    std::cout << fitted(rows, style_.columns, true);
  }

  void details(const std::vector<planner::Plan>& plans) {
    title("The layouts in detail");
    for (size_t i = 0; i < plans.size(); ++i) {
      const auto text = cost::to_string(plans[i].strategy);
      std::cout << style_.bold(std::to_string(i + 1)) << "  "
                << wrapped(text, 3, style_.columns) << "\n";
      for (const auto& line : {shares(plans[i].step), kinds(plans[i].step)}) {
        std::cout << "   " << style_.dim(wrapped(line, 3, style_.columns))
                  << "\n";
      }
    }
  }

  void memory(const planner::Plan& plan, const std::string& name) {
    title(name);
    const auto& estimate = plan.step.memory;
    if (estimate.ranks.empty()) return;
    const timeline::MemoryByKind& fullest = fullest_rank(estimate);
    const double limit = planner::usable_fullest_bytes(request_, plan);
    const double scale = std::max(limit, estimate.peak_bytes());
    std::vector<Bar> bars;
    for (const timeline::MemoryKind kind : timeline::kMemoryKinds) {
      if (fullest[kind] == 0) continue;
      const double bytes = static_cast<double>(fullest[kind]);
      bars.push_back(
          {std::string(timeline::to_string(kind)), gib(bytes), bytes / scale});
    }
    bars.push_back(
        {"reserved", gib(estimate.reserved_bytes),
         estimate.reserved_bytes / scale});
    bars.push_back(
        {"of " + gib(limit) + " for a job", gib(estimate.peak_bytes()),
         estimate.peak_bytes() / scale});
    draw(bars);
    if (estimate.host_bytes > 0) {
      const std::string host =
          "and " + gib(estimate.host_bytes) + " of host memory per rank";
      std::cout << "  " << wrapped(host, 2, style_.columns) << "\n";
    }
  }

  void step(const planner::Plan& plan) {
    title("A step of " + format_seconds(plan.step.step_seconds));
    std::vector<Bar> bars;
    for (const Part& part : parts_of(plan.step)) {
      const double share = part.seconds / plan.step.step_seconds;
      std::string note;
      if (part.hidden_seconds > 0.0005 * plan.step.step_seconds) {
        note = "+" + format_seconds(part.hidden_seconds) + " hidden";
      }
      bars.push_back(
          {part.name, format_seconds(part.seconds), share,
           format_percent(share), note});
    }
    draw(bars);
  }

  void configuration(const planner::Plan& plan) {
    std::cout << "\n";
    for (const auto& line : split(planner::to_configuration(plan, request_))) {
      std::cout << (line.empty() ? "" : "    ") << line << "\n";
    }
  }

  void others(const std::vector<planner::Rejected>& others) {
    if (others.empty()) return;
    title("Why not");
    for (const auto& other : others) {
      const std::string text = other.name + ": " + other.because + ".";
      std::cout << "  " << wrapped(text, 2, style_.columns) << "\n";
    }
  }

  void alternatives(
      const std::string& key, const std::vector<planner::Alternative>& rows) {
    heading({});
    title("The best plan for each " + key);
    size_t widest = 0;
    for (const auto& row : rows) widest = std::max(widest, columns(row.value));
    for (const auto& row : rows) {
      const std::string pad(widest - columns(row.value) + 2, ' ');
      std::string text = row.because;
      if (row.plan) text += " (" + cost::to_string(row.plan->strategy) + ")";
      std::cout << "  " << style_.bold(row.value) << pad
                << wrapped(text, widest + 4, style_.columns) << "\n";
    }
  }

  void sizes(const std::vector<planner::Alternative>& sizes) {
    heading({});
    title("The best layout for each number of devices");
    Rows rows = {
        {"  devices", "layout", "a step", "samples/s", "of a device",
         "memory of a device"}};
    for (const auto& size : sizes) {
      if (!size.plan) {
        rows.push_back({"  " + size.value, size.because, "", "", "", ""});
        continue;
      }
      const double rate = static_cast<double>(request_.global_batch) /
                          size.plan->step.step_seconds;
      rows.push_back(
          {"  " + size.value, to_string(size.plan->strategy.layout),
           format_seconds(size.plan->step.step_seconds), format_number(rate),
           format_number(rate / static_cast<double>(size.plan->devices)),
           gib(size.plan->step.memory.peak_bytes())});
    }
    std::cout << fitted(rows, style_.columns, true);
  }

  void paragraph(const std::string& name, const std::string& text) {
    title(name);
    std::cout << "  " << prose(text, 2, style_.columns) << "\n";
  }

  void title(const std::string& text) {
    std::cout << "\n" << style_.bold(text) << "\n";
  }

 private:
  struct Bar {
    std::string name;
    std::string value;
    double share = 0;
    std::string percent = {};
    std::string note = {};
  };

  static std::string shares(const cost::StepEstimate& step) {
    std::string text =
        "computing " + format_percent(planner::computing_share(step));
    for (const Part& part : parts_of(step)) {
      if (part.name == "matmuls" || part.name == "memory-bound operators") {
        continue;
      }
      text += format(
          ", {} {}", part.name,
          format_percent(part.seconds / step.step_seconds));
    }
    return text;
  }

  static std::string kinds(const cost::StepEstimate& step) {
    if (step.memory.ranks.empty()) return "";
    const timeline::MemoryByKind& fullest = fullest_rank(step.memory);
    std::string text;
    for (const timeline::MemoryKind kind : timeline::kMemoryKinds) {
      if (fullest[kind] < (1 << 20)) continue;
      text += format(
          "{}{} {}", text.empty() ? "" : ", ", timeline::to_string(kind),
          gib(static_cast<double>(fullest[kind])));
    }
    return text;
  }

  // Bars as long as there is room for, none on a narrow terminal.
  void draw(const std::vector<Bar>& bars) {
    size_t width = style_.columns > 84 ? 40 : 24;
    while (width > 0 && widest(drawn(bars, width)) > style_.columns) width -= 8;
    std::cout << fitted(drawn(bars, width), style_.columns, false);
  }

  static size_t widest(const Rows& rows) {
    size_t most = 0;
    for (const auto& line : split(aligned(rows))) {
      most = std::max(most, columns(line));
    }
    return most;
  }

  static Rows drawn(const std::vector<Bar>& bars, size_t width) {
    Rows rows;
    for (const Bar& bar : bars) {
      const auto full = static_cast<size_t>(std::lround(
          std::clamp(bar.share, 0.0, 1.0) * static_cast<double>(width)));
      std::string blocks;
      for (size_t i = 0; i < full; ++i) blocks += "█";
      rows.push_back({"  " + bar.name, bar.value});
      if (!bar.percent.empty()) rows.back().push_back(bar.percent);
      rows.back().push_back(
          blocks + (bar.note.empty() ? "" : (full > 0 ? " " : "") + bar.note));
    }
    return rows;
  }

  const planner::PlanRequest& request_;
  Style style_ = terminal_style(100);
};

using Json = nlohmann::ordered_json;

Json strategy_json(const cost::Strategy& strategy) {
  Json json;
  json["text"] = cost::to_string(strategy);
  for (const auto& key : planner::search_keys()) {
    const int64_t value = key.value(strategy);
    if (key.words.empty()) {
      json[key.name] = value;
    } else if (key.words[0] == "false") {
      json[key.name] = value == 1;
    } else {
      json[key.name] = key.text_of(value);
    }
  }
  return json;
}

Json by_axis(const std::array<double, 6>& seconds) {
  Json json;
  for (size_t i = 0; i < kAxes.size(); ++i) {
    json[std::string(to_string(kAxes[i]))] = seconds[i];
  }
  return json;
}

Json memory_json(const cost::MemoryEstimate& memory) {
  Json json;
  json["peak_bytes"] = memory.peak_bytes();
  json["reserved_bytes"] = memory.reserved_bytes;
  json["host_bytes"] = memory.host_bytes;
  for (const auto& rank : memory.ranks) {
    Json kinds;
    for (const timeline::MemoryKind kind : timeline::kMemoryKinds) {
      kinds[std::string(timeline::to_string(kind))] = rank[kind];
    }
    json["pipeline_ranks"].push_back(kinds);
  }
  return json;
}

Json plan_json(const planner::Plan& plan, const planner::PlanRequest& request) {
  const cost::StepEstimate& step = plan.step;
  const cost::StepParts& parts = step.parts;
  Json json;
  json["strategy"] = strategy_json(plan.strategy);
  json["devices"] = plan.devices;
  json["step_seconds"] = step.step_seconds;
  json[request.model.transformer ? "tokens_per_second" : "samples_per_second"] =
      step.tokens_per_second;
  json["model_flops_utilisation"] = step.model_flops_utilisation;
  json["computing_share"] = planner::computing_share(step);
  json["cost_per_step"] = plan.cost_per_step;
  json["seconds"] = {{"matrix", parts.matrix},       {"memory", parts.memory},
                     {"recompute", parts.recompute}, {"bubble", parts.bubble},
                     {"optimizer", parts.optimizer}, {"other", parts.other}};
  json["exposed_seconds"] = by_axis(parts.exposed);
  json["communication_seconds"] = by_axis(step.communication);
  json["memory"] = memory_json(step.memory);
  json["fits"] = step.fits;
  json["configuration"] = planner::to_configuration(plan, request);
  return json;
}

Json with_plan(
    Json json, const std::optional<planner::Plan>& plan,
    const planner::PlanRequest& request) {
  if (plan) json["plan"] = plan_json(*plan, request);
  return json;
}

}  // namespace

void print_plan_text(
    const planner::PlanRequest& request, const planner::PlanResult& result,
    bool verbose) {
  PlanPrinter printer(request);
  printer.heading(result);
  const planner::Reason& reason = result.reason;
  if (result.plans.empty()) {
    printer.title("Nothing fits");
    printer.paragraph("Need", reason.diagnosis);
    printer.paragraph("The closest plan", reason.fix);
    printer.memory(*result.closest, "Memory of its fullest device");
    printer.paragraph("What would do", reason.why);
    return;
  }
  const planner::Plan& best = result.plans.front();
  printer.table(result.plans);
  printer.paragraph("Need", reason.diagnosis);
  printer.paragraph("Plan", reason.fix);
  printer.paragraph("Why", reason.why);
  if (!verbose) {
    printer.paragraph(
        "More",
        "--verbose prints the details, --output plan.toml writes the "
        "configuration for echelon train.");
    return;
  }
  printer.details(result.plans);
  printer.step(best);
  printer.memory(best, "Memory of the fullest device");
  printer.title("The configuration for echelon train");
  printer.configuration(best);
  printer.others(result.others);
}

void print_plan_json(
    const planner::PlanRequest& request, const planner::PlanResult& result) {
  Json json;
  json["model"] = request.model.name;
  json["parameters"] = request.model.num_parameters();
  json["cluster"] = request.cluster.name;
  json["devices"] = request.cluster.num_devices();
  json["usable_bytes"] = planner::usable_device_bytes(request.cluster);
  json["free_share"] = request.free_share;
  json["batch"] = request.global_batch;
  json["stack"] = request.framework;
  json["considered"] = result.considered;
  json["pruned_by_memory"] = result.pruned;
  json["pruned_by_time"] = result.pruned_slow;
  json["estimated"] = result.estimated;
  json["simulated"] = result.simulated;
  json["bound"] = result.bound;
  json["plans"] = Json::array();
  for (const auto& plan : result.plans) {
    json["plans"].push_back(plan_json(plan, request));
  }
  if (result.closest) json["closest"] = plan_json(*result.closest, request);
  if (result.smallest) {
    json["smallest_cluster"] = plan_json(*result.smallest, request);
  }
  json["need"] = result.reason.diagnosis;
  json["plan"] = result.reason.fix;
  json["why"] = result.reason.why;
  json["others"] = Json::array();
  for (const auto& other : result.others) {
    json["others"].push_back(with_plan(
        {{"name", other.name}, {"because", other.because}}, other.plan,
        request));
  }
  print_json(json, std::cout);
}

void print_alternatives_json(
    const planner::PlanRequest& request, const std::string& key,
    const std::vector<planner::Alternative>& rows) {
  Json json;
  json["key"] = key;
  json["values"] = Json::array();
  for (const auto& row : rows) {
    json["values"].push_back(with_plan(
        {{"value", row.value}, {"because", row.because}}, row.plan, request));
  }
  print_json(json, std::cout);
}

void print_alternatives_text(
    const planner::PlanRequest& request, const std::string& key,
    const std::vector<planner::Alternative>& rows) {
  PlanPrinter(request).alternatives(key, rows);
}

void print_sizes_text(
    const planner::PlanRequest& request,
    const std::vector<planner::Alternative>& rows) {
  PlanPrinter(request).sizes(rows);
}

}  // namespace echelon::cli
