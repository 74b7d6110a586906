"""The site of these pages: `make docs` builds it, `make docs-serve` shows it."""

import ast
import gc
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import urlopen

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE / "site"), str(ROOT / "test/house")]

gc.set_threshold(200_000)  # trees of pages are many small objects: a sixth of the time

project = "torchrl-agents"
author = "the authors of torchrl-agents"
copyright = "MIT licence"
version = release = next(
    ast.literal_eval(node.value)
    for node in ast.parse((ROOT / "torchrl_data/__init__.py").read_text("utf-8")).body
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
)

extensions = [
    "myst_nb",
    "sphinx.ext.viewcode",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
    "sphinx_design",
    "pages",
    "reference_pages",
    "mathml",
    "terms",
    "links",
    "sidebar",
]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb", ".rst": "restructuredtext"}
exclude_patterns = ["site/**", "**/.ipynb_checkpoints"]
nitpicky = False

# Pages are those that a checkout shows, so headings have the anchors that they have there.
myst_heading_anchors = 5
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "attrs_inline"]
nb_execution_mode = "off"  # notebooks hold the output of a real run: docs/tutorials/execute.py
nb_merge_streams = True
suppress_warnings = ["mystnb.unknown_mime_type"]

python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"
viewcode_follow_imported_members = True
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_exclude = ".linenos, .gp, .go"


def _answers(url: str) -> bool:
    try:
        with urlopen(url + "objects.inv", timeout=3) as answer:
            return answer.status == 200
    except OSError:
        return False


_OTHERS = {
    "python": "https://docs.python.org/3/",
    "torch": "https://docs.pytorch.org/docs/stable/",
    "tensordict": "https://docs.pytorch.org/tensordict/stable/",
    "torchrl": "https://docs.pytorch.org/rl/stable/",
    "transformers": "https://huggingface.co/docs/transformers/main/en/",
}
# Where the network does not answer, names of others are shown without links.
with ThreadPoolExecutor(len(_OTHERS)) as _pool:
    _answered = dict(zip(_OTHERS, _pool.map(_answers, _OTHERS.values()), strict=True))
intersphinx_mapping = {name: (url, None) for name, url in _OTHERS.items() if _answered[name]}
intersphinx_timeout = 5

html_math_renderer = "mathml"
html_theme = "furo"
html_title = "torchrl-agents"
html_static_path = ["site/static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {
    "sidebar_hide_name": False,
    "navigation_with_keys": True,
    "light_css_variables": {
        "color-brand-primary": "#9a3412",
        "color-brand-content": "#9a3412",
        "color-brand-visited": "#7c2d12",
        "font-stack": "system-ui, -apple-system, 'Segoe UI', 'Noto Sans', sans-serif",
    },
    "dark_css_variables": {
        "color-brand-primary": "#fdba74",
        "color-brand-content": "#fdba74",
        "color-brand-visited": "#fed7aa",
    },
}
_project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
if _address := _project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["address"]:
    html_theme_options |= {
        "source_repository": f"{_address.rstrip('/')}/",
        "source_branch": "main",
        "source_directory": "docs/",
    }
pygments_style = "friendly"
pygments_dark_style = "github-dark"
