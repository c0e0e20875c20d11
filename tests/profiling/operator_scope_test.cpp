#include "echelon/profiling/operator_scope.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <string>
#include <thread>
#include <vector>

namespace echelon::profiling::operator_scope_test {

using testing::Contains;
using testing::ElementsAre;
using testing::Not;
using torch::Tensor;

struct Writer : OperatorHandler {
  void run(OperatorCall& call) override {
    names.push_back(call.name());
    call.whole = call.whole || whole;
    call.run();
  }
  Results run_region(
      const std::string& name, const std::function<Results()>& next) override {
    names.push_back(name);
    return next();
  }
  std::vector<std::string> names;
  bool whole = false;
};

// Gives `result` in place of what aten::mm would.
struct Replacer : OperatorHandler {
  explicit Replacer(Tensor result) : result(std::move(result)) {}
  void run(OperatorCall& call) override {
    if (call.name() != "aten::mm") return call.run();
    call.stack.resize(call.first());
    call.stack.emplace_back(result);
  }
  Tensor result;
};

TEST(OperatorScope, SeesOperatorsBelowAutogradAndInBackward) {
  const auto a = torch::randn({2, 3}).requires_grad_();
  const auto b = torch::randn({3, 4});
  Writer writer;
  {
    const OperatorScope scope(writer);
    torch::matmul(a, b).sum().backward();
  }
  // matmul is composed of others; mm runs forwards and backwards.
  EXPECT_THAT(writer.names, Not(Contains("aten::matmul")));
  EXPECT_THAT(writer.names, Contains("aten::mm").Times(2));
  const auto before = writer.names.size();
  torch::matmul(a, b);
  EXPECT_EQ(writer.names.size(), before) << "the scope has ended";
}

TEST(OperatorScope, InnerHandlersPassOperatorsToOuterOnes) {
  Writer outer, inner;
  Replacer replacer(torch::ones({2, 2}));
  const OperatorScope first(outer);
  {
    const OperatorScope second(inner);
    torch::mm(torch::eye(2), torch::eye(2));
    EXPECT_EQ(inner.names, outer.names);
    EXPECT_THAT(outer.names, Contains("aten::mm"));
  }
  outer.names.clear();
  const OperatorScope third(replacer);
  const auto product = torch::mm(torch::eye(2), torch::eye(2));
  EXPECT_THAT(outer.names, Not(Contains("aten::mm")));
  EXPECT_TRUE(product.equal(torch::ones({2, 2})));
}

TEST(OperatorScope, WholeOperatorsHideTheirInnerOperators) {
  const auto x = torch::randn({1, 2, 5, 5});
  const auto weight = torch::randn({3, 2, 3, 3});
  const auto convolve = [&](bool whole) {
    Writer writer;
    writer.whole = whole;
    const OperatorScope scope(writer);
    torch::conv2d(x, weight);
    return writer.names;
  };
  EXPECT_GT(convolve(false).size(), 1u);
  EXPECT_THAT(convolve(true), ElementsAre("aten::convolution"));
}

TEST(OperatorScope, OtherThreadsSeeNothing) {
  Writer writer;
  const OperatorScope scope(writer);
  std::thread([] { torch::ones({2}).add_(1); }).join();
  EXPECT_THAT(writer.names, ElementsAre());
}

TEST(OperatorScope, RegionsPassThroughAllHandlers) {
  const auto region = [] {
    return as_one_operator(
        "test::region", [] { return std::vector<Tensor>{torch::ones({1})}; });
  };
  EXPECT_EQ(region().size(), 1u);
  Writer outer, inner;
  const OperatorScope first(outer);
  const OperatorScope second(inner);
  EXPECT_EQ(region().size(), 1u);
  EXPECT_EQ(outer.names[0], "test::region");
  EXPECT_EQ(outer.names, inner.names);
}

}  // namespace echelon::profiling::operator_scope_test
