"""Triton's interpreter under the name of a CPU backend: vLLM's V2 runner then starts on a machine without a GPU.

vLLM counts Triton as present on a CPU build if a backend called "cpu" is among the entry points of `triton.backends`.
A folder with this package and its `dist-info` on the path is such an entry point; nothing is installed, so nothing else
sees it. Kernels are never compiled: the variable below turns every `@triton.jit` into its interpreter.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"
