// A rank's clock runs ahead of the events: it knows when it would reach the next
// wait, because nothing but waits holds it up. Transfers on shared links alone must
// be seen in order of time; they begin and end in a queue of events.
#include "echelon/simulator/event_run.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <queue>
#include <string>

#include "echelon/error.h"
#include "echelon/schedule/walk.h"
#include "echelon/simulator/draws.h"
#include "echelon/simulator/shared_links.h"

namespace echelon::simulator {
namespace {

constexpr double kNotYet = -1;
constexpr size_t kStoodStill = kNumStreams;  // beside the streams

struct Posted {
  const Instruction* instruction;
  double time;
};

struct Tag {
  const Instruction* instruction = nullptr;  // its last launch
  size_t on_their_way = 0;
  double end = 0;      // of the last that ended
  double seconds = 0;  // that its launches took since somebody waited for them
};

struct Rank {
  double now = 0;
  size_t action = 0;
  const Instructions* list = nullptr;  // being run; null: between actions
  size_t at = 0;
  double began = 0;  // the action
  bool finishing = false;
  bool done = false;
  const Instruction* waits_for = nullptr;  // wait or wait_all
  ptrdiff_t waits_for_cell = -1;           // of arrivals
  std::vector<double> arrivals;  // by local stage, microbatch and direction
  std::vector<Tag> tags;
  std::array<std::deque<Posted>, kNumStreams> posted;
  std::array<double, kNumStreams> free{};
  size_t on_their_way = 0;
  uint64_t draws = 0;
};

// A collective that gathers its members.
struct Meeting {
  size_t arrived = 0;
  double start = 0;
  double seconds = 0;
};

struct Flight {
  int32_t from = 0;
  int32_t to = 0;
  ptrdiff_t cell = 0;
  Action producer;
  double bytes = 0;
  double begin = 0;
  const Message* message = nullptr;
};

// Either the collective of a group in a slot, or a message.
struct Event {
  double time = 0;
  int32_t slot = -1;
  int32_t number = 0;
  bool operator>(const Event& other) const {
    if (time != other.time) return time > other.time;
    if (slot != other.slot) return slot > other.slot;
    return number > other.number;
  }
};

class Run {
 public:
  Run(const SimulatedJob& job, int64_t step, StepObserver* observer)
      : job_(job),
        step_(step),
        observer_(observer),
        links_(job.num_links),
        ranks_(job.ranks.size()),
        result_{.ranks = std::vector<RankStep>(job.ranks.size())} {
    for (auto& meetings : meetings_) meetings.resize(job.classes.groups.size());
    number_stages();
    find_positions();
    for (size_t c = 0; c < ranks_.size(); ++c) prepare(c);
  }

  StepRun run() {
    for (;;) {
      settle();
      const double end = links_.next_end();
      if (!starts_.empty() && starts_.top().time < end) {
        start(starts_.top());
      } else if (end < std::numeric_limits<double>::infinity()) {
        take_end(end);
      } else {
        break;
      }
    }
    for (size_t c = 0; c < ranks_.size(); ++c) {
      if (!ranks_[c].done) {
        throw Error(
            "simulator: rank " +
            std::to_string(job_.classes.classes[c].representative) +
            " waits for ever in schedule " + job_.schedule.name);
      }
      result_.ranks[c].end = ranks_[c].now;
      result_.seconds = std::max(result_.seconds, ranks_[c].now);
    }
    return std::move(result_);
  }

 private:
  // Set-up --------------------------------------------------------------------

  void number_stages() {
    local_.resize(static_cast<size_t>(job_.schedule.num_stages()));
    for (int32_t p = 0; p < job_.schedule.num_ranks(); ++p) {
      int32_t next = 0;
      for (const int32_t stage : job_.schedule.stages_of(p)) {
        local_[static_cast<size_t>(stage)] = next++;
      }
    }
  }

