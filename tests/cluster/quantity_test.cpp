#include "echelon/cluster/quantity.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace echelon::cluster::quantity_test {

TEST(Quantity, ReadsUnits) {
  EXPECT_EQ(parse_quantity("400 Gbit/s", Unit::bytes_per_second), 50e9);
  EXPECT_EQ(parse_quantity("50GB/s", Unit::bytes_per_second), 50e9);
  EXPECT_EQ(parse_quantity("3.35 TB/s", Unit::bytes_per_second), 3.35e12);
  EXPECT_EQ(parse_quantity("80 GiB", Unit::bytes), 80.0 * (1 << 30));
  EXPECT_EQ(parse_quantity("80 GB", Unit::bytes), 80e9);
  EXPECT_EQ(parse_quantity("5 us", Unit::seconds), 5e-6);
  EXPECT_EQ(parse_quantity("989.4 TFLOP/s", Unit::flops_per_second), 989.4e12);
}

TEST(Quantity, RefusesTheRest) {
  for (const char* text :
       {"", "400", "Gbit/s", "400 gbit/s", "400 Gbit", "400 Gbit/s x", "80 GiB",
        "inf GB/s", "nan GB/s", "1e308 TB/s", "4 00 GB/s", "0x10 GB/s"}) {
    EXPECT_EQ(parse_quantity(text, Unit::bytes_per_second), std::nullopt)
        << text;
  }
}

TEST(Quantity, WritesWhatReadsBest) {
  EXPECT_EQ(quantity_text(50e9, Unit::bytes_per_second), "50 GB/s");
  EXPECT_EQ(quantity_text(3.35e12, Unit::bytes_per_second), "3.35 TB/s");
  EXPECT_EQ(quantity_text(80.0 * (1 << 30), Unit::bytes), "80 GiB");
  EXPECT_EQ(quantity_text(5e-6, Unit::seconds), "5 us");
  EXPECT_EQ(quantity_text(0, Unit::seconds), "0 s");
}

TEST(Quantity, EveryValueComesBack) {
  std::mt19937_64 random(7);
  std::uniform_real_distribution<double> exponent(-12, 18);
  for (Unit unit :
       {Unit::bytes, Unit::bytes_per_second, Unit::seconds,
        Unit::flops_per_second}) {
    for (int i = 0; i < 2000; ++i) {
      const double value = std::pow(10.0, exponent(random));
      ASSERT_EQ(parse_quantity(quantity_text(value, unit), unit), value);
    }
  }
}

}  // namespace echelon::cluster::quantity_test
