"""How Sphinx makes a site of the pages; `make docs` runs it.

The pages are plain Markdown that a code host shows as well. So the source folder is the whole repository, and
links between pages, to examples and to results are the same in both places.
"""

import sys
from pathlib import Path

import lowtide

sys.path.append(str(Path(__file__).parent))

project = "Lowtide"
version = release = lowtide.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "navigation", "scripts"]

root_doc = "README"
include_patterns = ["*.md", "docs/**", "examples/*.py"]
exclude_patterns = [".*", "benchmarks", "build", "demo-output", "dist", "docs/site", "site", "src", "tests"]

myst_heading_anchors = 3
default_role = "py:obj"  # `cap` in a docstring is code, and a link where that is a name of ours
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # what torch says of nn.Module is not news
python_maximum_signature_line_length = 90
nitpicky = False  # docstrings also put names of other libraries and plain words of code in backticks

html_theme = "furo"
html_title = "Lowtide"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["front"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
