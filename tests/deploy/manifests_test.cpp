// The golden manifests against the published schemas of their engines: by the
// room's own checker and by another one in Python. Both find planted mistakes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "echelon/deploy/schemas.h"
#include "echelon/deploy/yaml.h"
#include "tests/deploy/cases.h"
#include "tests/support/places.h"
#include "tests/support/python.h"
#include "tests/support/temp_folder.h"

namespace echelon::manifests_test {

using Json = nlohmann::ordered_json;
using testing::Contains;
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

// What schema_problems() says about all documents of each file.
std::vector<std::vector<std::string>>
problems_of(const std::vector<std::string>& files) {
  std::vector<std::string> words = {"json"};
  words.insert(words.end(), files.begin(), files.end());
  std::istringstream lines(run_python_script("deploy/manifests.py", words));
  std::vector<std::vector<std::string>> problems;
  for (std::string line; std::getline(lines, line);) {
    auto& of_file = problems.emplace_back();
    for (const Json& document : Json::parse(line)) {
      const auto found = deploy::schema_problems(document);
      of_file.insert(of_file.end(), found.begin(), found.end());
    }
  }
  return problems;
}

TEST(Manifests, PassTheirSchemas) {
  NEED_CHECKER();
  std::vector<std::string> files;
  for (const auto& [name, options] : golden_cases()) {
    if (name.ends_with(".yaml")) files.push_back(golden(name));
  }
  EXPECT_EQ(
      problems_of(files), std::vector<std::vector<std::string>>(files.size()));
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

// A mistake, where it is planted, and what the checkers say: Python's, and the
// room's.
TEST(Manifests, MistakesAreFound) {
  NEED_CHECKER();
  struct Mistake {
    const char* file;
    std::string right, wrong, found, problem;
  };
  const std::vector<Mistake> mistakes = {
      {"jobset.yaml", "maxRestarts:", "maxRestart:", "'maxRestart' was",
       "spec.failurePolicy.maxRestart: there is no such field; did you mean "
       "\"maxRestarts\"?"},
      {"jobset.yaml", "parallelism:", "parallelisms:", "'parallelisms'",
       "spec.replicatedJobs[0].template.spec.parallelisms: there is no"},
      {"jobset.yaml", "completionMode: Indexed", "completionMode: Indexxed",
       "Indexxed",
       "completionMode: is \"Indexxed\", but must be one of "
       "[\"Indexed\",\"NonIndexed\"]"},
      {"jobset.yaml", "restartPolicy: Never", "restartPolicy: Newer", "Newer",
       "template.spec.template.spec.restartPolicy: is \"Newer\""},
      {"jobset.yaml", "action: FailJob\n", "action: Failjob\n", "Failjob",
       "podFailurePolicy.rules[0].action: is \"Failjob\""},
      {"jobset.yaml", "operator: In", "operator: in", "operator",
       "onExitCodes.operator: is \"in\""},
      {"jobset.yaml", "containerPort:", "containrPort:", "'containerPort' is a",
       "ports[0]: containerPort is missing"},
      {"jobset.yaml", "containerPort: 29500", "containerPort: \"29500\"",
       "'29500' is not of type 'integer'",
       "containerPort: is \"29500\", but must be of type integer"},
      {"jobset.yaml", "minAvailable:", "minAvailble:", "minAvailble",
       "spec.minAvailble: there is no such field"},
      {"jobset.yaml", "minAvailable: 1", "minAvailable: [1]", "[1]",
       "spec.minAvailable: is [1], but must be of type int-or-string"},
      {"jobset.yaml", "interval:", "intervals:", "intervals",
       "spec.podMetricsEndpoints[0].intervals: there is no"},
      {"jobset.yaml", "interval: \"15s\"", "interval: \"15 s\"", "'15 s'",
       "interval: \"15 s\" does not match"},
      {"jobset.yaml", "action: FailJobSet", "action: FailJobset", "FailJobset",
       "spec.failurePolicy.rules[0].action: is \"FailJobset\", but must be"},
      {"jobset.yaml", "kind: JobSet\nmetadata:\n  name:",
       "kind: JobSet\nmetadata:\n  names:", "'names' was",
       "metadata.names: there is no such field; did you mean \"name\"?"},
      {"jobset.yaml", "kind: PodDisruptionBudget", "kind: PodDisruptionBudge",
       "no schema", "kind: there is no schema for PodDisruptionBudge"},
      {"jobset.yaml", "policy/v1", "policy/v1beta1", "no schema",
       "apiVersion: is \"policy/v1beta1\""},
      {"kueue.yaml", "nominalQuota:", "nominalQuotas:", "nominalQuotas",
       "resources[0].nominalQuotas: there is no such field"},
      {"kueue.yaml", "cohortName:", "cohort:", "'cohort' was",
       "spec.cohort: there is no such field; did you mean \"cohortName\"?"},
      {"kueue.yaml", "reclaimWithinCohort: Any", "reclaimWithinCohort: All",
       "'All'", "spec.preemption.reclaimWithinCohort: is \"All\""},
      {"kueue.yaml", "kueue.x-k8s.io/v1beta2", "kueue.x-k8s.io/v1beta1",
       "not kueue.x-k8s.io/v1beta2", "but the schema is of kueue.x-k8s.io/"},
      {"kueue_elastic.yaml", "backoffLimitPerIndex:", "backoffLimitByIndex:",
       "backoffLimitByIndex", "spec.backoffLimitByIndex: there is no"},
      {"kai.yaml", "overQuotaWeight:", "overQuota:", "'overQuota' was",
       "spec.resources.gpu.overQuota: there is no such field"},
      {"trainer.yaml", "numNodes:", "numNode:", "numNode",
       "spec.mlPolicy.numNode: there is no such field"},
      {"trainer.yaml", "kind: ClusterTrainingRuntime\nmetadata:\n",
       "kind: ClusterTrainingRuntime\nmetadata:\n  namespace: a\n",
       "belongs to the whole cluster",
       "metadata.namespace: an object of the whole cluster has none"},
      {"lws.yaml", "size:", "sizes:", "'sizes' was",
       "spec.leaderWorkerTemplate.sizes: there is no such field"},
      {"lws.yaml", "workingDir:", "workDir:", "workDir",
       "workerTemplate.spec.containers[0].workDir: there is no"}};
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
  const auto problems = problems_of(files);
  ASSERT_EQ(problems.size(), files.size());
  for (size_t i = 0; i < mistakes.size(); ++i) {
    EXPECT_THAT(problems[i], Contains(HasSubstr(mistakes[i].problem)))
        << mistakes[i].wrong;
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
