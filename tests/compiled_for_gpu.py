"""Triton kernels compiled for a GPU that need not be there, to read what the compiler made of them.

The interpreter takes Python that the compiler refuses. Triton keeps what it has compiled on disk, so a kernel that two
tests read is compiled once.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any


def is_pointer(name: str) -> bool:
    """Whether an argument of a kernel of ours is one."""
    return name.endswith("_ptr")


def compile_for_gpu(
    kernel: Any,
    kind: Callable[[str], str],
    constants: Mapping[str, object],
    *,
    num_warps: int,
    num_stages: int | None = None,
    capability: int = 90,
    is_aligned: Callable[[str], bool] = is_pointer,
) -> Any:
    """A kernel compiled for a GPU of `capability`, an H200 if none is named.

    `kind`: Triton's name for the type of an argument that is no constant; `constants` may have more than the kernel
    takes. `is_aligned`: whether an argument is a multiple of 16, as torch's addresses are.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names: Sequence[str] = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else kind(name) for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items() if name in names},
        attrs={
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(names)
            if name not in constants and is_aligned(name)
        },
    )
    options = {"num_warps": num_warps} | ({} if num_stages is None else {"num_stages": num_stages})
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
