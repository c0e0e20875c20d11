#include "echelon/watch/web_page.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "echelon/authentication/key.h"
#include "echelon/error.h"
#include "echelon/monitoring/listen.h"
#include "echelon/report/chart.h"
#include "echelon/report/page.h"
#include "echelon/report/pipeline_page.h"
#include "echelon/report/sections.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon::watch {
namespace {

using report::Markup;
using report::Tile;

std::vector<Tile> tiles_of(const RunView& view) {
  std::vector<Tile> tiles;
  if (!view.last) return tiles;
  const std::string of =
      view.total_steps > 0 ? "of " + format_count(view.total_steps) : "";
  tiles.push_back(
      {"Step", format_count(view.last->step),
       view.eta_seconds
           ? format("{}, {} left", of, format_clock(*view.eta_seconds))
           : of,
       ""});
  if (!view.last->simulated) {
    tiles.push_back(
        {"Loss", format_number(view.loss), "mean of the last steps", ""});
  }
  const bool tokens = view.tokens_per_second > 0;
  tiles.push_back(
      {"Speed",
       format_count(tokens ? view.tokens_per_second : view.samples_per_second),
       format("{} a step", format_seconds(view.step_seconds)),
       tokens ? "tokens/s" : "samples/s"});
  if (view.flops_per_second) {
    const std::string rate = format_flops(*view.flops_per_second);
    tiles.push_back(
        view.mfu ? Tile{"MFU", format_percent(*view.mfu), rate, ""}
                 : Tile{"FLOPs", rate, "the devices' peak is not known", ""});
  }
  if (view.evaluation) {
    const auto& accuracy = view.evaluation->accuracy;
    tiles.push_back(
        {accuracy ? "Accuracy" : "Held-out loss",
         accuracy ? format_percent(*accuracy)
                  : format_number(view.evaluation->loss),
         format("held out, at step {}", view.evaluation->step), ""});
  }
  if (view.checkpoint) {
    tiles.push_back(
        {"Checkpoint", format_count(view.checkpoint->step),
         format_seconds(view.checkpoint->age_seconds) + " ago", ""});
  }
  return tiles;
}

report::Chart chart_of(
    const std::string& id, const std::string& title, const CurvePoints& curve,
    report::CurveStyle style) {
  report::Chart chart{.id = id, .title = title};
  chart.description = title + " over the steps of the run";
  if (!curve.points().empty()) {
    chart.headline = format_number(curve.points().back().y) + " now";
  }
  report::Curve drawn{.name = title, .color = "c1", .style = style};
  for (const auto& [x, y] : curve.points()) drawn.points.push_back({x, y});
  chart.curves.push_back(std::move(drawn));
  return chart;
}

void add_ranks(Markup& page, const RunView& view) {
  if (view.ranks.empty()) return;
  page.add("<section id='ranks'><h2>Ranks</h2>");
  const bool gpus = std::ranges::any_of(
      view.ranks, [](const auto& rank) { return rank.status.gpu.has_value(); });
  std::vector<std::string> heads = {"rank", "state", "memory"};
  if (gpus) heads.insert(heads.end(), {"GPU", "busy"});
  heads.emplace_back("host");
  report::open_table(page, "The state of each rank", heads);
  for (const auto& rank : view.ranks) {
    const auto& status = rank.status;
    std::string memory;
    if (status.gpu_memory_used) {
      memory = format_bytes(*status.gpu_memory_used);
    } else if (status.resident_bytes) {
      memory = format_bytes(*status.resident_bytes);
    }
    page.add("<tr><th scope='row'>{}</th><td>", status.rank);
    if (rank.in_doubt) {
      page.add("<strong class='doubt'>{}</strong>", rank.state);
    } else {
      page.add("{}", rank.state);
    }
    page.add("</td><td>{}</td>", memory);
    if (gpus) {
      page.add(
          "<td>{}</td><td>{}</td>",
          status.gpu ? std::to_string(*status.gpu) : "",
          status.gpu_busy ? format_percent(*status.gpu_busy) : "");
    }
    page.add("<td>{}</td></tr>", rank.host);
  }
  report::close_table(page);
  page.add("</section>");
}

// What each rank did: the stages of a pipeline, else computation and
// communication.
void add_last_step(Markup& page, const RunView& view) {
  if (!view.last_step || view.last_step->diagnosis.steps.empty()) return;
  const auto& [step, age, timeline, diagnosis] = *view.last_step;
  const std::string when =
      is_over(view.state) ? ""
                          : format(", {} ago", format_seconds(std::round(age)));
  const auto stages = report::stage_pictures(timeline, "last");
  page.add(
      "<section id='step'><h2>What each rank did</h2><p class='lead'>Step "
      "{}{}. {}</p>",
      format_count(step), when, stages ? stages->sentence : diagnosis.sentence);
  if (stages) {
    report::draw_stage_pictures(page, *stages);
  } else {
    report::draw_typical_step(page, timeline, diagnosis, "last-");
  }
  report::draw_rank_times(page, timeline, diagnosis);
  page.add("</section>");
}

// Equal in a time that does not tell how much of it is.
bool same_token(std::string_view a, std::string_view b) {
  unsigned char difference = a.size() == b.size() ? 0 : 1;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    difference |= static_cast<unsigned char>(a[i] ^ b[i]);
  }
  return difference == 0;
}

