// A real S3 server for a test: moto's, with faults (s3_server.py). A test that
// needs it begins with ECHELON_NEED_S3().
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "echelon/storage/object_store.h"
#include "tests/monitoring/http.h"
#include "tests/support/places.h"
#include "tests/support/process.h"
#include "tests/support/python.h"

namespace echelon::testing_support {

class S3Server {
 public:
  /// One for each test program, started when a test first asks; null where moto
  /// is not installed. Without faults.
  static S3Server* get() {
    static const std::unique_ptr<S3Server> server = start();
    if (server) server->set("");
    return server.get();
  }

  std::string endpoint() const {
    return "http://127.0.0.1:" + std::to_string(port_);
  }
  /// Of a user who may do everything, or nothing. It fails soon.
  storage::S3Settings settings(const std::string& user = "all") const {
    storage::S3Settings settings;
    settings.endpoint = endpoint();
    settings.access_key = keys_.at(user).at("access");
    settings.secret_key = keys_.at(user).at("secret");
    settings.keys_from = "the test";
    settings.first_wait = std::chrono::milliseconds(1);
    return settings;
  }
  /// The same as variables of a command.
  std::vector<std::string> environment(const std::string& user = "all") const {
    return {
        "AWS_ENDPOINT_URL=" + endpoint(),
        "AWS_ACCESS_KEY_ID=" + keys_.at(user).at("access").get<std::string>(),
        "AWS_SECRET_ACCESS_KEY=" +
            keys_.at(user).at("secret").get<std::string>(),
        "AWS_REGION=us-east-1", "AWS_MAX_ATTEMPTS=3"};
  }
  /// The same as variables of this process, whose copies go to that folder.
  void set_environment(const std::string& cache) const {
    for (const auto& entry : environment()) {
      const size_t equals = entry.find('=');
      ::setenv(
          entry.substr(0, equals).c_str(), entry.substr(equals + 1).c_str(), 1);
    }
    ::setenv("ECHELON_CACHE", cache.c_str(), 1);
  }
  /// Counts from 1 again, with a fault as in s3_server.py: "at=3&mode=after".
  void set(const std::string& fault) { ask("/_test/set?" + fault); }
  /// Puts empty objects PREFIX00000, PREFIX00001, … into the bucket.
  void fill(const std::string& prefix, int many) {
    ask("/_test/fill?prefix=" + prefix + "&many=" + std::to_string(many));
  }
  /// "PUT /models/a" for each request since set().
  std::vector<std::string> requests() {
    std::vector<std::string> lines;
    std::istringstream text(ask("/_test/log"));
    for (std::string line; std::getline(text, line);) lines.push_back(line);
    return lines;
  }

 private:
  static std::unique_ptr<S3Server> start() {
    if (pytorch_python().empty()) return nullptr;
    auto server = std::unique_ptr<S3Server>(new S3Server);
    server->port_ = free_port();
    server->process_ = std::make_unique<Command>(std::vector<std::string>{
        pytorch_python(), source_path("tests/support/s3_server.py"),
        std::to_string(server->port_)});
    server->process_->until_output("\n");
    const std::string said = server->process_->out();
    if (said.starts_with("no moto")) return nullptr;
    if (!said.starts_with("{")) {
      throw std::runtime_error("s3_server.py: " + server->process_->err());
    }
    server->keys_ = nlohmann::json::parse(said);
    return server;
  }
  std::string ask(const std::string& path) const {
    const auto socket = connect_to(port_);
    send_text(
        socket, "GET " + path + " HTTP/1.1\r\nHost: test\r\nConnection: close" +
                    "\r\n\r\n");
    const std::string answer = receive_all(socket);
    const size_t body = answer.find("\r\n\r\n");
    if (!answer.starts_with("HTTP/1.1 200") || body == std::string::npos) {
      throw std::runtime_error("s3_server.py answered: " + answer);
    }
    return answer.substr(body + 4);
  }

  int port_ = 0;
  std::unique_ptr<Command> process_;
  nlohmann::json keys_;
};

#define ECHELON_NEED_S3()                                          \
  if (::echelon::testing_support::S3Server::get() == nullptr) {    \
    GTEST_SKIP() << "needs Python's moto: run `make extras` once"; \
  }

}  // namespace echelon::testing_support
