#include "echelon/authentication/key.h"

#include <gmock/gmock.h>

namespace echelon::authentication::key_test {

const std::string kDigits =
    "00112233445566778899aabbccddeeff0123456789abcdef0123456789abcdef";

TEST(Key, IsWrittenAsHexadecimalDigits) {
  const auto key = Key::from_hex(kDigits);
  ASSERT_TRUE(key);
  EXPECT_EQ(key->to_hex(), kDigits);
  std::string capital = kDigits;
  capital[30] = 'F';
  EXPECT_EQ(Key::from_hex(capital)->to_hex(), kDigits);
}

TEST(Key, AnyOtherTextIsNone) {
  EXPECT_FALSE(Key::from_hex(""));
  EXPECT_FALSE(Key::from_hex(kDigits.substr(1)));
  EXPECT_FALSE(Key::from_hex(kDigits + "0"));
  EXPECT_FALSE(Key::from_hex(kDigits.substr(1) + "g"));
  EXPECT_FALSE(Key::from_hex(kDigits.substr(1) + " "));
  EXPECT_FALSE(Key::from_hex(kDigits.substr(1) + '\0'));
}

TEST(Key, EachIsAnother) {
  EXPECT_NE(Key::random().to_hex(), Key::random().to_hex());
}

// The first case of RFC 4231: HMAC fills its key up with zeros.
TEST(Key, SignsAsTheStandardSays) {
  const auto key = Key::from_hex(
      "0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b" + std::string(24, '0'));
  ASSERT_TRUE(key);
  std::string digits;
  for (const char c : key->sign("Hi There")) {
    const auto byte = static_cast<unsigned char>(c);
    digits += "0123456789abcdef"[byte / 16];
    digits += "0123456789abcdef"[byte % 16];
  }
  EXPECT_EQ(
      digits,
      "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
}

TEST(Key, DerivesAKeyForEachPurpose) {
  const Key key = *Key::from_hex(kDigits);
  EXPECT_EQ(key.derive("a").to_hex(), key.derive("a").to_hex());
  EXPECT_NE(key.derive("a").to_hex(), key.derive("b").to_hex());
  EXPECT_NE(key.derive("a").to_hex(), Key::random().derive("a").to_hex());
}

TEST(Key, TextsAreComparedWhole) {
  EXPECT_TRUE(equal_in_constant_time("ab", "ab"));
  EXPECT_FALSE(equal_in_constant_time("ab", "ac"));
  EXPECT_FALSE(equal_in_constant_time("ab", "abc"));
}

}  // namespace echelon::authentication::key_test
