// Memory, recorded spans, callbacks and errors of a pipeline.
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "echelon/error.h"
#include "echelon/parallel/pipeline/pipeline.h"
#include "echelon/schedule/memory.h"
#include "tests/parallel/pipeline/schedules.h"
#include "tests/parallel/pipeline/training.h"
#include "tests/support/error_text.h"
#include "tests/support/ranks.h"

namespace echelon::pipeline_behaviour_test {

using testing::Contains;
using testing::HasSubstr;
using torch::Tensor;
using training::batch_here;
using training::make_pipeline;
using training::Plan;
using training::run_step;

/// The number of a stage's tensors that are alive, and its maximum.
struct Alive {
  std::mutex mutex;
  std::map<int, int> now, most;

  void add(int stage, int change) {
    std::lock_guard lock(mutex);
    now[stage] += change;
    most[stage] = std::max(most[stage], now[stage]);
  }
  // A tensor that is counted while anything holds it.
  Tensor ones(int stage) {
    add(stage, 1);
    auto* value = new double(1.0);
    return torch::from_blob(
        value, {1},
        [this, stage, value](void*) {
          delete value;
          add(stage, -1);
        },
        torch::kFloat64);
  }
};

// Holds a counted tensor from its forward to its backward for weights.
struct CountedImpl : torch::nn::Module {
  CountedImpl(Alive& alive, int stage) : alive(alive), stage(stage) {
    weight = register_parameter("weight", torch::ones({1}, torch::kFloat64));
  }
  Tensor forward(const Tensor& x) { return x * (weight * alive.ones(stage)); }
  Alive& alive;
  int stage;
  Tensor weight;
};
TORCH_MODULE(Counted);

// Stage i is layer i, called "layer<i>".
LayerList counted_layers(Alive& alive, int32_t num_stages) {
  LayerList list;
  for (int32_t i = 0; i < num_stages; ++i) {
    list.add(
        "layer" + std::to_string(i), [&alive, i] { return Counted(alive, i); });
  }
  return list;
}

class Memory : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(
    Pipeline, Memory, testing::ValuesIn(schedule_names()),
    [](const auto& info) {
      std::string name = info.param;
      std::replace(name.begin(), name.end(), '-', '_');
      return name;
    });

// Counts the tensors that are alive, and checks the pipeline's own count.
TEST_P(Memory, MatchesTheSchedulesClaim) {
  const Plan plan{.steps = 2, .microbatches = 8};
  const Schedule schedule = schedules::named(GetParam(), 4, plan.microbatches);
  const auto claim = stored_activations(schedule).stages;
  Alive alive;
  const LayerList list = counted_layers(alive, schedule.num_stages());
  Ranks{4}.run([&](World& world) {
    Pipeline pipeline = make_pipeline(list, schedule, world.group());
    for (int step = 0; step < plan.steps; ++step) {
      const auto result = run_step(pipeline, plan, step);
      std::vector<int32_t> expected;
      for (int32_t stage : schedule.stages_of(world.rank())) {
        expected.push_back(claim[static_cast<size_t>(stage)]);
      }
      EXPECT_EQ(result.peak_stored, expected);
    }
  });
  for (const auto& [stage, most] : alive.most) {
    EXPECT_EQ(most, claim[static_cast<size_t>(stage)]) << "stage " << stage;
    EXPECT_EQ(alive.now[stage], 0) << "stage " << stage;
  }
  EXPECT_EQ(alive.most.size(), claim.size());
}

TEST(Pipeline, RecordsActionsWaitsAndTransfers) {
  const Plan plan{.steps = 1, .microbatches = 3};
  const LayerList list = nets::mlp();
  const Schedule schedule = schedules::named("zb-h1", 2, plan.microbatches);
  Ranks{2}.run([&](World& world) {
    timeline::Recorder recorder(world.rank(), 0, 1);
    recorder.begin_step(0);
    training::on_ranks(
        list, plan, schedule, world.group(), {.recorder = &recorder});
    std::vector<std::string> actions;
    std::vector<std::string> others;
    for (const auto& span : recorder.take()) {
      EXPECT_EQ(span.track, "compute");
      const bool action = span.kind == timeline::SpanKind::forward ||
                          span.kind == timeline::SpanKind::backward;
      EXPECT_EQ(action, !span.name.starts_with("wait ")) << span.name;
      (action ? actions : others).push_back(span.name);
    }
    std::vector<std::string> expected;
    for (const auto& action : schedule.ranks[world.rank()]) {
      expected.push_back(to_string(action));
    }
    EXPECT_EQ(actions, expected);
    std::vector<std::string> labels;
    for (const auto& record : world.history().snapshot()) {
      if (record.operation == "recv") labels.push_back(record.label);
    }
    EXPECT_THAT(labels, Contains(world.rank() == 0 ? "1I2" : "0F2"));
  });
}

// The receive of the next microbatch is posted while one is computed.
TEST(Pipeline, ReceivesArePostedAhead) {
  const Plan plan{.steps = 2, .microbatches = 4};
  const LayerList list = nets::mlp();
  const Schedule schedule = schedules::named("gpipe", 2, plan.microbatches);
  Ranks{2}.run([&](World& world) {
    timeline::Recorder recorder(world.rank(), 0, 1);
    int64_t before_step = 0;
    Pipeline pipeline =
        make_pipeline(list, schedule, world.group(), {.recorder = &recorder});
    for (int step = 0; step < plan.steps; ++step) {
      recorder.begin_step(step == 0 ? 1 : 0);  // the second is recorded
      before_step = timeline::steady_now_ns();
      run_step(pipeline, plan, step);
    }
    if (world.rank() == 0) return;
    std::map<std::string, timeline::Span> spans;
    for (const auto& span : recorder.take()) spans[span.name] = span;
    int checked = 0;
    for (const auto& record : world.history().snapshot()) {
      if (record.begin_ns < before_step || record.operation != "recv") {
        continue;
      }
      const auto m = record.label.back() - '0';
      if (m == 0) continue;
      const auto& earlier = spans.at("1F" + std::to_string(m - 1));
      EXPECT_LT(record.begin_ns, earlier.begin_ns) << record.label;
      ++checked;
    }
    EXPECT_EQ(checked, 3);
  });
}

TEST(Pipeline, CallsBackAroundTheLastBackward) {
  const Plan plan{.steps = 1, .microbatches = 6};
  const LayerList list = nets::mlp();
  for (const char* kind : {"1f1b", "zb-v"}) {
    const Schedule schedule = schedules::named(kind, 2, plan.microbatches);
    Ranks{2}.run([&](World& world) {
      timeline::Recorder recorder(world.rank(), 0, 1);
      recorder.begin_step(0);
      size_t done = 0;
      const auto count_done = [&] {
        for (const auto& span : recorder.take()) {
          done += span.kind != timeline::SpanKind::communication;
        }
        return done;
      };
      std::map<int32_t, size_t> calls;  // actions done before the last
      std::map<int32_t, int32_t> all_calls;
      size_t after = 0;
      training::on_ranks(
          list, plan, schedule, world.group(),
          {.recorder = &recorder,
           .before_gradients =
               [&](int32_t stage, bool last) {
                 ++all_calls[stage];
                 if (!last) return;
                 EXPECT_TRUE(calls.emplace(stage, count_done()).second);
               },
           .after_backwards = [&] { after = count_done(); }});
      const auto& actions = schedule.ranks[world.rank()];
      std::map<int32_t, size_t> expected;
      for (size_t i = 0; i < actions.size(); ++i) {
        if (actions[i].kind == ActionKind::backward ||
            actions[i].kind == ActionKind::backward_weight) {
          expected[actions[i].stage] = i;
        }
      }
      EXPECT_EQ(calls, expected);
      for (const auto& [_, count] : all_calls) {
        EXPECT_EQ(count, schedule.num_microbatches);
      }
      EXPECT_EQ(all_calls.size(), expected.size());
      EXPECT_EQ(after, actions.size());
    });
  }
}

TEST(Pipeline, ReducesOnceOverReplicas) {
  // Two pipelines of two ranks; each has half of the samples.
  Plan plan{.steps = 3, .microbatches = 4};
  for (const char* net : {"tied", "mlp"}) {
    const LayerList list = nets::named(net);
    const auto expected = training::on_one_device(list, plan);
    const Schedule schedule = schedules::named("1f1b", 2, plan.microbatches);
    Ranks{4}.run([&](World& world) {
      const int replica = world.rank() / 2;
      const Group pp = world.new_group(
          "pp", replica == 0 ? std::vector<int>{0, 1} : std::vector<int>{2, 3});
      const Group dp = world.new_group(
          "dp", world.rank() % 2 == 0 ? std::vector<int>{0, 2}
                                      : std::vector<int>{1, 3});
      auto stages = build_stages(
          list, partition_evenly(list, 2), schedule.rank_of_stage, pp.rank());
      training::Parameters parameters;
      for (const auto& item : stages[0].named_parameters()) {
        parameters.push_back(item);
      }
      int reductions = 0;
      PipelineOptions options{.ties = list.ties(), .copy_tied_values = true};
      options.after_backwards = [&] {
        ++reductions;
        for (const auto& [_, tensor] : parameters) {
          dp.all_reduce(tensor.grad());
        }
      };
      Pipeline pipeline(pp, schedule, std::move(stages), options);
      for (int step = 0; step < plan.steps; ++step) {
        auto batch = training::batch_of(plan, step);
        // The first replica takes a third of each microbatch's rows.
        const int64_t begin = replica == 0 ? 0 : 1;
        const int64_t rows = replica == 0 ? 1 : 2;
        for (auto& tensors : batch) {
          tensors[0] = tensors[0].narrow(0, begin, rows);
        }
        const auto whole = [&](const Tensors& outputs, int64_t m) {
          const Tensor target =
              parity::random(
                  {plan.rows, 4}, 5000 + 1000 * static_cast<uint64_t>(step) +
                                      static_cast<uint64_t>(m))
                  .narrow(0, begin, rows);
          return (outputs[0] - target).square().sum() /
                 static_cast<double>(plan.rows * plan.microbatches);
        };
        if (!pipeline.has_first_stage()) batch.clear();
        pipeline.step(batch, whole);
        for (const auto& [name, tensor] : parameters) {
          const auto& truth = expected.gradients[step].at(name);
          EXPECT_TRUE(torch::allclose(tensor.grad(), truth, 1e-11, 1e-13))
              << name << " step " << step;
        }
        training::update(parameters);
      }
      EXPECT_EQ(reductions, plan.steps);
    });
  }
}

// Frozen stages send no gradients back, and later steps may freeze others.
TEST(Pipeline, FrozenLayersMayChangeBetweenSteps) {
  const Plan plan{.steps = 1, .microbatches = 3};
  const LayerList list = nets::mlp();
  const Schedule schedule = schedules::named("zb-h1", 3, plan.microbatches);
  Ranks{3}.run([&](World& world) {
    Pipeline pipeline = make_pipeline(list, schedule, world.group());
    const auto parameters = pipeline.stages()[0].named_parameters();
    const auto step = [&] {
      for (const auto& [_, tensor] : parameters) {
        Tensor clear = tensor;
        clear.mutable_grad().reset();
      }
      const uint64_t before = world.history().count();
      run_step(pipeline, plan, 0);
      return world.history().count() - before;
    };
    const auto freeze = [&](bool frozen) {
      for (const auto& [_, tensor] : parameters) {
        Tensor parameter = tensor;
        parameter.requires_grad_(!frozen);
      }
    };
    step();
    const uint64_t messages = step();
    if (world.rank() == 0) freeze(true);
    step();  // learns
    const uint64_t fewer = step();
    for (const auto& [name, tensor] : parameters) {
      EXPECT_EQ(tensor.grad().defined(), world.rank() != 0) << name;
    }
    if (world.rank() < 2) {
      EXPECT_EQ(fewer, messages - 3);
    }
    if (world.rank() == 0) freeze(false);
    EXPECT_EQ(step(), messages);  // remembered
    for (const auto& [name, tensor] : parameters) {
      EXPECT_TRUE(tensor.grad().defined()) << name;
    }
  });
}

TEST(Pipeline, ScheduleMayChangeBetweenSteps) {
  const LayerList list = nets::mlp();
  Plan plan{.steps = 1, .microbatches = 4};
  const auto expected = training::on_one_device(list, plan);
  Ranks{2}.run([&](World& world) {
    Pipeline pipeline =
        make_pipeline(list, schedules::named("gpipe", 2, 2), world.group());
    pipeline.set_schedule(schedules::named("zb-h2", 2, 4));
    EXPECT_EQ(pipeline.schedule().name, "zb-h2");
    run_step(pipeline, plan, 0);
    for (const auto& [name, tensor] : pipeline.stages()[0].named_parameters()) {
      EXPECT_TRUE(torch::equal(tensor.grad(), expected.gradients[0].at(name)))
          << name;
    }
    EXPECT_THAT(
        error_text<ConfigError>(
            [&] { pipeline.set_schedule(schedules::named("zb-v", 2, 4)); }),
        HasSubstr("other ranks"));
  });
}

// How images lie in memory: where they are given and, as seen by the next stage
// and by the gradients that come back, where they arrive; one after the other.
struct Orders {
  using Strides = std::vector<int64_t>;
  std::function<Tensor(const Tensor&, int call)> give;
  std::mutex mutex;
  std::vector<Strides> given, arrived, gradients;

