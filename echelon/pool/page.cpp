// What a project used becomes columns of equal time, each with the mean of the
// devices in it, so that areas are device-hours however many jobs there were.
#include "echelon/pool/page.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <ctime>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "echelon/report/chart.h"
#include "echelon/report/page.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon::pool {
namespace {

using PageJson = nlohmann::ordered_json;
using report::coordinate;
using report::Markup;

constexpr double kDay = 86400;
constexpr size_t kColumns = 300;     // of a picture of the past
constexpr size_t kMostLanes = 64;    // devices with a lane of their own
constexpr size_t kMostBars = 1500;   // in all lanes
constexpr size_t kMostCharts = 12;   // projects with one of their own
constexpr size_t kMostRows = 200;    // of a table of jobs
constexpr size_t kMostDays = 14;     // with a bar of their own
constexpr int64_t kColors = 8;       // k0 … of assets/shards.css
constexpr double kStretched = 1000;  // the width of areas, in their own units

std::tm local(double seconds) {
  const auto whole_seconds = static_cast<std::time_t>(seconds);
  std::tm time{};
  ::localtime_r(&whole_seconds, &time);
  return time;
}

std::string text_of(const std::tm& time, const char* pattern) {
  std::array<char, 64> text{};
  std::strftime(text.data(), text.size(), pattern, &time);
  return text.data();
}

// "27 Nov 14:05"
std::string moment(double seconds) {
  return text_of(local(seconds), "%-d %b %H:%M");
}

// "12 s", "3 h 07 min", "2 d 5 h"
std::string duration(double seconds) {
  seconds = std::round(std::max(0.0, seconds));
  if (seconds < 2 * kDay) return unbroken(format_seconds(seconds));
  const auto hours = std::llround(seconds / 3600);
  const std::string days = format("{} d", hours / 24);
  return unbroken(hours % 24 == 0 ? days : format("{} {} h", days, hours % 24));
}

std::string hours(double value) {
  return value == 0 ? "0" : format("{:.{}f}", value, value < 100 ? 1 : 0);
}

int64_t whole_of(const PageJson& json, const char* key) {
  return json.at(key).get<int64_t>();
}

struct Taker {  // a project
  std::string name;
  std::string color;  // a class
  bool is_parent = false;
  int64_t guaranteed = 0;
  double device_hours = 0, borrowed_hours = 0;
  std::vector<std::pair<double, int64_t>> steps;
};

// Times on a horizontal axis, and its ticks.
struct Span {
  double since = 0, until = 1;

  double length() const { return until - since; }
  double share(double time) const {
    return std::clamp((time - since) / length(), 0.0, 1.0);
  }
  std::string percent(double time) const {
    return coordinate(100 * share(time), 3) + "%";
  }

