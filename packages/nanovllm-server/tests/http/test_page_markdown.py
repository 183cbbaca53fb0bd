"""Markdown on the chat page, in a real browser."""

import json

import pytest
from page_actions import read_texts, send_message, wait_for_answers

# The first test that runs may have to fetch the browser.
pytestmark = pytest.mark.timeout(180)

# Creates a view that counts its updates instead of scrolling, and renders a text that arrives in pieces.
RENDER = """(text, pieceSize, updateEvery) => {
  const view = new MarkdownView(document.createElement('div'), (update) => update());
  for (let start = 0, piece = 0; start < text.length; start += pieceSize, piece++) {
    view.append(text.slice(start, start + pieceSize));
    if (piece % updateEvery === updateEvery - 1) view.update();
  }
  view.update();
  return view;
}"""

DOCUMENT = """# Title

Some *emphasis*, **strong `code`** and ~~struck~~ text,
in two lines.

## Section with a [link](https://example.com/a?b=c "Title")

- one
- two
  1. nested
  2. list

     ```python
     def f():
         return "<b>"
     ```
- three

3. starts at three

> A quote
> > in a quote

| name | size |
|:-----|-----:|
| a    | 1    |
| b\\|c | **2** |

```rust
fn main() {}

    indented
```

Setext
---
    indented code

[reference]: https://example.com/reference

See [reference], <https://example.com> and <mail@example.com>.

***
~~~
a fence
that does not end"""

SPLITTING = [
    "para\n#no heading",
    "a | b\n---|---\nc | d",
    "a | b\n---|---x\n",
    "first\na | b\n--|--x\nlast",
    "- a\n\n\n  b\n- c\n\nd\n",
    "```py\ncode\n``\n```\nafter",
    "````\n```\ncode\n````\n\n```\n",
    "\n\n  ```\n  a\n ```\nb",
    "> ```\n> a\n\nb",
    "```\r\na\r\n```\r\nb\r\n",
    "[a]\n\n[a]: http://b.c/d\n\n[a] [A]\n\n[a]: http://b.c/other\n[a]",
    "a\n===\nb\n-\nc",
    "* a\n* b\n+ c\n1. d\n2) e",
    "~~~x y\n```\n~~~~ \ntext",
]


async def render(tab, text, piece_size=1_000_000, update_every=1):
    """Returns the HTML of a text that arrives in pieces."""
    return await tab.evaluate(f"({RENDER})({json.dumps(text)}, {piece_size}, {update_every}).element.innerHTML")


async def test_document_becomes_elements(tab):
    await tab.evaluate(f"$('log').append(({RENDER})({json.dumps(DOCUMENT)}, 1e6, 1).element)")
    texts = {
        "h3": ["Title"],
        "h4": ["Section with a link", "Setext"],
        "em": ["emphasis"],
        "strong": ["strong code", "2"],
        "p code": ["code"],
        "s": ["struck"],
        "ul > li > ol > li:first-child": ["nested"],
        "li pre": ['def f():\n    return "<b>"\n'],
        "blockquote blockquote": ["in a quote"],
        "th": ["name", "size"],
        "td": ["a", "1", "b|c", "2"],
        "td.right": ["1", "2"],
        ".language": ["python", "rust", "", ""],
        ".copy-code": ["Copy"] * 4,
    }
    assert {selector: await read_texts(tab, f"#log {selector}") for selector in texts} == texts
    assert (await read_texts(tab, "#log .code-block code"))[1:] == [
        "fn main() {}\n\n    indented\n",
        "indented code\n",
        "a fence\nthat does not end",
    ]
    assert await tab.evaluate("document.querySelector('#log > div > ol').start") == 3
    links = "[...document.querySelectorAll('#log a')].map((link) => [link.href, link.rel, link.target])"
    assert await tab.evaluate(links) == [
        [address, "noopener noreferrer", "_blank"]
        for address in (
            "https://example.com/a?b=c",
            "https://example.com/reference",
            "https://example.com/",
            "mailto:mail@example.com",
        )
    ]


async def test_result_does_not_depend_on_how_text_arrives(tab):
    for text in [DOCUMENT, *SPLITTING]:
        whole = await render(tab, text)
        for piece_size in (1, 2, 7):
            assert await render(tab, text, piece_size) == whole, text


async def test_finished_blocks_keep_their_elements(tab):
    same = f"""(() => {{
      const view = ({RENDER})('one\\n\\n- two\\n- three', 1e6, 1);
      const [paragraph, list] = view.element.children;
      const item = list.firstChild;
      view.append(' and\\n- four\\n\\n```\\na\\n');
      view.update();
      const code = view.element.querySelector('code').firstChild;
      view.append('b\\n```\\n\\nfive');
      view.update();
      return [paragraph, list, item, code].map((node) => view.element.contains(node));
    }})()"""
    assert await tab.evaluate(same) == [True] * 4


