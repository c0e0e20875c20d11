// The style of pipeline pictures and their player; its only caller is page.cpp.
#pragma once

namespace echelon::detail {

// Forwards are pale with dark numbers, backwards dark with white ones, so grey
// tells them apart; the halves of a split backward have patterns besides. The
// four shades are stages of one row. They serve light and dark paper alike.
inline constexpr char kPipelineStyle[] = R"css(
:root{--on:#08131d;--gap:#eef0f3;--gapline:#d5dae1;
--f0:#56b4e9;--f1:#7cc5ef;--f2:#a0d5f4;--f3:#c6e6f9;
--b0:#0072b2;--b1:#005f96;--b2:#004c79;--b3:#00395c;
--i0:#3dbb95;--i1:#63c9aa;--i2:#8ad7c0;--i3:#b2e5d6;
--w0:#e6b422;--w1:#ecc44f;--w2:#f1d37c;--w3:#f7e3ab;--send:#8a929c}
@media (prefers-color-scheme:dark){:root{--gap:#1a2027;--gapline:#333c48;
--b1:#1a81bd;--b2:#00598c;--b3:#004a75}}
.pipes{margin-top:24px}
.pipe{margin-top:26px}
.pipe figcaption{margin-bottom:12px}
.pipe .plot{padding-left:78px}
.bubble{font-size:14px}.bubble b{font-size:17px;font-weight:650}
.pf0{fill:var(--f0)}.pf1{fill:var(--f1)}.pf2{fill:var(--f2)}.pf3{fill:var(--f3)}
.pb0{fill:var(--b0)}.pb1{fill:var(--b1)}.pb2{fill:var(--b2)}.pb3{fill:var(--b3)}
.pi0{fill:url(#stripes0)}.pi1{fill:url(#stripes1)}
.pi2{fill:url(#stripes2)}.pi3{fill:url(#stripes3)}
.pw0{fill:url(#dots0)}.pw1{fill:url(#dots1)}
.pw2{fill:url(#dots2)}.pw3{fill:url(#dots3)}
.gi0{fill:var(--i0)}.gi1{fill:var(--i1)}.gi2{fill:var(--i2)}.gi3{fill:var(--i3)}
.gw0{fill:var(--w0)}.gw1{fill:var(--w1)}.gw2{fill:var(--w2)}.gw3{fill:var(--w3)}
.mark{fill:#000;fill-opacity:.3}.gg{fill:var(--gap)}
#gaps .mark{fill:var(--gapline);fill-opacity:1}
.gap{fill:url(#gaps)}.pt{fill:var(--send)}
.prow [data-m]{stroke:var(--paper);stroke-width:.75}
.prow [data-m]:hover{stroke:var(--ink);stroke-width:1.5}
.prow .pt{stroke:none}
.prow .n{font-size:11.5px;font-weight:600;fill:var(--on);pointer-events:none}
.prow .d{fill:#fff}
.heading{font-size:12px;font-weight:600;fill:var(--soft)}
.cursor{stroke:var(--c2);stroke-width:2;visibility:hidden}
.playing .cursor{visibility:visible}
.pipes>.keys{margin-top:14px}
.player{margin-top:20px;border:1px solid var(--hair);border-radius:10px;
padding:14px 16px 16px;position:relative}
.player[hidden]{display:none}
.controls{display:flex;flex-wrap:wrap;gap:8px 10px;align-items:center}
.controls button,.controls select{font:inherit;font-size:14px;color:var(--ink);
background:var(--panel);border:1px solid var(--hair);border-radius:6px;
height:32px;padding:0 11px;cursor:pointer;max-width:100%}
.controls button:hover{border-color:var(--soft)}
.controls .play{min-width:70px;font-weight:600}
.controls input{flex:1 1 120px;min-width:80px;accent-color:var(--accent);
margin:0}
.controls output{font-size:14px;min-width:9.5em;white-space:nowrap}
.controls output b{font-size:17px}
.scene{overflow-x:auto;margin-top:12px;padding-bottom:2px}
.line-name{font-size:12px;font-weight:600;color:var(--soft);margin-top:8px}
.devices{position:relative;display:flex;gap:14px;width:100%}
.device{flex:1 1 0;min-width:66px;text-align:center}
.queue{height:48px;position:relative}
.more{position:absolute;right:0;top:0;font-size:11px;color:var(--soft)}
.slot{height:66px;border-radius:8px;border:1.5px solid var(--hair);
background:repeating-linear-gradient(45deg,var(--gap) 0 5px,var(--gapline)
5px 6px);font-size:12px;line-height:1;padding-top:9px;overflow:hidden;
color:var(--soft);white-space:nowrap;transition:background-color .2s}
.slot.f,.slot.b,.slot.i,.slot.w{background:var(--f0);color:var(--on);
border-color:transparent}
.slot.b{background:var(--b0);color:#fff}
.slot.i{background:var(--i0)}.slot.w{background:var(--w0)}
.slot b{display:block;font-size:17px;margin-top:11px}
.who{font-size:12.5px;letter-spacing:-.01em;font-weight:600;margin-top:5px;overflow:hidden;
text-overflow:ellipsis;white-space:nowrap}
.kept{font-size:11px;color:var(--soft);min-height:30px;line-height:1.3;
margin-top:2px}
.kept i,.ways i{display:inline-block;width:7px;height:7px;border-radius:2px;
background:var(--f0);margin:0 1px}
.token{position:absolute;left:0;top:0;width:24px;height:24px;
border-radius:50%;font-size:12px;font-weight:650;
line-height:20px;text-align:center;font-style:normal;background:var(--f0);
color:var(--on);border:2px solid var(--paper);opacity:0;
transition:transform .38s ease-in-out,opacity .2s,background-color .3s}
.token.back{background:var(--b0);color:#fff}
.token.shown{opacity:1}
.token.work{background:#fff;color:#08131d;border-color:transparent}
.ways{display:flex;justify-content:space-between;gap:4px 16px;flex-wrap:wrap;
font-size:12.5px;color:var(--soft);margin-top:8px}
.tip{position:fixed;z-index:2;pointer-events:none;background:var(--ink);
color:var(--paper);font-size:12.5px;border-radius:5px;padding:3px 8px;
max-width:80vw}
@media (max-width:1159px){.l{display:none}}
@media (max-width:799px){.prow .m{display:none}}
@media (max-width:600px){.pipe .plot{padding-left:66px}.player{padding:12px}
.devices{gap:6px}.controls output{min-width:0}}
@media (prefers-reduced-motion:reduce){.token,.slot{transition:none}}
@media print{.player{display:none}.playing .cursor{visibility:hidden}
:root{--gap:#f0f0f0;--gapline:#ddd;--b1:#005f96;--b2:#004c79;--b3:#00395c}}
)css";

}  // namespace echelon::detail
