// A rank advances on its own clock until it has to wait, because nothing but
// waits holds it up: for the other ranks of a collective, for a message of the
// pipeline, or for what it launched in the background. Only transfers on shared
// links must be seen in order of time; a queue of events has their starts and
// ends.
#include "echelon/simulator/event_run.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "echelon/error.h"
#include "echelon/schedule/walk.h"
#include "echelon/simulator/draws.h"
#include "echelon/simulator/shared_links.h"
#include "echelon/text/check.h"

namespace echelon::simulator {
namespace {

constexpr size_t kBlocking = kNumStreams;  // the slot after the streams'
constexpr int32_t kMessage = -1;           // in place of a slot

// A collective whose members arrive one by one.
struct Rendezvous {
  size_t arrived = 0;
  double start = 0;
  double seconds = 0;
};

struct Transfer {
  int32_t from = 0;
  int32_t to = 0;
  ptrdiff_t cell = 0;
  Action producer;
  double bytes = 0;
  double begin = 0;
  const Message* message = nullptr;
};

double seconds_of(const Instruction& instruction) {
  return std::accumulate(
      instruction.seconds.begin(), instruction.seconds.end(), 0.0);
}

class Run {
 public:
  Run(const SimulatedJob& job, int64_t step, StepObserver* observer)
      : job_(job),
        step_(step),
        observer_(observer),
        positions_(positions_of(job.schedule)),
        transfers_(job.num_links) {
    for (auto& all : rendezvous_) all.resize(job.classes.groups.size());
    ranks_.reserve(job.ranks.size());
    draws_.resize(job.ranks.size());
    for (size_t c = 0; c < job.ranks.size(); ++c) prepare(c);
  }

  StepRun run() {
    settle();
    while (const auto ended = transfers_.next()) {
      take_end(*ended);
      settle();
    }
    StepRun result{.seconds = 0, .ranks = {}, .events = events_};
    for (size_t c = 0; c < ranks_.size(); ++c) {
      check_done(c);
      RankStep& sums = ranks_[c].sums;
      sums.end = ranks_[c].now;
      result.seconds = std::max(result.seconds, length_of(job_, sums));
      result.ranks.push_back(std::move(sums));
    }
    return result;
  }

 private:
  void prepare(size_t c) {
    const Program& program = *job_.ranks[c].program;
    const auto microbatches =
        static_cast<size_t>(job_.schedule.num_microbatches);
    ranks_.emplace_back(
        program, program.stages.size() * microbatches * 2,
        job_.classes.axes.size());
    if (!program.begin.empty()) ranks_.back().begin(program.begin);
    ready_.push_back(static_cast<int32_t>(c));
  }

  void check_done(size_t c) const {
    ECHELON_CHECK(
        ranks_[c].done, "rank {} waits for ever in schedule {}",
        job_.classes.classes[c].representative, job_.schedule.name);
  }

  size_t local(int32_t stage) const {
    return static_cast<size_t>(positions_.local[static_cast<size_t>(stage)]);
  }

  ptrdiff_t cell(int32_t stage, int32_t microbatch, bool backward) const {
    const auto number = static_cast<ptrdiff_t>(local(stage));
    return (number * job_.schedule.num_microbatches + microbatch) * 2 +
           (backward ? 1 : 0);
  }

  // One rank ------------------------------------------------------------------

  // Advances all ranks until each waits for an event.
  void settle() {
    while (!ready_.empty() || !complete_.empty()) {
      if (!ready_.empty()) {
        const int32_t c = ready_.back();
        ready_.pop_back();
        advance(c);
      } else {
        const auto [slot, group] = complete_.back();
        complete_.pop_back();
        const Rendezvous& rendezvous =
            rendezvous_[slot][static_cast<size_t>(group)];
        end_collective(
            slot, group, rendezvous.start,
            rendezvous.start + rendezvous.seconds);
      }
    }
  }

  void advance(int32_t c) {
    RunningRank& rank = ranks_[static_cast<size_t>(c)];
    while (!rank.done) {
      if (!rank.list && !begin_action(c, rank)) return;
      while (rank.at < rank.list->size()) {
        if (!execute(c, rank, (*rank.list)[rank.at])) return;
        ++rank.at;
      }
      end_list(c, rank);
    }
  }

  int64_t stage_rank(int32_t c) const {
    return job_.classes.classes[static_cast<size_t>(c)].stage_rank;
  }

  const std::vector<Action>& actions(int32_t c) const {
    return job_.schedule.ranks[static_cast<size_t>(stage_rank(c))];
  }

  bool begin_action(int32_t c, RunningRank& rank) {
    const Program& program = *job_.ranks[static_cast<size_t>(c)].program;
    const auto& list = actions(c);
    if (rank.action == list.size()) {
      rank.finishing = true;
      rank.begin(program.finish);
      return true;
    }
    const Action& action = list[rank.action];
    if (!take_message(c, rank, action)) return false;
    if (rank.action == 0) rank.sums.begin = rank.now;
    const auto& positions =
        positions_.actions[static_cast<size_t>(stage_rank(c))];
    rank.begin(
        program.pass(local(action.stage), action.kind, positions[rank.action]));
    return true;
  }