  // The first forward and backward of each stage, and the last action that gives
  // gradients of its weights.
  void find_positions() {
    positions_.resize(job_.schedule.ranks.size());
    for (size_t p = 0; p < positions_.size(); ++p) {
      const auto& list = job_.schedule.ranks[p];
      auto& positions = positions_[p];
      positions.resize(list.size());
      std::vector<bool> forward(local_.size()), backward(local_.size());
      std::vector<ptrdiff_t> last(local_.size(), -1);
      for (size_t i = 0; i < list.size(); ++i) {
        const auto stage = static_cast<size_t>(list[i].stage);
        const ActionKind kind = list[i].kind;
        if (kind != ActionKind::backward_weight) {
          auto& seen = kind == ActionKind::forward ? forward : backward;
          positions[i].first = !seen[stage];
          seen[stage] = true;
        }
        if (kind == ActionKind::backward || kind == ActionKind::backward_weight) {
          last[stage] = static_cast<ptrdiff_t>(i);
        }
      }
      for (const ptrdiff_t i : last) {
        if (i >= 0) positions[static_cast<size_t>(i)].last = true;
      }
    }
  }

  void prepare(size_t c) {
    Rank& rank = ranks_[c];
    const Program& program = *job_.ranks[c].program;
    rank.arrivals.assign(
        program.stages.size() * 2 *
            static_cast<size_t>(job_.schedule.num_microbatches),
        kNotYet);
    rank.tags.resize(static_cast<size_t>(program.num_tags));
    result_.ranks[c].exposed.resize(job_.classes.axes.size());
    result_.ranks[c].communication.resize(job_.classes.axes.size() + 1);
    ready_.push_back(static_cast<int32_t>(c));
  }

  ptrdiff_t cell(int32_t stage, int32_t microbatch, bool backward) const {
    const auto local = static_cast<ptrdiff_t>(local_[static_cast<size_t>(stage)]);
    return (local * job_.schedule.num_microbatches + microbatch) * 2 +
           (backward ? 1 : 0);
  }

  // One rank ------------------------------------------------------------------

  // Until nothing goes on without an event.
  void settle() {
    while (!ready_.empty() || !met_.empty()) {
      if (!ready_.empty()) {
        const int32_t c = ready_.back();
        ready_.pop_back();
        go_on(c);
      } else {
        const auto [slot, group] = met_.back();
        met_.pop_back();
        const Meeting& meeting = meetings_[slot][static_cast<size_t>(group)];
        end_collective(
            slot, group, meeting.start, meeting.start + meeting.seconds);
      }
    }
  }

  void go_on(int32_t c) {
    Rank& rank = ranks_[static_cast<size_t>(c)];
    while (!rank.done) {
      if (!rank.list && !begin_action(c, rank)) return;
      while (rank.at < rank.list->size()) {
        if (!carry_out(c, rank, (*rank.list)[rank.at])) return;
        ++rank.at;
      }
      end_list(c, rank);
    }
  }

  const std::vector<Action>& actions(int32_t c) const {
    const auto p = job_.classes.classes[static_cast<size_t>(c)].stage_rank;
    return job_.schedule.ranks[static_cast<size_t>(p)];
  }

  bool begin_action(int32_t c, Rank& rank) {
    const Program& program = *job_.ranks[static_cast<size_t>(c)].program;
    const auto& list = actions(c);
    if (rank.action == list.size()) {
      rank.finishing = true;
      rank.list = &program.finish;
    } else {
      const Action& action = list[rank.action];
      if (!take_message(c, rank, action)) return false;
      const auto p = static_cast<size_t>(
          job_.classes.classes[static_cast<size_t>(c)].stage_rank);
      rank.list = &program.pass(
          static_cast<size_t>(local_[static_cast<size_t>(action.stage)]),
          action.kind, positions_[p][rank.action]);
    }
    rank.at = 0;
    rank.began = rank.now;
    ++result_.events;
    return true;
  }

  // False: it has not arrived yet.
  bool take_message(int32_t c, Rank& rank, const Action& action) {
    const int32_t needed =
        detail::needed_stage(action, job_.schedule.num_stages());
    if (needed < 0) return true;
    const bool back = detail::is_backward(action.kind);
    const ptrdiff_t at = cell(action.stage, action.microbatch, back);
    const double arrival = rank.arrivals[static_cast<size_t>(at)];
    if (arrival == kNotYet) {
      rank.waits_for_cell = at;
      return false;
    }
    if (arrival > rank.now) {
      result_.ranks[static_cast<size_t>(c)].pipeline += arrival - rank.now;
      if (watched(c)) {
        observer_->wait_for_message(
            c, {back ? ActionKind::backward : ActionKind::forward, needed,
                action.microbatch},
            rank.now, arrival);
      }
      rank.now = arrival;
    }
    return true;
  }