  void draw_ticks(Markup& page, int bottom, size_t most) const {
    constexpr std::array kSteps = {1.0,      5.0,      15.0,      60.0,
                                   300.0,    900.0,    1800.0,    3600.0,
                                   10800.0,  21600.0,  43200.0,   kDay,
                                   2 * kDay, 7 * kDay, 30 * kDay, 365 * kDay};
    const auto found = std::ranges::find_if(kSteps, [&](double step) {
      return length() / step <= static_cast<double>(most);
    });
    const double step = found == kSteps.end() ? 365 * kDay : *found;
    const auto offset = static_cast<double>(local(since).tm_gmtoff);
    std::vector<double> ticks;
    for (double at = std::ceil((since + offset) / step) * step - offset;
         at <= until; at += step) {
      ticks.push_back(at);
    }
    for (size_t i = 0; i < ticks.size(); ++i) {
      const std::tm time = local(ticks[i]);
      const bool midnight =
          time.tm_hour == 0 && time.tm_min == 0 && time.tm_sec == 0;
      page.add(
          "<line class='grid' x1='{}' x2='{}' y1='-4' y2='{}'/>",
          percent(ticks[i]), percent(ticks[i]), bottom);
      report::draw_tick(
          page, i, ticks.size(), share(ticks[i]), bottom + 17,
          text_of(
              time, midnight && step >= 3600 ? "%-d %b"
                    : step < 60              ? "%H:%M:%S"
                                             : "%H:%M"),
          0.5 / static_cast<double>(most));
    }
  }
};

// The mean number of devices in each column.
std::vector<double> columns_of(const Taker& taker, const Span& span) {
  std::vector<double> columns(kColumns);
  const double width = span.length() / static_cast<double>(kColumns);
  for (size_t i = 0; i < taker.steps.size(); ++i) {
    const auto [begin, devices] = taker.steps[i];
    const double end =
        i + 1 < taker.steps.size() ? taker.steps[i + 1].first : span.until;
    if (devices == 0) continue;
    const double first = (begin - span.since) / width;
    const double last = (end - span.since) / width;
    for (auto c = static_cast<size_t>(std::max(0.0, first));
         c < kColumns && static_cast<double>(c) < last; ++c) {
      const auto at = static_cast<double>(c);
      columns[c] += static_cast<double>(devices) *
                    (std::min(last, at + 1) - std::max(first, at));
    }
  }
  return columns;
}

// Device-seconds of a taker between two times.
double used_between(const Taker& taker, double begin, double end) {
  double sum = 0;
  for (size_t i = 0; i < taker.steps.size(); ++i) {
    const double next =
        i + 1 < taker.steps.size() ? taker.steps[i + 1].first : end;
    const double time =
        std::min(next, end) - std::max(taker.steps[i].first, begin);
    if (time > 0) sum += time * static_cast<double>(taker.steps[i].second);
  }
  return sum;
}

// From `below` up to `above`, as steps from left to right and back.
std::string area_of(
    const std::vector<double>& below, const std::vector<double>& above,
    double top, int height) {
  const auto y = [&](double devices) {
    return coordinate(height * (1 - devices / top), 1);
  };
  const auto x = [&](size_t column) {
    return coordinate(
        kStretched * static_cast<double>(column) /
            static_cast<double>(kColumns),
        1);
  };
  std::string path;
  for (size_t i = 0; i < above.size(); ++i) {
    if (i > 0 && y(above[i]) == y(above[i - 1])) continue;
    path += path.empty() ? "M0 " + y(above[i]) : "H" + x(i) + "V" + y(above[i]);
  }
  path += "H" + x(kColumns);
  for (size_t i = below.size(); i-- > 0;) {
    if (i + 1 < below.size() && y(below[i]) == y(below[i + 1])) continue;
    path += (i + 1 < below.size() ? "H" + x(i + 1) : "") + "V" + y(below[i]);
  }
  return path + "H0Z";
}

class PoolPage {
 public:
  explicit PoolPage(const PageJson& answer)
      : answer_(answer),
        now_(answer.at("now")),
        past_(answer.at("history")),
        devices_(whole_of(now_, "devices")),
        unit_(now_.at("gpus").get<bool>() ? "GPU" : "slot"),
        unit_first_(now_.at("gpus").get<bool>() ? "GPU" : "Slot") {
    span_.since = past_.at("since").get<double>();
    span_.until = std::max(past_.at("until").get<double>(), span_.since + 1);
    int64_t leaves = 0;
    for (const PageJson& one : past_.at("projects")) {
      Taker taker{
          .name = one.at("project").get<std::string>(),
          .is_parent = one.at("is_parent").get<bool>(),
          .device_hours = one.at("device_hours").get<double>(),
          .borrowed_hours = one.at("borrowed_hours").get<double>()};
      taker.color = taker.is_parent
                        ? "ot"
                        : format("k{}", std::min(leaves++, kColors - 1));
      for (const PageJson& step : one.at("use")) {
        taker.steps.emplace_back(
            step.at(0).get<double>(), step.at(1).get<int64_t>());
      }
      for (const PageJson& held : now_.at("projects")) {
        if (held.at("project") == taker.name) {
          taker.guaranteed = whole_of(held, "guaranteed");
        }
      }
      takers_.push_back(std::move(taker));
    }
  }

  std::string html() {
    const auto host = answer_.at("host").get<std::string>();
    const std::string title = format("{}s of {}", unit_first_, host);
    page_.add("<header>");
    report::draw_title(page_, "pool", title);
    if (now_.at("drained").get<bool>()) {
      page_.add("<p class='outcome'>Drained: no job starts</p>");
    }
    draw_tiles();
    page_.add("</header>");
    draw_projects();
    draw_waiting();
    draw_running();
    draw_use();
    draw_lanes();
    draw_hours();
    page_.add(
        "<footer>Written by Echelon on {}, from what its pool on {} remembers. "
        "Times are this server\u2019s ({}).</footer>",
        moment(span_.until), host, text_of(local(span_.until), "%Z"));
    return report::page_of(title, std::move(page_), report::PageScript::none);
  }

