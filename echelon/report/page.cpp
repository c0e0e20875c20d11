#include "echelon/report/page.h"

#include <map>
#include <string_view>

namespace echelon::report {

// The files of the folder assets/, embedded by CMakeLists.txt.
namespace assets {
extern const std::string_view copy_js;
extern const std::string_view live_js;
extern const std::string_view page_html;
extern const std::string_view pipeline_css;
extern const std::string_view pipeline_js;
extern const std::string_view pipeline_patterns_svg;
extern const std::string_view plane_css;
extern const std::string_view report_css;
extern const std::string_view shards_css;
}  // namespace assets

namespace {

// Sections fewer than this are found without contents.
constexpr size_t kFewSections = 4;

// Links to the page's sections, for below its header; empty where they are few.
std::string contents_of(std::string_view page) {
  constexpr std::string_view kSection = "<section id=\"";
  constexpr std::string_view kHeading = "\"><h2>";
  std::string links;
  size_t sections = 0;
  for (size_t at = 0; (at = page.find(kSection, at)) != page.npos;) {
    at += kSection.size();
    const size_t id = page.find('"', at);
    if (page.substr(id, kHeading.size()) != kHeading) continue;
    const size_t heading = id + kHeading.size();
    links += format(
        "<li><a href=\"#{}\">{}</a></li>", page.substr(at, id - at),
        page.substr(heading, page.find("</h2>", heading) - heading));
    ++sections;
  }
  if (sections < kFewSections) return "";
  return "<nav class=\"contents\" aria-label=\"Contents\"><ul>" + links +
         "</ul></nav>";
}

std::string with_contents(std::string page) {
  constexpr std::string_view kHeader = "</header>";
  if (const size_t end = page.find(kHeader); end != page.npos) {
    page.insert(end + kHeader.size(), contents_of(page));
  }
  return page;
}

}  // namespace

std::string
page_of(const std::string& title, Markup content, PageScript script) {
  const bool copies =
      script == PageScript::copy || script == PageScript::player_and_copy;
  const bool plays =
      script == PageScript::player || script == PageScript::player_and_copy;
  // A live page has such pictures, and no controls.
  const bool has_pipelines = plays || script == PageScript::live;
  std::string style(assets::report_css);
  style.append(assets::shards_css).append(assets::plane_css);
  if (has_pipelines) style += assets::pipeline_css;
  std::string scripts;
  if (copies) scripts = format("<script>\n{}</script>\n", assets::copy_js);
  if (script == PageScript::live) {
    scripts = format("<script>\n{}</script>\n", assets::live_js);
  }
  if (plays) scripts += format("<script>\n{}</script>\n", assets::pipeline_js);
  std::string policy;
  if (script != PageScript::none) policy = "; script-src 'unsafe-inline'";
  if (script == PageScript::live) policy += "; connect-src 'self'";
  const std::map<std::string_view, std::string> values = {
      {"title", escape_markup(title)},
      {"style", style},
      {"script_policy", policy},
      {"refresh", script == PageScript::live
                      ? "<noscript><meta http-equiv=\"refresh\" "
                        "content=\"5\"></noscript>\n"
                      : ""},
      {"patterns",
       std::string(has_pipelines ? assets::pipeline_patterns_svg : "")},
      {"content", with_contents(std::move(content).finish())},
      {"script", scripts}};
  std::string page;
  std::string_view rest = assets::page_html;
  for (size_t at = 0; (at = rest.find("{{")) != std::string_view::npos;) {
    const size_t end = rest.find("}}", at);
    page += rest.substr(0, at);
    page += values.at(rest.substr(at + 2, end - at - 2));
    rest.remove_prefix(end + 2);
  }
  return page.append(rest);
}

void draw_title(Markup& page, const char* kind, const std::string& title) {
  page.add("<p class='eyebrow'>Echelon \u00b7 {}</p><h1>{}</h1>", kind, title);
}

void draw_tiles(Markup& page, const std::vector<Tile>& tiles) {
  if (tiles.empty()) return;
  page.add("<dl class='tiles'>");
  for (const auto& [name, value, sub, unit] : tiles) {
    page.add("<div class='tile'><dt>{}</dt>", name);
    page.add("<dd class='value'>{}", value);
    if (!unit.empty()) page.add("<small>\u00a0{}</small>", unit);
    page.add("</dd><dd class='sub'>{}</dd></div>", sub);
  }
  page.add("</dl>");
}

void add_prose(Markup& page, const std::string& text) {
  std::string_view rest = text;
  while (true) {
    const size_t begin = rest.find('`');
    const size_t end =
        begin == std::string_view::npos ? begin : rest.find('`', begin + 1);
    if (end == std::string_view::npos) break;
    page.add(
        "{}<code>{}</code>", rest.substr(0, begin),
        rest.substr(begin + 1, end - begin - 1));
    rest.remove_prefix(end + 1);
  }
  page.add("{}", rest);
}

void draw_facts(Markup& page, const Facts& facts) {
  if (facts.empty()) return;
  page.add("<dl class='facts'>");
  for (const auto& [name, value] : facts) {
    page.add("<div><dt>{}</dt><dd>{}</dd></div>", name, value);
  }
  page.add("</dl>");
}

void draw_key(Markup& page, const std::string& color, const std::string& text) {
  page.add(
      "<span class='key'><svg class='swatch' width='18' height='12' "
      "aria-hidden='true'><rect class='{}' width='18' height='12'/></svg>{}"
      "</span>",
      color, text);
}

void open_table(
    Markup& page, const std::string& label,
    const std::vector<std::string>& heads) {
  page.add(
      "<div class='scroll' tabindex='0' role='region' aria-label='{}'>"
      "<table><caption class='hidden'>{}</caption><thead><tr>",
      label, label);
  for (const auto& head : heads) page.add("<th scope='col'>{}</th>", head);
  page.add("</tr></thead><tbody>");
}

void close_table(Markup& page) {
  page.add("</tbody></table></div>");
}

void draw_bar_cell(
    Markup& page, const std::vector<std::pair<const char*, double>>& parts,
    double longest) {
  page.add("<td class='bar'><svg width='100%' height='12' aria-hidden='true'>");
  double x = 0;
  for (const auto& [color, seconds] : parts) {
    const double width = longest > 0 ? 100 * seconds / longest : 0;
    if (width < 0.005) continue;
    page.add(
        "<rect class='{}' x='{}%' width='{}%' height='12'/>", color, x, width);
    x += width;
  }
  page.add("</svg></td>");
}

void draw_caption(
    Markup& page, const std::string& title, const std::string& headline) {
  page.add("<h3>{}</h3>", title);
  if (!headline.empty()) page.add("<span class='now'>{}</span>", headline);
}

void open_svg(
    Markup& page, const std::string& id, int height, const std::string& title,
    const std::string& description) {
  page.add(
      "<svg width='100%' height='{}' role='img' aria-labelledby='{}-t {}-d'>",
      height, id, id);
  page.add(
      "<title id='{}-t'>{}</title><desc id='{}-d'>{}</desc>", id, title, id,
      description);
}

void draw_y_tick(Markup& page, double y, const std::string& label) {
  const auto at = coordinate(y);
  page.add(
      "<line class='grid' x1='0' x2='100%' y1='{}' y2='{}'/><text "
      "class='tick' x='-8' y='{}' text-anchor='end'>{}</text>",
      at, at, y + 4, label);
}

void draw_tick(
    Markup& page, size_t index, size_t count, double share, int y,
    const std::string& label, double edge) {
  const char* anchor = share < edge       ? "start"
                       : share > 1 - edge ? "end"
                                          : "middle";
  page.add(
      "<text class='{}' x='{}%' y='{}' text-anchor='{}'>{}</text>",
      count > 2 && index % 2 == 1 ? "tick minor" : "tick", 100 * share, y,
      anchor, label);
}

}  // namespace echelon::report