  // False if the message has not arrived yet.
  bool take_message(int32_t c, RunningRank& rank, const Action& action) {
    const int32_t needed =
        detail::needed_stage(action, job_.schedule.num_stages());
    if (needed < 0) return true;
    const bool back = detail::is_backward(action.kind);
    const ptrdiff_t at = cell(action.stage, action.microbatch, back);
    const double arrival = rank.arrivals[static_cast<size_t>(at)];
    if (arrival == RunningRank::kNotYet) {
      rank.waits_for_cell = at;
      return false;
    }
    if (arrival <= rank.now) return true;
    if (watched(c)) {
      const ActionKind kind = back ? ActionKind::backward : ActionKind::forward;
      observer_->wait_for_message(
          c, {kind, needed, action.microbatch}, rank.now, arrival);
    }
    rank.wait_until(arrival);
    return true;
  }

  // Executes one instruction. False if the rank has to wait; it goes on when
  // the event it waits for puts it into ready_.
  bool execute(int32_t c, RunningRank& rank, const Instruction& instruction) {
    switch (instruction.kind) {
      case Instruction::Kind::compute:
        compute(c, rank, instruction);
        return true;
      case Instruction::Kind::collective:
        if (!instruction.meets) {
          block(
              c, rank, instruction, rank.now,
              rank.now + instruction.collective_seconds);
          return true;
        }
        join(c, kBlocking, instruction, rank.now);
        return false;
      case Instruction::Kind::launch:
        if (rank.background.launch(instruction, rank.now)) {
          join_oldest(c, static_cast<size_t>(instruction.stream));
        }
        return true;
      case Instruction::Kind::wait:
      case Instruction::Kind::wait_all:
        if (!rank.background.done(instruction)) {
          rank.waits_for = &instruction;
          return false;
        }
        end_wait(c, rank, instruction);
        return true;
    }
    return true;
  }

  void compute(int32_t c, RunningRank& rank, const Instruction& instruction) {
    const double begin = rank.now;
    rank.compute(instruction, slowdown(c, instruction));
    if (!rank.finishing || !watched(c)) return;
    // It follows the framework's other work, which has no span.
    const double updating =
        instruction.seconds[static_cast<size_t>(Work::optimizer)] /
        seconds_of(instruction);
    if (updating <= 0) return;
    observer_->optimizer(c, rank.now - updating * (rank.now - begin), rank.now);
  }

  // The factor by which this takes longer than the instruction says. Each call
  // draws a new one, from seed, step and count, so that it depends on no other
  // rank.
  double slowdown(int32_t c, const Instruction& instruction) {
    const SimulatedRank& own = job_.ranks[static_cast<size_t>(c)];
    if (job_.jitter <= 0) return own.slowness;
    const double sum = seconds_of(instruction);
    const uint64_t word = mixed(
        mixed(own.seed, static_cast<uint64_t>(step_)),
        draws_[static_cast<size_t>(c)]++);
    const double spread = job_.jitter * instruction.spread_seconds;
    return own.slowness * std::max(0.0, 1 + normal(word) * spread / sum);
  }

  void end_list(int32_t c, RunningRank& rank) {
    ++events_;
    if (rank.finishing) {
      rank.done = true;
      return;
    }
    if (rank.list == &job_.ranks[static_cast<size_t>(c)].program->begin) {
      rank.list = nullptr;
      return;
    }
    const Action& action = actions(c)[rank.action];
    if (watched(c)) observer_->action(c, action, rank.began, rank.now);
    rank.list = nullptr;
    ++rank.action;
    send_output(c, rank, action);
  }

  // Messages ------------------------------------------------------------------

  void send_output(int32_t c, RunningRank& rank, const Action& action) {
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
    const size_t here = local(action.stage);
    const StageProgram& from = sender.program->stages[here];
    const Message& message = (back ? sender.backward : sender.forward)[here];
    send(
        {.from = c,
         .to = own.neighbours[receiver],
         .cell = at,
         .producer = action,
         .bytes = back ? from.backward_bytes : from.forward_bytes,
         .begin = rank.now,
         .message = &message});
    if (!job_.blocking_messages) return;
    rank.sums.sending += message.seconds;
    rank.now += message.seconds;
  }

  void send(const Transfer& transfer) {
    if (!job_.messages_share || job_.blocking_messages) {
      arrive(transfer, transfer.begin + transfer.message->seconds);
      return;
    }
    // Numbers of transfers that have ended are used again, so that memory grows
    // with the messages under way, not with those of the step.
    int32_t number = static_cast<int32_t>(messages_.size());
    if (unused_messages_.empty()) {
      messages_.push_back(transfer);
    } else {
      number = unused_messages_.back();
      unused_messages_.pop_back();
      messages_[static_cast<size_t>(number)] = transfer;
    }
    transfers_.add(
        {kMessage, number}, transfer.begin, transfer.message->seconds,
        transfer.message->links);
  }