 private:
  const PageJson& jobs() const { return answer_.at("jobs"); }
  static bool runs(const PageJson& job) { return whole_of(job, "devices") > 0; }
  std::string color_of(const std::string& project) const {
    const auto found = std::ranges::find(takers_, project, &Taker::name);
    return found == takers_.end() ? "kw" : found->color;
  }
  double since_of(const PageJson& job, const char* key) const {
    return span_.until - job.at(key).get<double>();
  }

  void draw_tiles() {
    const int64_t idle = whole_of(now_, "idle");
    const int64_t used = devices_ - idle;
    int64_t waiting = 0;
    double longest = 0;
    for (const PageJson& job : jobs()) {
      if (runs(job)) continue;
      ++waiting;
      longest = std::max(longest, since_of(job, "waiting_since"));
    }
    int64_t borrowed = 0;
    for (const PageJson& one : now_.at("projects")) {
      if (is_parent(one)) continue;
      borrowed += std::max<int64_t>(
          0, whole_of(one, "in_use") - whole_of(one, "guaranteed"));
    }
    const double used_hours = past_.at("used_hours").get<double>();
    const double all_hours = used_hours + past_.at("idle_hours").get<double>();
    report::draw_tiles(
        page_,
        {{format("{}s in use", unit_first_), std::to_string(used),
          format("{} idle", idle), format("of {}", devices_)},
         {"Borrowed", std::to_string(borrowed), "beyond guarantees", ""},
         {"Waiting", std::to_string(waiting),
          waiting > 0 ? "the longest for " + duration(longest) : "no job waits",
          waiting == 1 ? "job" : "jobs"},
         {format("{}-hours", unit_first_), hours(used_hours),
          format(
              "{} of what there was in {}",
              unbroken(
                  format_percent(all_hours > 0 ? used_hours / all_hours : 0)),
              duration(span_.length())),
          ""}});
  }

  bool is_parent(const PageJson& one) const {
    const auto found = std::ranges::find(
        takers_, one.at("project").get<std::string>(), &Taker::name);
    return found != takers_.end() && found->is_parent;
  }

  // --- Now

  void draw_projects() {
    page_.add("<section id='projects'><h2>Who has what</h2>");
    report::open_table(
        page_, "Projects now",
        {"Project", "In use", "Guaranteed", "Fair share", "Limit", "Waiting",
         ""});
    for (const PageJson& one : now_.at("projects")) {
      const int64_t in_use = whole_of(one, "in_use");
      const int64_t guaranteed = whole_of(one, "guaranteed");
      const int64_t within = std::min(in_use, guaranteed);
      page_.add(
          "<tr><th scope='row'>{}{}</th>",
          one.contains("parent") ? "\u2003" : "",
          one.at("project").get<std::string>());
      page_.add(
          "<td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td>", in_use,
          guaranteed, whole_of(one, "fair_share"),
          one.contains("limit") ? std::to_string(whole_of(one, "limit"))
                                : std::string("\u2013"),
          is_parent(one) ? std::string("\u2013")
                         : std::to_string(whole_of(one, "waiting")));
      report::draw_bar_cell(
          page_,
          {{"bw", static_cast<double>(within)},
           {"ex", static_cast<double>(in_use - within)},
           {"idle", static_cast<double>(guaranteed - within)}},
          static_cast<double>(devices_));
      page_.add("</tr>");
    }
    report::close_table(page_);
    page_.add("<p class='note keys'>");
    report::draw_key(page_, "bw", "in use, within the guarantee");
    report::draw_key(page_, "ex", "borrowed");
    report::draw_key(page_, "idle", "guaranteed, not in use");
    page_.add("</p>");
    std::vector<std::string> drained;
    for (const PageJson& name : now_.at("drained_devices")) {
      drained.push_back(name.get<std::string>());
    }
    if (!drained.empty()) {
      page_.add("<p class='note'>Drained: {}.</p>", join(drained, ", "));
    }
    page_.add("</section>");
  }