// The name in "127.0.0.1:9465"; ports differ where ssh leads here.
std::string_view name_in(std::string_view host) {
  const size_t colon = host.rfind(':');
  return colon == host.npos || host.ends_with(']') ? host
                                                   : host.substr(0, colon);
}

}  // namespace

std::string to_page(const RunView& view) {
  Markup page;
  page.add("<header>");
  report::draw_title(
      page, "a run now", view.title.empty() ? view.name : view.title);
  page.add(
      "<p class='outcome{}'>{}{}</p>", is_bad(view.state) ? "" : " calm",
      to_string(view.state), view.why.empty() ? "" : ": " + view.why);
  report::draw_tiles(page, tiles_of(view));
  page.add("</header>");
  if (!view.failure.empty()) {
    page.add("<p class='finding under'>{}</p>", view.failure);
  }
  if (!view.note.empty()) page.add("<p class='note'>{}</p>", view.note);
  if (view.speeds.points().size() > 1) {
    page.add("<section id='curves'><h2>Curves</h2><div class='grid2'>");
    report::draw_chart(
        page,
        chart_of(
            "loss", "Loss", view.losses, report::CurveStyle::raw_and_smooth));
    auto speed = chart_of(
        "speed", "Samples per second", view.speeds, report::CurveStyle::line);
    speed.scale = report::YScale::from_zero;
    report::draw_chart(page, speed);
    page.add("</div></section>");
  }
  add_ranks(page, view);
  add_last_step(page, view);
  if (!view.findings.empty()) {
    page.add(
        "<section id='findings'><h2>What holds it back</h2><ol "
        "class='findings'>");
    for (const auto& finding : view.findings) page.add("<li>{}</li>", finding);
    page.add("</ol></section>");
  }
  report::Facts facts = {{"Folder", view.path}};
  if (!view.layout.empty()) facts.emplace_back("Layout", view.layout);
  if (view.last) {
    facts.emplace_back("Epoch", format("{:.2f}", view.last->epoch));
    facts.emplace_back(
        "Learning rate", format_number(view.last->learning_rate));
  }
  facts.emplace_back("Restarts", format_count(view.restarts));
  page.add("<section id='facts'><h2>The run</h2>");
  report::draw_facts(page, facts);
  page.add("</section>");
  return report::page_of(view.name, std::move(page), report::PageScript::live);
}

std::optional<monitoring::PageRefusal>
refusal_of(const monitoring::PageRequest& request, std::string_view token) {
  const auto header = [&](const char* name) -> std::string {
    const auto found = request.headers.find(name);
    return found == request.headers.end() ? "" : found->second;
  };
  const auto refuse = [](std::string text) {
    return monitoring::PageRefusal{
        .status = 401, .headers = "", .text = std::move(text)};
  };
  constexpr std::array<std::string_view, 3> kOwn = {
      "127.0.0.1", "localhost", "[::1]"};
  const std::string host = header("host");
  if (std::ranges::find(kOwn, name_in(host)) == kOwn.end()) {
    return refuse(
        "this page is for 127.0.0.1 and localhost: another name led here\n");
  }
  const std::string origin = header("origin");
  if (!origin.empty() && origin != "http://" + host) {
    return refuse("another page has asked for this one\n");
  }
  constexpr std::string_view kToken = "token=";
  const std::string_view query = request.query;
  if (!query.starts_with(kToken) ||
      !same_token(query.substr(kToken.size()), token)) {
    return refuse(
        "the address lacks its token: take the one that `echelon watch --web` "
        "has printed\n");
  }
  return std::nullopt;
}

WebWatch::WebWatch(const std::filesystem::path& run, const std::string& address)
    : watch_(run, {.last_step = true}) {
  monitoring::Listening listening = monitoring::listen_at(address, "--web");
  if (!listening.loopback) {
    throw ConfigError(format(
        "--web {}: the page is for this host alone; give a port, and lead "
        "another host there with `ssh -L 9465:127.0.0.1:9465`",
        address));
  }
  const std::string token = authentication::Key::random().to_hex();
  url_ = format("http://{}/?token={}", listening.address, token);
  const auto make = [this] { return to_page(watch_.look()); };
  const auto state = [this] { return to_json(watch_.look(), true) + "\n"; };
  server_ = std::make_unique<monitoring::PageServer>(
      std::move(listening.socket),
      std::vector<monitoring::ServedPage>{
          {"/", "text/html; charset=utf-8", make},
          {"/state.json", "application/json", state}},
      [token](const monitoring::PageRequest& request) {
        return refusal_of(request, token);
      });
}

WebWatch::~WebWatch() = default;

void WebWatch::serve(std::chrono::milliseconds at_most) {
  server_->serve(at_most);
}

}  // namespace echelon::watch
