"""python scripts/build_docs.py OUT

Writes the site to OUT: README.md is its first page, each guide is a page, and ``reference/`` has
what pdoc makes of the docstrings. Prints each page that a link fails in, and each public name whose
docstring lacks something; exit status 1 where there is one.
"""

from __future__ import annotations

import ast
import html
import importlib
import inspect
import os
import re
import sys
import textwrap
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PUBLIC = (
    "dcp_placements",
    "dcp_placements.offline",
    "dcp_placements.presets",
    "dcp_placements.testing",
)
"""Modules whose ``__all__`` is the public interface."""

LINK = re.compile(r'(href|src)="([^"]+)"')
HEADING = re.compile(r"<h([1-6])[^>]*>(.*?)</h\1>", re.DOTALL)

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<nav><a href="{home}">dcp_placements</a><a href="{home}#pages-by-task">pages by task</a>
<a href="{reference}">reference</a></nav>
<main>
{body}
</main>
</body>
</html>
"""

STYLE = """
:root { color-scheme: light dark; --line: #8886; --shade: #8881 }
:root { --link: light-dark(#0550ae, #7cb7ff) }
body { margin: 0; font: 16px/1.55 system-ui, sans-serif }
nav { padding: .6rem 1rem; border-bottom: 1px solid var(--line) }
nav a { margin-right: 1.2rem }
main { max-width: 54rem; margin: 0 auto; padding: 0 1rem 4rem }
a { color: var(--link); text-decoration: none }
a:hover { text-decoration: underline }
code, pre { font: .875em/1.5 ui-monospace, monospace }
code { background: var(--shade); padding: .1em .25em; border-radius: 3px; overflow-wrap: anywhere }
code.short { white-space: nowrap }
pre { background: var(--shade); padding: .8rem 1rem; overflow-x: auto; border-radius: 5px }
pre code { background: none; padding: 0; overflow-wrap: normal }
.table { overflow-x: auto }
table { border-collapse: collapse }
th, td { border: 1px solid var(--line); padding: .35rem .6rem; text-align: left }
td { vertical-align: top; min-width: 5.5rem }
img { max-width: 100%; background: #fff; border-radius: 5px }
h1, h2, h3 { line-height: 1.25; margin: 2rem 0 .8rem }
"""


THEME = {
    "custom.css": """
:root { color-scheme: light dark }
@media (prefers-color-scheme: dark) {
    :root { --pdoc-background: #121212 }
    .pdoc {
        --text: #e6e6e6; --muted: #9aa0a6; --link: #7cb7ff; --link-hover: #a9d0ff;
        --code: #1c1c1c; --active: #4d4417; --accent: #262626; --accent2: #444;
        --nav-hover: rgba(255, 255, 255, 0.08);
        --name: #7cb7ff; --def: #7fd17f; --annotation: #8fc79a;
    }
    .pdoc :is(.nb, .kc, .o, .mi) { color: #7fd17f }
}
""",
    "module.html.jinja2": """{% extends "default/module.html.jinja2" %}
{% block nav_title %}<a href="../index.html">dcp_placements: guides</a>{% endblock %}
""",
}
"""Templates of pdoc that are replaced: dark pages, too, and a way back."""


def pages() -> list[Path]:
    """Return the Markdown files of the site."""
    folders = ("dcp_placements", "fakes", "scripts", ".github")
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.md"))]
    return [ROOT / "README.md", *found]


def page_name(page: Path) -> str:
    """Return the path of a page in the site.

    >>> page_name(ROOT / "README.md"), page_name(ROOT / "dcp_placements" / "load" / "README.md")
    ('index.html', 'dcp_placements/load/index.html')
    """
    name = page.relative_to(ROOT).as_posix()
    return re.sub(r"(README)?\.md$", lambda found: "index.html" if found[1] else ".html", name)


def anchor_of(heading: str) -> str:
    """Return the anchor of a heading, as code hosts make it.

    >>> anchor_of("Which layers, and <code>rename=</code>?")
    'which-layers-and-rename'
    """
    text = html.unescape(re.sub(r"<[^>]+>", "", heading))
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def site_link(page: Path, link: str, out: Path) -> str:
    """Return a link of a Markdown file as one of its page; files that are no pages are copied.

    Args:
        page: The Markdown file.
        link: The link in it.
        out: The folder of the site.
    """
    path, hash_, anchor = link.partition("#")
    if "://" in link or not path or not (target := (page.parent / path).resolve()).exists():
        return link
    if target.is_dir():
        target = target / "README.md" if (target / "README.md").exists() else target / "__init__.py"
    if target.suffix == ".md":
        name = page_name(target)
    else:
        name = f"files/{target.relative_to(ROOT).as_posix()}"
        if target.suffix not in (".svg", ".png"):
            name += ".txt"  # which a browser shows
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(target.read_bytes())
    return os.path.relpath(name, Path(page_name(page)).parent) + hash_ + anchor


def page_html(page: Path, out: Path) -> str:
    """Return a Markdown file as a page of the site."""
    import markdown2

    extras = {
        **{name: None for name in ("code-friendly", "cuddled-lists", "tables", "html-classes")},
        "fenced-code-blocks": None,
    }
    text = page.read_text()
    # What stands behind ```python is for the tests.
    text = re.sub(r"(?m)^```(\w+) .*$", r"```\1", text)
    body = str(markdown2.markdown(text, extras=extras))
    body = HEADING.sub(lambda h: f'<h{h[1]} id="{anchor_of(h[2])}">{h[2]}</h{h[1]}>', body)
    # A browser breaks lines at hyphens, and would part --report.
    body = re.sub(r"<code>([^<]{1,30})</code>", r'<code class="short">\1</code>', body)
    body = body.replace("<table>", '<div class="table"><table>')
    body = body.replace("</table>", "</table></div>")
    body = LINK.sub(lambda m: f'{m[1]}="{site_link(page, html.unescape(m[2]), out)}"', body)
    if page == ROOT / "README.md":
        body = with_references(body)
    folder = Path(page_name(page)).parent
    return PAGE.format(
        title=html.escape(text.partition("\n")[0].lstrip("# ")),
        style=STYLE,
        body=body,
        home=os.path.relpath("index.html", folder),
        reference=os.path.relpath("reference/dcp_placements.html", folder),
    )


def with_references(body: str) -> str:
    """Return the first page with links into the reference in the tables of public names."""
    head, mark, rest = body.partition('<h2 id="public-names">')
    tables, next_mark, tail = rest.partition("<h2 ")
    names = importlib.import_module("dcp_placements").__all__

    def linked(cell: re.Match[str]) -> str:
        of_cell = [name for name in names if re.search(rf"\b{name}\b", cell[1])]
        links = [f'<a href="reference/dcp_placements.html#{name}">{name}</a>' for name in of_cell]
        return f"<td>{cell[1]}<br><small>{', '.join(links)}</small></td><td>" if links else cell[0]

    tables = re.sub(r"<td>((?:(?!</td>).)*)</td>\s*<td>", linked, tables, flags=re.DOTALL)
    return head + mark + tables + next_mark + tail


def broken_links(out: Path) -> Iterator[str]:
    """Yield a line for each link of the guides' pages that leads to no file, or to no anchor."""
    files = {page: out / page_name(page) for page in pages()}
    texts = {page: file.read_text() for page, file in files.items() if file.is_file()}
    anchors: dict[Path, set[str]] = {}
    for page, text in texts.items():
        file = files[page]
        for _, link in LINK.findall(text):
            path, _, anchor = link.partition("#")
            if "://" in link:
                continue
            target = (file.parent / path).resolve() if path else file.resolve()
            if not target.is_file():
                yield f"{page.relative_to(ROOT)}: {link} leads to no file"
            elif anchor:
                if target not in anchors:
                    anchors[target] = set(re.findall(r'id="([^"]+)"', target.read_text()))
                if anchor not in anchors[target]:
                    yield f"{page.relative_to(ROOT)}: {link} leads to no heading"


def public_objects() -> Iterator[tuple[str, Any]]:
    """Yield the public classes and functions, with the public methods that torch's do not have."""
    for module_name in PUBLIC:
        module = importlib.import_module(module_name)
        for name in module.__all__:
            value = getattr(module, name)
            if isinstance(value, types.ModuleType):
                continue
            yield f"{module_name}.{name}", value
            for member, function in vars(value).items() if inspect.isclass(value) else ():
                is_public = not member.startswith("_") and inspect.isfunction(function)
                if is_public and not is_of_torch(value, member):
                    yield f"{module_name}.{name}.{member}", function


def is_of_torch(kind: type, member: str) -> bool:
    """Whether a base class outside this package has a method, and says what its arguments are."""
    bases = [base for base in kind.__mro__ if not base.__module__.startswith("dcp_placements")]
    return any(member in vars(base) for base in bases)


def parameters_of(value: Any) -> list[str]:
    """Return the names of the arguments that a caller passes; of torch's own classes none."""
    names = list(inspect.signature(value).parameters)
    if inspect.isclass(value):
        bases = [base for base in value.__mro__ if not base.__module__.startswith("dcp_placements")]
        inits = [vars(base)["__init__"] for base in bases if "__init__" in vars(base)]
        of_torch = [set(inspect.signature(init).parameters) for init in inits]
        names = [name for name in names if name not in set().union(*of_torch)]
    return [name for name in names if name not in ("self", "args", "kwargs")]


UNITS = {
    re.compile(r"nbytes|memory|max_shard_size"): r"[Bb]ytes?\b|GiB",
    re.compile(r"timeout.*|seconds"): r"[Ss]econds?\b",
    re.compile(r"(.*_)?shape"): r"[Ss]hape|elements",
}
"""What the line of an argument has to say, by the argument's name."""


def docstring_faults() -> Iterator[str]:
    """Yield a line for each public name whose docstring lacks an argument, a unit or an error."""
    for name, value in public_objects():
        text = inspect.getdoc(value) or ""
        if not text:
            yield f"{name}: has no docstring"
            continue
        parameters = parameters_of(value)
        missing = [arg for arg in parameters if not re.search(rf"\b{arg}\b", text)]
        if missing:
            yield f"{name}: its docstring does not say what {', '.join(missing)} is"
        for argument in parameters:
            yield from [f"{name}: {fault}" for fault in unit_faults(argument, text)]
        if silent := [error for error in errors_of(value) if error not in text]:
            yield f"{name}: its docstring does not say when it raises {', '.join(silent)}"


def unit_faults(argument: str, text: str) -> Iterator[str]:
    """Yield what the line of an argument lacks.

    >>> list(unit_faults("memory", "memory: Most bytes that are read at a time."))
    []
    >>> list(unit_faults("memory", "memory: The most that is read at a time."))
    ['the line of memory lacks its unit']
    """
    line = re.search(rf"^ *{argument}: (.*(?:\n {{4,}}(?! *\w+: ).*)*)", text, re.MULTILINE)
    for named, unit in UNITS.items():
        if line and named.fullmatch(argument) and not re.search(unit, line[1]):
            yield f"the line of {argument} lacks its unit"


def errors_of(value: Any) -> list[str]:
    """Return the names of the errors that a function, or the making of a class, raises itself."""
    if inspect.isclass(value):
        makers = [vars(value).get(name) for name in ("__init__", "__post_init__", "__new__")]
        return sorted({error for maker in makers if maker for error in errors_of(maker)})
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(value))))
    except (OSError, TypeError, SyntaxError):  # made by a decorator, without a source of its own
        return []
    raised = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    called = [node.func for node in raised if isinstance(node, ast.Call)]
    names = [node.id for node in called if isinstance(node, ast.Name)]
    return sorted({name for name in names if name[0].isupper()})


def build(out: Path) -> list[str]:
    """Write the site, and return a line for each fault."""
    from pdoc import pdoc, render

    out.mkdir(parents=True, exist_ok=True)
    for page in pages():
        file = out / page_name(page)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(page_html(page, out))
    for name in PUBLIC:  # these modules import what they name when it is asked for
        module = importlib.import_module(name)
        vars(module).update({public: getattr(module, public) for public in module.__all__})
    (out / "theme").mkdir(exist_ok=True)
    for name, text in THEME.items():
        (out / "theme" / name).write_text(text)
    render.configure(docformat="google", show_source=False, template_directory=out / "theme")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pdoc(*PUBLIC, output_directory=out / "reference")
    return [*broken_links(out), *docstring_faults()]


if __name__ == "__main__":
    folder = Path(sys.argv[1]).resolve()
    faults = build(folder)
    print(*faults, sep="\n", end="\n" if faults else "")
    print(f"{folder / 'index.html'}: {len(pages())} pages, and the reference")
    sys.exit(bool(faults))
