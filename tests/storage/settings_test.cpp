// Whose keys, and which storage.
#include "echelon/storage/settings.h"

#include <gmock/gmock.h>

#include <cstdlib>

#include "echelon/error.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace echelon::settings_test {

using storage::parse_object_url;
using storage::read_settings;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

// Without the user's own variables and files.
class StorageSettings : public testing::Test {
 protected:
  void SetUp() override {
    for (const char* name :
         {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN",
          "AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_REGION",
          "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3",
          "AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE", "AWS_CA_BUNDLE",
          "AWS_MAX_ATTEMPTS"}) {
      ::unsetenv(name);
    }
    ::setenv("HOME", folder_.path().c_str(), 1);
  }
  void TearDown() override { ::setenv("HOME", home_.c_str(), 1); }

  TempFolder folder_;
  const std::string home_ = std::getenv("HOME");
};

TEST_F(StorageSettings, VariablesComeFirst) {
  folder_.write(
      ".aws/credentials",
      "[default]\naws_access_key_id = file\naws_secret_access_key = f\n");
  ::setenv("AWS_ACCESS_KEY_ID", "variable", 1);
  ::setenv("AWS_SECRET_ACCESS_KEY", "secret", 1);
  ::setenv("AWS_SESSION_TOKEN", "token", 1);
  ::setenv("AWS_REGION", "eu-west-1", 1);
  ::setenv("AWS_ENDPOINT_URL", "http://host:9000/", 1);
  ::setenv("AWS_MAX_ATTEMPTS", "2", 1);
  const auto settings = read_settings();
  EXPECT_EQ(settings.access_key, "variable");
  EXPECT_EQ(settings.secret_key, "secret");
  EXPECT_EQ(settings.session_token, "token");
  EXPECT_EQ(settings.region, "eu-west-1");
  EXPECT_EQ(settings.endpoint, "http://host:9000");
  EXPECT_EQ(settings.attempts, 2);
}

TEST_F(StorageSettings, ProfilesOfBothFiles) {
  folder_.write(
      ".aws/credentials",
      "# comment\n[default]\naws_access_key_id=first\n"
      "aws_secret_access_key=1\n[lab]\naws_access_key_id = second\n"
      "aws_secret_access_key = a=b/+\naws_session_token = t\n");
  folder_.write(
      ".aws/config",
      "[default]\nregion = us-west-2\n[profile lab]\ns3 =\n  region = x\n"
      "region = lab-1\nendpoint_url = https://minio.lab:9000\n");
  const auto first = read_settings();
  EXPECT_EQ(first.access_key, "first");
  EXPECT_EQ(first.region, "us-west-2");
  EXPECT_EQ(first.endpoint, "");
  ::setenv("AWS_PROFILE", "lab", 1);
  const auto lab = read_settings();
  EXPECT_EQ(lab.access_key, "second");
  EXPECT_EQ(lab.secret_key, "a=b/+");
  EXPECT_EQ(lab.session_token, "t");
  EXPECT_EQ(lab.region, "lab-1");
  EXPECT_EQ(lab.endpoint, "https://minio.lab:9000");
}

TEST_F(StorageSettings, WhatIsMissingOrWrongIsNamedWithoutKeys) {
  const auto refused = [] { return error_text([] { read_settings(); }); };
  EXPECT_THAT(
      refused(), AllOf(HasSubstr("AWS_ACCESS_KEY_ID"), HasSubstr("profile")));
  ::setenv("AWS_ACCESS_KEY_ID", "public", 1);
  EXPECT_THAT(refused(), HasSubstr("set both or none"));
  ::setenv("AWS_SECRET_ACCESS_KEY", "hidden", 1);
  for (const char* wrong :
       {"host:9000", "ftp://host", "http://u:hidden@host"}) {
    ::setenv("AWS_ENDPOINT_URL", wrong, 1);
    EXPECT_THAT(
        refused(),
        AllOf(HasSubstr("AWS_ENDPOINT_URL"), Not(HasSubstr("hidden"))));
  }
  ::setenv("AWS_ENDPOINT_URL", "", 1);
  ::setenv("AWS_MAX_ATTEMPTS", "many", 1);
  EXPECT_THAT(refused(), HasSubstr("from 1 to 100"));
  ::setenv("AWS_MAX_ATTEMPTS", "3", 1);
  ::setenv("AWS_REGION", "eu west", 1);
  EXPECT_THAT(refused(), HasSubstr("is no region"));
}

TEST_F(StorageSettings, Addresses) {
  const auto url = parse_object_url("s3://models/runs/first/");
  EXPECT_EQ(url.bucket, "models");
  EXPECT_EQ(url.key, "runs/first");
  EXPECT_EQ(parse_object_url("s3://models").key, "");
  for (const char* wrong :
       {"models/runs", "s3://", "s3://Mo/x", "s3://a_b/x", "s3://abc//x",
        "s3://abc/x//y", "https://abc/x"}) {
    EXPECT_THAT(
        error_text([&] { parse_object_url(wrong); }),
        AllOf(HasSubstr(wrong), HasSubstr("s3://BUCKET/NAME")));
  }
}

}  // namespace echelon::settings_test
