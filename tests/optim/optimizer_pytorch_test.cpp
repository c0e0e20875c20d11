// Every optimizer, setting, schedule and clipping compared with Python's
// torch.optim, step by step in float64.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>

#include "echelon/optim/clip.h"
#include "echelon/optim/optimizer.h"
#include "tests/support/python.h"
#include "tests/support/temp_folder.h"

namespace echelon::optimizer_pytorch_test {

constexpr int64_t kSteps = 9;

// reference.py has the same parameters. Weight decay does not apply to the last
// two.
const std::vector<std::vector<int64_t>> kShapes = {
    {5, 7}, {7}, {3, 2, 3, 3}, {67}};

int64_t total_size() {
  int64_t size = 0;
  for (const auto& shape : kShapes) {
    size += c10::multiply_integers(shape);
  }
  return size;
}

struct Case {
  OptimizerOptions options;
  std::string schedule = "constant";  // options.schedule
  double second_rate_factor = 1.0;
};

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const auto name :
       {OptimizerKind::sgd, OptimizerKind::adam, OptimizerKind::adamw}) {
    for (double decay : {0.0, 0.1}) {
      for (double clip : {0.0, 2.0}) {
        Case c;
        c.options.name = name;
        c.options.learning_rate = 0.05;
        c.options.weight_decay = decay;
        c.options.clip_norm = clip;
        cases.push_back(c);
        c.options.beta1 = 0.7;
        c.options.beta2 = 0.95;
        c.options.epsilon = 1e-3;
        c.options.momentum = 0.9;
        c.second_rate_factor = 3.0;
        cases.push_back(c);
        c.options.nesterov = true;
        cases.push_back(c);
      }
    }
  }
  const std::pair<const char*, RateSchedule> schedules[] = {
      {"constant", RateSchedule::constant},
      {"linear", RateSchedule::linear},
      {"cosine", RateSchedule::cosine},
      {"step", RateSchedule::step}};
  for (const auto& [name, schedule] : schedules) {
    for (int64_t warmup : {0, 1, 4}) {
      Case c;
      c.schedule = name;
      c.options.schedule = schedule;
      c.options.warmup_steps = warmup;
      c.options.final_factor = 0.2;
      c.options.step_every = 2;
      c.options.step_factor = 0.3;
      cases.push_back(c);
    }
  }
  return cases;
}

nlohmann::json to_json(const Case& c) {
  const auto& o = c.options;
  return {
      {"name", to_string(o.name)},
      {"learning_rate", o.learning_rate},
      {"weight_decay", o.decay()},
      {"momentum", o.momentum},
      {"nesterov", o.nesterov},
      {"beta1", o.beta1},
      {"beta2", o.beta2},
      {"epsilon", o.epsilon},
      {"clip_norm", o.clip_norm},
      {"schedule", c.schedule},
      {"warmup_steps", o.warmup_steps},
      {"final_factor", o.final_factor},
      {"step_every", o.step_every},
      {"step_factor", o.step_factor},
      {"steps", kSteps},
      {"second_rate_factor", c.second_rate_factor}};
}

std::vector<torch::Tensor> split(const torch::Tensor& flat) {
  std::vector<torch::Tensor> parts;
  int64_t at = 0;
  for (const auto& shape : kShapes) {
    const int64_t size = c10::multiply_integers(shape);
    parts.push_back(flat.narrow(0, at, size).view(shape).clone());
    at += size;
  }
  return parts;
}

// Row 0: the parameters; row 1 + s: the gradients of step s. One gradient
// exists from step 3 on, another is missing in step 5.
torch::Tensor make_values() {
  const int64_t size = total_size();
  auto values = torch::sin(
      torch::arange((kSteps + 1) * size, torch::kFloat64).mul(1.7).square());
  values = values.view({kSteps + 1, size});
  const double nan = std::numeric_limits<double>::quiet_NaN();
  values.slice(0, 1, 4).select(1, 35) = nan;  // the first bias
  values[6][0] = nan;                         // the first matrix
  return values.contiguous();
}

std::vector<double> run(const Case& c, const torch::Tensor& values) {
  std::vector<torch::Tensor> parameters;
  for (auto& part : split(values[0])) {
    parameters.push_back(part.set_requires_grad(true));
  }
  std::vector<ParameterGroup> groups(2);
  groups[0].weight_decay = c.options.decay();
  groups[1].learning_rate_factor = c.second_rate_factor;
  for (size_t i = 0; i < parameters.size(); ++i) {
    groups[parameters[i].dim() > 1 ? 0 : 1].parameters.emplace_back(
        std::to_string(i), parameters[i]);
  }
  const auto optimizer = make_optimizer(c.options, groups);
  const LearningRateSchedule schedule(c.options, kSteps);
  std::vector<double> results;
  for (int64_t step = 0; step < kSteps; ++step) {
    const auto gradients = split(values[step + 1]);
    for (size_t i = 0; i < parameters.size(); ++i) {
      const bool absent = std::isnan(gradients[i].flatten()[0].item<double>());
      parameters[i].mutable_grad() = absent ? torch::Tensor() : gradients[i];
    }
    const double norm = c.options.clip_norm > 0
                            ? clip_gradients(parameters, c.options.clip_norm)
                            : gradient_norm(parameters);
    optimizer->set_learning_rate(
        c.options.learning_rate * schedule.factor(step));
    results.push_back(optimizer->learning_rate());
    optimizer->step();
    results.push_back(norm);
    for (const auto& parameter : parameters) {
      const auto flat = parameter.detach().contiguous();
      results.insert(
          results.end(), flat.data_ptr<double>(),
          flat.data_ptr<double>() + flat.numel());
    }
  }
  return results;
}

TEST(OptimizerPytorch, FollowsTorchOptim) {
  ECHELON_NEED_PYTHON();
  const TempFolder folder;
  const auto cases = all_cases();
  auto json = nlohmann::json::array();
  for (const auto& c : cases) {
    json.push_back(to_json(c));
  }
  const auto values = make_values();
  folder.write("cases.json", json.dump());
  folder.write(
      "values.f64",
      {reinterpret_cast<const char*>(values.data_ptr()), values.nbytes()});
  run_python_script(
      "optim/reference.py",
      {folder.path("cases.json"), folder.path("values.f64"),
       folder.path("results.f64")});
  const std::string bytes = read_file(folder.path("results.f64"));
  std::vector<double> expected(bytes.size() / sizeof(double));
  std::memcpy(expected.data(), bytes.data(), bytes.size());

  const size_t per_case = kSteps * (2 + static_cast<size_t>(total_size()));
  ASSERT_EQ(expected.size(), cases.size() * per_case);
  double largest = 0.0;
  for (size_t i = 0; i < cases.size(); ++i) {
    const auto results = run(cases[i], values);
    ASSERT_EQ(results.size(), per_case);
    for (size_t k = 0; k < per_case; ++k) {
      const double difference =
          std::abs(results[k] - expected[i * per_case + k]);
      largest = std::max(largest, difference);
      ASSERT_LE(difference, 1e-12)
          << to_json(cases[i]).dump() << " step "
          << k / (2 + static_cast<size_t>(total_size()));
    }
  }
  std::cout << cases.size() << " cases, largest difference " << largest << "\n";
}

}  // namespace echelon::optimizer_pytorch_test
