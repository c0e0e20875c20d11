#include "echelon/simulator/event_run.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "echelon/schedule/options.h"
#include "echelon/schedule/timing.h"

namespace echelon::simulator::event_run_test {

Instruction meet(int16_t group, double seconds) {
  Instruction one{.kind = Instruction::Kind::collective};
  one.group = group;
  one.collective_seconds = seconds;
  return one;
}

Instruction launched(int16_t group, int16_t tag, double seconds) {
  Instruction one = meet(group, seconds);
  one.kind = Instruction::Kind::launch;
  one.stream = Stream::reduce;
  one.tag = tag;
  return one;
}

Instructions computing(double seconds) {
  Instructions list;
  add_compute(list, Work::matrix, seconds);
  return list;
}

// F = 1, I = W = 1, B = 2, in each of v stages 1/v of it.
Program unit_program(size_t stages) {
  const double part = 1.0 / static_cast<double>(stages);
  Program program;
  program.passes = {
      computing(part), computing(2 * part), computing(part), computing(part)};
  program.stages.resize(stages);
  for (auto& stage : program.stages) {
    for (size_t kind = 0; kind < 4; ++kind) {
      stage.pass[kind].fill(static_cast<int32_t>(kind));
    }
  }
  return program;
}

struct Setting {
  Layout layout;
  Schedule schedule;
  std::vector<AxisMask> axes;
  bool symmetry = true;
};

// Every rank of a coordinate along pp runs programs[coordinate]; links: in and
// out of each class.
SimulatedJob job_of(
    const Setting& setting, const std::vector<Program>& programs,
    double message_seconds = 0) {
  const Mesh mesh(setting.layout);
  RankColours colours{.axes = setting.axes};
  const int64_t pp = setting.layout.pp;
  colours.pipeline.resize(static_cast<size_t>(pp));
  for (int64_t p = 0; p < pp; ++p) {
    for (int64_t q = 0; q < pp; ++q) {
      if (p != q) colours.pipeline[static_cast<size_t>(p)].push_back(q);
    }
  }
  for (int64_t rank = 0; rank < mesh.size(); ++rank) {
    colours.of_rank.push_back(
        static_cast<uint64_t>(mesh.coordinate(rank, Axis::pp)));
  }
  SimulatedJob job{
      .classes = find_classes(mesh, colours, setting.symmetry),
      .schedule = setting.schedule};
  job.num_links = 2 * job.classes.classes.size();
  for (size_t c = 0; c < job.classes.classes.size(); ++c) {
    const RankClass& one = job.classes.classes[c];
    SimulatedRank rank;
    rank.program = &programs[static_cast<size_t>(one.stage_rank)];
    const auto out = static_cast<int32_t>(2 * c);
    rank.forward.assign(
        rank.program->stages.size(),
        {.seconds = message_seconds, .links = {out}});
    rank.backward = rank.forward;
    job.ranks.push_back(rank);
  }
  for (const GroupClass& group : job.classes.groups) {
    std::vector<int32_t> links;
    for (const int32_t member : group.members) links.push_back(2 * member);
    job.group_links.push_back(links);
  }
  job.group_shares.assign(job.classes.groups.size(), false);
  return job;
}

Schedule
made(const char* kind, int32_t ranks, int32_t microbatches, int32_t v = 0) {
  return make_schedule({schedule_kind(kind), ranks, microbatches, v});
}

double step_of(const Setting& setting, double transfer = 0) {
  std::vector<Program> programs;
  for (int32_t p = 0; p < setting.schedule.num_ranks(); ++p) {
    programs.push_back(unit_program(setting.schedule.stages_of(p).size()));
  }
  return run_step(job_of(setting, programs, transfer), 0).seconds;
}

TEST(EventRun, BubbleOfGPipeAndOf1F1B) {
  for (const char* kind : {"gpipe", "1f1b"}) {
    for (const int p : {1, 2, 4, 8}) {
      for (const int m : {8, 16, 33}) {
        const Setting setting{{.pp = p}, made(kind, p, m), {}};
        EXPECT_NEAR(step_of(setting), 3.0 * (m + p - 1), 1e-9)
            << kind << " " << p << " " << m;
      }
    }
  }
}

TEST(EventRun, InterleavingMakesTheBubbleVTimesSmaller) {
  for (const int v : {2, 3, 4}) {
    const int p = 4, m = 8;
    const Setting setting{{.pp = p}, made("interleaved", p, m, v), {}};
    EXPECT_NEAR(step_of(setting), 3.0 * (m + (p - 1.0) / v), 1e-9) << v;
  }
}

TEST(EventRun, ZeroBubbleSchedulesKeepTheirPromise) {
  const int p = 4, m = 16;
  // H1: a third of 1F1B's bubble.
  EXPECT_NEAR(
      step_of({{.pp = p}, made("zb-h1", p, m), {}}), 3.0 * m + (p - 1), 1e-9);
  // H2 and V: each rank works without a pause, the last begins p - 1 later.
  EXPECT_LE(
      step_of({{.pp = p}, made("zb-h2", p, m), {}}), 3.0 * m + (p - 1) + 1e-9);
}

TEST(EventRun, AgreesWithTheTimingOfEverySchedule) {
  for (const auto& kind : schedule_names()) {
    const Schedule schedule = made(kind.c_str(), 4, 12);
    const size_t v = schedule.stages_of(0).size();
    const double part = 1.0 / static_cast<double>(v);
    const std::vector<StageCost> costs(
        static_cast<size_t>(schedule.num_stages()),
        StageCost{part, 2 * part, part, part, 0.125});
    const double step = step_of({{.pp = 4}, schedule, {}}, 0.125);
    EXPECT_NEAR(step, time_schedule(schedule, costs).makespan, 1e-9) << kind;
  }
}

TEST(EventRun, ACollectiveWaitsForTheSlowest) {
  std::vector<Program> programs = {unit_program(1)};
  programs[0].passes[0].push_back(meet(0, 0.25));
  Setting setting{{.tp = 4}, made("1f1b", 1, 1), {mask_of(Axis::tp)}, false};
  SimulatedJob job = job_of(setting, programs);
  job.ranks[2].slowness = 1.5;
  const StepRun run = run_step(job, 0);
  EXPECT_NEAR(run.seconds, 1.5 + 0.25 + 3, 1e-12);
  EXPECT_NEAR(run.ranks[0].exposed[0], 0.75, 1e-12);
  EXPECT_NEAR(run.ranks[2].exposed[0], 0.25, 1e-12);
  EXPECT_NEAR(run.ranks[0].communication[0], 0.25, 1e-12);
}

// Two replicas with this backward, which wait at the end for what they
// launched.
double step_with(const Instructions& backward, bool shared = false) {
  std::vector<Program> programs = {unit_program(1)};
  programs[0].passes[1] = backward;
  programs[0].finish = {Instruction{.kind = Instruction::Kind::wait_all}};
  programs[0].num_tags = 2;
  const Setting setting{
      {.dp_replicate = 2}, made("1f1b", 1, 1), {mask_of(Axis::dp_replicate)}};
  SimulatedJob job = job_of(setting, programs);
  job.group_shares.assign(job.group_shares.size(), shared);
  return run_step(job, 0).seconds;
}

// Backward 2 s, then a reduction of the gradients that were launched at its
// middle.
double overlapped(double seconds) {
  Instructions backward = computing(1);
  backward.push_back(launched(0, 0, seconds));
  add_compute(backward, Work::matrix, 1);
  return step_with(backward);
}

TEST(EventRun, WhatRunsBesideComputingCostsNothingUntilItIsLonger) {
  EXPECT_NEAR(overlapped(0), 3, 1e-12);
  EXPECT_NEAR(overlapped(0.5), 3, 1e-12);
  EXPECT_NEAR(overlapped(1), 3, 1e-12);
  EXPECT_NEAR(overlapped(4), 6, 1e-12);
}

TEST(EventRun, CollectivesOfAStreamFollowEachOther) {
  EXPECT_NEAR(step_with({launched(0, 0, 2), launched(0, 1, 3)}), 6, 1e-12);
}

// Gathers and reductions that are launched together, on a link of their own or
// one.
double two_flows(bool shared) {
  Instruction gather = launched(0, 0, 2);
  gather.stream = Stream::gather;
  return step_with({gather, launched(0, 1, 2)}, shared);
}

TEST(EventRun, TwoEqualFlowsOfALinkTakeTwiceAsLong) {
  EXPECT_NEAR(two_flows(false), 1 + 2, 1e-12);
  EXPECT_NEAR(two_flows(true), 1 + 4, 1e-12);
}

// Something of everything: tp inside of passes, gradients launched in the last
// backward, messages that share links with them.
std::vector<Program> everything(size_t ranks, size_t stages) {
  std::vector<Program> programs;
  for (size_t p = 0; p < ranks; ++p) {
    Program program = unit_program(stages);
    for (size_t kind = 0; kind < 4; ++kind) {
      program.passes[kind].push_back(meet(0, 0.03));
      add_compute(
          program.passes[kind], Work::memory,
          0.1 + 0.01 * static_cast<double>(p + kind));
    }
    Instructions last = program.passes[1];
    last.insert(last.begin() + 1, launched(1, 0, 0.7));
    last.push_back(launched(1, 1, 0.4));
    program.passes.push_back(last);
    for (auto& stage : program.stages) {
      stage.pass[static_cast<size_t>(ActionKind::backward)][2] = 4;
      stage.pass[static_cast<size_t>(ActionKind::backward)][3] = 4;
    }
    program.finish = {Instruction{.kind = Instruction::Kind::wait_all}};
    add_compute(program.finish, Work::optimizer, 0.5);
    program.num_tags = 2;
    programs.push_back(program);
  }
  return programs;
}

TEST(EventRun, EachRankByItselfGivesTheSame) {
  const Layout layouts[] = {
      {.dp_replicate = 4},
      {.tp = 4},
      {.pp = 4},
      {.dp_replicate = 3, .tp = 2, .pp = 4},
      {.dp_replicate = 2, .tp = 3, .pp = 2}};
  for (const Layout& layout : layouts) {
    for (const bool shares : {false, true}) {
      const auto pp = static_cast<int32_t>(layout.pp);
      Setting setting{
          layout,
          pp > 1 ? made("interleaved", pp, 8, 2) : made("1f1b", 1, 8),
          {mask_of(Axis::tp), mask_of(Axis::dp_replicate)}};
      const auto programs = everything(static_cast<size_t>(pp), pp > 1 ? 2 : 1);
      double seconds[2];
      for (const bool symmetry : {false, true}) {
        setting.symmetry = symmetry;
        SimulatedJob job = job_of(setting, programs, 0.2);
        job.group_shares.assign(job.group_shares.size(), shares);
        job.messages_share = shares;
        const StepRun run = run_step(job, 0);
        seconds[symmetry] = run.seconds;
        EXPECT_EQ(
            run.ranks.size(),
            static_cast<size_t>(symmetry ? pp : layout.num_ranks()));
        for (const RankStep& rank : run.ranks) {
          double sum = rank.pipeline;
          for (const double one : rank.work) sum += one;
          for (const double one : rank.exposed) sum += one;
          EXPECT_NEAR(sum, rank.end, 1e-9);
        }
      }
      EXPECT_NEAR(seconds[0], seconds[1], 1e-9) << to_string(layout) << shares;
      EXPECT_GT(seconds[0], 24);
    }
  }
}

// Errors of operations that are drawn one by one add up as squares do.
TEST(EventRun, ComputingThatMeetsKeepsTheSpreadOfItsOperations) {
  Instructions list;
  for (int i = 0; i < 4; ++i) append(list, computing(3));
  add_compute(list, Work::memory, 8);
  ASSERT_EQ(list.size(), 1u);
  EXPECT_DOUBLE_EQ(list[0].spread_seconds, 10);  // 4 of 3 squared, one of 8
  EXPECT_DOUBLE_EQ(list[0].seconds[static_cast<size_t>(Work::matrix)], 12);
  EXPECT_DOUBLE_EQ(list[0].seconds[static_cast<size_t>(Work::memory)], 8);
  append(list, {meet(0, 1)});
  append(list, computing(2));
  ASSERT_EQ(list.size(), 3u);
  EXPECT_DOUBLE_EQ(list[2].spread_seconds, 2);
}

TEST(EventRun, JitterDependsOnSeedAndStepAlone) {
  const std::vector<Program> programs = {unit_program(1)};
  const Setting setting{{.tp = 2}, made("1f1b", 1, 4), {}, false};
  SimulatedJob job = job_of(setting, programs);
  job.jitter = 0.1;
  job.ranks[0].seed = 1;
  job.ranks[1].seed = 2;
  const StepRun first = run_step(job, 0);
  EXPECT_EQ(first.ranks[0].end, run_step(job, 0).ranks[0].end);
  EXPECT_NE(first.ranks[0].end, first.ranks[1].end);
  EXPECT_NE(first.ranks[0].end, run_step(job, 1).ranks[0].end);
  EXPECT_NEAR(first.ranks[0].end, 12, 3);
}

}  // namespace echelon::simulator::event_run_test
