// The style of points over two axes (plane.h), for pages that have them.
#pragma once

namespace echelon::detail {

// What a point says stands below the picture while it is pointed at, has the
// keyboard's focus or was tapped; without a script.
inline constexpr char kPlaneStyle[] = R"css(
.plane foreignObject{overflow:visible}
.hint,.says{margin:0;font-size:13px;line-height:18px;white-space:pre-line;
background:var(--paper)}
.hint{color:var(--soft)}
.says{min-height:54px}
.point foreignObject{display:none;pointer-events:none}
.point:hover foreignObject,.point:focus foreignObject{display:inline}
.points:hover .point:focus:not(:hover) foreignObject{display:none}
.point circle{stroke:transparent;stroke-width:6px;pointer-events:all}
.point.ring circle{stroke:var(--ink);stroke-width:2px}
.point:focus{outline:none}
.point:hover circle,.point:focus circle{stroke:var(--ink);stroke-width:2px;
fill-opacity:1}
@media (max-width:600px){.plane .plot{padding-bottom:54px;padding-right:16px}}
@media print{.plane .hint{display:none}}
)css";

}  // namespace echelon::detail
