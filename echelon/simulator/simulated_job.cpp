// A job is built in four steps: the schedule; the classes of ranks, refined
// from a first colour that holds all that a rank's time depends on by itself; a
// program and the messages of each class, made for its first rank; and the
// links that messages and groups use. A class has four links, two within the
// node and two into the network, one for each direction. Transfers share links
// only where something else can use them at the same time; the rest need no
// events.
#include "echelon/simulator/simulated_job.h"

#include <algorithm>
#include <bit>
#include <map>
#include <set>

#include "echelon/cost/distinct_pipelines.h"
#include "echelon/cost/layer_work.h"
#include "echelon/cost/memory_estimate.h"
#include "echelon/cost/operation_time.h"
#include "echelon/cost/strategy.h"
#include "echelon/error.h"
#include "echelon/schedule/options.h"
#include "echelon/simulator/draws.h"
#include "echelon/simulator/stage_program.h"

namespace echelon::simulator {
namespace {

// The links of a rank class, in the order of their numbers.
enum class Side { inside_out, inside_in, network_out, network_in };
constexpr size_t kSides = 4;

int32_t link_of(int32_t rank_class, Side side) {
  return rank_class * static_cast<int32_t>(kSides) + static_cast<int32_t>(side);
}

Schedule schedule_of(const cost::Strategy& strategy) {
  ScheduleOptions options;
  options.kind =
      strategy.layout.pp > 1 ? strategy.schedule : ScheduleKind::one_f_one_b;
  options.ranks = static_cast<int32_t>(strategy.layout.pp);
  options.microbatches = static_cast<int32_t>(strategy.num_microbatches());
  options.stages_per_rank =
      static_cast<int32_t>(cost::stages_per_rank(strategy));
  return make_schedule(options);
}

// Distinct ranks by seed, ascending.
std::vector<int64_t>
choose_stragglers(const SimulationOptions& options, int64_t ranks) {
  std::set<int64_t> chosen;
  const auto wanted = static_cast<size_t>(std::min(options.stragglers, ranks));
  for (uint64_t draw = 0; chosen.size() < wanted; ++draw) {
    const uint64_t word = mixed(mixed(options.seed, 0x57A6), draw);
    chosen.insert(static_cast<int64_t>(word % static_cast<uint64_t>(ranks)));
  }
  return {chosen.begin(), chosen.end()};
}

class JobBuilder {
 public:
  JobBuilder(
      const cost::ModelShape& model, const cost::Strategy& strategy,
      const cluster::Cluster& cluster, const SimulationOptions& options)
      : model_(model),
        strategy_(strategy),
        cluster_(cluster),
        options_(options),
        framework_(cost::framework_on(
            cost::find_framework(strategy.framework),
            cluster.groups.front().node.device)),
        copied_(
            model.transformer ? cost::copied_embedding(
                                    *model.transformer, strategy, framework_)
                              : 0),
        axes_(traffic_axes(strategy, copied_ > 0)),
        built_{.mesh = Mesh(strategy.layout)} {
    if (strategy.rank_microbatch.empty()) add_size(strategy.microbatch_size);
    for (const int64_t samples : strategy.rank_microbatch) add_size(samples);
  }

  ModelJob build() {
    SimulatedJob& job = built_.job;
    job.schedule = schedule_of(strategy_);
    job.jitter = options_.jitter;
    job.overlap_slowdown = framework_.overlap_slowdown;
    job.blocking_messages = framework_.blocking_transfers;
    job.validates_afterwards = framework_.validates_afterwards;
    job.messages_share = true;
    built_.stragglers = choose_stragglers(options_, built_.mesh.size());
    find_neighbours();
    job.classes = find_classes(
        built_.mesh, colours(), options_.symmetry && options_.jitter == 0);
    job.num_links = kSides * job.classes.classes.size();
    for (size_t c = 0; c < job.classes.classes.size(); ++c) add_rank(c);
    for (const GroupClass& group : job.classes.groups) add_group(group);
    return std::move(built_);
  }

 private:
  // The work of the ranks with one size of microbatches.
  struct Sized {
    cost::Strategy strategy;
    std::vector<std::vector<cost::LayerWork>> work;  // by stage
  };

  void add_size(int64_t samples) {
    if (sizes_.count(samples) > 0) return;
    Sized sized{
        .strategy = cost::with_microbatch(strategy_, samples), .work = {}};
    sized.work = cost::stage_work(
        cost::layer_work(model_, sized.strategy, framework_), sized.strategy);
    sizes_.emplace(samples, std::move(sized));
  }