@pytest.mark.parametrize(
    "block",
    [
        "Some *text* with `code` and a [link](https://a.b).\n\n",
        "## Heading\n\n- item\n- item\n\n| a | b |\n|---|---|\n| c | d |\n\n",
        "```py\n" + "x = 1\n" * 50 + "```\n\n",
    ],
    ids=["paragraphs", "mixed", "code"],
)
async def test_work_for_an_answer_of_100_kb_is_linear(tab, block):
    """An update after every 20 characters parses each character a bounded number of times."""
    text = (block * (100_000 // len(block) + 1))[:100_000]
    ratio = f"({RENDER})({json.dumps(text)}, 4, 5).numParsedCharacters / {len(text)}"
    assert await tab.evaluate(ratio) < 2 * len(block) / 20 + 10 if "```" not in block else await tab.evaluate(ratio) < 4


async def test_one_open_code_block_of_100_kb_is_parsed_once(tab):
    ratio = f"({RENDER})('```\\n' + 'some line of code\\n'.repeat(6000), 4, 5).numParsedCharacters"
    assert await tab.evaluate(ratio) < 200


async def test_updates_leave_most_of_the_time_to_the_browser(tab):
    """A list of 100 KB is one block. The pause after an update is several times as long as the update."""
    share = f"""(async () => {{
      let duration = 0, numUpdates = 0;
      const view = new MarkdownView(document.createElement('div'), (update) => {{
        const start = performance.now();
        update();
        duration += performance.now() - start;
        numUpdates++;
      }});
      view.append('- an *item* of a list\\n'.repeat(5000));
      view.update();
      const start = performance.now();
      duration = numUpdates = 0;
      while (numUpdates < 3) {{
        view.append('- more\\n');
        await new Promise((resolve) => setTimeout(resolve, 1));
      }}
      return duration / (performance.now() - start);
    }})()"""
    assert await tab.evaluate(share) < 0.5


HOSTILE_TEXTS = {
    "script": "<script>document.title='owned'</script>\n\n<img src=x onerror=\"document.title='owned'\">\n\n<svg/onload=alert(1)>",
    "schemes": "[a](javascript:alert(1)) [b](JaVaScRiPt:alert(1)) [c](data:text/html,x) <javascript:alert(1)> [d](vbscript:x) "
    "[e](file:///etc/passwd) [f](&#106;avascript:alert(1)) [g](//evil.example) [h](java\tscript:x) ![i](javascript:x)",
    "reference": "[a]\n\n[a]: javascript:alert(1)",
    "fence": "```<img src=x onerror=alert(1)>\n<script>\n```",
}


async def test_hostile_markdown_is_shown_as_text(tab, engine):
    for number, text in enumerate(HOSTILE_TEXTS.values(), 1):
        engine.reply = [*text.encode()]
        await send_message(tab, "hi")
        await wait_for_answers(tab, number)
    assert await tab.evaluate("document.querySelectorAll('.turn :is(img, script, svg, a, iframe)').length") == 0
    handlers = "[...document.querySelectorAll('.turn *')].flatMap((e) => e.getAttributeNames()).filter((n) => /^on|src/.test(n))"
    assert await tab.evaluate(handlers) == []
    script, schemes, *_ = await read_texts(tab, ".assistant .text")
    assert script == HOSTILE_TEXTS["script"].replace("\n\n", "")
    assert schemes == HOSTILE_TEXTS["schemes"].replace("&#106;", "j") or "(javascript:alert(1))" in schemes
    assert await tab.evaluate("document.title") == "nanovllm"


async def test_remote_image_is_only_a_link(tab, url):
    await tab.evaluate(f"$('log').append(({RENDER})('![x](https://example.com/x.png)', 1e6, 1).element)")
    assert await tab.evaluate("[...document.querySelectorAll('#log img, #log a')].map((e) => e.tagName)") == ["A"]


# A text of n repetitions, and the text that its elements have; None: the source.
REPEATED = {
    "asterisks": ("*", ""),
    "words after asterisks": ("**a ", ""),
    "backticks": ("`", ""),
    "single backticks": ("`a``", ""),
    "brackets": ("[", ""),
    "links in links": ("[a](", ""),
    "angle brackets": ("<", ""),
    "comments": ("<!--", ""),
    "ampersands": ("&", ""),
    "quotes": ("> ", "end"),
    "lists": ("- ", "end"),
    "numbered lists": ("1. ", "end"),
    "pipes": ("|", "\n|-|"),
    "tildes": ("~~a", ""),
    "lines": ("a\n", "="),
}


@pytest.mark.parametrize("name", REPEATED)
async def test_hostile_repetition_is_shown_quickly(tab, name):
    repeated, end = REPEATED[name]
    timed = f"""(() => {{
      const text = {json.dumps(repeated)}.repeat(10000) + {json.dumps(end)};
      const start = performance.now();
      const view = ({RENDER})(text, text.length, 1);
      return {{ms: performance.now() - start, text: view.element.textContent, depth: view.element.querySelectorAll('*').length}};
    }})()"""
    result = await tab.evaluate(timed)
    # It takes less than 100 ms; work that grows with the square of the length would take minutes.
    assert result["ms"] < 5000
    assert result["text"].endswith(end.strip("\n=")) or name == "pipes"