  // False: it has to wait.
  bool carry_out(int32_t c, Rank& rank, const Instruction& instruction) {
    switch (instruction.kind) {
      case Instruction::Kind::compute:
        compute(c, rank, instruction);
        return true;
      case Instruction::Kind::collective:
        meet(c, kStoodStill, instruction, rank.now);
        return false;
      case Instruction::Kind::launch:
        launch(c, rank, instruction);
        return true;
      case Instruction::Kind::wait:
      case Instruction::Kind::wait_all:
        if (!over(rank, instruction)) {
          rank.waits_for = &instruction;
          return false;
        }
        end_wait(c, rank, instruction);
        return true;
    }
    return true;
  }

  void compute(int32_t c, Rank& rank, const Instruction& instruction) {
    const SimulatedRank& own = job_.ranks[static_cast<size_t>(c)];
    double factor = own.slowness;
    if (job_.jitter > 0) {
      double sum = 0;
      for (const double seconds : instruction.seconds) sum += seconds;
      const uint64_t word =
          mixed(mixed(own.seed, static_cast<uint64_t>(step_)), rank.draws++);
      factor *= std::max(
          0.0,
          1 + job_.jitter * normal(word) * instruction.spread_seconds / sum);
    }
    const double begin = rank.now;
    auto& work = result_.ranks[static_cast<size_t>(c)].work;
    for (size_t kind = 0; kind < kNumWorks; ++kind) {
      const double seconds = instruction.seconds[kind] * factor;
      work[kind] += seconds;
      rank.now += seconds;
    }
    if (rank.finishing && watched(c)) observer_->optimizer(c, begin, rank.now);
  }

  void end_list(int32_t c, Rank& rank) {
    if (rank.finishing) {
      rank.done = true;
      return;
    }
    const Action& action = actions(c)[rank.action];
    if (watched(c)) observer_->action(c, action, rank.began, rank.now);
    rank.list = nullptr;
    ++rank.action;
    hand_on(c, rank, action);
  }

  // Messages ------------------------------------------------------------------

  void hand_on(int32_t c, Rank& rank, const Action& action) {
    if (action.kind == ActionKind::backward_weight) return;
    const bool back = detail::is_backward(action.kind);
    const int32_t stage = action.stage + (back ? -1 : 1);
    if (stage < 0 || stage >= job_.schedule.num_stages()) return;
    const ptrdiff_t at = cell(stage, action.microbatch, back);
    const auto receiver = static_cast<size_t>(
        job_.schedule.rank_of_stage[static_cast<size_t>(stage)]);
    const RankClass& own = job_.classes.classes[static_cast<size_t>(c)];
    if (static_cast<int64_t>(receiver) == own.stage_rank) {
      rank.arrivals[static_cast<size_t>(at)] = rank.now;
      return;
    }
    const SimulatedRank& sender = job_.ranks[static_cast<size_t>(c)];
    const auto local = static_cast<size_t>(local_[static_cast<size_t>(action.stage)]);
    const StageProgram& from = sender.program->stages[local];
    send({.from = c,
          .to = own.neighbours[receiver],
          .cell = at,
          .producer = action,
          .bytes = back ? from.backward_bytes : from.forward_bytes,
          .begin = rank.now,
          .message = &(back ? sender.backward : sender.forward)[local]});
    if (job_.blocking_messages) stand_and_send(c, rank, back, local);
  }

  void stand_and_send(int32_t c, Rank& rank, bool back, size_t local) {
    const SimulatedRank& sender = job_.ranks[static_cast<size_t>(c)];
    const double seconds =
        (back ? sender.backward : sender.forward)[local].seconds;
    result_.ranks[static_cast<size_t>(c)].sending += seconds;
    rank.now += seconds;
  }