  static std::string asked(const PageJson& job) {
    const int64_t least = whole_of(job, "least"), most = whole_of(job, "most");
    return least == most ? std::to_string(least)
                         : format("{}\u2013{}", least, most);
  }

  void draw_waiting() {
    page_.add("<section id='waiting'><h2>Who waits, and why</h2>");
    std::vector<const PageJson*> waiting;
    for (const PageJson& job : jobs()) {
      if (!runs(job)) waiting.push_back(&job);
    }
    if (waiting.empty()) {
      page_.add("<p class='lead'>No job waits.</p></section>");
      return;
    }
    report::open_table(
        page_, "Jobs that wait",
        {"Job", "Project", "User", "Asks for", "Waits", "Why"});
    for (size_t i = 0; i < std::min(waiting.size(), kMostRows); ++i) {
      const PageJson& job = *waiting[i];
      row_of(job);
      page_.add(
          "<td>{}</td><td>{}</td><td>{}</td></tr>", asked(job),
          duration(since_of(job, "waiting_since")), why(job));
    }
    report::close_table(page_);
    say_rest(waiting.size());
    page_.add("</section>");
  }

  static std::string why(const PageJson& job) {
    if (job.at("state") == "starting") {
      return format(
          "it has been given {}, and starts when they are free",
          counted(whole_of(job, "given"), "device"));
    }
    std::string text = job.value("why", "");
    if (job.contains("note")) {
      text += (text.empty() ? "" : "; ") + job.at("note").get<std::string>();
    }
    return text;
  }

  void row_of(const PageJson& job) {
    page_.add(
        "<tr><th scope='row'>{}</th><td>{}</td><td>{}</td>",
        whole_of(job, "job"), job.at("project").get<std::string>(),
        job.at("user").get<std::string>());
  }

  void say_rest(size_t count) {
    if (count <= kMostRows) return;
    page_.add(
        "<p class='note'>And {} more; <code>echelon pool list</code> has all."
        "</p>",
        count - kMostRows);
  }

  static std::string names_of(const PageJson& job) {
    constexpr size_t kMost = 8;
    std::vector<std::string> names;
    const PageJson& all = job.at("device_names");
    for (const PageJson& name : all) {
      if (names.size() < kMost) names.push_back(short_name(name));
    }
    return join(names, ", ") + (all.size() > kMost
                                    ? format(" and {} more", all.size() - kMost)
                                    : "");
  }
  // "GPU-3f2c41aa-…" says enough.
  static std::string short_name(const std::string& name) {
    constexpr size_t kMost = 12;
    return name.size() <= kMost ? name : name.substr(0, kMost) + "\u2026";
  }

  void draw_running() {
    page_.add("<section id='running'><h2>What runs</h2>");
    size_t count = 0;
    for (const PageJson& job : jobs()) count += runs(job) ? 1 : 0;
    if (count == 0) {
      page_.add("<p class='lead'>No job runs.</p></section>");
      return;
    }
    report::open_table(
        page_, "Jobs that run",
        {"Job", "Project", "User", "Has", "Asked for", "Runs for", "Devices",
         "Command"});
    size_t row = 0;
    for (const PageJson& job : jobs()) {
      if (!runs(job) || row++ >= kMostRows) continue;
      constexpr size_t kLongest = 90;
      std::string command = job.at("command").get<std::string>();
      if (command.size() > kLongest) {
        command = command.substr(0, kLongest) + "\u2026";
      }
      row_of(job);
      page_.add(
          "<td>{}</td><td>{}</td><td>{}</td><td>{}</td><td><code>{}</code></td>"
          "</tr>",
          whole_of(job, "devices"), asked(job),
          duration(since_of(job, "started")), names_of(job), command);
    }
    report::close_table(page_);
    say_rest(count);
    page_.add("</section>");
  }

  // --- The past

