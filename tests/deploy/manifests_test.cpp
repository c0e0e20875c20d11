// The golden manifests against the published schemas of their engines, and that
// the checker finds mistakes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "echelon/deploy/yaml.h"
#include "tests/deploy/cases.h"
#include "tests/support/places.h"
#include "tests/support/python.h"
#include "tests/support/temp_folder.h"

namespace echelon::manifests_test {

using Json = nlohmann::ordered_json;
using testing::HasSubstr;

#define NEED_CHECKER()                                                    \
  ECHELON_NEED_PYTHON();                                                  \
  if (std::system((pytorch_python() +                                     \
                   " -c 'import importlib.util as u; "                    \
                   "exit(u.find_spec(\"kubernetes_validate\") is None)'") \
                      .c_str()) != 0) {                                   \
    GTEST_SKIP() << "needs kubernetes-validate: run `make extras` once";  \
  }

std::string golden(const std::string& name) {
  return source_path("tests/deploy/golden/" + name);
}

std::string check(const std::vector<std::string>& files) {
  std::vector<std::string> words = {"check"};
  words.insert(words.end(), files.begin(), files.end());
  try {
    return run_python_script("deploy/manifests.py", words);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
}

TEST(Manifests, PassTheirSchemas) {
  NEED_CHECKER();
  std::vector<std::string> files;
  for (const auto& [name, options] : golden_cases()) {
    if (name.ends_with(".yaml")) files.push_back(golden(name));
  }
  const std::string text = check(files);
  size_t fine = 0;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    EXPECT_TRUE(line.ends_with(": fine")) << line;
    ++fine;
  }
  EXPECT_GT(fine, 3 * files.size());
  for (const char* kind :
       {"JobSet", "Job", "ClusterQueue", "Cohort", "LocalQueue",
        "ResourceFlavor", "Queue", "ClusterTrainingRuntime", "TrainJob",
        "LeaderWorkerSet", "PodMonitor", "PodDisruptionBudget", "ConfigMap",
        "Service"}) {
    EXPECT_THAT(text, HasSubstr(std::string(": ") + kind + " "));
  }
}

// A mistake, where it is planted, and what the checker says.
TEST(Manifests, MistakesAreFound) {
  NEED_CHECKER();
  struct Mistake {
    const char* file;
    std::string right, wrong, found;
  };
  const std::vector<Mistake> mistakes = {
      {"jobset.yaml", "maxRestarts:", "maxRestart:", "'maxRestart' was"},
      {"jobset.yaml", "parallelism:", "parallelisms:", "'parallelisms'"},
      {"jobset.yaml", "completionMode: Indexed", "completionMode: Indexxed",
       "Indexxed"},
      {"jobset.yaml",
       "containerPort:", "containrPort:", "'containerPort' is a"},
      {"jobset.yaml", "minAvailable:", "minAvailble:", "minAvailble"},
      {"jobset.yaml", "interval:", "intervals:", "intervals"},
      {"jobset.yaml", "action: FailJobSet", "action: FailJobset", "FailJobset"},
      {"kueue.yaml", "nominalQuota:", "nominalQuotas:", "nominalQuotas"},
      {"kueue.yaml", "cohortName:", "cohort:", "'cohort' was"},
      {"kueue.yaml", "reclaimWithinCohort: Any", "reclaimWithinCohort: All",
       "'All'"},
      {"kueue.yaml", "kueue.x-k8s.io/v1beta2", "kueue.x-k8s.io/v1beta1",
       "not kueue.x-k8s.io/v1beta2"},
      {"kueue_elastic.yaml",
       "backoffLimitPerIndex:", "backoffLimitByIndex:", "backoffLimitByIndex"},
      {"kai.yaml", "overQuotaWeight:", "overQuota:", "'overQuota' was"},
      {"trainer.yaml", "numNodes:", "numNode:", "numNode"},
      {"trainer.yaml", "kind: ClusterTrainingRuntime\nmetadata:\n",
       "kind: ClusterTrainingRuntime\nmetadata:\n  namespace: a\n",
       "belongs to the whole cluster"},
      {"lws.yaml", "size:", "sizes:", "'sizes' was"},
      {"lws.yaml", "workingDir:", "workDir:", "workDir"}};
  const TempFolder folder;
  std::vector<std::string> files;
  for (size_t i = 0; i < mistakes.size(); ++i) {
    std::string text = read_file(golden(mistakes[i].file));
    const size_t at = text.find(mistakes[i].right);
    ASSERT_NE(at, std::string::npos) << mistakes[i].right;
    text.replace(at, mistakes[i].right.size(), mistakes[i].wrong);
    files.push_back(folder.write(std::to_string(i) + "-", text));
  }
  const std::string text = check(files);
  for (size_t i = 0; i < mistakes.size(); ++i) {
    std::string found;
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      if (line.starts_with(std::to_string(i) + "-:") &&
          !line.ends_with(": fine")) {
        found += line + "\n";
      }
    }
    EXPECT_THAT(found, HasSubstr(mistakes[i].found)) << mistakes[i].wrong;
  }
}

TEST(Manifests, AReaderOfYamlFindsTheSameValues) {
  ECHELON_NEED_PYTHON();
  Json value;
  for (const char* text : {"yes",      "No",
                           "y",        "1",
                           "1e3",      "0x10",
                           "0o7",      "1_000",
                           "1:30",     "64Gi",
                           "~",        "null",
                           "",         " a ",
                           "a: b",     "- a",
                           "#a",       "a #b",
                           "it's",     "\"a\"",
                           "a\\nb",    "a\nb",
                           "a\n\nb\n", "a\n\n",
                           "  a\n",    "a \nb\n",
                           "\ta",      "$(A)",
                           "*a",       "&a",
                           "!a",       "%a",
                           "@a",       "`a`",
                           "{a}",      "[a]",
                           "ä…\n",     "\xF0\x9F\x98\x80 a",
                           "a,b",      "?",
                           "|",        ">",
                           "-",        "---",
                           "...",      "=",
                           "<<",       "2026-11-27",
                           "a:",       "\x7f"}) {
    value["list"].push_back(text);
    value["members"][text] = Json{{"in", text}};
    value["lists"].push_back(Json::array({text, Json::array({text})}));
  }
  value["numbers"] = {0, -1, 2.5, true, false, nullptr};
  EXPECT_EQ(
      run_python(
          "import json, sys, yaml\n"
          "read = yaml.safe_load(sys.argv[1])\n"
          "meant = json.loads(sys.argv[2])\n"
          "for key in meant:\n"
          "    if read[key] != meant[key]: print(key, read[key], meant[key])\n",
          {deploy::to_yaml(value), value.dump()}),
      "");
}

}  // namespace echelon::manifests_test
