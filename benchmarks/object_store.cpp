// What the storage of an object costs over a copy of the file: upload_file and
// download against read, write and fsync of the same bytes. Alternates; prints
// a line of JSON with the medians, and the processors' time of this process.
//
//   object_store --folder PATH --url s3://BUCKET/KEY [--mib 256] [--rounds 5]
//
// The server is where AWS_ENDPOINT_URL says; benchmarks/storage.py starts one.
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <random>

#include "benchmarks/arguments.h"
#include "benchmarks/times.h"
#include "echelon/storage/object_store.h"
#include "echelon/text/file_descriptor.h"

namespace {

using namespace echelon;

void print(const char* name, const Times& times, bool last = false) {
  std::printf(
      "\"%s\": {\"seconds\": %.4f, \"processor_seconds\": %.4f}%s", name,
      Times::median(times.seconds), Times::median(times.processor_seconds),
      last ? "}\n" : ", ");
}

void copy(const std::string& from, const std::string& to) {
  const FileDescriptor in(::open(from.c_str(), O_RDONLY));
  const FileDescriptor out(
      ::open(to.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644));
  std::vector<char> part(size_t{1} << 20);
  for (ssize_t got; (got = ::read(in.fd(), part.data(), part.size())) > 0;) {
    if (::write(out.fd(), part.data(), static_cast<size_t>(got)) != got) {
      throw Error("cannot write " + to);
    }
  }
  ::fsync(out.fd());
}

int run(const Arguments& arguments) {
  arguments.allow({"--folder", "--url", "--mib", "--rounds"});
  const auto number = [&](const char* name, int64_t otherwise) {
    return arguments.has(name) ? std::stoll(arguments.text(name)) : otherwise;
  };
  const int64_t bytes = number("--mib", 256) << 20;
  const std::string folder = arguments.text("--folder");
  const auto url = storage::parse_object_url(arguments.text("--url"));
  const std::string from = folder + "/from", to = folder + "/to";
  {
    std::mt19937_64 random(1);
    std::vector<uint64_t> part(size_t{1} << 17);
    std::ofstream file(from, std::ios::binary);
    for (int64_t done = 0; done < bytes; done += 1 << 20) {
      for (auto& word : part) word = random();
      file.write(reinterpret_cast<const char*>(part.data()), 1 << 20);
    }
  }
  storage::ObjectStore store(url.bucket, storage::read_settings());
  Times plain, up, down;
  for (int64_t round = 0; round < number("--rounds", 5); ++round) {
    plain.take([&] { copy(from, to); });
    up.take([&] { store.upload_file(from, url.key); });
    const auto object = store.find(url.key);
    down.take([&] {
      const FileDescriptor file(::open(to.c_str(), O_RDWR | O_TRUNC));
      store.download(*object, file.fd());
      ::fsync(file.fd());
    });
  }
  std::printf("{\"mib\": %lld, ", static_cast<long long>(bytes >> 20));
  print("copy", plain);
  print("upload", up);
  print("download", down, true);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(Arguments(argc, argv));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
