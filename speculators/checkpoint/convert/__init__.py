"""Converters between the speculators format and the formats other projects train drafters in, both ways.

`conversion` converts folders, `formats` is the list of formats, one module each implements `adapter.FormatAdapter`.
`fields`, `block_drafters` and `eagle_drafters` hold what several formats have in common.
"""

from speculators.checkpoint.convert.adapter import FormatAdapter
from speculators.checkpoint.convert.conversion import Conversion, convert
from speculators.checkpoint.convert.formats import FORMATS, NATIVE, detect_format, format_names

__all__ = ["FORMATS", "NATIVE", "Conversion", "FormatAdapter", "convert", "detect_format", "format_names"]
