#include "echelon/config/document.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <limits>

#include "echelon/config/byte_size.h"
#include "echelon/config/section.h"
#include "echelon/config/value.h"
#include "tests/support/error_text.h"

namespace echelon::config::document_test {

using std::chrono::milliseconds;
using testing::HasSubstr;

enum class Color { red, green };

struct Options {
  bool flag = false;
  int64_t count = 1;
  uint64_t seed = 0;
  double rate = 0.5;
  std::string name = "a";
  std::vector<int64_t> shape = {1, 2};
  std::vector<double> mean = {0.5};
  std::vector<std::string> words;
  milliseconds timeout = std::chrono::minutes(10);
  Color color = Color::red;

  bool operator==(const Options&) const = default;
};

void bind(Section& section, Options& options) {
  section.field("flag", options.flag, "a flag");
  section.field(
      "count", options.count, "a count", {.at_least = 1, .at_most = 9});
  section.field("seed", options.seed, "a seed");
  section.field("rate", options.rate, "a rate", {.above = 0, .below = 1});
  section.field("name", options.name, "a name").one_of({"a", "beta", "gamma"});
  section.field("shape", options.shape, "a shape")
      .length(1, 3)
      .within({.at_least = 1});
  section.field("mean", options.mean, "a mean").also("average");
  section.field("words", options.words, "words");
  section.field("timeout", options.timeout, "a time", {.at_least = 1});
  section.field(
      "color", options.color, "a color",
      {{"red", Color::red}, {"green", Color::green}});
}

Options bound(Document& document) {
  Options options;
  auto section = document.section("t", "a table");
  bind(section, options);
  document.finish();
  return options;
}

Options read(const std::string& text) {
  auto document = Document::parse(text, "f.toml");
  return bound(document);
}

std::string
error_of(const std::string& text, const std::vector<std::string>& sets = {}) {
  return error_text<ConfigError>([&] {
    auto document = Document::parse(text, "f.toml");
    for (const auto& set : sets) document.set(set);
    bound(document);
  });
}

TEST(Document, ReadsEveryType) {
  const Options options = read(
      "[t]\nflag = true\ncount = 3\nseed = 9223372036854775807\nrate = 0.25\n"
      "name = \"beta\"\nshape = [3, 4, 5]\nmean = [1, 0.5]\n"
      "words = [\"x\", \"y z\"]\ntimeout = \"1500ms\"\ncolor = \"green\"\n");
  EXPECT_TRUE(options.flag);
  EXPECT_EQ(options.count, 3);
  EXPECT_EQ(options.seed, 9223372036854775807u);
  EXPECT_EQ(options.rate, 0.25);
  EXPECT_EQ(options.name, "beta");
  EXPECT_EQ(options.shape, (std::vector<int64_t>{3, 4, 5}));
  EXPECT_EQ(options.mean, (std::vector<double>{1.0, 0.5}));
  EXPECT_EQ(options.words, (std::vector<std::string>{"x", "y z"}));
  EXPECT_EQ(options.timeout, milliseconds(1500));
  EXPECT_EQ(options.color, Color::green);
}

TEST(Document, KeepsDefaults) {
  const Options options = read("");
  EXPECT_EQ(options.count, 1);
  EXPECT_EQ(options.timeout, std::chrono::minutes(10));
}

TEST(Document, TimesHaveUnits) {
  for (const auto& [text, expected] :
       std::vector<std::pair<std::string, milliseconds>>{
           {"\"30s\"", milliseconds(30000)},
           {"\"10m\"", milliseconds(600000)},
           {"\"2h\"", milliseconds(7200000)},
           {"\"1.5s\"", milliseconds(1500)},
           {"45", milliseconds(45000)},
           {"2.5", milliseconds(2500)}}) {
    EXPECT_EQ(read("[t]\ntimeout = " + text).timeout, expected) << text;
  }
  for (const std::string text :
       {"\"30\"", "\"s\"", "\"30 s\"", "\"-3s\"", "-3", "\"1e300h\"", "true"}) {
    EXPECT_THAT(error_of("[t]\ntimeout = " + text), HasSubstr("must be a time"))
        << text;
  }
}

struct Wrong {
  std::string text;
  std::string message;  // of the line after [t]
};

// Each line below [t], and the error without "f.toml:2:".
void expect_errors(const std::vector<Wrong>& all) {
  for (const auto& [text, message] : all) {
    EXPECT_EQ(error_of("[t]\n" + text + "\n"), "f.toml:2:" + message);
  }
}

TEST(Document, AKeyHasSoManyParts) {
  const auto key = [](int parts) {
    std::string text = "a";
    for (int i = 1; i < parts; ++i) text += ".a";
    return text;
  };
  const auto error = [](const std::string& text) {
    return error_text<ConfigError>([&] { parse_toml(text, "job.toml"); });
  };
  const std::string said = "a key of more than 100 parts; write fewer dots";
  EXPECT_EQ(error("x = 1\n" + key(101) + " = 1\n"), "job.toml:2: " + said);
  EXPECT_EQ(error("[" + key(50000) + "]\n"), "job.toml:1: " + said);
  EXPECT_EQ(error("x = {" + key(101) + " = 1}"), "job.toml:1: " + said);
  EXPECT_EQ(
      error_text<ConfigError>(
          [&] { parse_value("{" + key(101) + " = 1}", "--set"); }),
      "--set: " + said);
  // Dots elsewhere are no parts.
  const std::string dots(200, '.');
  std::string numbers;
  for (int i = 0; i < 200; ++i) numbers += "1.5, ";
  parse_toml(
      key(100) + " = 1\nb = \"" + dots + "\\\"" + dots + "\" # " + dots +
          "\nc = '" + dots + "'\nd = \"\"\"\n" + dots + "\"\n" + dots +
          "\"\"\"\ne = [" + numbers + "]\n",
      "job.toml");
}

TEST(Document, NamesPlaceValueRule) {
  expect_errors(
      {{"  count = 0", "11: [t] count = 0: must be at least 1"},
       {"count = 10", "9: [t] count = 10: must be at most 9"},
       {"rate = 1", "8: [t] rate = 1: must be below 1"},
       {"rate = nan", "8: [t] rate = nan: must be a finite number"},
       {"name = \"bta\"",
        "8: [t] name = \"bta\": must be \"a\", \"beta\" or \"gamma\"; did you "
        "mean \"beta\"?"},
       {"color = \"gren\"",
        "9: [t] color = \"gren\": must be \"red\" or \"green\"; did you mean "
        "\"green\"?"},
       {"shape = []", "9: [t] shape = []: must be a list of 1 to 3, not of 0"},
       {"shape = [1, 0]", "9: [t] shape = [1, 0]: must be at least 1"}});
}

TEST(Document, RefusesWrongTypes) {
  expect_errors(
      {{"count = \"3\"", "9: [t] count = \"3\": must be a whole number"},
       {"count = 3.0", "9: [t] count = 3.0: must be a whole number"},
       {"flag = 1", "8: [t] flag = 1: must be true or false"},
       {"name = 5",
        "8: [t] name = 5: must be a string; put it in quotes: \"5\""},
       {"shape = 3",
        "9: [t] shape = 3: must be a list of whole numbers, as in [1, 2]"},
       {"shape = [1, \"x\"]",
        "9: [t] shape = [1, \"x\"]: must be a list of whole numbers, as in [1, "
        "2]; \"x\" is not one"},
       {"count = 1979-05-27",
        "9: [t] count = 1979-05-27: must be a whole number"},
       {"count = {a = 1}", "9: [t] count = {…}: must be a whole number"},
       {"seed = -1", "8: [t] seed = -1: must be at least 0"}});
}

TEST(Document, NamesTheNearestKnown) {
  expect_errors(
      {{"cuont = 3",
        "1: [t] cuont = 3: unknown key; did you mean \"count\"?"}});
  EXPECT_EQ(
      error_of("[zebra]\ncount = 3\n"),
      "f.toml:1:1: [zebra]: unknown table; there are [t]");
  EXPECT_EQ(
      error_of("count = 3\n"),
      "f.toml:1:1: count = 3: stands before any table; did you mean [t] "
      "count?");
}

TEST(Document, NamesTheNearestTable) {
  auto document = Document::parse("[tarin]\ncount = 3\n", "f.toml");
  document.section("train", "a table");
  EXPECT_EQ(
      error_text<ConfigError>([&] { document.finish(); }),
      "f.toml:1:1: [tarin]: unknown table; did you mean [train]?");
}

TEST(Document, SaysWhereAKeyBelongs) {
  auto document = Document::parse("[a]\ncount = 3\n[t]\n", "f.toml");
  document.section("a", "another table");
  EXPECT_EQ(
      error_text<ConfigError>([&] { bound(document); }),
      "f.toml:2:1: [a] count = 3: unknown key; did you mean [t] count?");
}

TEST(Document, KnowsTheNamesOfOtherPrograms) {
  constexpr OtherNames kNames[] = {
      {"t", "", "table options"},
      {"t.count", "", "num_things n-things"},
      {"t.name", " = \"beta\"", "second"},
      {"t.rate", "", "a.count"},
      {"", "nothing does that", "cont"}};
  const auto error = [&](const std::string& text, const std::string& set) {
    auto document = Document::parse(text, "f.toml");
    if (!set.empty()) document.set(set);
    document.also_called(kNames);
    document.section("a", "another table");
    return error_text<ConfigError>([&] { bound(document); });
  };
  for (const auto& [text, set, message] :
       std::vector<std::array<std::string, 3>>{
           {"[table]\n", "",
            "f.toml:1:1: [table]: unknown table; did you mean "
            "[t]?"},
           {"[t]\nnum_things = 1", "",
            "f.toml:2:1: [t] num_things = 1: unknown key; did you mean "
            "\"count\"?"},
           {"[a]\nN_Things = 1", "",
            "f.toml:2:1: [a] N_Things = 1: unknown key; did you mean [t] "
            "count?"},
           {"[t]\nsecond = true", "",
            "f.toml:2:1: [t] second = true: unknown key; did you mean [t] name "
            "= \"beta\"?"},
           {"[a]\ncount = 1", "",
            "f.toml:2:1: [a] count = 1: unknown key; did you mean [t] rate?"},
           {"[a]\ncont = 1", "",
            "f.toml:2:1: [a] cont = 1: unknown key; nothing does that"},
           {"", "a.num-things=1",
            "--set a.num-things=1: [a] num-things = 1: unknown key; did you "
            "mean t.count?"},
           {"", "n_things=1",
            "--set n_things=1: must be TABLE.KEY=VALUE; did you mean "
            "t.count?"}}) {
    EXPECT_EQ(error(text, set), message);
  }
}

TEST(Document, AnotherNameOfAKey) {
  EXPECT_EQ(read("[t]\naverage = [2.0]\n").mean, std::vector<double>{2.0});
  EXPECT_EQ(
      error_of("[t]\nmean = [1.0]\naverage = [2.0]\n"),
      "f.toml:3:1: [t] average = [2.0]: is another name of mean, which is also "
      "set; keep one of the two");
}

TEST(Document, RefusesWhatIsNotToml) {
  EXPECT_EQ(
      error_of("[t]\ncount = 1\ncount = 2\n"),
      "f.toml:3:9: count is given twice; keep one of the two");
  EXPECT_EQ(
      error_of("[t]\ncount = 1\n[t]\n"),
      "f.toml:3:1: [t] is given twice; keep one of the two and put all of its "
      "keys there");
  EXPECT_EQ(
      error_of("[t]\nname = beta\n"),
      "f.toml:2:8: not TOML: value: could not determine value type; a string "
      "needs quotes: \"beta\"");
  EXPECT_THAT(
      error_of("[t]\nname = \"beta\ncount = 1\n"),
      HasSubstr("is the closing quote missing?"));
  for (const std::string text :
       {"[t", "a b = 1", "= 1", "a =", "\xff\xfe", "[t]\ncount = 1OO\n", "[[[[",
        "a = [[[[[[", "\"", "count = 99999999999999999999"}) {
    const std::string message = error_of(text);
    EXPECT_THAT(message, HasSubstr("f.toml:")) << text;
    EXPECT_EQ(std::ranges::count(message, '\n'), 0) << message;
  }
}

TEST(Document, DeepNestingIsAnErrorNotACrash) {
  EXPECT_THAT(error_of("a = " + std::string(100000, '[')), HasSubstr("f.toml"));
}

TEST(Document, ShowsSeveralErrorsInFileOrder) {
  EXPECT_EQ(
      error_of("[t]\nrate = 7\ncuont = 3\nflag = 3\n"),
      "f.toml:2:8: [t] rate = 7: must be below 1\n"
      "f.toml:3:1: [t] cuont = 3: unknown key; did you mean \"count\"?\n"
      "f.toml:4:8: [t] flag = 3: must be true or false");
}

TEST(Document, ShowsAtMostFiveLines) {
  const std::string message =
      error_of("[t]\na1 = 1\na2 = 1\na3 = 1\na4 = 1\na5 = 1\na6 = 1\na7 = 1\n");
  EXPECT_EQ(std::ranges::count(message, '\n'), 4) << message;
  EXPECT_THAT(message, HasSubstr("and 3 more errors"));
}

TEST(ByteSize, ReadsUnitsAndWritesTheShortestExactText) {
  constexpr int64_t kGi = int64_t{1} << 30;
  for (const auto& [text, bytes] : std::vector<std::pair<std::string, int64_t>>{
           {"48GiB", 48 * kGi},
           {"512 MiB", kGi / 2},
           {"2GB", 2'000'000'000},
           {"1.5 KiB", 1536},
           {"65536", 65536},
           {"7 B", 7},
           {"-1 kB", -1000},
           {"9007199254740993", 9007199254740993}}) {
    EXPECT_EQ(parse_bytes(text), bytes) << text;
  }
  for (const char* text :
       {"", "GiB", "1 gigabyte", "1 GiB/s", "x1 GiB", "1e30", "nan",
        "9223372036854775808", "9000000 TiB"}) {
    EXPECT_EQ(parse_bytes(text), std::nullopt) << text;
  }
  for (const auto& [bytes, text] : std::vector<std::pair<int64_t, std::string>>{
           {0, "0"},
           {999, "999"},
           {1000, "1 kB"},
           {1234567, "1234567"},
           {26214400, "25 MiB"},
           {50'000'000'000, "50 GB"},
           {51981058048, "49573 MiB"},
           {48 * kGi, "48 GiB"}}) {
    EXPECT_EQ(bytes_text(bytes), text);
    EXPECT_EQ(parse_bytes(text), bytes);
  }
}

struct Sizes {
  int64_t limit = 25 << 20;
  std::vector<int64_t> each;
};

Sizes sizes_of(Document& document) {
  Sizes sizes;
  auto section = document.section("t", "a table");
  section.field("limit", Bytes(sizes.limit), "a limit", {.at_least = 0});
  section.field("each", BytesList(sizes.each), "limits", {.at_least = 1});
  document.finish();
  return sizes;
}

TEST(Document, SizesHaveUnits) {
  auto document = Document::parse(
      "[t]\nlimit = \"48GiB\"\neach = [\"1 MiB\", 1000001]\n", "f.toml");
  const Sizes read = sizes_of(document);
  EXPECT_EQ(read.limit, int64_t{48} << 30);
  EXPECT_EQ(read.each, (std::vector<int64_t>{1 << 20, 1000001}));
  EXPECT_EQ(
      document.to_toml(),
      "[t]\nlimit = \"48 GiB\"\neach = [\"1 MiB\", 1000001]\n");
  EXPECT_EQ(document.entry("t.limit").default_value, "\"25 MiB\"");
  EXPECT_EQ(document.entry("t.limit").type, "bytes");
  auto again = Document::parse(document.to_toml(), "g.toml");
  again.set("t.limit=512 MiB");
  EXPECT_EQ(sizes_of(again).limit, 512 << 20);

  const auto error = [](const std::string& text) {
    auto wrong = Document::parse("[t]\n" + text, "f.toml");
    return error_text<ConfigError>([&] { sizes_of(wrong); });
  };
  EXPECT_EQ(
      error("limit = \"48 gigs\""),
      "f.toml:2:9: [t] limit = \"48 gigs\": must be a size such as \"48GiB\", "
      "\"512 MiB\", \"2GB\", or a number of bytes");
  EXPECT_THAT(error("limit = \"-1 GiB\""), HasSubstr("must be at least 0"));
  EXPECT_THAT(error("each = [\"1\", true]"), HasSubstr("true is not one"));
  EXPECT_THAT(error("each = [\"0 GiB\"]"), HasSubstr("must be at least 1"));
}

TEST(Document, OverridesWin) {
  auto document = Document::parse("[t]\ncount = 3\n", "f.toml");
  for (const auto* set :
       {"t.count=4", "t.count=5", "t.name=gamma", "t.shape=[7]", "t.rate=1e-3",
        "t.flag=true"}) {
    document.set(set);
  }
  const Options options = bound(document);
  EXPECT_EQ(options.count, 5);
  EXPECT_EQ(options.name, "gamma");
  EXPECT_EQ(options.shape, std::vector<int64_t>{7});
  EXPECT_EQ(options.rate, 1e-3);
  EXPECT_EQ(document.entry("t.count").place.text(), "--set t.count=5");
  EXPECT_EQ(document.where("t.count"), "--set t.count=5: [t] count = 5");
}

TEST(Document, OverridesAreChecked) {
  for (const auto& [set, message] :
       {std::pair("t.count=0", ": [t] count = 0: must be at least 1"),
        {"t.cuont=1", ": [t] cuont = 1: unknown key; did you mean \"count\"?"},
        {"count=1", ": must be TABLE.KEY=VALUE; did you mean t.count?"},
        {"t.=1",
         ": must be TABLE.KEY=VALUE; write for example --set train.steps=100"},
        {"t.count=1OO", ": [t] count = \"1OO\": must be a whole number"}}) {
    EXPECT_EQ(error_of("", {set}), std::string("--set ") + set + message);
  }
  EXPECT_THAT(error_of("", {"t.shape=[1,"}), HasSubstr("is not a TOML value"));
  EXPECT_THAT(
      error_of("", {"t.count=1\nflag=true"}),
      HasSubstr("must be a whole number"));
}

TEST(Document, KnowsWhoSetAValue) {
  auto document = Document::parse("\n[t]\ncount = 3\n", "f.toml");
  document.set("t.rate=0.75");
  document.set("t", "flag", Value(true), "--flag");
  bound(document);
  EXPECT_EQ(document.entry("t.count").place.short_text(), "f.toml:3");
  EXPECT_EQ(document.entry("t.rate").place.short_text(), "--set t.rate=0.75");
  EXPECT_EQ(document.entry("t.flag").place.short_text(), "--flag");
  EXPECT_TRUE(document.entry("t.name").place.is_default());
  EXPECT_EQ(document.where("t.name"), "f.toml: [t] name = \"a\" (default)");
  EXPECT_EQ(document.entry("t.count").default_value, "1");
  EXPECT_EQ(document.entry("t.count").value, "3");
}

TEST(Document, WritesWhatItReadsBack) {
  Options options;
  options.count = 7;
  options.seed = std::numeric_limits<int64_t>::max();
  options.rate = 0.1 + 0.2;
  options.mean = {1e-300, 1.0, 12345678901234567890.0};
  options.words = {"", "a\"b\\c\n\t\x01", "ä€"};
  options.timeout = milliseconds(61001);
  options.color = Color::green;
  Document written;
  auto section = written.section("t", "a table");
  bind(section, options);
  written.finish();
  for (bool with_help : {false, true}) {
    const std::string text = written.to_toml(with_help);
    EXPECT_TRUE(read(text) == options) << text;
  }
}

TEST(Document, ChecksOptionsOfAProgram) {
  Options options;
  options.count = 0;
  options.seed = std::numeric_limits<uint64_t>::max();
  Document document;
  auto section = document.section("t", "a table");
  bind(section, options);
  EXPECT_EQ(
      error_text<ConfigError>([&] { document.finish(); }),
      "[t] count = 0: must be at least 1\n"
      "[t] seed = 18446744073709551615: must be at most 2^63 - 1");
}

TEST(Document, RefusesFilesThatAreNone) {
  EXPECT_THROW(Document::read("/nonexistent/x.toml"), ConfigError);
  EXPECT_THROW(Document::read("/"), ConfigError);
  EXPECT_THROW(Document::read("/dev/zero"), ConfigError);
}

TEST(Value, ShortensBetweenCharacters) {
  EXPECT_EQ(shortened("abc", 10), "abc");
  std::string text;
  for (int i = 0; i < 100; ++i) text += "ä";
  const std::string shorter = shortened(text, 20);
  EXPECT_LE(shorter.size(), 24u);
  EXPECT_EQ((shorter.size() - 3) % 2, 0u);
}

}  // namespace echelon::config::document_test
