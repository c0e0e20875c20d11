// The sanitizer finds every fault that is planted here, and reports nothing for
// the same program without it.
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <optional>

#include "tests/test_device/places.h"

namespace echelon::planted_faults_test {

using namespace test_device;
using torch::Tensor;

/// A program with a fault, if `faulty`.
struct Fault {
  std::string name;
  std::function<void(bool faulty)> run;
  /// What the report names: the operators of both accesses, or the finding's
  /// other words.
  std::vector<std::string> names;
  Finding finding = Finding::unordered_access;
};

void PrintTo(const Fault& fault, std::ostream* out) {
  *out << fault.name;
}

Tensor on_device(std::vector<int64_t> sizes, int index = 0) {
  return torch::ones(sizes, device(index));
}
Tensor pinned(std::vector<int64_t> sizes) {
  return torch::ones(sizes, torch::TensorOptions().pinned_memory(true));
}

// ------------------------------------------------------------------- streams

void read_without_event(bool faulty) {
  const Tensor x = on_device({64});
  const auto side = new_stream();
  if (!faulty) order(current(), side);
  const c10::StreamGuard on_side(side);
  x.exp();
}

void use_of_a_side_stream_s_result(bool faulty) {
  const auto side = new_stream();
  Tensor y = on_device({64});
  order(current(), side);
  {
    const c10::StreamGuard on_side(side);
    y.mul_(2);
  }
  if (!faulty) order(side, current());
  y.exp();
}

void overwrite_of_what_is_read(bool faulty) {
  Tensor x = on_device({64});
  const Tensor y = on_device({64});
  const auto side = new_stream();
  order(current(), side);
  {
    const c10::StreamGuard on_side(side);
    y.add(x);
  }
  if (!faulty) order(side, current());
  x.zero_();
}

void two_writes(bool faulty) {
  Tensor x = on_device({64});
  const auto side = new_stream();
  order(current(), side);
  x.fill_(2);
  if (!faulty) order(current(), side);
  const c10::StreamGuard on_side(side);
  x.fill_(3);
}

void event_before_the_write(bool faulty) {
  Tensor x = on_device({64});
  const auto side = new_stream();
  c10::Event event(torch::kPrivateUse1);
  if (faulty) event.record(current());
  x.fill_(2);
  if (!faulty) event.record(current());
  event.block(side);
  const c10::StreamGuard on_side(side);
  x.exp();
}

void event_for_the_wrong_stream(bool faulty) {
  const Tensor x = on_device({64});
  const auto side = new_stream();
  const auto other = new_stream();
  order(current(), faulty ? other : side);
  const c10::StreamGuard on_side(side);
  x.exp();
}

void event_that_is_recorded_again(bool faulty) {
  Tensor x = on_device({64});
  const auto side = new_stream();
  c10::Event event(torch::kPrivateUse1);
  event.record(current());
  if (faulty) event.block(side);
  x.fill_(2);
  event.record(current());
  if (!faulty) event.block(side);
  const c10::StreamGuard on_side(side);
  x.exp();
}

void chain_of_streams_with_a_gap(bool faulty) {
  const Tensor x = on_device({64});
  const auto second = new_stream();
  const auto third = new_stream();
  if (!faulty) order(current(), second);
  order(second, third);
  const c10::StreamGuard on_third(third);
  x.exp();
}

void slice_of_a_flat_buffer(bool faulty) {
  Tensor flat = on_device({128});
  const auto side = new_stream();
  order(current(), side);
  {
    const c10::StreamGuard on_side(side);
    flat.narrow(0, 0, 64).mul_(2);
  }
  flat.narrow(0, faulty ? 63 : 64, 64).exp();
}

void list_of_tensors(bool faulty) {
  std::vector<Tensor> tensors{on_device({8}), on_device({8})};
  const auto side = new_stream();
  order(current(), side);
  {
    const c10::StreamGuard on_side(side);
    tensors[1].mul_(2);
  }
  if (!faulty) order(side, current());
  torch::_foreach_add_(tensors, 1);
}

void thread_that_forgets_the_stream(bool faulty) {
  Tensor x = on_device({64});
  const auto side = new_stream();
  order(current(), side);
  {
    const c10::StreamGuard on_side(side);
    x.mul_(2);
  }
  std::thread([&] {
    // The current stream is per thread.
    std::optional<c10::StreamGuard> on_side;
    if (!faulty) on_side.emplace(side);
    x.exp();
  }).join();
}

// -------------------------------------------------------------------- memory

void block_that_is_freed_too_early(bool faulty) {
  Tensor x = on_device({64});
  const auto side = new_stream();
  order(current(), side);
  {
    const c10::StreamGuard on_side(side);
    x.exp();
  }
  if (!faulty) x.record_stream(side);
  x = Tensor();
  on_device({64});  // takes the same block
}

void record_stream_of_the_wrong_stream(bool faulty) {
  Tensor x = on_device({64});
  const auto side = new_stream();
  order(current(), side);
  {
    const c10::StreamGuard on_side(side);
    x.exp();
  }
  x.record_stream(faulty ? current() : side);
  x = Tensor();
  on_device({64});
}

void block_of_a_side_stream(bool faulty) {
  const auto side = new_stream();
  Tensor x;
  {
    const c10::StreamGuard on_side(side);
    x = on_device({64});
  }
  order(side, current());
  x.exp();
  if (!faulty) order(current(), side);
  x = Tensor();
  const c10::StreamGuard on_side(side);
  on_device({64});
}

// -------------------------------------------------------------- host memory

float first(const Tensor& host) {
  return *static_cast<const volatile float*>(host.const_data_ptr());
}

void copy_that_is_read_too_soon(bool faulty) {
  const Tensor x = on_device({64});
  Tensor host = pinned({64});
  host.copy_(x, /*non_blocking=*/true);
  if (!faulty) current().synchronize();
  first(host);
}

void source_that_changes_under_the_copy(bool faulty) {
  Tensor host = pinned({64});
  Tensor x = on_device({64});
  x.copy_(host, /*non_blocking=*/true);
  if (!faulty) current().synchronize();
  host.fill_(2);
}

void wait_for_another_stream(bool faulty) {
  const Tensor x = on_device({64});
  Tensor host = pinned({64});
  const auto side = new_stream();
  order(current(), side);
  {
    const c10::StreamGuard on_side(side);
    host.copy_(x, /*non_blocking=*/true);
  }
  (faulty ? current() : side).synchronize();
  first(host);
}

void event_before_the_copy(bool faulty) {
  const Tensor x = on_device({64});
  Tensor host = pinned({64});
  c10::Event event(torch::kPrivateUse1);
  if (faulty) event.record(current());
  host.copy_(x, /*non_blocking=*/true);
  if (!faulty) event.record(current());
  event.synchronize();
  first(host);
}

void second_copy_into_one_buffer(bool faulty) {
  const Tensor x = on_device({64});
  Tensor host = pinned({64});
  host.copy_(x, /*non_blocking=*/true);
  c10::Event event(torch::kPrivateUse1);
  event.record(current());
  host.copy_(x, /*non_blocking=*/true);
  if (!faulty) event.record(current());
  event.synchronize();
  first(host);
}

// ---------------------------------------------------------------- collectives

using Options = c10d::AllreduceOptions;

c10::intrusive_ptr<c10d::Work>
all_reduce(c10d::Backend& group, const Tensor& tensor, bool async) {
  std::vector<Tensor> tensors{tensor};
  Options options;
  options.asyncOp = async;
  return group.allreduce(tensors, options);
}

/// Two ranks with a group of both.
void on_pair(const std::function<void(int, c10d::Backend&)>& body) {
  on_ranks(
      2, [&](int rank, Groups& groups) { body(rank, groups.make("pair")); });
}

void result_without_wait(bool faulty) {
  on_pair([&](int rank, c10d::Backend& group) {
    const Tensor x = on_device({64}, rank);
    const auto work = all_reduce(group, x, true);
    if (!faulty) work->wait();
    x.exp();
    if (faulty) work->wait();
  });
}

void input_that_changes_under_a_collective(bool faulty) {
  on_pair([&](int rank, c10d::Backend& group) {
    Tensor input = on_device({64}, rank);
    Tensor output = on_device({128}, rank);
    c10d::AllgatherOptions options;
    options.asyncOp = true;
    const auto work = group._allgather_base(output, input, options);
    if (!faulty) work->wait();
    input.zero_();
    if (faulty) work->wait();
  });
}

void wait_on_another_stream(bool faulty) {
  on_pair([&](int rank, c10d::Backend& group) {
    const Tensor x = on_device({64}, rank);
    const auto side = new_stream(rank);
    const auto work = all_reduce(group, x, true);
    {
      std::optional<c10::StreamGuard> on_side;
      if (faulty) on_side.emplace(side);
      work->wait();
    }
    x.exp();
  });
}

void synchronous_call_on_a_side_stream(bool faulty) {
  on_pair([&](int rank, c10d::Backend& group) {
    const Tensor x = on_device({64}, rank);
    const auto side = new_stream(rank);
    order(current(rank), side);
    {
      const c10::StreamGuard on_side(side);
      all_reduce(group, x, false);
    }
    if (!faulty) order(side, current(rank));
    x.exp();
  });
}

void work_that_is_dropped(bool faulty) {
  on_pair([&](int rank, c10d::Backend& group) {
    Tensor x = on_device({64}, rank);
    auto work = all_reduce(group, x, true);
    if (!faulty) work->wait();
    work.reset();
    x = Tensor();
    on_device({64}, rank);  // takes the same block
  });
}

void optimizer_before_the_gradients(bool faulty) {
  on_pair([&](int rank, c10d::Backend& group) {
    Tensor parameter = on_device({64}, rank);
    const Tensor gradients = on_device({256}, rank);
    const auto work = all_reduce(group, gradients, true);
    if (!faulty) work->wait();
    std::vector<Tensor> parameters{parameter};
    std::vector<Tensor> shares{gradients.narrow(0, 64, 64)};
    torch::_foreach_add_(parameters, shares, -0.1);
    if (faulty) work->wait();
  });
}

void message_that_is_read_too_soon(bool faulty) {
  on_pair([&](int rank, c10d::Backend& group) {
    std::vector<Tensor> tensors{on_device({64}, rank)};
    const auto work =
        rank == 0 ? group.send(tensors, 1, 0) : group.recv(tensors, 0, 0);
    if (!faulty || rank == 0) work->wait();
    tensors[0].exp();
    work->wait();
  });
}

void buffer_that_is_sent(bool faulty) {
  on_pair([&](int rank, c10d::Backend& group) {
    std::vector<Tensor> tensors{on_device({64}, rank)};
    const auto work =
        rank == 0 ? group.send(tensors, 1, 0) : group.recv(tensors, 0, 0);
    if (!faulty || rank == 1) work->wait();
    tensors[0].zero_();
    work->wait();
  });
}

void batch_that_is_not_waited_for(bool faulty) {
  on_pair([&](int rank, c10d::Backend& group) {
    std::vector<Tensor> out{on_device({64}, rank)};
    std::vector<Tensor> in{on_device({64}, rank)};
    group.startCoalescing();
    group.send(out, 1 - rank, 0);
    group.recv(in, 1 - rank, 0);
    const auto work = group.endCoalescing();
    if (!faulty) work->wait();
    in[0].exp();
    work->wait();
  });
}

void buffers_of_two_collectives(bool faulty) {
  on_pair([&](int rank, c10d::Backend& group) {
    // A gradient bucket is filled again while its reduction is under way.
    Tensor bucket = on_device({64}, rank);
    const Tensor gradient = on_device({64}, rank);
    const auto work = all_reduce(group, bucket, true);
    const auto copy = new_stream(rank);
    order(current(rank), copy);
    if (!faulty) {
      const c10::StreamGuard on_copy(copy);
      work->wait();
    }
    {
      const c10::StreamGuard on_copy(copy);
      bucket.copy_(gradient);
    }
    work->wait();
  });
}

void communicators_in_two_orders(bool faulty) {
  on_ranks(2, [&](int rank, Groups& groups) {
    auto& tp = groups.make("tp");
    auto& dp = groups.make("dp");
    const Tensor x = on_device({64}, rank);
    const Tensor y = on_device({64}, rank);
    // Connected in one order; else this test would hang, as NCCL does.
    all_reduce(tp, x, false);
    all_reduce(dp, y, false);
    const bool swap = faulty && rank == 1;
    const auto one = all_reduce(swap ? dp : tp, x, true);
    const auto other = all_reduce(swap ? tp : dp, y, true);
    one->wait();
    other->wait();
  });
}

void memory_that_one_rank_has_registered(bool faulty) {
  on_pair([&](int rank, c10d::Backend& group) {
    group.barrier(c10d::BarrierOptions())->wait();  // it connects
    Tensor registered =
        group.allocateTensor(64, torch::TensorOptions().device(device(rank)));
    Tensor unregistered = on_device({64}, rank);
    Tensor& large = faulty && rank == 1 ? unregistered : registered;
    Tensor part = large.narrow(0, 32 * rank, 32);
    group._allgather_base(large, part, c10d::AllgatherOptions())->wait();
  });
}

const std::vector<Fault>& faults() {
  using enum Finding;
  static const std::vector<Fault> all{
      {"ReadWithoutEvent", &read_without_event, {"exp", "fill_"}},
      {"UseOfASideStreamsResult",
       &use_of_a_side_stream_s_result,
       {"exp", "mul"}},
      {"OverwriteOfWhatIsRead", &overwrite_of_what_is_read, {"zero_", "add"}},
      {"TwoWrites", &two_writes, {"fill_"}},
      {"EventBeforeTheWrite", &event_before_the_write, {"exp", "fill_"}},
      {"EventForTheWrongStream", &event_for_the_wrong_stream, {"exp"}},
      {"EventThatIsRecordedAgain",
       &event_that_is_recorded_again,
       {"exp", "fill_"}},
      {"ChainOfStreamsWithAGap", &chain_of_streams_with_a_gap, {"exp"}},
      {"SliceOfAFlatBuffer", &slice_of_a_flat_buffer, {"exp", "mul"}},
      {"ListOfTensors", &list_of_tensors, {"_foreach_add_", "mul"}},
      {"ThreadThatForgetsTheStream",
       &thread_that_forgets_the_stream,
       {"exp", "mul"}},
      {"BlockThatIsFreedTooEarly",
       &block_that_is_freed_too_early,
       {"fill_", "exp"}},
      {"RecordStreamOfTheWrongStream",
       &record_stream_of_the_wrong_stream,
       {"fill_", "exp"}},
      {"BlockOfASideStream", &block_of_a_side_stream, {"fill_", "exp"}},
      {"CopyThatIsReadTooSoon",
       &copy_that_is_read_too_soon,
       {"copy to the host", "writes"},
       early_host_access},
      {"SourceThatChangesUnderTheCopy",
       &source_that_changes_under_the_copy,
       {"copy to the device", "reads"},
       early_host_access},
      {"WaitForAnotherStream",
       &wait_for_another_stream,
       {"copy to the host"},
       early_host_access},
      {"EventBeforeTheCopy",
       &event_before_the_copy,
       {"copy to the host"},
       early_host_access},
      {"SecondCopyIntoOneBuffer",
       &second_copy_into_one_buffer,
       {"copy to the host"},
       early_host_access},
      {"ResultWithoutWait", &result_without_wait, {"exp", "all_reduce"}},
      {"InputThatChangesUnderACollective",
       &input_that_changes_under_a_collective,
       {"zero_", "all_gather"}},
      {"WaitOnAnotherStream", &wait_on_another_stream, {"exp", "all_reduce"}},
      {"SynchronousCallOnASideStream",
       &synchronous_call_on_a_side_stream,
       {"exp", "all_reduce"}},
      {"WorkThatIsDropped", &work_that_is_dropped, {"fill_", "all_reduce"}},
      {"OptimizerBeforeTheGradients",
       &optimizer_before_the_gradients,
       {"_foreach_add_", "all_reduce"}},
      {"MessageThatIsReadTooSoon",
       &message_that_is_read_too_soon,
       {"exp", "recv"}},
      {"BufferThatIsSent", &buffer_that_is_sent, {"zero_", "send"}},
      {"BatchThatIsNotWaitedFor",
       &batch_that_is_not_waited_for,
       {"exp", "batch of messages"}},
      {"BuffersOfTwoCollectives",
       &buffers_of_two_collectives,
       {"copy_", "all_reduce"}},
      {"CommunicatorsInTwoOrders",
       &communicators_in_two_orders,
       {"ranks 0 and 1"},
       communicator_order},
      {"MemoryThatOneRankHasRegistered",
       &memory_that_one_rank_has_registered,
       {"all_gather has registered memory on some ranks alone"},
       mixed_registration},
  };
  return all;
}

class PlantedFaults : public testing::TestWithParam<Fault> {
 protected:
  // What a program left behind is over, and the host knows it.
  void SetUp() override {
    for (const int index : {0, 1}) guard().synchronizeDevice(index);
    take_reports();
  }
  // What has the memory next is not unordered with the fault.
  void TearDown() override { guard().synchronizeDevice(0); }
};

TEST_P(PlantedFaults, AreFoundAndNamed) {
  GetParam().run(true);
  drain(0);
  const auto reports = take_reports();
  ASSERT_FALSE(reports.empty());
  EXPECT_EQ(reports[0].finding, GetParam().finding);
  for (const auto& name : GetParam().names) {
    EXPECT_THAT(reports[0].text, testing::HasSubstr(name));
  }
}

TEST_P(PlantedFaults, AreNotReportedWithoutTheFault) {
  GetParam().run(false);
  drain(0);
  for (const auto& report : take_reports()) ADD_FAILURE() << report.text;
}

INSTANTIATE_TEST_SUITE_P(
    All, PlantedFaults, testing::ValuesIn(faults()),
    [](const auto& info) { return info.param.name; });

}  // namespace echelon::planted_faults_test