  int64_t microbatch(int64_t rank) const {
    return cost::microbatch_of(strategy_, mesh().data_index(rank));
  }
  const Sized& sized(int64_t rank) const { return sizes_.at(microbatch(rank)); }

  const Mesh& mesh() const { return built_.mesh; }

  // Coordinates along pp that send to each other.
  void find_neighbours() {
    const auto& owners = built_.job.schedule.rank_of_stage;
    neighbours_.resize(static_cast<size_t>(strategy_.layout.pp));
    const auto add = [&](int32_t to, int32_t of) {
      auto& list = neighbours_[static_cast<size_t>(of)];
      if (to != of && std::ranges::find(list, to) == list.end()) {
        list.push_back(to);
      }
    };
    for (size_t stage = 0; stage + 1 < owners.size(); ++stage) {
      add(owners[stage], owners[stage + 1]);
      add(owners[stage + 1], owners[stage]);
    }
  }

  bool straggles(int64_t rank) const {
    return std::ranges::binary_search(built_.stragglers, rank);
  }

  // The initial colour has what a rank's time depends on by itself: its stages,
  // its kind of node, how fast it is, and which of its messages leave the node.
  RankColours colours() {
    RankColours all{
        .axes = axes_,
        .of_rank = {},
        .pipeline = neighbours_,
        .ends = {0, strategy_.layout.pp - 1}};
    all.of_rank.reserve(static_cast<size_t>(mesh().size()));
    for (int64_t rank = 0; rank < mesh().size(); ++rank) {
      all.of_rank.push_back(mixed(program_key(rank), straggles(rank) ? 1 : 0));
    }
    return all;
  }

  uint64_t program_key(int64_t rank) const {
    const int64_t at = mesh().coordinate(rank, Axis::pp);
    uint64_t key = mixed(static_cast<uint64_t>(at), cluster_.group_index(rank));
    if (sizes_.size() > 1) {
      key = mixed(key, static_cast<uint64_t>(microbatch(rank)));
    }
    const int64_t node = cluster_.node_index(rank);
    const auto mix_place_of = [&](int64_t other) {
      const int64_t partner = mesh().moved(rank, Axis::pp, other);
      const bool near = cluster_.node_index(partner) == node;
      key = mixed(
          key,
          (uint64_t{cluster_.group_index(partner)} << 1) | (near ? 1u : 0u));
    };
    for (const int64_t other : neighbours_[static_cast<size_t>(at)]) {
      mix_place_of(other);
    }
    // The ends of a pipeline sum a tied embedding.
    const int64_t last = strategy_.layout.pp - 1;
    if (copied_ > 0 && (at == 0 || at == last)) mix_place_of(last - at);
    return key;
  }

  // Ranks ---------------------------------------------------------------------

  void add_rank(size_t c) {
    const RankClass& one = built_.job.classes.classes[c];
    const int64_t rank = one.representative;
    SimulatedRank simulated;
    simulated.program = program_of(rank);
    simulated.slowness = straggles(rank) ? options_.straggler_factor : 1;
    simulated.seed = mixed(options_.seed, static_cast<uint64_t>(rank));
    const auto& schedule = built_.job.schedule;
    for (const int32_t stage :
         schedule.stages_of(static_cast<int32_t>(one.stage_rank))) {
      simulated.forward.push_back(message(c, rank, stage, stage + 1));
      simulated.backward.push_back(message(c, rank, stage, stage - 1));
    }
    built_.job.ranks.push_back(std::move(simulated));
  }

  double bytes_between(int64_t rank, int32_t stage, int32_t next) const {
    const auto giver = static_cast<size_t>(std::min(stage, next));
    return sized(rank).work[giver].back().output_bytes;
  }

  Message message(size_t c, int64_t rank, int32_t stage, int32_t next) const {
    const auto& owners = built_.job.schedule.rank_of_stage;
    if (next < 0 || next >= static_cast<int32_t>(owners.size())) return {};
    const int32_t other = owners[static_cast<size_t>(next)];
    const RankClass& own = built_.job.classes.classes[c];
    if (other == own.stage_rank) return {};
    const int64_t receiver = mesh().moved(rank, Axis::pp, other);
    Message one;
    one.seconds = cost::transfer_seconds(
        strategy_, cluster_, framework_, bytes_between(rank, stage, next), rank,
        receiver);
    const bool near =
        cluster_.node_index(rank) == cluster_.node_index(receiver);
    const int32_t to = own.neighbours[static_cast<size_t>(other)];
    one.links = {
        link_of(
            static_cast<int32_t>(c),
            near ? Side::inside_out : Side::network_out),
        link_of(to, near ? Side::inside_in : Side::network_in)};
    return one;
  }