  void draw_use() {
    page_.add(
        "<section id='use'><h2>Use over time</h2><p class='lead'>{}s in use, "
        "by "
        "project. The height of the picture is all {}.</p>",
        unit_first_, counted(devices_, unit_));
    constexpr int kHeight = 220;
    page_.add(
        "<div class='grid2 only'><figure class='chart' id='all'><figcaption>");
    report::draw_caption(
        page_, format("{}s in use", unit_first_),
        unbroken(format_percent(
            past_.at("used_hours").get<double>() /
            std::max(
                1e-12, past_.at("used_hours").get<double>() +
                           past_.at("idle_hours").get<double>()))) +
            " of the time");
    page_.add("<span class='keys'>");
    for (const Taker& taker : takers_) {
      if (!taker.is_parent && taker.device_hours > 0) {
        report::draw_key(page_, taker.color, taker.name);
      }
    }
    page_.add("</span></figcaption><div class='plot'>");
    report::open_svg(
        page_, "all", kHeight + 24, "Devices in use",
        "Devices in use over time, a layer for each project. " + hours_text());
    const auto top = static_cast<double>(devices_);
    draw_axes(kHeight, 9);
    open_areas(kHeight);
    std::vector<double> below(kColumns);
    for (const Taker& taker : takers_) {
      if (taker.is_parent || taker.device_hours == 0) continue;
      auto above = columns_of(taker, span_);
      for (size_t i = 0; i < kColumns; ++i) above[i] += below[i];
      page_.add(
          "<path class='{}' d='{}'><title>{}: {} {}-hours</title></path>",
          taker.color, area_of(below, above, top, kHeight), taker.name,
          hours(taker.device_hours), unit_);
      below = std::move(above);
    }
    page_.add("</svg></svg></div></figure></div>");
    draw_charts();
    page_.add("</section>");
  }

  std::string hours_text() const {
    std::string text;
    for (const Taker& taker : takers_) {
      if (!taker.is_parent) {
        text += format(
            "{}: {} {}-hours. ", taker.name, hours(taker.device_hours), unit_);
      }
    }
    return text;
  }

  void draw_axes(int height, size_t most_ticks) {
    for (const double tick :
         report::whole_ticks(0, static_cast<double>(devices_), height / 40)) {
      report::draw_y_tick(
          page_, height * (1 - tick / static_cast<double>(devices_)),
          coordinate(tick));
    }
    span_.draw_ticks(page_, height, most_ticks);
    page_.add(
        "<line class='axis' x1='0' x2='100%' y1='{}' y2='{}'/>", height,
        height);
  }

  void open_areas(int height) {
    page_.add(
        "<svg class='areas' width='100%' height='{}' viewBox='0 0 1000 {}' "
        "preserveAspectRatio='none'>",
        height, height);
  }

  // Each project against its guarantee.
  void draw_charts() {
    constexpr int kHeight = 110;
    const auto shown = [](const Taker& taker) {
      return taker.device_hours > 0 || taker.guaranteed > 0;
    };
    page_.add("<div class='grid3'>");
    size_t number = 0;
    for (const Taker& taker : takers_) {
      if (!shown(taker) || number == kMostCharts) continue;
      const auto id = format("project-{}", number++);
      page_.add("<figure class='chart' id='{}'><figcaption>", id);
      report::draw_caption(
          page_, taker.name,
          taker.borrowed_hours > 0
              ? format(
                    "{} borrowed {}-hours", hours(taker.borrowed_hours), unit_)
              : "");
      page_.add("</figcaption><div class='plot'>");
      report::open_svg(
          page_, id, kHeight + 24, taker.name,
          format(
              "Devices of {} over time. It is guaranteed {}, and used {} "
              "{}-hours, {} of them borrowed.",
              taker.name, taker.guaranteed, hours(taker.device_hours), unit_,
              hours(taker.borrowed_hours)));
      draw_axes(kHeight, 4);
      open_areas(kHeight);
      page_.add(
          "<path class='{}' d='{}'/></svg>", taker.color,
          area_of(
              std::vector<double>(kColumns), columns_of(taker, span_),
              static_cast<double>(devices_), kHeight));
      const double y = kHeight * (1 - static_cast<double>(taker.guaranteed) /
                                          static_cast<double>(devices_));
      page_.add(
          "<line class='level' x1='0' x2='100%' y1='{}' y2='{}'/>",
          coordinate(y), coordinate(y));
      page_.add("</svg></div></figure>");
    }
    page_.add(
        "</div><p class='note'>Dashed: what the project is guaranteed now. "
        "Above it, devices are borrowed.{}</p>",
        std::ranges::count_if(takers_, shown) >
                static_cast<std::ptrdiff_t>(kMostCharts)
            ? format(" Of more projects, the first {} are shown.", kMostCharts)
            : "");
  }

  struct Bar {
    size_t lane = 0;
    std::string project;
    int64_t job = 0;  // 0: several
    double began = 0, ended = 0;
  };

