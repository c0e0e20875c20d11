// The frame of every page that we write (one file, no network, light and dark),
// and the parts that several pages have.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "echelon/report/markup.h"

namespace echelon::report {

/// Whether a page holds pictures that play (pipeline_page.h), and texts to
/// copy: each <pre class="copy"> gets a button.
/// A live page takes its newest state from its own address each second.
enum class PageScript { none, player, copy, player_and_copy, live };

/// The page as a whole. Without a script it forbids all of them. A page of four
/// sections or more, each <section id='…'><h2>, lists them below its header.
std::string
page_of(const std::string& title, Markup content, PageScript script);

/// A line above the title that says what the page is: "training run".
void draw_title(Markup& page, const char* kind, const std::string& title);

/// A headline figure.
struct Tile {
  std::string name;
  std::string value;
  std::string sub;   // below the value
  std::string unit;  // smaller, after the value; may be empty
};
void draw_tiles(Markup& page, const std::vector<Tile>& tiles);

/// Text whose `commands` between backticks are set as code.
void add_prose(Markup& page, const std::string& text);

/// Names and values in columns; nothing without any.
using Facts = std::vector<std::pair<std::string, std::string>>;
void draw_facts(Markup& page, const Facts& facts);

/// One entry of a legend: a patch of the class `color`, and its meaning.
void draw_key(Markup& page, const std::string& color, const std::string& text);

/// A table that scrolls on narrow screens, up to and including <tbody>. `label`
/// is for those who do not see it.
void open_table(
    Markup& page, const std::string& label,
    const std::vector<std::string>& heads);
void close_table(Markup& page);

/// A cell with a bar of parts side by side, each a class and seconds; `longest`
/// seconds fill the cell. Parts too narrow to see are left out.
void draw_bar_cell(
    Markup& page, const std::vector<std::pair<const char*, double>>& parts,
    double longest);

/// A figure's caption: its title and the one value to take away.
void draw_caption(
    Markup& page, const std::string& title, const std::string& headline);

/// Writes the picture's beginning, from <svg> to the description for those who
/// do not see it. `id` is unique in the page.
void open_svg(
    Markup& page, const std::string& id, int height, const std::string& title,
    const std::string& description);

/// A horizontal line of the grid at `y`, with its label on the left.
void draw_y_tick(Markup& page, double y, const std::string& label);

/// A tick of the horizontal axis at a share of its length, `y` the baseline of
/// its label. Labels stay inside of the plot: those closer to an end than the
/// share `edge` begin or end at their tick. It is number `index` of `count`. Of
/// three or more, every second one is left out on narrow screens.
void draw_tick(
    Markup& page, size_t index, size_t count, double share, int y,
    const std::string& label, double edge = 0.05);

}  // namespace echelon::report
