#include "echelon/timeline/trace_file.h"

#include <gmock/gmock.h>

#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "echelon/error.h"
#include "tests/checkpoint/small_disk.h"
#include "tests/support/temp_folder.h"

namespace echelon::timeline::trace_file_test {

using nlohmann::json;
using testing::ElementsAre;
using testing::MatchesRegex;

const Attributes kResource = {
    {"service.name", "echelon"}, {"echelon.ranks", int64_t{4}}};

StepMetrics step_of(int64_t step) {
  return {
      .step = step, .loss = 0.5, .step_seconds = 0.25, .learning_rate = 1e-3};
}

int64_t ms(int64_t number) {
  return steady_now_ns() / 1'000'000 * 1'000'000 + number * 1'000'000;
}

void append(TraceFile& file, int64_t step) {
  file.append(
      step_of(step), {"step", ms(0), ms(10)},
      {{"data", ms(0), ms(2)}, {"update", ms(2), ms(10), 0.005}});
}

json attributes_in(const json& list) {
  json all = json::object();
  for (const auto& one : list) all[one.at("key")] = one.at("value");
  return all;
}

class TraceFiles : public testing::Test {
 protected:
  std::string path() const { return folder_.path("otlp/traces.jsonl"); }
  std::vector<json> lines() const {
    std::vector<json> all;
    std::istringstream text(read_file(path()));
    for (std::string line; std::getline(text, line);) {
      all.push_back(json::parse(line));
    }
    return all;
  }
  /// All spans, whatever their line.
  std::vector<json> spans() const {
    std::vector<json> all;
    for (const auto& line : lines()) {
      for (const auto& resource : line.at("resourceSpans")) {
        for (const auto& scope : resource.at("scopeSpans")) {
          for (const auto& span : scope.at("spans")) all.push_back(span);
        }
      }
    }
    return all;
  }
  std::vector<int64_t> steps() const {
    std::vector<int64_t> all;
    for (const auto& span : spans()) {
      if (span.at("name") != "step") continue;
      all.push_back(std::stoll(attributes_in(span.at("attributes"))
                                   .at("echelon.step")
                                   .at("intValue")
                                   .get<std::string>()));
    }
    return all;
  }

  TempFolder folder_;
};

// https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding
TEST_F(TraceFiles, AreOtlpJson) {
  {
    TraceFile file(path(), kResource, "1.2");
    append(file, 7);
  }
  ASSERT_EQ(lines().size(), 1u);
  const json line = lines()[0];
  const json& resource = line.at("resourceSpans").at(0);
  const json known = attributes_in(resource.at("resource").at("attributes"));
  EXPECT_EQ(known.at("service.name").at("stringValue"), "echelon");
  EXPECT_EQ(known.at("echelon.ranks").at("intValue"), "4");
  EXPECT_EQ(
      resource.at("scopeSpans").at(0).at("scope"),
      (json{{"name", "echelon"}, {"version", "1.2"}}));
  std::map<std::string, json> named;
  for (const auto& span : spans()) {
    named[span.at("name")] = span;
    EXPECT_THAT(
        span.at("traceId").get<std::string>(), MatchesRegex("[0-9a-f]{32}"));
    EXPECT_THAT(
        span.at("spanId").get<std::string>(), MatchesRegex("[0-9a-f]{16}"));
    EXPECT_EQ(span.at("kind"), 1);
  }
  ASSERT_EQ(named.size(), 3u);
  const json& step = named.at("step");
  EXPECT_FALSE(step.contains("parentSpanId"));
  const json figures = attributes_in(step.at("attributes"));
  EXPECT_EQ(figures.at("echelon.step").at("intValue"), "7");
  EXPECT_EQ(figures.at("echelon.loss").at("doubleValue"), 0.5);
  for (const char* part : {"data", "update"}) {
    EXPECT_EQ(named.at(part).at("traceId"), step.at("traceId"));
    EXPECT_EQ(named.at(part).at("parentSpanId"), step.at("spanId"));
    EXPECT_NE(named.at(part).at("spanId"), step.at("spanId"));
  }
  EXPECT_FALSE(named.at("data").contains("attributes"));
  EXPECT_EQ(
      attributes_in(named.at("update").at("attributes"))
          .at("echelon.seconds")
          .at("doubleValue"),
      0.005);
  const auto time = [&](const char* name, const char* which) {
    return std::stoll(named.at(name).at(which).get<std::string>());
  };
  EXPECT_EQ(
      time("data", "endTimeUnixNano"), time("update", "startTimeUnixNano"));
  EXPECT_NEAR(
      static_cast<double>(time("step", "startTimeUnixNano")) * 1e-9,
      static_cast<double>(std::time(nullptr)), 60);
}

TEST_F(TraceFiles, HaveWhatFollowedAStepInIt) {
  TraceFile file(path(), kResource, "1");
  file.append({"evaluation", ms(0), ms(1)});  // before any step
  append(file, 1);
  file.append({"evaluation", ms(20), ms(50)}, {{"echelon.accuracy", 0.75}});
  append(file, 2);
  file.flush();
  const auto all = spans();
  EXPECT_THAT(steps(), ElementsAre(1, 2));
  const json& alone = all[0];
  EXPECT_EQ(alone.at("name"), "evaluation");
  EXPECT_FALSE(alone.contains("parentSpanId"));
  const json* step = nullptr;
  const json* evaluation = nullptr;
  for (const auto& span : all) {
    if (span.at("name") == "step" && step == nullptr) step = &span;
    if (span.at("name") == "evaluation") evaluation = &span;
  }
  EXPECT_EQ(evaluation->at("parentSpanId"), step->at("spanId"));
  EXPECT_EQ(step->at("endTimeUnixNano"), evaluation->at("endTimeUnixNano"));
  EXPECT_EQ(
      attributes_in(evaluation->at("attributes"))
          .at("echelon.accuracy")
          .at("doubleValue"),
      0.75);
}

// A host loads the batch of a step while the device is at the one before.
TEST_F(TraceFiles, BeginAStepWithItsFirstPart) {
  const int64_t begin = ms(0);
  {
    TraceFile file(path(), kResource, "1");
    file.append(
        step_of(1), {"step", begin + 5, begin + 10},
        {{"data", begin, begin + 2}});
  }
  const auto all = spans();
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[0].at("name"), "data");
  EXPECT_EQ(all[0].at("startTimeUnixNano"), all[1].at("startTimeUnixNano"));
}

