"""The pages' style sheet."""

from __future__ import annotations

from lightning_aigc.report.theme import FONT, style_variables

STYLE = (
    style_variables()
    + f"*{{box-sizing:border-box}}body{{margin:0;background:var(--page);color:var(--text);font:16px/1.55 {FONT}}}"
    + """
main{max-width:64rem;margin:0 auto;padding:1.5rem 1rem 4rem}
h1{font-size:.95rem;font-weight:600;color:var(--soft);margin:0 0 .6rem;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:2.2rem 0 .7rem;letter-spacing:-.01em}
h3{font-size:.95rem;margin:1.2rem 0 .4rem}
p{margin:.4rem 0}
.soft{color:var(--soft);font-size:.9rem}
.card{background:var(--card);border:1px solid var(--rule);border-radius:12px;padding:1rem 1.1rem}
.verdict{border-left:6px solid var(--tone);font-size:1.3rem;line-height:1.4;font-weight:600;
letter-spacing:-.01em;overflow-wrap:anywhere}
.verdict .mark{color:var(--tone);margin-right:.45rem}
.good{--tone:var(--good)}.mixed{--tone:var(--mixed)}.bad{--tone:var(--bad)}.unknown{--tone:var(--unknown)}
span.good,span.mixed,span.bad,span.unknown{color:var(--tone);font-weight:500}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(8.8rem,1fr));gap:.7rem;margin:.9rem 0 0}
.fact{background:var(--card);border:1px solid var(--rule);border-radius:12px;padding:.65rem .85rem}
.fact b{display:block;font-size:1.12rem;font-variant-numeric:tabular-nums;letter-spacing:-.01em}
.fact span{color:var(--soft);font-size:.82rem}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.9rem}
th{text-align:left;color:var(--soft);font-weight:500;font-size:.82rem}
td,th{padding:.4rem .9rem .4rem 0;border-bottom:1px solid var(--rule);vertical-align:top}
tr:last-child td{border-bottom:0}
.numbers td,.numbers th{white-space:nowrap}
td{font-variant-numeric:tabular-nums}
code,pre{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;font-size:.84rem}
code{overflow-wrap:anywhere}
pre{background:var(--page);border:1px solid var(--rule);border-radius:8px;padding:.8rem;overflow-x:auto;margin:.4rem 0}
.prompts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,26rem),1fr));gap:1.3rem}
.prompts figure{margin:0}
.prompts figcaption{font-weight:500;margin-bottom:.35rem;overflow-wrap:anywhere}
.images{display:grid;gap:4px 6px;
grid-template-columns:var(--label,3.1rem) repeat(var(--columns),minmax(0,9rem));align-items:center}
.images img{width:100%;display:block;border-radius:8px;background:var(--rule)}
.images span{font-size:.76rem;color:var(--soft);text-align:center}
.images span.when{text-align:left;overflow-wrap:anywhere}
.images .when .swatch{width:.6rem;height:.6rem;margin-right:.25rem}
.chart svg{display:block;overflow:visible}
.chart+.chart{margin-top:1rem}
.chart>div{width:100%;display:block}
.level{color:var(--card);border-radius:99px;padding:.05rem .55rem;font-size:.76rem;background:var(--tone)}
.swatch{display:inline-block;width:.75rem;height:.75rem;border-radius:3px;margin-right:.45rem;vertical-align:-.05rem}
details{margin:.4rem 0}summary{cursor:pointer;color:var(--soft);font-size:.9rem}
.copy{font-size:.8rem}
#vg-tooltip-element{background:var(--card)!important;color:var(--text)!important;border:1px solid var(--rule)!important;
border-radius:8px!important;font-family:inherit!important;font-size:.82rem!important;max-width:20rem;
box-shadow:0 4px 18px #0003!important}
#vg-tooltip-element td{border:0;padding:.1rem .4rem .1rem 0}#vg-tooltip-element td.key{color:var(--soft)!important}
@media(max-width:36rem){main{padding:1rem .7rem 3rem}.card{padding:.8rem}.verdict{font-size:1.08rem}
h2{margin-top:1.7rem}}
"""
)
