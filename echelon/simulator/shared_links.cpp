// A transfer stores the seconds that it would still take alone, as of its last
// change of pace. Only the transfers on the links of one that starts or ends
// can change; each change pushes a new end and a new version, and ends of old
// versions are dropped when they come to the top of the queue. A start or end
// thus takes as many steps as its links carry transfers, times the logarithm of
// the queue.
#include "echelon/simulator/shared_links.h"

#include <algorithm>

namespace echelon::simulator {

int32_t SharedLinks::start(
    double now, double seconds, const std::vector<int32_t>& links) {
  int32_t number = static_cast<int32_t>(transfers_.size());
  if (unused_.empty()) {
    transfers_.emplace_back();
  } else {
    number = unused_.back();
    unused_.pop_back();
  }
  Transfer& transfer = transfers_[static_cast<size_t>(number)];
  transfer = {
      .left = seconds,
      .since = now,
      .version = transfer.version + 1,
      .links = &links};
  for (const int32_t link : links) {
    links_[static_cast<size_t>(link)].push_back(number);
  }
  set_pace(now, number);
  update_paces(now, links);
  return number;
}

double SharedLinks::next_end() {
  drop_stale();
  return ends_.empty() ? std::numeric_limits<double>::infinity()
                       : ends_.top().time;
}

int32_t SharedLinks::take_end() {
  drop_stale();
  const End end = ends_.top();
  ends_.pop();
  Transfer& transfer = transfers_[static_cast<size_t>(end.transfer)];
  for (const int32_t link : *transfer.links) {
    std::erase(links_[static_cast<size_t>(link)], end.transfer);
  }
  update_paces(end.time, *transfer.links);
  unused_.push_back(end.transfer);
  return end.transfer;
}

void SharedLinks::update_paces(double now, const std::vector<int32_t>& links) {
  for (const int32_t link : links) {
    for (const int32_t number : links_[static_cast<size_t>(link)]) {
      set_pace(now, number);
    }
  }
}

void SharedLinks::set_pace(double now, int32_t number) {
  Transfer& transfer = transfers_[static_cast<size_t>(number)];
  size_t most = 1;
  for (const int32_t link : *transfer.links) {
    most = std::max(most, links_[static_cast<size_t>(link)].size());
  }
  const double pace = 1.0 / static_cast<double>(most);
  if (pace == transfer.pace) return;
  transfer.left -= (now - transfer.since) * transfer.pace;
  transfer.left = std::max(0.0, transfer.left);
  transfer.since = now;
  transfer.pace = pace;
  ++transfer.version;
  ends_.push({now + transfer.left / pace, number, transfer.version});
}

void SharedLinks::drop_stale() {
  while (!ends_.empty()) {
    const End& end = ends_.top();
    const Transfer& transfer = transfers_[static_cast<size_t>(end.transfer)];
    if (transfer.version == end.version) return;
    ends_.pop();
  }
}

void TransferEvents::add(
    Name name, double time, double seconds, const std::vector<int32_t>& links) {
  starts_.push({time, name, seconds, &links});
}

std::optional<TransferEvents::Ended> TransferEvents::next() {
  for (;;) {
    const double end = links_.next_end();
    if (!starts_.empty() && starts_.top().time < end) {
      const Start start = starts_.top();
      starts_.pop();
      begin(start);
    } else if (end < std::numeric_limits<double>::infinity()) {
      Ended ended = moving_[static_cast<size_t>(links_.take_end())];
      ended.end = end;
      return ended;
    } else {
      return std::nullopt;
    }
  }
}

void TransferEvents::begin(const Start& start) {
  const auto number = static_cast<size_t>(
      links_.start(start.time, start.seconds, *start.links));
  if (moving_.size() <= number) moving_.resize(number + 1);
  moving_[number] = {.name = start.name, .begin = start.time, .end = 0};
}

}  // namespace echelon::simulator