TEST_F(TraceFiles, SayWhatIsNotFinite) {
  {
    TraceFile file(path(), kResource, "1");
    StepMetrics bad = step_of(1);
    bad.loss = std::numeric_limits<double>::quiet_NaN();
    bad.grad_norm = std::numeric_limits<double>::infinity();
    file.append(bad, {"step", ms(0), ms(1)}, {});
  }
  const json step = spans().at(0);
  EXPECT_EQ(step.at("status").at("code"), 2);
  const json figures = attributes_in(step.at("attributes"));
  EXPECT_EQ(figures.at("echelon.loss").at("doubleValue"), "NaN");
  EXPECT_EQ(figures.at("echelon.grad_norm").at("doubleValue"), "Infinity");
}

TEST_F(TraceFiles, GoOnBehindTheLastWholeLine) {
  {
    TraceFile file(path(), kResource, "1");
    append(file, 1);
  }
  folder_.write("otlp/traces.jsonl", read_file(path()) + "{\"resourceSp");
  {
    TraceFile file(path(), kResource, "1");
    append(file, 2);
  }
  EXPECT_THAT(steps(), ElementsAre(1, 2));
}

// Readers limit a line to 1 MiB.
TEST_F(TraceFiles, HaveLinesOfLimitedLength) {
  {
    TraceFile file(path(), kResource, "1");
    for (int step = 1; step <= 1000; ++step) append(file, step);
  }
  EXPECT_EQ(steps().size(), 1000u);
  std::istringstream text(read_file(path()));
  for (std::string line; std::getline(text, line);) {
    EXPECT_LT(line.size(), 1u << 19);
  }
}

TEST_F(TraceFiles, GetWhatAFullDiskHadNoRoomFor) {
  const std::string disk = folder_.make_folder("otlp");
  const int result = in_child([&] {
    if (!mount_disk(disk, "size=64k")) return 77;
    TraceFile file(path(), kResource, "1");
    int step = 0;
    bool full = false;
    while (!full && step < 2000) {
      append(file, ++step);
      try {
        file.flush();
      } catch (const Error& error) {
        full = std::string(error.what()).find("No space") != std::string::npos;
      }
    }
    if (!full) return 1;
    ::mount("none", disk.c_str(), "tmpfs", MS_REMOUNT, "size=1m");
    append(file, ++step);
    file.flush();
    return steps().size() == static_cast<size_t>(step) ? 0 : 2;
  });
  if (result == 77) GTEST_SKIP() << "needs root's rights, for a small disk";
  EXPECT_EQ(result, 0);
}

}  // namespace echelon::timeline::trace_file_test
