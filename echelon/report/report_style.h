// The style sheet of the report; its only caller is page.cpp.
#pragma once

namespace echelon::detail {

// Categories use the palette of Okabe and Ito, which people with any colour
// vision tell apart; overlapped communication is hatched besides.
inline constexpr char kReportStyle[] = R"css(
:root{color-scheme:light dark;
--paper:#fff;--ink:#16191d;--soft:#59626e;--hair:#e3e6ea;--grid:#edeff2;
--panel:#f6f7f9;--idle:#eceff2;--accent:#0068b0;
--c1:#0072b2;--c2:#c65300;
--fw:#56b4e9;--bw:#0072b2;--op:#cc79a7;--ex:#d55e00;--ovl:#e3934f;
--ovg:#fbe9da;--da:#009e73;--ot:#8a929c}
@media (prefers-color-scheme:dark){:root{
--paper:#101318;--ink:#e9ecf0;--soft:#a2acb8;--hair:#2a3038;--grid:#20262d;
--panel:#171b21;--idle:#20262d;--accent:#6cb8f0;
--c1:#5cb3ee;--c2:#f29148;
--fw:#86cdf7;--bw:#3593d6;--op:#dd93bd;--ex:#f47b28;--ovl:#b5692f;
--ovg:#3b2717;--da:#2bbd92;--ot:#7b8591}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);
font:15px/1.5 Inter,"Segoe UI","Helvetica Neue",Helvetica,Arial,
"Liberation Sans",sans-serif;font-variant-numeric:tabular-nums}
main{max-width:1120px;margin:0 auto;padding:44px 28px 36px}
h1,h2,h3,p,dl,dd,figure{margin:0}
h1{font-size:32px;line-height:1.15;letter-spacing:-.02em;font-weight:650;
overflow-wrap:anywhere}
h2{font-size:20px;letter-spacing:-.01em;font-weight:650;margin:52px 0 6px}
h3{font-size:14px;font-weight:600}
.eyebrow{color:var(--soft);font-size:13px;letter-spacing:.02em;
margin-bottom:8px}
.outcome{display:inline-block;margin-top:14px;padding:5px 11px;
border:1px solid var(--c2);color:var(--c2);border-radius:6px;
font-size:14px;font-weight:600;overflow-wrap:anywhere}
.lead{font-size:17px;line-height:1.5;max-width:46em;color:var(--ink)}
.finding,.lead{overflow-wrap:anywhere}
.finding{max-width:52em;margin-top:8px;color:var(--soft)}
.under{margin-top:14px}
a{color:var(--accent);text-underline-offset:2px}
.note{color:var(--soft);font-size:13px;max-width:60em;margin-top:10px}
.tiles{display:flex;flex-wrap:wrap;gap:1px;background:var(--hair);border:1px solid var(--hair);
border-radius:10px;overflow:hidden;margin-top:30px}
.tile{background:var(--paper);padding:16px 18px 15px;flex:1 1 158px}
.tile dt{color:var(--soft);font-size:13px}
.tile .value{font-size:27px;line-height:1.25;font-weight:650;
letter-spacing:-.02em;white-space:nowrap}
.tile .value small{font-size:15px;font-weight:500;letter-spacing:0;
margin-left:2px}
.tile .sub{color:var(--soft);font-size:13px}
.grid2,.grid3{display:grid;gap:34px 40px;margin-top:22px}
.grid2{grid-template-columns:minmax(0,3fr) minmax(0,2fr)}
.grid3{grid-template-columns:repeat(3,minmax(0,1fr))}
.even{grid-template-columns:repeat(2,minmax(0,1fr))}
.only{grid-template-columns:minmax(0,1fr)}
figure{min-width:0}
figcaption{display:flex;flex-wrap:wrap;gap:2px 14px;align-items:baseline;
margin-bottom:14px}
.now{color:var(--soft);font-size:13px}
.keys{display:flex;flex-wrap:wrap;gap:4px 18px;font-size:13px;
color:var(--soft)}
figcaption .keys{margin-left:auto}
.key{display:inline-flex;align-items:center;gap:7px;white-space:nowrap}
.stroke{width:16px;height:0;border-top:2.5px solid;border-radius:2px}
.stroke.c1{color:var(--c1)}.stroke.c2{color:var(--c2)}
.swatch{border-radius:2.5px;flex:none}
.plot{padding-left:58px}
.plot svg{display:block;overflow:visible}
.lanes .plot{padding-left:92px}
.lanes{margin-top:26px}
.memory .plot{padding-left:66px}
.grid{stroke:var(--grid);stroke-width:1}
.axis{stroke:var(--soft);stroke-width:1;stroke-opacity:.55}
.tick,.name{fill:var(--soft);font-size:12px}
.name{fill:var(--ink)}.share{fill:var(--soft);font-size:11px}
.curves path{fill:none}
.line{stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.raw{stroke-width:1;stroke-opacity:.34;stroke-linejoin:round}
.dots{stroke-width:7;stroke-linecap:round}
.line.c1,.raw.c1,.dots.c1{stroke:var(--c1)}
.line.c2,.raw.c2,.dots.c2{stroke:var(--c2)}
.curves .band{stroke:none;fill-opacity:.2}
.curves .band.c1{fill:var(--c1)}.curves .band.c2{fill:var(--c2)}
.fw{fill:var(--fw)}.bw{fill:var(--bw)}.op{fill:var(--op)}.ex{fill:var(--ex)}
.ov{fill:url(#hatch)}.da{fill:var(--da)}.ot{fill:var(--ot)}
.idle{fill:var(--idle)}
.mp{fill:var(--bw)}.mo{fill:var(--fw)}.mg{fill:var(--op)}.ma{fill:var(--da)}
.mu{fill:var(--ex)}.mc{fill:var(--ovl)}.mw{fill:var(--ot)}
.areas path{stroke:var(--paper);stroke-width:.6;vector-effect:non-scaling-stroke}
.areas path:hover{filter:brightness(1.12)}
.level{stroke:var(--ink);stroke-width:1.4;stroke-dasharray:6 4}
.level.limit{stroke:var(--ex);stroke-dasharray:none}
.level-name{fill:var(--ink);font-size:12px;paint-order:stroke;
stroke:var(--paper);stroke-width:4px;stroke-linejoin:round}
.co{fill:transparent}.cut{stroke:var(--paper);stroke-width:1.5}
.hatch-ground{fill:var(--ovg)}.hatch-line{fill:var(--ovl)}
.rank rect:not(.idle):hover{filter:brightness(1.15)}
.rank .co:hover{stroke:var(--ink);stroke-width:1}
.defs{position:absolute}
.scroll{overflow-x:auto;margin-top:26px}
table{border-collapse:collapse;width:100%;font-size:14px;white-space:nowrap}
th,td{text-align:right;padding:6px 0 6px 20px;
border-bottom:1px solid var(--hair)}
th{font-weight:600;color:var(--soft);font-size:13px;vertical-align:bottom}
tbody th{color:var(--ink);font-size:14px}
th:first-child,td:first-child{text-align:left;padding-left:0}
.all th,.all td{font-weight:650}
.compared th:first-child{white-space:normal}
.compared .part th:first-child{font-weight:400;padding-left:14px}
details{margin-top:14px}summary{cursor:pointer;color:var(--accent);
font-size:14px}details .scroll{margin-top:10px}
td.bar{width:26%;min-width:150px;padding-left:24px}
td.bar svg{display:block;border-radius:3px}
.facts{display:grid;grid-template-columns:repeat(auto-fill,minmax(230px,1fr));
gap:0 40px;margin-top:14px}
.facts div{padding:8px 0 14px;border-top:1px solid var(--hair);min-width:0;
overflow-wrap:anywhere}
.facts dt{color:var(--soft);font-size:13px}
footer{margin-top:52px;padding-top:16px;border-top:1px solid var(--hair);
color:var(--soft);font-size:13px}
.hidden{position:absolute;width:1px;height:1px;overflow:hidden;
clip-path:inset(50%)}
:focus-visible{outline:2px solid var(--accent);outline-offset:3px}
@media (max-width:960px){th,td{padding-left:14px}
td.bar{width:18%;min-width:110px}}
@media (max-width:860px){.grid2,.grid3,.even{grid-template-columns:minmax(0,1fr)}}
@media (max-width:600px){main{padding:26px 16px 24px}h1{font-size:25px}
.tile{padding:12px 13px;flex:1 1 40%}.tile .value{font-size:22px}.minor{display:none}
.lead{font-size:16px}.plot{padding-left:52px}
.lanes .plot{padding-left:60px}
figcaption .keys{margin-left:0}}
@media print{:root{color-scheme:light;
--paper:#fff;--ink:#000;--soft:#444;--hair:#ccc;--grid:#e6e6e6;
--panel:#fff;--idle:#ececec;--accent:#0068b0;--c1:#0072b2;--c2:#c65300;
--fw:#56b4e9;--bw:#0072b2;--op:#cc79a7;--ex:#d55e00;--ovl:#e3934f;
--ovg:#fbe9da;--da:#009e73;--ot:#8a929c}
body{font-size:12px;-webkit-print-color-adjust:exact;
print-color-adjust:exact}
main{max-width:none;padding:0}
figure,.tiles,tr,.facts div{break-inside:avoid}
h2,h3{break-after:avoid}h2{margin-top:30px}
.grid2{grid-template-columns:minmax(0,3fr) minmax(0,2fr)}
.grid3{grid-template-columns:repeat(3,minmax(0,1fr))}
.scroll{overflow:visible}
.lanes .plot{padding-left:92px}}
)css";

}  // namespace echelon::detail