  void send(const Flight& flight) {
    if (!job_.messages_share || job_.blocking_messages) {
      arrive(flight, flight.begin + flight.message->seconds);
      return;
    }
    int32_t number = static_cast<int32_t>(flights_.size());
    if (unused_flights_.empty()) {
      flights_.push_back(flight);
    } else {
      number = unused_flights_.back();
      unused_flights_.pop_back();
      flights_[static_cast<size_t>(number)] = flight;
    }
    starts_.push({flight.begin, -1, number});
  }

  void arrive(const Flight& flight, double end) {
    ++result_.events;
    Rank& rank = ranks_[static_cast<size_t>(flight.to)];
    rank.arrivals[static_cast<size_t>(flight.cell)] = end;
    result_.ranks[static_cast<size_t>(flight.from)].communication.back() +=
        end - flight.begin;
    if (watched(flight.from) || watched(flight.to)) {
      observer_->message(
          flight.from, flight.to, flight.producer, flight.bytes, flight.begin,
          end);
    }
    if (rank.waits_for_cell != flight.cell) return;
    rank.waits_for_cell = -1;
    ready_.push_back(flight.to);
  }

  // Collectives ---------------------------------------------------------------

  int32_t group_of(int32_t c, const Instruction& instruction) const {
    return job_.classes.classes[static_cast<size_t>(c)]
        .groups[static_cast<size_t>(instruction.group)];
  }

  void launch(int32_t c, Rank& rank, const Instruction& instruction) {
    const auto stream = static_cast<size_t>(instruction.stream);
    ++rank.on_their_way;
    Tag& tag = rank.tags[static_cast<size_t>(instruction.tag)];
    tag.instruction = &instruction;
    ++tag.on_their_way;
    rank.posted[stream].push_back({&instruction, rank.now});
    if (rank.posted[stream].size() == 1) next_posted(c, stream);
  }

  void next_posted(int32_t c, size_t stream) {
    const Rank& rank = ranks_[static_cast<size_t>(c)];
    if (rank.posted[stream].empty()) return;
    const Posted& posted = rank.posted[stream].front();
    meet(c, stream, *posted.instruction, std::max(posted.time, rank.free[stream]));
  }

  void meet(
      int32_t c, size_t slot, const Instruction& instruction, double time) {
    const int32_t group = group_of(c, instruction);
    const auto at = static_cast<size_t>(group);
    Meeting& meeting = meetings_[slot][at];
    ++meeting.arrived;
    meeting.start = std::max(meeting.start, time);
    meeting.seconds = std::max(meeting.seconds, instruction.collective_seconds);
    if (meeting.arrived < job_.classes.groups[at].members.size()) return;
    if (job_.group_shares[at]) {
      starts_.push({meeting.start, static_cast<int32_t>(slot), group});
    } else {
      met_.emplace_back(slot, group);
    }
  }

  void end_collective(size_t slot, int32_t group, double start, double end) {
    const auto at = static_cast<size_t>(group);
    meetings_[slot][at] = {};
    ++result_.events;
    for (const int32_t c : job_.classes.groups[at].members) {
      if (slot == kStoodStill) {
        end_standing(c, start, end);
      } else {
        end_launched(c, slot, start, end);
      }
    }
  }

  void end_standing(int32_t c, double start, double end) {
    Rank& rank = ranks_[static_cast<size_t>(c)];
    const Instruction& instruction = (*rank.list)[rank.at];
    RankStep& sums = result_.ranks[static_cast<size_t>(c)];
    const auto axes = static_cast<size_t>(instruction.group);
    sums.exposed[axes] += end - rank.now;
    sums.communication[axes] += end - start;
    if (watched(c)) {
      observer_->collective(c, instruction, rank.now, end, true);
    }
    rank.now = end;
    ++rank.at;
    ready_.push_back(c);
  }