  // Too many to be seen: cells of equal time, each with the project that had
  // the device for most of it.
  std::vector<Bar> cells_of(const std::vector<Bar>& bars, size_t lanes) const {
    const size_t count = kMostBars / lanes;
    const double width = span_.length() / static_cast<double>(count);
    std::vector<std::map<std::string, double>> spent(lanes * count);
    for (const Bar& bar : bars) {
      for (auto c = static_cast<size_t>((bar.began - span_.since) / width);
           c < count; ++c) {
        const double begin = span_.since + width * static_cast<double>(c);
        if (begin >= bar.ended) break;
        spent[bar.lane * count + c][bar.project] +=
            std::min(bar.ended, begin + width) - std::max(bar.began, begin);
      }
    }
    std::vector<Bar> cells;
    for (size_t i = 0; i < spent.size(); ++i) {
      double idle = width;
      const std::string* most = nullptr;
      double longest = 0;
      for (const auto& [project, time] : spent[i]) {
        idle -= time;
        if (time <= longest) continue;
        longest = time;
        most = &project;
      }
      if (most == nullptr || longest < idle) continue;
      const double began = span_.since + width * static_cast<double>(i % count);
      if (!cells.empty() && cells.back().lane == i / count &&
          cells.back().project == *most &&
          began - cells.back().ended < width / 2) {
        cells.back().ended = began + width;
        continue;
      }
      cells.push_back(
          {.lane = i / count,
           .project = *most,
           .began = began,
           .ended = began + width});
    }
    return cells;
  }

  std::vector<Bar> bars() const {
    std::map<std::string, size_t> lanes;
    for (const PageJson& name : answer_.at("device_names")) {
      if (lanes.size() == kMostLanes) break;
      lanes.emplace(name.get<std::string>(), lanes.size());
    }
    std::vector<Bar> all;
    for (const PageJson& one : past_.at("allocations")) {
      const double ended = one.at("ended").get<double>();
      for (const PageJson& name : one.at("names")) {
        const auto found = lanes.find(name.get<std::string>());
        if (found == lanes.end()) continue;
        all.push_back(
            {.lane = found->second,
             .project = one.at("project").get<std::string>(),
             .job = whole_of(one, "job"),
             .began = std::max(one.at("began").get<double>(), span_.since),
             .ended = ended == 0 ? span_.until : ended});
      }
    }
    std::ranges::sort(all, [](const Bar& a, const Bar& b) {
      return std::pair(a.lane, a.began) < std::pair(b.lane, b.began);
    });
    return all.size() > kMostBars ? cells_of(all, lanes.size()) : all;
  }

  void draw_lanes() {
    const PageJson& names = answer_.at("device_names");
    const size_t count = std::min(names.size(), kMostLanes);
    const auto drawn = bars();
    if (drawn.empty()) return;
    const int row = count <= 16 ? 24 : 14;
    const int height = row * static_cast<int>(count);
    page_.add(
        "<section id='devices'><h2>Device by device</h2><p class='lead'>Whose "
        "job each had when. Point at a bar for the job.</p>"
        "<figure class='lanes' id='lanes'><figcaption><span class='keys'>");
    for (const Taker& taker : takers_) {
      if (!taker.is_parent && taker.device_hours > 0) {
        report::draw_key(page_, taker.color, taker.name);
      }
    }
    report::draw_key(page_, "idle", "idle");
    page_.add("</span></figcaption><div class='plot'>");
    report::open_svg(
        page_, "lanes", height + 24, "Devices over time",
        format("{} lanes, one for each device. {}", count, hours_text()));
    span_.draw_ticks(page_, height, 9);
    for (size_t i = 0; i < count; ++i) {
      const int top = row * static_cast<int>(i);
      page_.add(
          "<text class='name' x='-8' y='{}' text-anchor='end'>{}</text>"
          "<rect class='idle' x='0' y='{}' width='100%' height='{}'/>",
          top + row / 2 + 3, short_name(names.at(i).get<std::string>()), top,
          row - 4);
    }
    for (const Bar& bar : drawn) {
      page_.add(
          "<rect class='{}' x='{}' y='{}' width='{}' height='{}'>",
          color_of(bar.project), span_.percent(bar.began),
          row * static_cast<int>(bar.lane),
          coordinate(
              100 * (span_.share(bar.ended) - span_.share(bar.began)), 3) +
              "%",
          row - 4);
      page_.add(
          "<title>{} of {}, {} to {}</title></rect>",
          bar.job > 0 ? format("job {}", bar.job) : std::string("jobs"),
          bar.project, moment(bar.began), moment(bar.ended));
    }
    page_.add("</svg></div></figure>");
    if (names.size() > count) {
      page_.add(
          "<p class='note'>The first {} of {}.</p>", count,
          counted(static_cast<int64_t>(names.size()), "device"));
    }
    page_.add("</section>");
  }

