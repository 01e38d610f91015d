"""The compiler half of a Triton backend, which an interpreter never calls."""

from typing import Any

from triton.backends.compiler import BaseBackend, GPUTarget


class InterpreterBackend(BaseBackend):
    """Accepts the target "cpu" and refuses to compile for it."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return "interpreter"

    def parse_options(self, options: dict[str, Any]) -> Any:
        raise NotImplementedError("this backend interprets kernels: leave TRITON_INTERPRET at 1")

    def add_stages(self, stages: dict[str, Any], options: Any, language: Any = None) -> None:
        raise NotImplementedError("this backend has no compiler stages")

    def load_dialects(self, context: Any) -> None:
        pass

    def get_module_map(self) -> dict[str, Any]:
        return {}
