"""The look of the HTML report."""

STYLE = """
:root{--ground:#fbfbfa;--paper:#fff;--ink:#1c1f23;--faint:#60666e;--line:#dfe2e6;--good:#14713c;--good-ground:#e2f4e8;
--left:#8a4b00;--left-ground:#fdf0dc;--bar:#2f6fd0;--box:#eef3fb;--box-line:#9db6dc;--input:#f4f1ea;--input-line:#cbbf9f}
@media(prefers-color-scheme:dark){:root{--ground:#15181c;--paper:#1c2026;--ink:#e7e9ec;--faint:#9ba3ad;--line:#343a42;
--good:#7fdca0;--good-ground:#143322;--left:#f3c37c;--left-ground:#3a2a10;--bar:#6aa2f0;--box:#222c3b;--box-line:#49618a;
--input:#2a2820;--input-line:#5f573f}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:16px/1.55 system-ui,sans-serif}
main{max-width:72rem;margin:0 auto;padding:2rem 1.25rem 4rem}
h1{font-size:clamp(1.5rem,4vw,2.2rem);line-height:1.2;margin:.1em 0 .4em;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:2.4rem 0 .8rem}
.kicker{margin:0;color:var(--faint);letter-spacing:.06em;text-transform:uppercase;font-size:.78rem}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(10rem,1fr));gap:.75rem;margin:1.5rem 0 0}
.cards div,details,figure,.lint{background:var(--paper);border:1px solid var(--line);border-radius:10px}
.cards div{padding:.8rem 1rem}
dt{color:var(--faint);font-size:.85rem}
dd{margin:0;font-size:1.25rem;font-weight:600;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.92rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.45rem .7rem;border-bottom:1px solid var(--line);vertical-align:top}
thead th{color:var(--faint);font-weight:500;white-space:nowrap}
.scroll td{white-space:nowrap}
.wide{overflow-x:auto}.wide td:first-child{white-space:nowrap}
details{margin:.6rem 0;padding:.6rem 1rem}
summary{cursor:pointer}
details[open] summary{margin-bottom:.6rem}
.tag{display:inline-block;padding:.05rem .5rem;border-radius:99px;font-size:.82rem;
background:var(--left-ground);color:var(--left)}
.tag.good,.tag.info{background:var(--good-ground);color:var(--good)}
.lint{padding:.8rem 1rem .8rem 2rem;margin:0}
.lint li{margin:.3rem 0}
.histogram th{width:9rem;font-weight:500;white-space:nowrap}
.histogram td{display:flex;align-items:center;gap:.6rem}
.bar{display:block;height:.9rem;min-width:2px;border-radius:3px;background:var(--bar);
flex:none;max-width:calc(100% - 4rem)}
figure{margin:0 0 1rem;padding:1rem}
figcaption{color:var(--faint);margin-bottom:.6rem}
svg{display:block}
svg text{fill:var(--ink);font:600 11px system-ui,sans-serif;text-anchor:middle}
svg text.detail{fill:var(--faint);font-weight:400}
svg rect{fill:var(--box);stroke:var(--box-line)}
svg .input rect{fill:var(--input);stroke:var(--input-line)}
svg .edge{fill:none;stroke:var(--faint);stroke-width:1.2;opacity:.8}
@media(max-width:40rem){main{padding:1.25rem 1rem 3rem}section>.scroll :is(td,th){white-space:normal}
th,td{padding:.4rem .5rem}details,figure{padding:.6rem .7rem}svg{width:100%;height:auto;min-width:30rem}}
"""
