#include "echelon/data/sources/csv_table.h"

#include <gmock/gmock.h>

#include "echelon/data/sources/inspect.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace echelon::csv_table_test {

using testing::ElementsAre;
using testing::HasSubstr;

std::string refusal(const std::string& text) {
  return error_text<DataError>([&] { parse_csv(text, "points.csv"); });
}

TEST(CsvTable, ColumnsByName) {
  const CsvTable table = parse_csv("a,target,b\n1,0,-2.5e1\n+3,2,.5\n", "t");
  EXPECT_THAT(table.columns, ElementsAre("a", "b"));
  EXPECT_THAT(table.inputs, ElementsAre(1, -25, 3, 0.5f));
  EXPECT_THAT(table.targets, ElementsAre(0, 2));
  EXPECT_EQ(table.classes, 3);
}

TEST(CsvTable, QuotesAndLineEndsOfOtherPrograms) {
  const CsvTable table = parse_csv(
      "\xEF\xBB\xBF\"a, \"\"b\"\"\n(m)\", c ,target\r\n\r\n\"1\", 2 ,\"1\"\r\n",
      "t");
  EXPECT_THAT(table.columns, ElementsAre("a, \"b\"\n(m)", "c"));
  EXPECT_THAT(table.inputs, ElementsAre(1, 2));
  EXPECT_THAT(table.targets, ElementsAre(1));
  EXPECT_THAT(parse_csv("x,target\n5,1", "t").inputs, ElementsAre(5));
}

TEST(CsvTable, WhatIsNone) {
  EXPECT_THAT(refusal(""), HasSubstr("points.csv: is empty"));
  EXPECT_THAT(refusal("\n\n"), HasSubstr("is empty"));
  EXPECT_THAT(
      refusal("a,b\n1,2\n"),
      HasAll("no column is called \"target\"", "there are a, b"));
  EXPECT_THAT(refusal("target\n1\n"), HasSubstr("no column beside"));
  EXPECT_THAT(refusal("a,target\n"), HasSubstr("no row of numbers"));
  EXPECT_THAT(
      refusal("a,a,target\n1,2,0\n"),
      HasSubstr("points.csv:1: two columns are called \"a\""));
  EXPECT_THAT(
      refusal("a,target\n1,0\n\n1\n"),
      HasSubstr("points.csv:4: 1 fields; the first line names 2"));
  EXPECT_THAT(
      refusal("a,target\n1,setosa\n"),
      HasAll("points.csv:2: target is \"setosa\"", "a whole number from 0"));
  for (const char* bad : {"-1", "1.0", "2147483648", "", "1e3"}) {
    EXPECT_THAT(
        refusal(std::string("a,target\n1,") + bad + "\n"),
        HasSubstr("target is"))
        << bad;
  }
  for (const char* bad : {"", "NaN", "inf", "1e99", "0x1", "1 2", "one"}) {
    EXPECT_THAT(
        refusal(std::string("a,target\n") + bad + ",1\n"),
        HasAll("points.csv:2: column \"a\" is", "finite numbers"))
        << bad;
  }
  EXPECT_THAT(
      refusal("a,target\n\"1,0\n"), HasSubstr("points.csv:2: a quoted field"));
  EXPECT_THAT(
      refusal("a,target\n\"1\"x,0\n"), HasSubstr("behind a closing quote"));
}

TEST(CsvTable, IsInspected) {
  TempFolder folder;
  DataOptions options{
      .name = DataKind::tensors,
      .path = folder.write("a.CSV", "x,y,target\n1,2,0\n3,4,1\n5,6,1\n7,8,0\n"),
      .holdout = 0.25};
  const DataFacts facts = inspect_data(options);
  EXPECT_EQ(facts.num_train, 3);
  EXPECT_EQ(facts.describe, "4 samples, 2 classes, 2");
  options.holdout_path = folder.write("b.csv", "x,target\n1,0\n");
  EXPECT_THAT(
      error_text<DataError>([&] { inspect_data(options); }),
      HasAll("b.csv", "its samples are [1]"));
}

}  // namespace echelon::csv_table_test
