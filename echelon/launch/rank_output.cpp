#include "echelon/launch/rank_output.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "echelon/error.h"

namespace echelon::launch {

RankOutput::RankOutput(Show show, const std::string& log_path) : show_(show) {
  if (!log_path.empty()) {
    log_ =
        open(log_path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (log_ < 0) {
      throw ConfigError(
          "[launch] cannot write the log " + log_path + ": " +
          std::strerror(errno) + "; choose another folder");
    }
  }
  for (int stream = show == Show::direct ? 2 : 1; stream <= 2; ++stream) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) {
      const int error = errno;
      close_all();
      throw ConfigError(
          std::string("[launch] no pipe for a rank's output: ") +
          std::strerror(error) +
          "; `ulimit -n` sets how many files may be open");
    }
    fcntl(ends[0], F_SETFL, O_NONBLOCK);
    lanes_[stream].read_end = ends[0];
    lanes_[stream].write_end = ends[1];
  }
}

RankOutput::RankOutput(RankOutput&& other) noexcept
    : show_(other.show_),
      tail_(std::move(other.tail_)),
      log_(std::exchange(other.log_, -1)),
      log_error_(other.log_error_) {
  for (int stream = 1; stream <= 2; ++stream) {
    lanes_[stream] = std::exchange(other.lanes_[stream], Lane{});
  }
}

RankOutput::~RankOutput() {
  close_all();
}

void RankOutput::close_all() {
  close_write_ends();
  close_stream(1);
  close_stream(2);
  if (log_ >= 0) {
    close(std::exchange(log_, -1));
  }
}

void RankOutput::close_write_ends() {
  for (Lane& lane : lanes_) {
    if (lane.write_end >= 0) {
      close(std::exchange(lane.write_end, -1));
    }
  }
}

void RankOutput::close_stream(int stream) {
  if (lanes_[stream].read_end >= 0) {
    close(std::exchange(lanes_[stream].read_end, -1));
  }
}

bool RankOutput::read(
    int stream, TimePoint now, Screen& screen, size_t max_bytes) {
  Lane& lane = lanes_[stream];
  if (lane.read_end < 0) {
    return false;
  }
  char bytes[64 << 10];
  const ssize_t size =
      ::read(lane.read_end, bytes, std::min(max_bytes, sizeof bytes));
  if (size < 0 && (errno == EAGAIN || errno == EINTR)) {
    return false;
  }
  if (size <= 0) {
    close_stream(stream);
    return false;
  }
  const std::string_view text(bytes, size);
  log(text);
  if (stream == 2) {
    tail_.add(text);
  }
  show(stream, text, now, screen);
  return true;
}

void RankOutput::show(
    int stream, std::string_view bytes, TimePoint now, Screen& screen) {
  Lane& lane = lanes_[stream];
  switch (show_) {
    case Show::hidden:
      return;
    case Show::raw:
    case Show::direct:
      screen.write(stream, bytes);
      return;
    case Show::whole: {
      lane.last_byte = now;
      lane.partial.append(bytes);
      const size_t end = lane.partial.size() > LineCutter::kMaxLine
                             ? lane.partial.size()
                             : lane.partial.rfind('\n') + 1;
      screen.write(stream, std::string_view(lane.partial).substr(0, end));
      lane.partial.erase(0, end);
      return;
    }
    case Show::prefixed:
      lane.cutter.feed(bytes, now, sink(stream, screen));
  }
}

LineCutter::Sink RankOutput::sink(int stream, Screen& screen) {
  return [this, stream, &screen](std::string_view line) {
    const std::string text = screen.is_terminal(stream)
                                 ? safe_for_terminal(line)
                                 : std::string(line);
    screen.write(stream, lanes_[stream].prefix + text + "\n");
  };
}

void RankOutput::idle(TimePoint now, Screen& screen) {
  for (int stream = 1; stream <= 2; ++stream) {
    Lane& lane = lanes_[stream];
    lane.cutter.feed_idle(now, sink(stream, screen));
    if (!lane.partial.empty() &&
        now - lane.last_byte >= std::chrono::milliseconds(500)) {
      screen.write(stream, std::exchange(lane.partial, {}));
    }
  }
}

bool RankOutput::waiting() const {
  return std::any_of(lanes_, lanes_ + 3, [](const Lane& lane) {
    return lane.cutter.waiting() || !lane.partial.empty();
  });
}

void RankOutput::finish(Screen& screen) {
  for (int stream = 1; stream <= 2; ++stream) {
    close_stream(stream);
    lanes_[stream].cutter.finish(sink(stream, screen));
    screen.write(stream, std::exchange(lanes_[stream].partial, {}));
  }
}

void RankOutput::log(std::string_view bytes) {
  while (log_ >= 0 && !bytes.empty()) {
    const ssize_t done = ::write(log_, bytes.data(), bytes.size());
    if (done < 0 && errno == EINTR) {
      continue;
    }
    if (done <= 0) {
      log_error_ = errno;
      close(std::exchange(log_, -1));
      return;
    }
    bytes.remove_prefix(done);
  }
}

}  // namespace echelon::launch