  void draw_hours() {
    const double idle = past_.at("idle_hours").get<double>();
    const double all = past_.at("used_hours").get<double>() + idle;
    const double time = span_.length() / 3600;
    page_.add(
        "<section id='hours'><h2>{}-hours</h2><p class='lead'>From {} to {}, "
        "{} {}-hours in all.</p>",
        unit_first_, moment(span_.since), moment(span_.until), hours(all),
        unit_);
    report::open_table(
        page_, "Device-hours by project",
        {"Project", "Used", "Part of all", "Within guarantee", "Borrowed",
         "Guaranteed", "Mean in use", ""});
    const auto row = [&](const std::string& name, double used,
                         const std::vector<std::string>& cells,
                         const char* color) {
      page_.add(
          "<tr><th scope='row'>{}</th><td>{}</td><td>{}</td>", name,
          hours(used), unbroken(format_percent(all > 0 ? used / all : 0)));
      for (const auto& cell : cells) page_.add("<td>{}</td>", cell);
      page_.add("<td>{}</td>", format("{:.2f}", time > 0 ? used / time : 0));
      report::draw_bar_cell(page_, {{color, used}}, all);
      page_.add("</tr>");
    };
    for (const Taker& taker : takers_) {
      if (taker.is_parent) continue;
      row(taker.name, taker.device_hours,
          {hours(taker.device_hours - taker.borrowed_hours),
           hours(taker.borrowed_hours),
           hours(static_cast<double>(taker.guaranteed) * time)},
          taker.color.c_str());
    }
    row("idle", idle, {"\u2013", "\u2013", "\u2013"}, "ot");
    report::close_table(page_);
    draw_days();
    page_.add("</section>");
  }

  void draw_days() {
    if (span_.length() < 1.5 * kDay) return;
    report::StackedBars bars{
        .id = "days",
        .title = format("{}-hours by day", unit_first_),
        .description = "A row for each day, newest first. " + hours_text(),
        .whole = 24 * static_cast<double>(devices_)};
    std::tm day = local(span_.until);
    day.tm_hour = day.tm_min = day.tm_sec = 0;
    day.tm_isdst = -1;
    double end = span_.until;
    while (bars.rows.size() < kMostDays && end > span_.since) {
      const auto midnight = static_cast<double>(std::mktime(&day));
      const double begin = std::max(midnight, span_.since);
      report::StackedRow row{.name = text_of(day, "%A, %-d %B")};
      double used = 0;
      for (const Taker& taker : takers_) {
        if (taker.is_parent) continue;
        const double part = used_between(taker, begin, end) / 3600;
        used += part;
        row.parts.push_back(
            {taker.color, taker.name, part, hours(part) + " h"});
      }
      const double whole = static_cast<double>(devices_) * (end - begin) / 3600;
      row.parts.push_back(
          {"idle", "idle", std::max(0.0, whole - used),
           hours(std::max(0.0, whole - used)) + " h"});
      row.total = format("{} of {}", hours(used), hours(whole));
      if (end > begin) bars.rows.push_back(std::move(row));
      end = begin;
      --day.tm_mday;
      day.tm_isdst = -1;
    }
    page_.add("<div class='grid2 only'>");
    report::draw_stacked_bars(page_, bars);
    page_.add("</div>");
  }

  const PageJson& answer_;
  const PageJson& now_;
  const PageJson& past_;
  int64_t devices_;
  const char* unit_;
  const char* unit_first_;  // of a sentence
  Span span_;
  std::vector<Taker> takers_;
  Markup page_;
};

}  // namespace

std::string to_html(const nlohmann::ordered_json& answer) {
  return PoolPage(answer).html();
}

}  // namespace echelon::pool