  void end_launched(int32_t c, size_t stream, double start, double end) {
    Rank& rank = ranks_[static_cast<size_t>(c)];
    const Posted posted = rank.posted[stream].front();
    rank.posted[stream].pop_front();
    rank.free[stream] = end;
    --rank.on_their_way;
    Tag& tag = rank.tags[static_cast<size_t>(posted.instruction->tag)];
    --tag.on_their_way;
    tag.end = end;
    tag.seconds += end - start;
    result_.ranks[static_cast<size_t>(c)]
        .communication[static_cast<size_t>(posted.instruction->group)] +=
        end - start;
    if (watched(c)) {
      observer_->collective(c, *posted.instruction, start, end, false);
    }
    next_posted(c, stream);
    if (!rank.waits_for || !over(rank, *rank.waits_for)) return;
    rank.waits_for = nullptr;
    ready_.push_back(c);
  }

  static bool over(const Rank& rank, const Instruction& wait) {
    if (wait.kind == Instruction::Kind::wait_all) return rank.on_their_way == 0;
    return rank.tags[static_cast<size_t>(wait.tag)].on_their_way == 0;
  }

  // What ran beside computing was not free: it took a part of the device.
  void end_wait(int32_t c, Rank& rank, const Instruction& wait) {
    double seconds = 0;
    const Tag* last = nullptr;
    const auto look_at = [&](Tag& tag) {
      if (!tag.instruction) return;
      seconds += tag.seconds;
      tag.seconds = 0;
      if (!last || tag.end > last->end) last = &tag;
    };
    if (wait.kind == Instruction::Kind::wait_all) {
      for (Tag& tag : rank.tags) look_at(tag);
    } else {
      look_at(rank.tags[static_cast<size_t>(wait.tag)]);
    }
    if (!last) return;
    const double stood = std::max(0.0, last->end - rank.now);
    RankStep& sums = result_.ranks[static_cast<size_t>(c)];
    if (stood > 0) {
      sums.exposed[static_cast<size_t>(last->instruction->group)] += stood;
      if (watched(c)) {
        observer_->wait_for(c, *last->instruction, rank.now, last->end);
      }
    }
    const double slowed =
        job_.overlap_slowdown * std::max(0.0, seconds - stood);
    sums.work[static_cast<size_t>(Work::memory)] += slowed;
    rank.now += stood + slowed;
  }

  // Events --------------------------------------------------------------------

  void start(const Event event) {
    starts_.pop();
    ++result_.events;
    int32_t transfer = 0;
    if (event.slot < 0) {
      const Message& message =
          *flights_[static_cast<size_t>(event.number)].message;
      transfer = links_.start(event.time, message.seconds, message.links);
    } else {
      const auto at = static_cast<size_t>(event.number);
      transfer = links_.start(
          event.time, meetings_[static_cast<size_t>(event.slot)][at].seconds,
          job_.group_links[at]);
    }
    const auto number = static_cast<size_t>(transfer);
    if (transfers_.size() <= number) transfers_.resize(number + 1);
    transfers_[number] = event;
  }

  void take_end(double time) {
    const Event event = transfers_[static_cast<size_t>(links_.take_end())];
    if (event.slot >= 0) {
      end_collective(
          static_cast<size_t>(event.slot), event.number, event.time, time);
      return;
    }
    const Flight flight = flights_[static_cast<size_t>(event.number)];
    unused_flights_.push_back(event.number);
    arrive(flight, time);
  }

  bool watched(int32_t c) const { return observer_ && observer_->wants(c); }

  const SimulatedJob& job_;
  int64_t step_;
  StepObserver* observer_;
  SharedLinks links_;
  std::vector<Rank> ranks_;
  StepRun result_;
  std::vector<int32_t> local_;  // by stage: which of its rank's
  std::vector<std::vector<Position>> positions_;  // by coordinate, of its list
  std::vector<int32_t> ready_;
  std::vector<std::pair<size_t, int32_t>> met_;  // slot and group
  std::array<std::vector<Meeting>, kNumStreams + 1> meetings_;
  std::vector<Flight> flights_;
  std::vector<int32_t> unused_flights_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> starts_;
  std::vector<Event> transfers_;  // by number of the transfer
};

}  // namespace

StepRun run_step(
    const SimulatedJob& job, int64_t step, StepObserver* observer) {
  return Run(job, step, observer).run();
}

}  // namespace echelon::simulator