  void arrive(const Transfer& transfer, double end) {
    ++events_;
    RunningRank& sender = ranks_[static_cast<size_t>(transfer.from)];
    RunningRank& rank = ranks_[static_cast<size_t>(transfer.to)];
    sender.sums.communication.back() += end - transfer.begin;
    rank.arrivals[static_cast<size_t>(transfer.cell)] = end;
    if (watched(transfer.from) || watched(transfer.to)) {
      observer_->message(
          transfer.from, transfer.to, transfer.producer, transfer.bytes,
          transfer.begin, end);
    }
    if (rank.waits_for_cell != transfer.cell) return;
    rank.waits_for_cell = -1;
    ready_.push_back(transfer.to);
  }

  // Collectives ---------------------------------------------------------------

  int32_t group_of(int32_t c, const Instruction& instruction) const {
    return job_.classes.classes[static_cast<size_t>(c)]
        .groups[static_cast<size_t>(instruction.group)];
  }

  void join_oldest(int32_t c, size_t stream) {
    const auto oldest =
        ranks_[static_cast<size_t>(c)].background.oldest(stream);
    if (oldest.instruction) join(c, stream, *oldest.instruction, oldest.time);
  }

  void
  join(int32_t c, size_t slot, const Instruction& instruction, double time) {
    const int32_t group = group_of(c, instruction);
    const auto at = static_cast<size_t>(group);
    Rendezvous& rendezvous = rendezvous_[slot][at];
    ++rendezvous.arrived;
    rendezvous.start = std::max(rendezvous.start, time);
    // Members on different devices may have different times for one collective:
    // the slowest sets it.
    rendezvous.seconds =
        std::max(rendezvous.seconds, instruction.collective_seconds);
    if (rendezvous.arrived < job_.classes.groups[at].members.size()) return;
    if (job_.group_shares[at]) {
      transfers_.add(
          {static_cast<int32_t>(slot), group}, rendezvous.start,
          rendezvous.seconds, job_.group_links[at]);
    } else {
      complete_.emplace_back(slot, group);
    }
  }

  void end_collective(size_t slot, int32_t group, double start, double end) {
    const auto at = static_cast<size_t>(group);
    rendezvous_[slot][at] = {};
    ++events_;
    for (const int32_t c : job_.classes.groups[at].members) {
      if (slot == kBlocking) {
        end_blocking(c, start, end);
      } else {
        end_launched(c, slot, start, end);
      }
    }
  }

  void block(
      int32_t c, RunningRank& rank, const Instruction& instruction,
      double start, double end) {
    if (watched(c)) {
      observer_->collective(c, instruction, rank.now, end, true);
    }
    rank.block_until(instruction, start, end);
  }

  void end_blocking(int32_t c, double start, double end) {
    RunningRank& rank = ranks_[static_cast<size_t>(c)];
    block(c, rank, (*rank.list)[rank.at], start, end);
    ++rank.at;
    ready_.push_back(c);
  }

  void end_launched(int32_t c, size_t stream, double start, double end) {
    RunningRank& rank = ranks_[static_cast<size_t>(c)];
    const Instruction& instruction =
        rank.background.finish_oldest(stream, start, end);
    rank.sums.communication[static_cast<size_t>(instruction.group)] +=
        end - start;
    if (watched(c)) observer_->collective(c, instruction, start, end, false);
    join_oldest(c, stream);
    if (!rank.waits_for || !rank.background.done(*rank.waits_for)) return;
    rank.waits_for = nullptr;
    ready_.push_back(c);
  }

  void end_wait(int32_t c, RunningRank& rank, const Instruction& wait) {
    const double begin = rank.now;
    const Background::Ended ended = rank.end_wait(wait, job_.overlap_slowdown);
    if (ended.end > begin && watched(c)) {
      observer_->wait_for(c, *ended.last, begin, ended.end);
    }
  }

  void take_end(const TransferEvents::Ended& ended) {
    const auto [slot, number] = ended.name;
    if (slot != kMessage) {
      end_collective(static_cast<size_t>(slot), number, ended.begin, ended.end);
      return;
    }
    const Transfer transfer = messages_[static_cast<size_t>(number)];
    unused_messages_.push_back(number);
    arrive(transfer, ended.end);
  }

  bool watched(int32_t c) const { return observer_ && observer_->wants(c); }

  const SimulatedJob& job_;
  int64_t step_;
  StepObserver* observer_;
  SchedulePositions positions_;
  TransferEvents transfers_;
  std::vector<RunningRank> ranks_;
  std::vector<uint64_t> draws_;  // by rank class, so far
  int64_t events_ = 0;
  std::vector<int32_t> ready_;
  std::vector<std::pair<size_t, int32_t>> complete_;  // slot and group
  std::array<std::vector<Rendezvous>, kNumStreams + 1> rendezvous_;
  std::vector<Transfer> messages_;
  std::vector<int32_t> unused_messages_;
};

}  // namespace

double length_of(const SimulatedJob& job, const RankStep& rank) {
  return job.validates_afterwards ? rank.own_seconds() : rank.end;
}

StepRun
run_step(const SimulatedJob& job, int64_t step, StepObserver* observer) {
  return Run(job, step, observer).run();
}

}  // namespace echelon::simulator
