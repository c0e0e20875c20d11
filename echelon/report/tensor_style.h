// The style of pictures of cut layers; its only caller is page.cpp.
#pragma once

namespace echelon::detail {

// Eight light fills that carry dark text on light and on dark paper; a ninth
// rank begins anew, and every part has its rank's number besides.
inline constexpr char kTensorStyle[] = R"css(
:root{--hid:#9cc7e6;--ink-on:#08131d}
@media (prefers-color-scheme:dark){:root{--hid:#2f6d99}}
.hid{fill:var(--hid)}
th.left,td.left{text-align:left}
th.where{max-width:24em;overflow:hidden;text-overflow:ellipsis;
font-weight:500}
.all th.where{font-weight:650}
.k0{fill:#56b4e9}.k1{fill:#f0b03a}.k2{fill:#4fc39f}.k3{fill:#e2a5ca}
.k4{fill:#e9df5a}.k5{fill:#9fb3ee}.k6{fill:#ef9a72}.k7{fill:#b9c1cb}
.kw{fill:var(--idle)}
.cut-layer{margin-top:30px}
.cut-layer figcaption{margin-bottom:4px}
.cut-region{border-top:1px solid var(--hair);padding:12px 0 6px;
margin-top:10px;break-inside:avoid}
.cut-formula{font-size:13px;color:var(--soft)}
.cut-formula b{color:var(--ink);font-weight:600;margin-right:10px}
.cut-formula i{font-family:Georgia,"Liberation Serif",serif;font-size:15px;
color:var(--ink)}
.cut-flow{display:flex;flex-wrap:wrap;align-items:center;gap:14px 9px;
margin-top:10px}
.cut-item{flex:none;max-width:100%}
.cut-item svg{display:block;margin:5px 0;max-width:100%}
.cut-item p{font-size:12px;line-height:1.35;color:var(--soft);max-width:16em}
.cut-item .what{color:var(--ink);font-weight:600;font-size:13px}
.cut-item rect{stroke:var(--paper);stroke-width:1.5}
.cut-item rect.kw{stroke:var(--hair)}
.cut-item .n,.cut-item .s{fill:var(--ink-on);text-anchor:middle;
pointer-events:none}
.cut-item .n{font-size:12px;font-weight:650}.cut-item .s{font-size:10.5px}
.cut-item .w{fill:var(--soft)}
.cut-item .g{fill:var(--soft);font-size:11px;text-anchor:middle}
.cut-signed{display:flex;align-items:center;gap:9px;flex:none;max-width:100%}
.cut-cost{display:block;white-space:nowrap}
.cut-times{font-size:19px;color:var(--soft);flex:none}
.cut-op{flex:none;width:136px;border-left:3px solid var(--hair);
padding:2px 0 2px 9px;font-size:12px;line-height:1.4}
.cut-op.sends{border-left-color:var(--ex)}
.cut-op p{color:var(--soft)}.cut-op b{color:var(--ink);font-weight:600}
.cut-op p+p{margin-top:5px}
.cut-notes{font-size:13px;color:var(--soft);margin-top:6px;
overflow-wrap:anywhere}
@media print{:root{--hid:#9cc7e6}.cut-layer{break-inside:auto}}
)css";

}  // namespace echelon::detail
