"""The chat's markdown, in a real browser under the real policy: what it makes of ordinary, odd and hostile texts."""

from typing import Any

import pytest
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
    const began = performance.now();
    box.append(...blocks(text, code));
    const seconds = (performance.now() - began) / 1000;
    const all = [...box.querySelectorAll('*')];
    return {
      seconds,
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
    "> quote\n> - list": "<blockquote><p>quote</p><ul><li>list</li></ul></blockquote>",
    "a\n\n---\n\nb": "<p>a</p><hr><p>b</p>",
    "one  \ntwo\\\nthree": "<p>one<br>two<br>three</p>",
    "7 x 1 = 7\n7 x 2 = 14\n\n- a\n  b\n\n> c\n> *d\n> e*": (
        "<p>7 x 1 = 7<br>7 x 2 = 14</p><ul><li>a<br>b</li></ul><blockquote><p>c<br><em>d<br>e</em></p></blockquote>"
    ),
    "2 * 3 * 4, snake_case_name, \\*plain\\*": "<p>2 * 3 * 4, snake_case_name, *plain*</p>",
    '**"강조"**입니다': '<p><strong>"강조"</strong>입니다</p>',
    "这是**“重点”**内容": "<p>这是<strong>“重点”</strong>内容</p>",
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
ENDLESS = {
    "stars": "*" * 20_000,
    "bold": "**a" * 10_000,
    "brackets": "[" * 10_000 + "]" * 10_000,
    "links": "[a](b " * 8_000,
    "images": "![](" * 10_000,
    "ticks": "`a" * 10_000,
    "quotes": "> " * 10_000,
    "lists": "- " * 10_000,
    "bars": "|" * 20_000,
    "lines": "a\n" * 20_000,
    "spaces": "a" + " " * 90_000 + "b",
    "blanks": "- x\n" + "\n" * 20_000 + "y",
}


def render(page: Page, texts: list[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = page.evaluate(RENDER, texts)
    return found


def test_ordinary_markdown(page: Page) -> None:
    found = render(page, list(ORDINARY))
    assert {text: each["html"] for text, each in zip(ORDINARY, found, strict=True)} == ORDINARY


def test_addresses_become_links_and_end_before_the_punctuation(page: Page) -> None:
    texts = ["See https://a.example/x_y. (https://b.example/q)", "[t](https://c.example/a_(b)) <https://d.example>"]
    links = [[value for name, value in each["attributes"] if name == "href"] for each in render(page, texts)]
    assert links == [
        ["https://a.example/x_y", "https://b.example/q"],
        ["https://c.example/a_(b)", "https://d.example/"],
    ]


def test_hostile_texts_become_text_or_harmless_links(page: Page) -> None:
    for text, each in zip(HOSTILE, render(page, list(HOSTILE)), strict=True):
        assert set(each["tags"]) <= TAGS, text
        for name, value in each["attributes"]:
            assert name in ATTRIBUTES, text
            assert name != "href" or value.startswith(("https://", "http://")), text
        assert "a" not in each["tags"][each["tags"].index("a") + 1 :] if "a" in each["tags"] else True, text


@pytest.mark.parametrize("kind", sorted(ENDLESS))
def test_no_text_takes_long(page: Page, kind: str) -> None:
    """Generous for a slow machine; what grows with the square of the length takes minutes."""
    (found,) = render(page, [ENDLESS[kind]])
    assert found["seconds"] < 3
    assert set(found["tags"]) <= TAGS
