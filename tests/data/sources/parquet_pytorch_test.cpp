// Parquet files that pyarrow has written give what the same rows as text give.
#include "echelon/data/sources/parquet.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>

#include "echelon/data/sources/csv_table.h"
#include "echelon/data/sources/inspect.h"
#include "echelon/data/sources/text.h"
#include "tests/support/error_text.h"
#include "tests/support/places.h"
#include "tests/support/python.h"
#include "tests/support/temp_folder.h"

namespace echelon::parquet_pytorch_test {

class Parquet : public testing::Test {
 protected:
  void SetUp() override {
    ECHELON_NEED_TRANSFORMERS();  // pyarrow is in the same environment
    if (!std::filesystem::exists(program("../lib/libechelon_parquet.so"))) {
      GTEST_SKIP() << "built without Arrow's C++ library (make extras)";
    }
    run_python_script("data/sources/parquet_reference.py", {folder_.path()});
  }
  TextCorpus corpus(const std::string& name) const {
    return TextCorpus(
        {.name = DataKind::text,
         .path = folder_.path(name),
         .tokenizer = "bytes",
         .sequence = 8,
         .end_of_text_id = 256});
  }
  std::string refusal(const std::string& name) const {
    return error_text<DataError>([&] {
      inspect_data({.name = DataKind::tensors, .path = folder_.path(name)});
    });
  }

  TempFolder folder_;
};

TEST_F(Parquet, TextsConversationsAndTokensAreThoseOfLines) {
  for (const std::string name :
       {"lines", "coded", "large", "chats", "tokens", "mixed"}) {
    const bool texts = name == "coded" || name == "large";
    const TextCorpus lines = corpus((texts ? "lines" : name) + ".jsonl");
    const TextCorpus rows = corpus(name + ".parquet");
    EXPECT_GT(rows.num_samples(), 2) << name;
    ASSERT_EQ(rows.num_samples(), lines.num_samples()) << name;
    for (int64_t i = 0; i < rows.num_samples(); ++i) {
      std::vector<int64_t> read[2][2];
      for (const bool parquet : {false, true}) {
        auto& [inputs, targets] = read[parquet ? 1 : 0];
        inputs.resize(8);
        targets.resize(8);
        (parquet ? rows : lines)
            .read(i, inputs.data(), targets.data(), nullptr);
      }
      ASSERT_EQ(read[0][0], read[1][0]) << name << " " << i;
      ASSERT_EQ(read[0][1], read[1][1]) << name << " " << i;
    }
  }
}

TEST_F(Parquet, ATableIsThatOfCsv) {
  const CsvTable csv = read_table(folder_.path("table.csv"), "table.csv");
  const CsvTable parquet =
      read_table(folder_.path("table.parquet"), "table.parquet");
  EXPECT_EQ(parquet.rows(), 3000);
  EXPECT_EQ(parquet.columns[1], "y, squared");
  EXPECT_EQ(parquet.columns, csv.columns);
  EXPECT_EQ(parquet.inputs, csv.inputs);
  EXPECT_EQ(parquet.targets, csv.targets);
  EXPECT_EQ(parquet.classes, 5);
}

TEST_F(Parquet, WhatIsNotRead) {
  EXPECT_THAT(
      refusal("nulls.parquet"),
      HasAll("nulls.parquet:3: column \"x\" is \"\"", "finite numbers"));
  EXPECT_THAT(
      refusal("decimals.parquet"),
      HasAll("column \"x\"", "the type decimal", "not read"));
  EXPECT_THAT(
      refusal("lists.parquet"), HasAll("the type list<", "are not read"));
  EXPECT_THAT(
      refusal("coded.parquet"),
      HasAll("no column is called \"target\"", "there are text"));
  EXPECT_THAT(
      error_text<DataError>([&] { corpus("table.parquet"); }),
      HasAll(
          "table.parquet", "has no column \"text\", \"messages\"",
          "there are x, y, squared, flag"));
  // A part of a file, and one with other bytes in it.
  std::ifstream file(folder_.path("lines.parquet"), std::ios::binary);
  std::string bytes(std::istreambuf_iterator<char>(file), {});
  folder_.write("part.parquet", bytes.substr(0, bytes.size() / 2));
  EXPECT_THAT(
      error_text<DataError>([&] { corpus("part.parquet"); }),
      HasAll("part.parquet", "arquet"));
  for (const size_t at : {bytes.size() / 4, bytes.size() - 200}) {
    std::string broken = bytes;
    for (size_t i = 0; i < 100; ++i) broken[at + i] = '\xff';
    folder_.write("broken.parquet", broken);
    EXPECT_THAT(
        error_text<DataError>([&] { corpus("broken.parquet"); }),
        HasAll("broken.parquet"));
  }
}

}  // namespace echelon::parquet_pytorch_test
