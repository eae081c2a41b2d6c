"""Settings of the documentation site: ``make docs``."""

import importlib.metadata
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

project = "zero_shard"
copyright = "the zero_shard maintainers, Apache-2.0"
release = importlib.metadata.version("zero-shard")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["diagrams.py"]

myst_heading_anchors = 3
highlight_language = "text"  # of blocks that name none
copybutton_exclude = ".linenos, .gp, .go"

python_use_unqualified_type_names = True
python_maximum_signature_line_length = 90
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_use_ivar = True
napoleon_custom_sections = ["Source"]

html_theme = "furo"
html_title = "zero_shard"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#2b5fa4", "color-brand-content": "#2b5fa4"},
    "dark_css_variables": {"color-brand-primary": "#7fb0ee", "color-brand-content": "#7fb0ee"},
}
