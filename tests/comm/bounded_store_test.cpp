#include "echelon/comm/store/bounded_store.h"

#include <gmock/gmock.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chrono>
#include <future>

#include "echelon/error.h"
#include "tests/support/error_text.h"

namespace echelon::bounded_store_test {

using testing::HasSubstr;
using namespace std::chrono_literals;

// Its server hangs until `answers` is set.
class HangingStore : public c10d::HashStore {
 public:
  bool check(const std::vector<std::string>& keys) override {
    answers.get_future().wait();
    return HashStore::check(keys);
  }
  std::promise<void> answers;
};

TEST(BoundedStore, PassesCallsOn) {
  const auto store =
      bounded_store(c10::make_intrusive<c10d::HashStore>(), 1min, "here:1");
  store->set("a", std::string("x"));
  EXPECT_EQ(store->get_to_str("a"), "x");
  EXPECT_EQ(store->add("n", 2), 2);
  EXPECT_EQ(store->add("n", 3), 5);
  EXPECT_TRUE(store->check({"a", "n"}));
  EXPECT_EQ(store->compareSet("a", "x", "y"), "y");
  store->append("a", {'z'});
  EXPECT_EQ(
      store->multiGet({"a"}), (std::vector<std::vector<uint8_t>>{{'y', 'z'}}));
  EXPECT_TRUE(store->deleteKey("a"));
  EXPECT_FALSE(store->check({"a"}));
  EXPECT_EQ(store->getNumKeys(), 1);
  EXPECT_TRUE(store->hasExtendedApi());
}

TEST(BoundedStore, AWaitHasItsOwnTimeOutAndLosesNothing) {
  const auto store =
      bounded_store(c10::make_intrusive<c10d::HashStore>(), 1min, "here:1");
  EXPECT_ANY_THROW(store->wait({"a"}, 10ms));
  store->set("a", std::string("x"));
  store->wait({"a"}, 10ms);
  EXPECT_EQ(store->get_to_str("a"), "x");
}

TEST(BoundedStore, ACallThatIsNotAnsweredEnds) {
  const auto hanging = c10::make_intrusive<HangingStore>();
  auto store = bounded_store(hanging, 100ms, "here:29500");
  EXPECT_THAT(
      error_text<CommError>([&] { store->check({"a"}); }),
      HasSubstr("the store at here:29500 has not answered within 0.1 s"));
  // Later calls do not wait, nor does the end of the store.
  EXPECT_THAT(
      error_text<CommError>([&] { store->set("a", std::string("x")); }),
      HasSubstr("has not answered"));
  store.reset();
  hanging->answers.set_value();
}

}  // namespace echelon::bounded_store_test
