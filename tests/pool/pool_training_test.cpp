// A job that trains on borrowed slots, with a pool's daemon.
#include <csignal>

#include "tests/pool/pool_server.h"
#include "tests/train/trained_command.h"

namespace echelon::pool {
namespace {

constexpr int64_t kSteps = 1000000;  // until it is stopped

class PoolTraining : public PoolServer {
 protected:
  Words train(const std::string& run) const {
    return train_digits(path(run), kSteps) +
           set(
               {"train.batch=24", "model.name=mlp", "model.dtype=float64",
                "checkpoint.every_steps=0", "train.eval_every=1000000"});
  }
  std::vector<double> losses(const std::string& run) const {
    std::vector<double> all;
    std::ifstream file(path(run) + "/metrics.jsonl");
    for (std::string line; std::getline(file, line);) {
      const Json values = Json::parse(line, nullptr, false);
      if (!values.is_object() || !values.contains("loss")) continue;
      EXPECT_EQ(values["step"], all.size() + 1);
      all.push_back(values["loss"]);
    }
    return all;
  }
  bool goes_on() const {
    const size_t before = losses("run").size();
    return Command::until([&] { return losses("run").size() >= before + 10; });
  }
  /// It trains on so many slots, and the launcher has that many ranks.
  bool has(int64_t id, int slots) const {
    const std::string ranks = ": " + std::to_string(slots) + " ranks";
    return Command::until([&] {
      Command asked({program("echelon"), "job", "status", path("run")});
      return asked.wait() == 0 &&
             asked.out().find(ranks) != std::string::npos &&
             job(id)["devices"] == slots;
    });
  }
};

TEST_F(PoolTraining, AJobGivesBorrowedSlotsBackAndGoesOnFromMemory) {
  start(
      "[pool]\n[project.language]\nguaranteed = 2\n"
      "[project.vision]\nguaranteed = 2\n");
  Words words = {"submit", "--json", "--project",     "language",
                 "-n",     "2..4",   "--preemptible", "--"};
  const Finished submitted = finished(words + train("run"));
  ASSERT_EQ(submitted.code, 0) << submitted.err;
  const int64_t trains = Json::parse(submitted.out)["job"];
  ASSERT_TRUE(has(trains, 4)) << job(trains).dump(1);
  ASSERT_TRUE(goes_on());

  const int64_t other = submit(
      {"--project", "vision", "-n", "2"},
      "touch " + path("began") + "; while [ ! -e " + path("enough") +
          " ]; do sleep 0.02; done");
  ASSERT_TRUE(appears("began")) << why(other);
  EXPECT_TRUE(has(trains, 2)) << job(trains).dump(1);
  EXPECT_TRUE(goes_on());
  std::ofstream(path("enough"));
  ASSERT_TRUE(reaches(other, "done"));
  EXPECT_TRUE(has(trains, 4)) << job(trains).dump(1);
  EXPECT_TRUE(goes_on());
  finished({"cancel", std::to_string(trains)});
  ASSERT_TRUE(Command::until([&] { return ask({"list"})["jobs"].empty(); }));

  // Each step once, with the losses of one device.
  const auto got = losses("run");
  Command one(train("one"));
  ASSERT_TRUE(Command::until([&] {
    return losses("one").size() >= got.size();
  })) << one.err();
  one.signal(SIGTERM);
  ASSERT_EQ(one.wait(), 75) << one.err();
  const auto wanted = losses("one");
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_NEAR(got[i] / wanted[i], 1, 1e-10) << i + 1;
  }
}

}  // namespace
}  // namespace echelon::pool
