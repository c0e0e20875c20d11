#include "tests/comm/local/cases.h"

#include <ATen/ATen.h>

#include <functional>
#include <map>
#include <mutex>

#include "echelon/comm/shared_memory/failure.h"
#include "tests/comm/shared_memory/thread_ranks.h"

namespace echelon::local::testing {
namespace {

using Backend = c10d::Backend;
using Tensors = std::vector<at::Tensor>;

#define REQUIRE(condition, ...)                                                \
  if (!(condition)) {                                                          \
    throw std::runtime_error(                                                  \
        c10::str(__FILE__, ":", __LINE__, ": " #condition ": ", __VA_ARGS__)); \
  }

const std::vector<at::ScalarType> kDtypes = {
    at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kChar,
    at::kByte,  at::kShort,  at::kInt,      at::kLong, at::kBool};

constexpr int64_t kPeriod = 13;
constexpr int64_t kMaxCount = (3 << 20) + 1;

// Rank r's values: small numbers that differ by rank and place, of both signs
// where the dtype has them; sums of 8 of them fit in int8. Cut from one table,
// since they repeat after kPeriod.
at::Tensor values(int64_t count, at::ScalarType dtype, int rank) {
  static std::mutex mutex;
  static std::map<at::ScalarType, at::Tensor> tables;
  std::lock_guard lock(mutex);
  auto& table = tables[dtype];
  if (!table.defined()) {
    auto base = at::arange(kMaxCount + kPeriod, at::kLong) * 7 % kPeriod;
    if (dtype == at::kBool) {
      table = base.remainder(5).eq(0);
    } else {
      table = (dtype == at::kByte ? base : base - 6).to(dtype);
    }
    if (at::isFloatingType(dtype)) {
      table /= 4;  // all float dtypes hold these exactly
    }
  }
  return table.narrow(0, rank * 6 % kPeriod, count);
}

// The reduction of values(count, dtype, first + r) over r, one period of it
// computed here.
at::Tensor reference(
    int size, int first, int64_t count, c10d::ReduceOp::RedOpType op,
    at::ScalarType dtype) {
  Tensors inputs;
  for (int r = 0; r < size; ++r) {
    inputs.push_back(values(kPeriod, dtype, first + r));
  }
  const bool floating = at::isFloatingType(dtype);
  auto wide = dtype == at::kDouble ? at::kDouble
              : floating           ? at::kFloat
                                   : at::kLong;
  at::Tensor result = inputs[0].to(wide);
  for (size_t j = 1; j < inputs.size(); ++j) {
    const auto value = inputs[j].to(wide);
    if (op == c10d::ReduceOp::MIN) {
      result = at::minimum(result, value);
    } else if (op == c10d::ReduceOp::MAX) {
      result = at::maximum(result, value);
    } else {
      result = result + value;
    }
  }
  if (op == c10d::ReduceOp::AVG) {
    const auto n = static_cast<int64_t>(inputs.size());
    result = floating ? result / n : at::div(result, n, "trunc");
  }
  result = dtype == at::kBool ? result.ne(0) : result.to(dtype);
  return result.repeat({count / kPeriod + 1}).narrow(0, 0, count);
}

// Around the limits: payload slots (32 and 64 KiB, also divided by the size),
// claimed chunks (256 KiB), stages (1 MiB).
std::vector<int64_t> counts(int64_t element_size, int size) {
  std::vector<int64_t> counts = {0, 1, 7, 63, 64, 1001};
  for (const int64_t bytes : {32 << 10, 64 << 10, 256 << 10}) {
    for (const int64_t edge : {-1, 0, 1}) {
      counts.push_back(bytes / element_size + edge);
      counts.push_back(bytes / element_size / size + edge);
    }
  }
  counts.push_back((1 << 20) / element_size + 5);
  if (element_size > 1) counts.push_back((3 << 20) / element_size - 3);
  return counts;
}

Tensors inputs_of(int size, int64_t count, at::ScalarType dtype) {
  Tensors inputs;
  for (int r = 0; r < size; ++r) inputs.push_back(values(count, dtype, r));
  return inputs;
}

void wait(const c10::intrusive_ptr<c10d::Work>& work) {
  work->wait(std::chrono::milliseconds(0));
}

void reduce_all(
    Backend& b, at::ScalarType dtype, c10d::ReduceOp::RedOpType op,
    int64_t count) {
  const int rank = b.getRank();
  const int size = b.getSize();
  const auto inputs = inputs_of(size, count, dtype);
  const auto expected = reference(size, 0, count, op, dtype);
  const auto where = c10::str(dtype, " op ", int(op), " count ", count);

  c10d::AllreduceOptions all;
  all.reduceOp = op;
  all.asyncOp = count % 2 == 0;
  Tensors mine = {inputs[rank].clone()};
  wait(b.allreduce(mine, all));
  REQUIRE(at::equal(mine[0], expected), "all_reduce ", where);

  c10d::ReduceOptions one;
  one.reduceOp = op;
  one.rootRank = count % size;
  mine = {inputs[rank].clone()};
  wait(b.reduce(mine, one));
  if (rank == one.rootRank) {
    REQUIRE(at::equal(mine[0], expected), "reduce ", where);
  }

  // Slice j of rank r's input is values of rank r + j.
  Tensors rows;
  for (int j = 0; j < size; ++j) rows.push_back(values(count, dtype, rank + j));
  auto input = at::cat(rows);
  auto output = at::empty({count}, input.options());
  c10d::ReduceScatterOptions scatter;
  scatter.reduceOp = op;
  wait(b._reduce_scatter_base(output, input, scatter));
  REQUIRE(
      at::equal(output, reference(size, rank, count, op, dtype)),
      "reduce_scatter ", where);
}

/// Every operation, dtype and reduction, at sizes around each path's limits,
/// against plain arithmetic on one rank.
void reductions(Backend& b) {
  for (const auto dtype : kDtypes) {
    for (const auto op :
         {c10d::ReduceOp::SUM, c10d::ReduceOp::AVG, c10d::ReduceOp::MIN,
          c10d::ReduceOp::MAX}) {
      if (dtype == at::kBool && op == c10d::ReduceOp::AVG) continue;
      const bool thorough = op == c10d::ReduceOp::SUM;
      for (const auto count : thorough
                                  ? counts(at::elementSize(dtype), b.getSize())
                                  : std::vector<int64_t>{0, 1, 1001, 100003}) {
        reduce_all(b, dtype, op, count);
      }
    }
  }
}

void move_all(Backend& b, at::ScalarType dtype, int64_t count) {
  const int rank = b.getRank();
  const int size = b.getSize();
  const auto inputs = inputs_of(size, count, dtype);
  const auto where = c10::str(dtype, " count ", count);
  const auto options = at::TensorOptions().dtype(dtype);
  const int root = static_cast<int>(count % size);

  auto gathered = at::empty({count * size}, options);
  auto input = inputs[rank].clone();
  wait(b._allgather_base(gathered, input, {}));
  REQUIRE(at::equal(gathered, at::cat(inputs)), "all_gather ", where);

  c10d::BroadcastOptions from;
  from.rootRank = root;
  Tensors copy = {
      rank == root ? inputs[root].clone() : at::zeros({count}, options)};
  wait(b.broadcast(copy, from));
  REQUIRE(at::equal(copy[0], inputs[root]), "broadcast ", where);

  std::vector<Tensors> lists;
  if (rank == root) {
    lists.emplace_back();
    for (int r = 0; r < size; ++r) {
      lists[0].push_back(at::empty({count}, options));
    }
  }
  c10d::GatherOptions gather;
  gather.rootRank = root;
  Tensors one = {input};
  wait(b.gather(lists, one, gather));
  for (int r = 0; rank == root && r < size; ++r) {
    REQUIRE(at::equal(lists[0][r], inputs[r]), "gather ", where);
  }
  c10d::ScatterOptions scatter;
  scatter.rootRank = root;
  if (rank == root) lists[0] = inputs;
  one = {at::empty({count}, options)};
  wait(b.scatter(one, lists, scatter));
  REQUIRE(at::equal(one[0], inputs[rank]), "scatter ", where);

  // Equal parts: what rank r has for rank j is values of r * size + j.
  Tensors out;
  Tensors in;
  for (int j = 0; j < size; ++j) {
    out.push_back(values(count, dtype, rank * size + j));
    in.push_back(values(count, dtype, j * size + rank));
  }
  auto sent = at::cat(out).view({size, count});
  auto received = at::empty_like(sent);
  std::vector<int64_t> none;
  wait(b.alltoall_base(received, sent, none, none, {}));
  REQUIRE(at::equal(received.view({-1}), at::cat(in)), "all_to_all ", where);

  // Unequal: rank r sends ((r + j) % 3) * count / 2 rows to j.
  const auto rows = [&](int a, int b) { return (a + b) % 3 * (count / 2); };
  std::vector<int64_t> output_splits;
  std::vector<int64_t> input_splits;
  out.clear();
  in.clear();
  for (int j = 0; j < size; ++j) {
    input_splits.push_back(rows(rank, j));
    output_splits.push_back(rows(j, rank));
    out.push_back(values(rows(rank, j), dtype, rank * size + j));
    in.push_back(values(rows(j, rank), dtype, j * size + rank));
  }
  sent = at::cat(out);
  const auto expected = at::cat(in);
  received = at::empty_like(expected);
  wait(b.alltoall_base(received, sent, output_splits, input_splits, {}));
  REQUIRE(at::equal(received, expected), "unequal all_to_all ", where);
  wait(b.barrier({}));
}

void movements(Backend& b) {
  for (const auto dtype : kDtypes) {
    const bool thorough = dtype == at::kFloat || dtype == at::kChar;
    for (const auto count : thorough
                                ? counts(at::elementSize(dtype), b.getSize())
                                : std::vector<int64_t>{0, 1, 1001, 100003}) {
      move_all(b, dtype, count);
    }
  }
}

/// Lists of tensors, strided tensors, coalesced forms.
void lists(Backend& b) {
  const int rank = b.getRank();
  const int size = b.getSize();
  const auto at_rank = [](int r, int64_t n) {
    return values(n, at::kFloat, r);
  };
  const auto sum_of = [&](int64_t n) {
    return reference(size, 0, n, c10d::ReduceOp::SUM, at::kFloat);
  };

  Tensors many = {
      at_rank(rank, 6).clone().view({2, 3}), at::empty({0}),
      at_rank(rank, 70001).clone()};
  wait(b.allreduce_coalesced(many, {}));
  REQUIRE(at::equal(many[0], sum_of(6).view({2, 3})), "coalesced");
  REQUIRE(at::equal(many[2], sum_of(70001)), "coalesced");

  Tensors inputs = {at_rank(rank, 5), at_rank(rank + 1, 40000)};
  Tensors outputs = {at::empty({5 * size}), at::empty({40000 * size})};
  wait(b.allgather_into_tensor_coalesced(outputs, inputs, {}));
  for (int r = 0; r < size; ++r) {
    REQUIRE(at::equal(outputs[0].narrow(0, 5 * r, 5), at_rank(r, 5)), r);
    REQUIRE(
        at::equal(
            outputs[1].narrow(0, 40000 * r, 40000), at_rank(r + 1, 40000)),
        r);
  }

  inputs = {at_rank(rank, 3 * size), at_rank(rank, 9000 * size)};
  outputs = {at::empty({3}), at::empty({9000})};
  wait(b.reduce_scatter_tensor_coalesced(outputs, inputs, {}));
  REQUIRE(at::equal(outputs[0], sum_of(3 * size).narrow(0, 3 * rank, 3)), rank);
  REQUIRE(
      at::equal(outputs[1], sum_of(9000 * size).narrow(0, 9000 * rank, 9000)),
      rank);

  // A strided tensor is used through a copy, and holds the result.
  auto matrix = at_rank(rank, 600).view({20, 30}).clone();
  Tensors strided = {matrix.t()};
  wait(b.allreduce(strided, {}));
  REQUIRE(at::equal(matrix, sum_of(600).view({20, 30})), "strided");
}

/// Tags out of order, all send before they receive, big ones.
void messages(Backend& b) {
  const int rank = b.getRank();
  const int size = b.getSize();
  const int next = (rank + 1) % size;
  const int previous = (rank + size - 1) % size;
  // All send before they receive; also to oneself in a group of one.
  for (const int64_t count : {0, 1, 1000, 65536, 65537, 300000, 1000003}) {
    if (size == 1 && count * 4 > (1 << 20)) {
      continue;  // would wait for its own receive
    }
    Tensors out = {values(count, at::kFloat, rank)};
    Tensors in = {at::empty({count})};
    auto sending = b.send(out, next, 5);
    auto receiving = b.recv(in, previous, 5);
    wait(sending);
    wait(receiving);
    REQUIRE(at::equal(in[0], values(count, at::kFloat, previous)), count);
  }
  // Tags in the opposite order, with small and big ones between.
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  std::vector<Tensors> in(20);
  std::vector<Tensors> out(20);
  const auto count = [](int tag) { return tag % 3 == 0 ? 200003 : 100 + tag; };
  for (int tag = 0; tag < 20; ++tag) {
    out[tag] = {values(count(tag), at::kFloat, rank + tag)};
    works.push_back(b.send(out[tag], next, tag));
  }
  for (int tag = 19; tag >= 0; --tag) {
    in[tag] = {at::empty({count(tag)})};
    auto work = b.recv(in[tag], previous, tag);
    if (tag % 2 == 0) {
      wait(work);
    } else {
      works.push_back(work);
    }
  }
  for (const auto& work : works) wait(work);
  for (int tag = 0; tag < 20; ++tag) {
    REQUIRE(
        at::equal(in[tag][0], values(count(tag), at::kFloat, previous + tag)),
        "tag ", tag);
  }
  // A later receive completes while an earlier one waits for its message.
  Tensors late = {at::empty({8})};
  Tensors soon = {at::empty({8})};
  auto first = b.recv(late, previous, 100);
  Tensors a = {values(8, at::kFloat, rank)};
  auto sent = b.send(a, next, 101);
  wait(b.recv(soon, previous, 101));
  wait(sent);
  wait(b.send(a, next, 100));
  wait(first);
  REQUIRE(at::equal(late[0], soon[0]), "late");
  wait(b.barrier({}));
}

/// Hundreds in flight, waited for in any order, through futures too.
void many_in_flight(Backend& b) {
  const int rank = b.getRank();
  const int size = b.getSize();
  const float sum = size * (size + 1) / 2.0f;
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  std::vector<Tensors> tensors;
  for (int k = 0; k < 300; ++k) {
    tensors.push_back({at::full({(k * 7919) % 200000 + 1}, rank + 1.0f)});
    works.push_back(b.allreduce(tensors.back(), {}));
  }
  for (int k = 299; k >= 0; --k) {
    if (k % 3 == 0) {
      works[k]->getFuture()->waitAndThrow();
    } else {
      wait(works[k]);
    }
  }
  for (const auto& t : tensors) {
    REQUIRE(t[0].eq(sum).all().item<bool>(), "sum");
  }
  // Dropped handles: the operation keeps the tensors.
  for (int k = 0; k < 50; ++k) {
    Tensors t = {at::full({50000}, rank + 1.0f)};
    b.allreduce(t, {});
  }
  wait(b.barrier({}));
}

// `call` must throw Mismatch with a text that names each call, on every rank.
void expect_mismatch(
    Backend& b, const std::vector<std::string>& words,
    const std::function<c10::intrusive_ptr<c10d::Work>()>& call) {
  const auto error = thrown_by<Mismatch>([&] { wait(call()); });
  const std::string text = error.what();
  for (const auto& word : words) {
    REQUIRE(
        text.find(word) != std::string::npos, "\"", word, "\" not in ", text);
  }
  REQUIRE(
      error.missing() == std::vector<int>{b.getSize() - 1} || b.getSize() == 2,
      text);
  Tensors t = {at::full({3}, 1.0f)};
  wait(b.allreduce(t, {}));
  REQUIRE(t[0][0].item<float>() == b.getSize(), "not usable afterwards");
}

/// Every kind of disagreement; the group is used after each.
void mismatches(Backend& b) {
  const int size = b.getSize();
  if (size == 1) return;
  const bool odd = b.getRank() == size - 1;  // the one that differs
  const std::string odd_rank = "rank " + std::to_string(size - 1);
  Tensors t = {at::ones({4})};
  expect_mismatch(
      b,
      {"all_reduce(float32 [4], sum)",
       odd_rank + " broadcast(float32 [4], root 0)"},
      [&] { return odd ? b.broadcast(t, {}) : b.allreduce(t, {}); });
  expect_mismatch(b, {odd_rank + " barrier"}, [&] {
    return odd ? b.barrier({}) : b.allreduce(t, {});
  });
  Tensors shape = {at::ones({odd ? 5 : 4})};
  expect_mismatch(b, {"[4]", odd_rank + " all_reduce(float32 [5], sum)"}, [&] {
    return b.allreduce(shape, {});
  });
  shape = {odd ? at::ones({2, 300000}) : at::ones({300000, 2})};
  expect_mismatch(b, {"[300000, 2]", "[2, 300000]"}, [&] {
    return b.allreduce(shape, {});
  });
  Tensors dtype = {odd ? at::ones({4}, at::kHalf) : at::ones({4})};
  expect_mismatch(
      b, {"float32", "float16"}, [&] { return b.allreduce(dtype, {}); });
  c10d::AllreduceOptions op;
  op.reduceOp = odd ? c10d::ReduceOp::MAX : c10d::ReduceOp::SUM;
  expect_mismatch(b, {"sum", odd_rank + " all_reduce(float32 [4], max)"}, [&] {
    return b.allreduce(t, op);
  });
  c10d::BroadcastOptions root;
  root.rootRank = odd ? 1 : 0;
  expect_mismatch(
      b, {"root 0", "root 1"}, [&] { return b.broadcast(t, root); });
  // The last rank expects one row more from rank 0 than that sends.
  std::vector<int64_t> in(size, 2);
  std::vector<int64_t> out(size, 2);
  if (odd) out[0] = 3;
  auto sent = at::ones({2 * size});
  auto received = at::empty({odd ? 2 * size + 1 : 2 * size});
  expect_mismatch(b, {"all_to_all", "receives 3,2"}, [&] {
    return b.alltoall_base(received, sent, out, in, {});
  });
  // A message of another size tells the receiver, and only it.
  if (b.getRank() == 0) {
    Tensors three = {at::ones({3})};
    wait(b.send(three, size - 1, 1));
    wait(b.send(t, size - 1, 1));
  } else if (odd) {
    const auto error = thrown_by<Mismatch>([&] { wait(b.recv(t, 0, 1)); });
    const std::string text = error.what();
    REQUIRE(text.find("3 elements") != std::string::npos, text);
    wait(b.recv(t, 0, 1));
  }
  wait(b.barrier({}));
}

}  // namespace

std::vector<Case> cases() {
  return {
      {"Reductions", reductions},
      {"Movements", movements},
      {"Lists", lists},
      {"Messages", messages},
      {"ManyInFlight", many_in_flight},
      {"Mismatches", mismatches}};
}

}  // namespace echelon::local::testing