  void note(std::vector<Strides>& where, const Tensor& tensor) {
    std::lock_guard lock(mutex);
    where.push_back(tensor.strides().vec());
  }
};

// Stage 0 ends with "give".
LayerList images(Orders& orders) {
  LayerList list;
  nets::add_linear(list, "fc", 6, 24);
  list.add_function("give", [&orders](const Tensor& x) {
    const auto call = static_cast<int>(orders.given.size());
    const Tensor y = orders.give(x.view({-1, 2, 3, 4}), call);
    orders.note(orders.given, y);
    if (y.requires_grad()) {
      y.register_hook(
          [&orders](const Tensor& g) { orders.note(orders.gradients, g); });
    }
    return y;
  });
  list.add_function("look", [&orders](const Tensor& x) {
    orders.note(orders.arrived, x);
    return (x * 2).reshape({-1, 24});
  });
  nets::add_linear(list, "head", 24, 4);
  return list;
}

TEST(Pipeline, TensorsKeepTheirMemoryOrder) {
  const auto plain = [](const Tensor& x, int) { return x; };
  const auto channels_last = [](const Tensor& x, int) {
    return x.contiguous(torch::MemoryFormat::ChannelsLast);
  };
  const auto channels_outermost = [](const Tensor& x, int) {
    return x.transpose(0, 1).contiguous().transpose(0, 1);
  };
  const auto every_other = [](const Tensor& x, int) {
    return torch::stack({x, x}, -1).select(-1, 0);
  };
  // A step and its evaluation are nine calls: the next begins with the other
  // order.
  const auto changing = [&](const Tensor& x, int call) {
    return call % 2 == 0 ? x : channels_last(x, call);
  };
  struct Case {
    const char* name;
    std::function<Tensor(const Tensor&, int)> give;
    Orders::Strides even, odd;  // as they arrive when these calls come first
  };
  // Samples have 2 channels, 3 rows and 4 columns.
  const Orders::Strides rows = {24, 12, 4, 1}, last = {24, 1, 8, 2};
  const std::vector<Case> cases = {
      {"as they are", plain, rows, rows},
      {"channels last", channels_last, last, last},
      {"channels outermost",
       channels_outermost,
       {12, 36, 4, 1},
       {12, 36, 4, 1}},
      {"every other element", every_other, rows, rows},
      {"changing", changing, rows, last}};
  const Plan plan{.steps = 3, .microbatches = 4, .evaluate = true};
  const int evaluated = training::evaluation_of(plan).microbatches;
  for (const auto& c : cases) {
    Orders one;
    one.give = c.give;
    const auto expected = training::on_one_device(images(one), plan);
    for (const char* kind : {"1f1b", "zb-h1"}) {
      for (const bool in_order : {false, true}) {
        for (const bool vary : {false, true}) {
          Orders orders;
          orders.give = c.give;
          const LayerList list = images(orders);
          const auto schedule = schedules::named(kind, 2, plan.microbatches);
          Ranks{2}.run([&](World& world) {
            const auto actual = training::on_ranks(
                list, plan, schedule, world.group(),
                {.shapes_vary = vary, .messages_in_order = in_order});
            training::expect_part(
                expected, actual, world.rank() == 1, parity::kRounding);
          });
          // The order is that of the call, or of the first step's call where
          // the next stage knows what comes.
          std::vector<Orders::Strides> arrived, gradients;
          for (int step = 0; step < plan.steps; ++step) {
            for (int at = 0; at < plan.microbatches + evaluated; ++at) {
              const int call = vary ? static_cast<int>(arrived.size()) : at;
              arrived.push_back(call % 2 == 0 ? c.even : c.odd);
              if (at < plan.microbatches) gradients.push_back(arrived.back());
            }
          }
          const auto what = std::string(c.name) + (vary ? ", shapes vary" : "");
          EXPECT_EQ(orders.arrived, arrived) << what;
          EXPECT_EQ(orders.gradients, gradients) << what;
        }
      }
    }
  }
}

// Errors ----------------------------------------------------------------------

// The error of the first rank that fails.
std::string first_error(int ranks, const std::function<void(World&)>& body) {
  return error_text([&] { Ranks{ranks}.run(body); });
}

std::string error_of(
    const LayerList& list, const Plan& plan, const std::string& kind = "1f1b",
    const PipelineOptions& options = {}) {
  return first_error(2, [&](World& world) {
    training::on_ranks(
        list, plan, schedules::named(kind, 2, plan.microbatches), world.group(),
        options);
  });
}

TEST(PipelineErrors, OutputIsNotWhatTheNextLayerTakes) {
  LayerList list;
  nets::add_linear(list, "encoder", 6, 10);
  nets::add_linear(list, "head", 12, 4);
  EXPECT_THAT(
      error_of(list, {}),
      HasAll("rank 1", "\"head\"", "\"encoder\"", "float64 [3, 10]"));
}

// A layer whose output depends on more than its input.
LayerList moody(int changes_at) {
  LayerList list;
  nets::add_linear(list, "fc1", 6, 8);
  auto calls = std::make_shared<int>(0);
  list.add_function("moody", [calls, changes_at](const Tensor& x) {
    return ++*calls > changes_at ? x.narrow(0, 0, 2) : x;
  });
  list.add_function("next", [](const Tensor& x) { return x * 2; });
  nets::add_linear(list, "head", 8, 4);
  return list;
}

TEST(PipelineErrors, ShapeChangesOnOneRankOnly) {
  const Plan plan{.steps = 3, .microbatches = 2};
  EXPECT_THAT(
      error_of(moody(3), plan),
      HasAll(
          "\"moody\", the end of stage 0", "float64 [2, 8]", "float64 [3, 8]",
          "microbatch 1", "shapes_vary"));
}

TEST(Pipeline, ShapesMayVaryWithTheOption) {
  const Plan plan{.steps = 3, .microbatches = 2};
  EXPECT_EQ(
      error_of(moody(3), plan, "zb-h1", {.shapes_vary = true}), "no error");
}

TEST(Pipeline, AsksOnceForEachNumberOfShapes) {
  const LayerList list = nets::mlp();
  const Plan plan;
  const auto loss = training::loss_of(plan, 0);
  Ranks{2}.run([&](World& world) {
    Pipeline pipeline =
        make_pipeline(list, schedules::named("gpipe", 2, 5), world.group());
    const auto asks = [&](int64_t shapes) {
      const auto before = world.history().count();
      pipeline.step(batch_here(pipeline, plan, 0), loss, shapes);
      int64_t count = 0;
      const auto all = world.history().snapshot();
      for (size_t i = all.size() - (world.history().count() - before);
           i < all.size(); ++i) {
        count += all[i].label == "pipeline step" ? 1 : 0;
      }
      return count;
    };
    EXPECT_EQ(asks(0), 1);
    EXPECT_EQ(asks(0), 1);
    EXPECT_EQ(asks(7), 1);
    EXPECT_EQ(asks(7), 0);
    EXPECT_EQ(asks(8), 1);
    EXPECT_EQ(asks(7), 0);
    pipeline.set_schedule(schedules::named("1f1b", 2, 5));
    EXPECT_EQ(asks(7), 1);
  });
}

TEST(PipelineErrors, RanksMakeDifferentCalls) {
  const LayerList list = nets::mlp();
  const auto run = [&](const std::function<void(Pipeline&, int)>& body) {
    return first_error(2, [&](World& world) {
      Pipeline pipeline =
          make_pipeline(list, schedules::named("gpipe", 2, 5), world.group());
      body(pipeline, world.rank());
    });
  };
  const Plan plan;
  const auto loss = training::loss_of(plan, 0);
  EXPECT_THAT(
      run([&](Pipeline& pipeline, int rank) {
        if (rank == 0) pipeline.step(training::batch_of(plan, 0));
        if (rank == 1) pipeline.evaluate({});
      }),
      HasAll("step", "evaluate"));
  EXPECT_THAT(
      run([&](Pipeline& pipeline, int rank) {
        if (rank == 0) pipeline.set_schedule(schedules::named("1f1b", 2, 5));
        pipeline.step(batch_here(pipeline, plan, 0), loss);
      }),
      HasSubstr("another schedule"));
  EXPECT_THAT(
      run([&](Pipeline& pipeline, int) {
        pipeline.step(training::batch_of(plan, 0), loss);
      }),
      HasSubstr("the rank of stage 0 alone takes them"));
  EXPECT_THAT(
      run([&](Pipeline& pipeline, int rank) {
        auto batch = training::batch_of(plan, 0);
        batch.pop_back();
        pipeline.step(rank == 0 ? batch : std::vector<Tensors>{}, loss);
      }),
      HasAll("4 microbatches", "is for 5"));
  EXPECT_THAT(
      run([&](Pipeline& pipeline, int) {
        pipeline.step(batch_here(pipeline, plan, 0));
      }),
      HasSubstr("no loss function"));
  EXPECT_THAT(
      run([&](Pipeline& pipeline, int) {
        pipeline.step(
            batch_here(pipeline, plan, 0), [](const Tensors& outputs, int64_t) {
              return outputs[0].detach();
            });
      }),
      HasAll("the loss of microbatch 0", "one number"));
}

TEST(PipelineErrors, AfterAFailedCall) {
  const LayerList list = nets::mlp();
  Ranks{1}.run([&](World& world) {
    Pipeline pipeline =
        make_pipeline(list, schedules::named("gpipe", 1, 5), world.group());
    const Plan plan;
    EXPECT_ANY_THROW(pipeline.step({}, training::loss_of(plan, 0)));
    EXPECT_THAT(
        error_text([&] { run_step(pipeline, plan, 0); }),
        HasSubstr("build a new one"));
  });
}

TEST(PipelineErrors, StagesThatDoNotFitTheSchedule) {
  const LayerList list = nets::mlp();
  const auto build = [&](World& world, const Schedule& schedule, int32_t rank) {
    Pipeline pipeline(
        world.group(), schedule,
        build_stages(
            list, partition_evenly(list, schedule.num_stages()),
            schedule.rank_of_stage, rank));
  };
  Ranks{1}.run([&](World& world) {
    EXPECT_THAT(
        error_text<ConfigError>(
            [&] { build(world, schedules::named("gpipe", 2, 2), 0); }),
        HasSubstr("is for 2 ranks, but axis world has 1"));
    EXPECT_THAT(
        error_text<ConfigError>(
            [&] { build(world, schedules::named("gpipe", 1, 2), 1); }),
        HasAll("puts stages 0 on rank 0", "(none)"));
    Schedule broken = schedules::named("gpipe", 1, 2);
    broken.ranks[0].pop_back();
    EXPECT_THAT(
        error_text<ConfigError>([&] { build(world, broken, 0); }),
        HasSubstr("0B1"));
  });
  EXPECT_THAT(
      error_text<ConfigError>([&] { partition_evenly(list, 9); }),
      HasAll("9 pipeline stages", "8 layers"));
}

// The others, which wait for its outputs and gradients, end with its name.
TEST(PipelineErrors, StageThatFailsMidStep) {
  const Plan plan{.steps = 2, .microbatches = 4};
  LayerList list;
  nets::add_linear(list, "fc1", 6, 8);
  auto calls = std::make_shared<int>(0);
  list.add_function("fatal", [calls](const Tensor& x) {
    if (++*calls == 7) throw std::runtime_error("out of luck");
    return x * 1.0;
  });
  nets::add_linear(list, "head", 8, 4);
  std::mutex mutex;
  std::map<int, std::string> errors;
  EXPECT_THAT(
      first_error(
          3,
          [&](World& world) {
            try {
              training::on_ranks(
                  list, plan, schedules::named("zb-h1", 3, plan.microbatches),
                  world.group());
            } catch (const CommError& error) {
              std::lock_guard lock(mutex);
              errors[world.rank()] = error.what();
              throw;
            }
          }),
      HasAll("rank 1", "out of luck"));
  ASSERT_EQ(errors.size(), 2u);
  EXPECT_THAT(errors[0], HasAll("rank 1", "\"1"));
  EXPECT_THAT(errors[2], HasAll("rank 1", "\"1F"));
}

TEST(PipelineErrors, TiesThatDoNotFit) {
  const auto build = [](const LayerList& list, const std::vector<Tie>& ties) {
    return first_error(2, [&](World& world) {
      make_pipeline(
          list, schedules::named("gpipe", 2, 2), world.group(), {.ties = ties});
    });
  };
  LayerList list;
  nets::add_linear(list, "in", 6, 6);
  nets::add_linear(list, "out", 6, 6);
  EXPECT_THAT(
      build(list, {{"in.weight", "out.wait"}}),
      HasAll("\"out.wait\"", "in no stage"));
  EXPECT_THAT(
      build(list, {{"in.weight", "out.bias"}}), HasSubstr("shape or dtype"));
  EXPECT_THAT(
      build(list, {{"in.weight", "out.weight"}}),
      HasAll("\"in.weight\" and \"out.weight\"", "different values"));
}

}  // namespace echelon::pipeline_behaviour_test
