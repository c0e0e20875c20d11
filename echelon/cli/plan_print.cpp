#include "echelon/cli/plan_print.h"

#include <algorithm>
#include <cmath>
#include <ostream>
#include <sstream>

#include "echelon/planner/configuration.h"
#include "echelon/planner/reasons.h"
#include "echelon/text/table.h"
#include "echelon/text/units.h"

namespace echelon::cli {
namespace {

std::string count(int64_t number) {
  return format_count(static_cast<double>(number));
}

std::string gib(double bytes) {
  return format_number(bytes / (1 << 30)) + " GiB";
}

std::string parameters_text(double parameters) {
  if (parameters >= 1e9) return format_number(parameters / 1e9) + " billion";
  return format_number(parameters / 1e6) + " million";
}

std::string cluster_text(const Cluster& cluster) {
  std::string text;
  for (const auto& group : cluster.groups) {
    text += text.empty() ? "" : " + ";
    text += count(group.count * group.node.num_devices) + " x " +
            group.node.device.name;
    if (group.count > 1) {
      text += " in " + count(group.count) + " nodes of " +
              count(group.node.num_devices);
    }
  }
  return text;
}

// "tp 12 %" for each axis that costs a part of the step.
struct Part {
  std::string name;
  double seconds = 0;
  double hidden_seconds = 0;  // of communication, beside
};

std::string axis_name(Axis axis) {
  if (axis == Axis::dp_replicate) return "dp";
  if (axis == Axis::dp_shard) return "fsdp";
  return std::string(to_string(axis));
}

std::vector<Part> parts_of(const StepEstimate& step) {
  std::vector<Part> parts = {
      {"matrix products", step.parts.matrix},
      {"memory-bound operators", step.parts.memory},
      {"computed again", step.parts.recompute}};
  for (size_t i = 0; i < kAxes.size(); ++i) {
    const double hidden =
        std::max(0.0, step.communication[i] - step.parts.exposed[i]);
    parts.push_back(
        {axis_name(kAxes[i]) + " communication", step.parts.exposed[i],
         hidden});
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

class Printer {
 public:
  Printer(const PlanRequest& request, const PlanStyle& style, std::ostream& out)
      : request_(request), style_(style), out_(out) {}

  void heading(const PlanResult& result) {
    const auto& model = request_.model;
    std::string what = bold(model.name) + ", " +
                       parameters_text(model.num_parameters()) + " parameters";
    const int64_t seq = request_.seq_len > 0 ? request_.seq_len : model.seq_len;
    if (model.transformer) what += ", sequences of " + count(seq) + " tokens";
    out_ << what << ", batch " << count(request_.global_batch) << "\n";
    out_ << cluster_text(request_.cluster) << ", "
         << to_string(request_.precision) << ", " << request_.stack << "\n";
    if (result.considered == 0) return;
    out_ << dim(wrapped(
                count(result.considered) +
                    " strategies: " + count(result.pruned) + " cannot fit, " +
                    count(result.pruned_slow) + " are slower by the bound, " +
                    count(result.estimated) + " steps estimated",
                0, style_.columns))
         << "\n";
  }

  void plans(const std::vector<Plan>& plans) {
    title(plans.size() > 1 ? "The best layouts" : "The best layout");
    for (size_t i = 0; i < plans.size(); ++i) {
      one_of_many(plans[i], static_cast<int>(i) + 1);
    }
  }

  void memory(const Plan& plan, const std::string& name) {
    title(name);
    const auto& estimate = plan.step.memory;
    if (estimate.ranks.empty()) return;
    const auto& fullest =
        estimate.ranks[static_cast<size_t>(estimate.fullest())];
    const double limit = usable_fullest_bytes(request_, plan);
    const double whole = std::max(limit, estimate.peak_bytes());
    std::vector<Bar> bars;
    for (const MemoryKind kind : kMemoryKinds) {
      if (fullest[kind] == 0) continue;
      const double bytes = static_cast<double>(fullest[kind]);
      bars.push_back({std::string(to_string(kind)), gib(bytes), bytes / whole});
    }
    bars.push_back(
        {"reserved", gib(estimate.reserved_bytes),
         estimate.reserved_bytes / whole});
    bars.push_back(
        {"of " + gib(limit) + " for a job", gib(estimate.peak_bytes()),
         estimate.peak_bytes() / whole});
    draw(bars);
    if (estimate.host_bytes > 0) {
      out_ << "  and " << gib(estimate.host_bytes)
           << " of the host's memory for each rank\n";
    }
  }

  void step(const Plan& plan) {
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

  void reason(const Reason& reason) {
    paragraph("Diagnosis", reason.diagnosis);
    paragraph("Fix", reason.fix);
  }
  void why(const Reason& reason) { paragraph("Why", reason.why); }

  void configuration(const Plan& plan) {
    std::istringstream lines(to_configuration(plan, request_));
    out_ << "\n";
    for (std::string line; std::getline(lines, line);) {
      out_ << (line.empty() ? "" : "    ") << line << "\n";
    }
  }

  void others(const std::vector<Rejected>& others) {
    if (others.empty()) return;
    title("Why not");
    for (const auto& other : others) {
      const std::string text = other.name + ": " + other.because + ".";
      out_ << "  " << wrapped(text, 2, style_.columns) << "\n";
    }
  }

  void title(const std::string& text) { out_ << "\n" << bold(text) << "\n"; }

  std::string bold(const std::string& text) const {
    return style_.colours ? "\033[1m" + text + "\033[0m" : text;
  }
  std::string dim(const std::string& text) const {
    return style_.colours ? "\033[2m" + text + "\033[0m" : text;
  }

 private:
  struct Bar {
    std::string name;
    std::string value;
    double share = 0;
    std::string percent = {};
    std::string note = {};
  };

  void paragraph(const std::string& name, const std::string& text) {
    title(name);
    out_ << "  " << wrapped(text, 2, style_.columns) << "\n";
  }

  void one_of_many(const Plan& plan, int number) {
    const StepEstimate& step = plan.step;
    const std::string place = std::to_string(number);
    std::string lead = to_string(plan.strategy);
    if (plan.devices != request_.cluster.num_devices()) {
      lead = count(plan.devices) + " devices, " + lead;
    }
    out_ << bold(place) << "  " << wrapped(lead, 3, style_.columns) << "\n";
    std::string figures =
        bold(format_seconds(step.step_seconds)) + " a step, " +
        format_count(step.tokens_per_second) +
        (request_.model.transformer ? " tokens/s" : " samples/s") +
        ", utilisation " + format_percent(step.model_flops_utilisation) + ", " +
        gib(step.memory.peak_bytes()) + " a device";
    if (plan.cost_per_step > 0) {
      figures += ", costs " + format_number(plan.cost_per_step) + " a step";
    }
    out_ << "   " << wrapped(figures, 3, style_.columns) << "\n";
    out_ << "   " << dim(wrapped(shares(step), 3, style_.columns)) << "\n";
    out_ << "   " << dim(wrapped(kinds(step), 3, style_.columns)) << "\n";
  }

  static std::string shares(const StepEstimate& step) {
    std::string text = "computing " + format_percent(computing_share(step));
    for (const Part& part : parts_of(step)) {
      if (part.name == "matrix products" ||
          part.name == "memory-bound operators") {
        continue;
      }
      text += ", " + part.name + " " +
              format_percent(part.seconds / step.step_seconds);
    }
    return text;
  }

  static std::string kinds(const StepEstimate& step) {
    if (step.memory.ranks.empty()) return "";
    const auto& fullest =
        step.memory.ranks[static_cast<size_t>(step.memory.fullest())];
    std::string text;
    for (const MemoryKind kind : kMemoryKinds) {
      if (fullest[kind] < (1 << 20)) continue;
      text += (text.empty() ? "" : ", ") + std::string(to_string(kind)) + " " +
              gib(static_cast<double>(fullest[kind]));
    }
    return text;
  }

  void draw(const std::vector<Bar>& bars) {
    std::vector<std::vector<std::string>> rows;
    const size_t width = std::min<size_t>(40, style_.columns > 84 ? 40 : 24);
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
    out_ << aligned(rows);
  }

  const PlanRequest& request_;
  const PlanStyle& style_;
  std::ostream& out_;
};

}  // namespace

void print_plan_text(
    const PlanRequest& request, const PlanResult& result,
    const PlanStyle& style, std::ostream& out) {
  Printer printer(request, style, out);
  printer.heading(result);
  if (result.plans.empty()) {
    printer.title("Nothing fits");
    if (!result.closest) return;
    printer.memory(*result.closest, "The closest, a device");
    printer.reason(result.reason);
    printer.why(result.reason);
    return;
  }
  const Plan& best = result.plans.front();
  printer.plans(result.plans);
  printer.step(best);
  printer.memory(best, "Memory of the fullest device");
  printer.reason(result.reason);
  printer.configuration(best);
  printer.why(result.reason);
  printer.others(result.others);
}

void print_alternatives_text(
    const PlanRequest& request, const std::string& key,
    const std::vector<Alternative>& rows, const PlanStyle& style,
    std::ostream& out) {
  Printer printer(request, style, out);
  printer.heading({});
  printer.title("The best plan for each " + key);
  size_t widest = 0;
  for (const auto& row : rows) widest = std::max(widest, columns(row.value));
  for (const auto& row : rows) {
    const std::string pad(widest - columns(row.value) + 2, ' ');
    std::string text = row.because;
    if (row.plan) text += " (" + to_string(row.plan->strategy) + ")";
    out << "  " << printer.bold(row.value) << pad
        << wrapped(text, widest + 4, style.columns) << "\n";
  }
}

}  // namespace echelon::cli
