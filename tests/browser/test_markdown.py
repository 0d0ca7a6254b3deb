"""The chat's markdown, in a real browser under the real policy: its output for ordinary, odd and hostile texts."""

import re
from typing import Any

from playwright.sync_api import Page

RENDER = """async (texts) => {
  const base = document.querySelector('script[type=module]').src.replace(/[^/]+$/, '');
  const { blocks } = await import(base + 'markdown.js');
  const code = (text, language) => {
    const node = document.createElement('pre');
    node.className = language;
    node.textContent = text;
    return node;
  };
  return texts.map((text) => {
    const box = document.createElement('div');
    blocks(text, code).forEach((node) => box.append(node));
    const all = [...box.querySelectorAll('*')];
    return {
      html: box.innerHTML,
      text: box.textContent,
      tags: all.map((node) => node.localName),
      attributes: all.flatMap((node) => [...node.attributes].map((each) => [each.name, each.value])),
    };
  });
}"""
TAGS = {"a", "blockquote", "br", "code", "del", "em", "hr", "li", "ol", "p", "pre", "strong", "ul"}
TAGS |= {f"h{level}" for level in range(1, 7)} | {"table", "tbody", "td", "th", "thead", "tr"}
ATTRIBUTES = {"align", "class", "href", "rel", "start", "target", "title"}
ORDINARY = {
    "Some **bold**, *italic*, ***both***, `code`, ~~gone~~.": (
        "<p>Some <strong>bold</strong>, <em>italic</em>, <em><strong>both</strong></em>, <code>code</code>,"
        " <del>gone</del>.</p>"
    ),
    "# One\n\n### Three ###\ntext": "<h1>One</h1><h3>Three</h3><p>text</p>",
    "1. one\n2. two\n   - inner\n\n7. other": (
        "<ol><li><p>one</p></li><li><p>two</p><ul><li>inner</li></ul></li><li><p>other</p></li></ol>"
    ),
    "- a\n- b": "<ul><li>a</li><li>b</li></ul>",
    "5. five\n6. six": '<ol start="5"><li>five</li><li>six</li></ol>',
    "- [x] done\n- [ ] open": "<ul><li>☑ done</li><li>☐ open</li></ul>",
    "```python\nx = '<b>'\n```\nafter": "<pre class=\"python\">x = '&lt;b&gt;'</pre><p>after</p>",
    "```\nnever closed": '<pre class="">never closed</pre>',
    "| a | b |\n|---|:-:|\n| 1 | 2 |": (
        '<table><thead><tr><th align="">a</th><th align="center">b</th></tr></thead>'
        '<tbody><tr><td align="">1</td><td align="center">2</td></tr></tbody></table>'
    ),
    "Here it is:\n| a |\n|---|\n| 1 |": (
        '<p>Here it is:</p><table><thead><tr><th align="">a</th></tr></thead>'
        '<tbody><tr><td align="">1</td></tr></tbody></table>'
    ),
    "a | b\nc | d": "<p>a | b<br>c | d</p>",
    "> quote\n> - list": "<blockquote><p>quote</p><ul><li>list</li></ul></blockquote>",
    "a\n\n---\n\nb": "<p>a</p><hr><p>b</p>",
    "one  \ntwo\\\nthree": "<p>one<br>two<br>three</p>",
    "7 x 1 = 7\n7 x 2 = 14\n\n- a\n  b\n\n> c\n> *d\n> e*": (
        "<p>7 x 1 = 7<br>7 x 2 = 14</p><ul><li>a<br>b</li></ul><blockquote><p>c<br><em>d<br>e</em></p></blockquote>"
    ),
    "2 * 3 * 4, snake_case_name, \\*plain\\*": "<p>2 * 3 * 4, snake_case_name, *plain*</p>",
    '**"강조"**입니다': '<p><strong>"강조"</strong>입니다</p>',
    "这是**“重点”**内容": "<p>这是<strong>“重点”</strong>内容</p>",
    r"so \( a^2 \) is \[ \int_0^1 x\,dx \] and $x_1$, for $5 and $10": (
        r'<p>so <code class="formula">a^2</code> is <code class="formula display">\int_0^1 x\,dx</code> and '
        r'<code class="formula">x_1</code>, for $5 and $10</p>'
    ),
    "$$\n\\begin{matrix} a & b \\\\\n- c & d \\end{matrix}\n$$\n\nafter": (
        '<code class="formula display">\\begin{matrix} a &amp; b \\\\\n- c &amp; d \\end{matrix}</code><p>after</p>'
    ),
    r"\( never closed \*": "<p>( never closed *</p>",
    "half **bold and `code": "<p>half **bold and `code</p>",
    "<b>x</b> &amp; y": "<p>&lt;b&gt;x&lt;/b&gt; &amp; y</p>",
}
HOSTILE = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt&colon;alert(1))",
    "[x](data:text/html,<script>alert(1)</script>)",
    "[x](vbscript:msgbox(1))",
    "[x](//evil.example)",
    "[x](\\\\evil.example)",
    "![x](javascript:alert(1))",
    "![x](https://evil.example/pixel.png)",
    "<javascript:alert(1)>",
    '[x](https://a.example/"onmouseover="alert(1))',
    '[x](https://a.example "t" onclick="alert(1)")',
    "```<img src=x onerror=alert(1)>\ncode\n```",
    '```"><script>alert(1)</script>\ncode\n```',
    "| <script>alert(1)</script> |\n|---|\n| <svg onload=alert(1)> |",
    "`</code><script>alert(1)</script>`",
    "[<img src=x onerror=alert(1)>](https://a.example)",
    "[a [b](https://inner.example)](https://outer.example)",
    "<style>*{display:none}</style>\n\n<iframe src=https://evil.example></iframe>",
)
SQUARE = 400
ENDLESS = {
    "stars": "*" * 20_000,
    "stars around a letter": "*" * 10_000 + "a" + "*" * 10_000,
    "bold": "**a" * 10_000,
    "half emphases": "*a _b ~~c " * 2_000,
    "open brackets": "[" * 20_000,
    "brackets of pictures": "![" * 10_000,
    "brackets": "[" * 10_000 + "]" * 10_000,
    "links": "[a](b " * 8_000,
    "targets": "[](" * 8_000,
    "nested links": "[" * 4_000 + "a" + "](u)" * 4_000,
    "images": "![](" * 10_000,
    "ticks": "`a" * 10_000,
    "ticks of all lengths": "a".join("`" * length for length in range(1, 200)),
    "less-than signs": "<" * 20_000,
    "ampersands": "&" * 20_000,
    "backslashes": "\\" * 20_000,
    "half addresses": "<http://" * 3_000,
    "quotes": "> " * 10_000,
    "quotes in lines": "> a\n" * 5_000,
    "lists": "- " * 10_000,
    "lists in lines": "- a\n" * 5_000,
    "loose lists": "- a\n\n" * 5_000,
    "paragraphs of an item": "- a\n" + "\n  b\n" * 4_000,
    "bars": "|" * 20_000,
    "columns above short lines": "|a" * SQUARE + "|\n" + "|-" * SQUARE + "|\n" + "x\n" * SQUARE,
    "half tables": "a|b\n" * 5_000,
    "lines": "a\n" * 20_000,
    "spaces": "a" + " " * 90_000 + "b",
    "blanks before a line": "- x\n" + "\n" * 20_000 + "y",
    "blanks before a line of the item": "- x\n" + "\n" * 20_000 + "  y",
    "blanks at the end": "x" + "\n" * 20_000,
    "half formulas": r"\(a" * 8_000,
    "half formulas on lines": "$$\na\n" * 4_000,
    "dollars": "$a" * 10_000,
    "dollar signs": "$" * 20_000,
    "fences": "```\n``\n" * 5_000,
}
"""Long texts, by the part that repeats."""
MOST_STEPS, MOST_NODES = 40.0, 4.0
"""Limits on the parser's steps, as counted by `steps`, and on the elements it creates, per character of a text."""
RUN = 400_000
UNMATCHED = (
    "` " + "a" * RUN + "`",
    "http://a" + "." * RUN + "x",
    "```" + "a" * RUN + "`",
    "```" + " " * RUN + "`",
    "~" * RUN + "`",
    "# " + " " * RUN + "a\u2028b",
    "a|b\n" + " " * RUN + "x",
    "a|b\n-" + " " * RUN + "x",
    "- " * (RUN // 2) + "x",
    "a\n" + "=" * RUN + "x",
)
"""Texts that nearly match a pattern, so long that a pattern which backtracks would take hours."""
PARSE = """async (text) => {
  const base = document.querySelector('script[type=module]').src.replace(/[^/]+$/, '');
  const { blocks } = await import(base + 'markdown.js');
  blocks(text, () => document.createElement('pre'));
}"""
IN_CHAT = """async ([name, text]) => {
  const base = document.querySelector('script[type=module]').src.replace(/[^/]+$/, '');
  return (await import(base + 'chat_text.js'))[name](text);
}"""


def steps(page: Page, texts: list[str]) -> list[int]:
    """Return, per text, how often the parser's functions, branches and loop bodies ran. The engine counts
    only in scripts that it loads after this begins, so `page` must not have loaded the parser yet."""
    session = page.context.new_cdp_session(page)
    session.send("Profiler.enable")
    session.send("Profiler.startPreciseCoverage", {"callCount": True, "detailed": True})
    counts = []
    for text in texts:
        page.evaluate(PARSE, text)
        scripts = session.send("Profiler.takePreciseCoverage")["result"]
        parser = [function for script in scripts if "/markdown" in script["url"] for function in script["functions"]]
        counts.append(sum(part["count"] for function in parser for part in function["ranges"]))
    return counts


def render(page: Page, texts: list[str]) -> list[dict[str, Any]]:
    rendered: list[dict[str, Any]] = page.evaluate(RENDER, texts)
    return rendered


def test_ordinary_markdown(page: Page) -> None:
    rendered = render(page, list(ORDINARY))
    assert {text: result["html"] for text, result in zip(ORDINARY, rendered, strict=True)} == ORDINARY


def test_addresses_become_links_and_end_before_the_punctuation(page: Page) -> None:
    texts = ["See https://a.example/x_y. (https://b.example/q)", "[t](https://c.example/a_(b)) <https://d.example>"]
    links = [[value for name, value in result["attributes"] if name == "href"] for result in render(page, texts)]
    assert links == [
        ["https://a.example/x_y", "https://b.example/q"],
        ["https://c.example/a_(b)", "https://d.example/"],
    ]


def test_an_address_ends_where_text_without_spaces_goes_on(page: Page) -> None:
    texts = {
        "官网是https://example.com。你可以下载": "https://example.com",
        "見てください（https://example.com/a）とのこと": "https://example.com/a",
        "자세한 내용은 https://example.com에서 확인하세요": "https://example.com",
        "见“https://example.com:8080/docs?q=1#top”，谢谢": "https://example.com:8080/docs?q=1#top",
        "https://ja.wikipedia.org/wiki/東京 と http://[::1]:8642": "https://ja.wikipedia.org/wiki/東京",
    }
    shown = [re.findall(r"<a [^>]*>([^<]+)</a>", result["html"])[0] for result in render(page, list(texts))]
    assert shown == list(texts.values())


def test_hostile_texts_become_text_or_harmless_links(page: Page) -> None:
    for text, result in zip(HOSTILE, render(page, list(HOSTILE)), strict=True):
        assert set(result["tags"]) <= TAGS, text
        for name, value in result["attributes"]:
            assert name in ATTRIBUTES, text
            assert name != "href" or value.startswith(("https://", "http://")), text
        assert "a" not in result["tags"][result["tags"].index("a") + 1 :] if "a" in result["tags"] else True, text


def test_a_line_with_too_few_cells_ends_in_a_wide_one(page: Page) -> None:
    (table,) = render(page, ["|a|b|c|\n|-|-|-|\n|1|\n|1|2|3|4|"])
    rows = table["html"].split("<tr>")[2:]
    assert rows[0].startswith('<td align="">1</td><td colspan="2"></td>')
    assert rows[1].count("<td") == 3


def test_the_work_grows_with_the_length_of_a_text_and_not_faster(page: Page) -> None:
    counted = dict(zip(ENDLESS, steps(page, list(ENDLESS.values())), strict=True))
    assert min(counted.values()) > 0
    assert {kind: count for kind, count in counted.items() if count > MOST_STEPS * len(ENDLESS[kind])} == {}
    for text, result in zip(ENDLESS.values(), render(page, list(ENDLESS.values())), strict=True):
        assert len(result["tags"]) < MOST_NODES * len(text)
        assert set(result["tags"]) <= TAGS


def test_patterns_give_up_on_long_texts_at_once(page: Page) -> None:
    for text in UNMATCHED:
        page.evaluate(PARSE, text)


def test_marks_nest_no_deeper_than_a_page_can_show(page: Page) -> None:
    (result,) = render(page, ["*" * 10_000 + "a" + "*" * 10_000])
    assert result["text"].count("*") > 19_000
    assert result["tags"].count("strong") < 40


def test_json_that_is_nested_deeply_is_still_readable(page: Page) -> None:
    depth = 20_000
    shown = page.evaluate(IN_CHAT, ["readable", "[" * depth + "]" * depth])
    assert len(shown) < 200 * depth
    assert page.evaluate(IN_CHAT, ["readable", '{"a":[1]}']) == '{\n  "a": [\n    1\n  ]\n}'


def test_a_message_of_blank_lines_is_looked_at_once(page: Page) -> None:
    assert page.evaluate(IN_CHAT, ["messageOf", "\n" * RUN + "x"])["files"] == []