  const Program* program_of(int64_t rank) {
    const auto [at, is_new] =
        program_of_key_.emplace(program_key(rank), nullptr);
    if (is_new) {
      built_.programs.push_back(std::make_unique<Program>(make(rank)));
      at->second = built_.programs.back().get();
    }
    return at->second;
  }

  Program make(int64_t rank) {
    const auto own = static_cast<int32_t>(mesh().coordinate(rank, Axis::pp));
    const Sized& mine = sized(rank);
    const int64_t first_rank = mesh().moved(rank, Axis::pp, 0);
    const cost::StageTimes times =
        cost::stage_times(model_, mine.strategy, cluster_, first_rank);
    const cost::Framework framework = cost::framework_on(
        cost::find_framework(mine.strategy.framework),
        cluster_.node_of(first_rank).device);
    StageProgramInput input{
        .strategy = mine.strategy,
        .cluster = cluster_,
        .framework = framework,
        .axes = axes_,
        .after = times.after[static_cast<size_t>(own)],
        .rank = rank};
    const auto stages = built_.job.schedule.stages_of(own);
    for (const int32_t stage : stages) {
      input.stages.push_back(&mine.work[static_cast<size_t>(stage)]);
    }
    if (own == 0 || own + 1 == strategy_.layout.pp) {
      input.tied_bytes = copied_ * cost::reduced_bytes(strategy_, framework_);
    }
    Program program = make_program(input);
    for (size_t local = 0; local < stages.size(); ++local) {
      if (stages[local] == 0) continue;
      program.stages[local].backward_bytes =
          bytes_between(rank, stages[local], stages[local] - 1);
    }
    return program;
  }

  // Groups --------------------------------------------------------------------

  void add_group(const GroupClass& group) {
    const bool inside = goes_inside(group.axes, group.representative);
    std::vector<int32_t> links;
    for (const int32_t member : group.members) {
      links.push_back(
          link_of(member, inside ? Side::inside_out : Side::network_out));
      links.push_back(
          link_of(member, inside ? Side::inside_in : Side::network_in));
    }
    built_.job.group_links.push_back(std::move(links));
    built_.job.group_shares.push_back(shares(group, inside));
  }

  bool goes_inside(AxisMask axes, int64_t rank) const {
    return cost::place_of(strategy_, cluster_, axes_of(axes), rank).nodes <= 1;
  }

  // Whether anything else may use those links at the same time. A rank blocks
  // in one collective at a time, while background collectives continue.
  bool shares(const GroupClass& group, bool inside) const {
    if (strategy_.layout.pp > 1 && messages_go(inside)) return true;
    const auto launched = launched_axes(strategy_);
    const auto is_launched = [&](AxisMask axes) {
      return std::ranges::find(launched, axes) != launched.end();
    };
    if (is_launched(group.axes)) return true;
    return std::ranges::any_of(axes_, [&](AxisMask axes) {
      return is_launched(axes) && goes_inside(axes, 0) == inside;
    });
  }

  bool messages_go(bool inside) const {
    const int64_t ranks = mesh().size();
    const int64_t few = std::min<int64_t>(ranks, 4096);
    for (int64_t rank = 0; rank < few; ++rank) {
      const int64_t at = mesh().coordinate(rank, Axis::pp);
      for (const int64_t other : neighbours_[static_cast<size_t>(at)]) {
        const int64_t neighbour = mesh().moved(rank, Axis::pp, other);
        if ((cluster_.node_index(rank) == cluster_.node_index(neighbour)) ==
            inside) {
          return true;
        }
      }
    }
    return false;
  }

  const cost::ModelShape& model_;
  const cost::Strategy& strategy_;
  const cluster::Cluster& cluster_;
  const SimulationOptions& options_;
  const cost::Framework framework_;
  std::map<int64_t, Sized> sizes_;  // by samples of a microbatch
  double copied_;  // elements of the embedding that both ends hold
  std::vector<AxisMask> axes_;
  std::vector<std::vector<int64_t>> neighbours_;
  std::map<uint64_t, const Program*> program_of_key_;
  ModelJob built_;
};

}  // namespace

ModelJob make_job(
    const cost::ModelShape& model, const cost::Strategy& strategy,
    const cluster::Cluster& cluster, const SimulationOptions& options) {
  return JobBuilder(model, strategy, cluster, options).build();
}

}  // namespace echelon::simulator
