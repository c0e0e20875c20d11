#include "benchmarks/published/csv.h"

#include <gtest/gtest.h>

#include "tests/support/error_text.h"

namespace echelon::csv_test {

std::string error_of(const std::string& text) {
  return error_text<DataError>([&] { parse_csv(text, "t.csv"); });
}

TEST(Csv, ReadsQuotesBreaksAndCarriageReturns) {
  const auto table = parse_csv(
      "\xEF\xBB\xBF"
      "a,b\r\n\"1,\"\"x\"\"\n2\",\r\n\n3,4",
      "t.csv");
  EXPECT_EQ(table.columns, (std::vector<std::string>{"a", "b"}));
  ASSERT_EQ(table.rows.size(), 2u);
  EXPECT_EQ(table.rows[0].cells[0], "1,\"x\"\n2");
  EXPECT_EQ(table.rows[0].cells[1], "");
  EXPECT_EQ(table.rows[0].line, 2);
  EXPECT_EQ(table.rows[1].line, 5);
  EXPECT_EQ(table.rows[1].cells[1], "4");
  EXPECT_EQ(table.column("b"), 1);
  EXPECT_EQ(table.column("c"), -1);
}

TEST(Csv, ErrorsNameTheLine) {
  EXPECT_EQ(
      error_of(""), "t.csv:1: empty: the first line must name the columns");
  EXPECT_EQ(error_of("a,a\n"), "t.csv:1: column \"a\" is there twice");
  EXPECT_EQ(error_of("a,\n"), "t.csv:1: column 2 has no name");
  EXPECT_EQ(error_of("a,b\n1,2\n3\n"), "t.csv:3: 1 cells, but 2 columns");
  EXPECT_EQ(
      error_of("a,b\n1,\"2\n"),
      "t.csv:2: a quote that is opened here is never closed");
  EXPECT_EQ(
      error_of("a,b\n1,\"2\"x\n"),
      "t.csv:2: text behind a closing quote: a comma is missing");
  EXPECT_TRUE(error_of("a,b\n1,2\"\n").starts_with("t.csv:2: a quote inside"));
  EXPECT_THROW(read_csv("/nowhere/t.csv"), DataError);
  EXPECT_THROW(read_csv("/"), DataError);
}

}  // namespace echelon::csv_test
